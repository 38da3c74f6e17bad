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
from foresample.targets.constraints import ConstrainedTarget, centred, constrained, fixed
from foresample.targets.frequencies import FrequencyTarget, in_frequencies
from foresample.targets.gradients import guided, with_gradients
from foresample.targets.replicas import replicated
from foresample.targets.stepped import Step, StepTarget, from_step, step_error

__all__ = [
    "ChainTarget",
    "ConstrainedTarget",
    "Denoiser",
    "FrequencyTarget",
    "Step",
    "StepTarget",
    "StructureTarget",
    "centred",
    "constrained",
    "fixed",
    "flow",
    "from_chain",
    "from_edm",
    "from_scheduler",
    "from_sde",
    "from_step",
    "guided",
    "in_frequencies",
    "langevin",
    "replicated",
    "reverse_sde",
    "step_error",
    "structures",
    "vp",
    "with_gradients",
]
