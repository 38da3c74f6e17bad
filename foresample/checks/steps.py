"""Are the transitions of a target made from a step function those of the step?"""

from __future__ import annotations

import torch

from foresample.checks.findings import Finding
from foresample.contracts import Target, Wrapper
from foresample.targets import StepTarget, step_error

_ROUNDINGS = 1000  # of the chain's dtype, relative to the largest number in a result


def step_is_its_own(target: Target, seed: int) -> list[Finding]:
    """Compare the step with mean + std·z along a few chains; [] for targets that were made in another way."""
    while isinstance(target, Wrapper):
        target = target.target
    if not isinstance(target, StepTarget):
        return []
    error = step_error(target, target.step, seed=seed)
    worst = int(error.argmax())
    detail = (
        f"the step less the target's differs by at most {float(error[worst]):.2g} of its size, at step {worst}"
    )
    passed = bool(error.isfinite().all()) and float(error[worst]) < _ROUNDINGS * torch.finfo(error.dtype).eps
    return [Finding("step is the target's", passed, detail)]
