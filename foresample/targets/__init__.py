"""Targets: transition formulas around any denoiser, and closed-form chains."""

from foresample.targets.affine import AffineTarget, Denoiser, Kind
from foresample.targets.edm import from_edm, karras_sigmas
from foresample.targets.flow import flow
from foresample.targets.langevin import langevin
from foresample.targets.mixture import GaussianMixture
from foresample.targets.replicated import replicated
from foresample.targets.vp import vp

__all__ = [
    "AffineTarget",
    "Denoiser",
    "GaussianMixture",
    "Kind",
    "flow",
    "from_edm",
    "karras_sigmas",
    "langevin",
    "replicated",
    "vp",
]
