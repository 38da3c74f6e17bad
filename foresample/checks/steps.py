"""The comparison of a target made from a step function with that function."""

from __future__ import annotations

import torch

from foresample.checks.findings import Finding
from foresample.contracts import Target, Wrapper
from foresample.targets import StepTarget, step_error

_ROUNDINGS = 1000  # rounding errors of the chain's dtype, relative to the largest number in a result


def step_is_its_own(target: Target, seed: int) -> list[Finding]:
    """Compare the step with mean + std·z along a few chains; [] for targets not made by `from_step`."""
    while isinstance(target, Wrapper):
        target = target.target
    if not isinstance(target, StepTarget):
        return []
    error = step_error(target, target.step, seed=seed)
    worst = int(error.argmax())
    detail = f"step and transition differ by at most {float(error[worst]):.2g} of their size, at step {worst}"
    passed = bool(error.isfinite().all()) and float(error[worst]) < _ROUNDINGS * torch.finfo(error.dtype).eps
    return [Finding("step is the target's", passed, detail)]
