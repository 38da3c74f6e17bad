"""Targets: transition formulas around any denoiser, and closed-form chains (`foresample.GaussianMixture`)."""

from foresample.targets.atoms import StructureTarget, structures
from foresample.targets.chained import (
    ChainTarget,
    Denoiser,
    flow,
    from_chain,
    from_edm,
    from_scheduler,
    from_sde,
    langevin,
    reverse_sde,
    vp,
)
from foresample.targets.frequencies import FrequencyTarget, in_frequencies
from foresample.targets.replicas import replicated

__all__ = [
    "ChainTarget",
    "Denoiser",
    "FrequencyTarget",
    "StructureTarget",
    "flow",
    "from_chain",
    "from_edm",
    "from_scheduler",
    "from_sde",
    "in_frequencies",
    "langevin",
    "replicated",
    "reverse_sde",
    "structures",
    "vp",
]
