"""Targets: transition formulas around any denoiser, and closed-form chains."""

from foresample.chains import Chain, Kind, karras_sigmas
from foresample.targets.atoms import StructureTarget, structures
from foresample.targets.chained import (
    ChainTarget,
    Denoiser,
    flow,
    from_chain,
    from_edm,
    from_scheduler,
    langevin,
    reverse_sde,
    vp,
)
from foresample.targets.frequencies import FrequencyTarget, in_frequencies
from foresample.targets.mixture import GaussianMixture
from foresample.targets.replicas import replicated

__all__ = [
    "Chain",
    "ChainTarget",
    "Denoiser",
    "FrequencyTarget",
    "GaussianMixture",
    "Kind",
    "StructureTarget",
    "flow",
    "from_chain",
    "from_edm",
    "from_scheduler",
    "in_frequencies",
    "karras_sigmas",
    "langevin",
    "replicated",
    "reverse_sde",
    "structures",
    "vp",
]
