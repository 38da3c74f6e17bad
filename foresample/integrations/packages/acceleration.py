"""Acceleration of packages with sampling loops of their own; `loop` explains how to add one.

denoising-diffusion-pytorch   sample() of GaussianDiffusion, its 1-D twin and those with learned variances or guidance;
                              of both in continuous time, and of ElucidatedDiffusion
MONAI                         DiffusionInferer.sample() with a DDPMScheduler
boltz                         AtomDiffusion.sample() of either version, without steering
deepinv                       PosteriorDiffusion and DPS, with the Euler and the ancestral solvers
OpenAI's diffusion class      p_sample_loop() and p_sample_loop_progressive() of any copy
sbi                           sample() and sample_batched() of posteriors from score estimators (NPSE)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from foresample.integrations.packages.boltz import AtomLoop
from foresample.integrations.packages.continuous import ContinuousLoop, ElucidatedLoop
from foresample.integrations.packages.deepinv import DeepinvLoop
from foresample.integrations.packages.gaussian import GaussianLoop
from foresample.integrations.packages.loop import PackageLoop
from foresample.integrations.packages.monai import InfererLoop
from foresample.integrations.packages.openai import OpenAILoop
from foresample.integrations.packages.sbi import SbiLoop
from foresample.integrations.replaced import Replaced
from foresample.settings import Settings

PACKAGES: tuple[type[PackageLoop], ...] = (
    GaussianLoop,
    ContinuousLoop,
    ElucidatedLoop,
    InfererLoop,
    AtomLoop,
    DeepinvLoop,
    OpenAILoop,
    SbiLoop,
)
"""The order in which an object is compared with them."""


def is_package(served: Any) -> bool:
    """True for an object of one of these packages."""
    return any(kind.functions(served) for kind in PACKAGES)


def accelerate_package(served: Any, settings: Settings) -> AcceleratedPackage:
    """Accelerate an object of a package; see `foresample.accelerate`."""
    restore_package(served)
    replaced, kind = Replaced(), next(kind for kind in PACKAGES if kind.functions(served))
    loops = [kind(served, name, settings, replaced) for name in kind.functions(served)]
    for loop in loops:
        replaced.put(served, loop.name, loop)
    return AcceleratedPackage(served)


def restore_package(served: Any) -> None:
    """Restore the object's own loop."""
    for ours in list(vars(served).values()):
        if isinstance(ours, PackageLoop):
            ours.replaced.remove()


@dataclass(frozen=True)
class AcceleratedPackage:
    """The replaced functions of an object; a context manager that returns the object."""

    served: Any

    def __enter__(self) -> Any:
        return self.served

    def __exit__(self, *error: object) -> None:
        restore_package(self.served)
