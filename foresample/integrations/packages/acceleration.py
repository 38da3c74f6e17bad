"""Packages with a sampling loop of their own, drawn speculatively: denoising-diffusion-pytorch, MONAI, boltz.

    denoising-diffusion-pytorch   GaussianDiffusion, its 1-D twin and the one with learned variances: sample()
    MONAI                         DiffusionInferer.sample() with a DDPMScheduler
    boltz                         AtomDiffusion.sample() of either version, without steering

`accelerate` puts another loop in the place of theirs, on that one instance. Nothing is imported from any: an object
is known by the attributes it walks with. At every sample its loop, and each function of it that the loop calls, must be
the package's own, neither overridden nor patched, and everything the loop reads is read again. GaussianDiffusion's own
loop is also run, with a stand-in for its network, and compared with the chain read off it: at first, and again
whenever the object holds other numbers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from foresample.integrations.packages.boltz import AtomSample, is_atom_diffusion
from foresample.integrations.packages.gaussian import GaussianLoop, is_gaussian_diffusion, loop_name
from foresample.integrations.packages.monai import InfererSample, is_inferer
from foresample.integrations.packages.stand_in import StandIn
from foresample.integrations.replaced import Replaced
from foresample.settings import Settings


def is_package(served: Any) -> bool:
    """Whether this is an object of a package known here."""
    return is_gaussian_diffusion(served) or is_inferer(served) or is_atom_diffusion(served)


def accelerate_package(served: Any, settings: Settings) -> AcceleratedPackage:
    """See `foresample.accelerate`."""
    restore_package(served)
    kind: type[StandIn] = GaussianLoop
    if not is_gaussian_diffusion(served):
        kind = InfererSample if is_inferer(served) else AtomSample
    name = loop_name(served) if kind is GaussianLoop else "sample"
    replaced = Replaced()
    ours = kind(served, name, getattr(served, name), settings, replaced)
    ours.refuse_early()
    replaced.put(served, name, ours)
    return AcceleratedPackage(served)


def restore_package(served: Any) -> None:
    """Give it its own loop back."""
    for ours in list(vars(served).values()):
        if isinstance(ours, StandIn):
            ours.replaced.remove()


@dataclass(frozen=True)
class AcceleratedPackage:
    """What `accelerate` put in place; a context manager that hands out the object."""

    served: Any

    def __enter__(self) -> Any:
        return self.served

    def __exit__(self, *error: object) -> None:
        restore_package(self.served)
