"""The plain sampler: the baseline every figure is measured against, and the oracle of the law."""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter

import torch
from torch import Tensor

from foresample import kernels
from foresample import noise as streams
from foresample.contracts import (
    NO_FAULT,
    Target,
    note_fault,
    predict,
    raise_faults,
    require_finite,
    require_target,
    start_states,
    transition_mean,
)
from foresample.engine import Observer, Timed, capture, resolve_seeds
from foresample.report import Report, Run, Tally
from foresample.speculate import Commit
from foresample.targets.affine import AffineTarget

_LOOK_EVERY = 64  # steps between looks for a number that is none, on a device where looking means waiting


class Sequential:
    """The plain sampler for one target and batch size, kept between runs. Arguments as for `sequential`."""

    def __init__(self, target: Target, count: int, *, graph: bool = False) -> None:
        require_target(target)
        device = target.std.device
        if graph and device.type != "cuda":
            raise ValueError("graph=True needs a target on a CUDA device; leave it out on others")
        self.target, self.timed = target, Timed(target)
        self.row = torch.arange(count, device=device)
        self.key, self.step, self.fault = (torch.zeros_like(self.row) for _ in range(3))
        self.needed = torch.ones(count, 1, dtype=torch.bool, device=device)
        self.x = target.std.new_zeros((count, *target.shape))
        self.previous = torch.zeros_like(self.x)
        with torch.no_grad():
            self.graph = capture(self._transition) if graph else None

    def sample(self, key: Tensor, observe: Observer | None = None) -> Run:
        """The samples of these seeds, one per row."""
        target, zero, started = self.target, torch.zeros_like(self.row), perf_counter()
        steps, self.timed.seconds = len(target.std), 0.0
        self.key.copy_(key)
        self.step.zero_()
        self.fault.fill_(NO_FAULT)
        tally, look_every = Tally(0, steps, key.device), _LOOK_EVERY if self.x.is_cuda else 1
        with torch.no_grad():
            unit = streams.normal(
                self.key, target.shape, target.std.dtype, stream=streams.START, step=zero, draw=zero
            )
            self.x.copy_(start_states(target, unit))
            for k in range(steps):
                if self.graph is not None:
                    self.graph.replay()
                else:
                    self._transition()
                if (k + 1) % look_every == 0 or k + 1 == steps:
                    raise_faults(self.fault, self.row)
                if observe is not None:
                    observe(self._commit(k))
        samples = self.x.clone()
        require_finite(samples, self.row)
        tally.lengths[0] = steps * len(self.row)
        report = Report("sequential", steps, len(self.row), 0, slots=len(self.row), occupancy=1.0)
        run = tally.close(report, samples, zero + steps, zero + steps)
        report.seconds, report.target_seconds = perf_counter() - started, self.timed.seconds
        return run

    def _transition(self) -> None:
        prediction = predict(self.timed, self.x.clone(), self.step, self.row)
        self._move(prediction)
        self.step.add_(1).clamp_(max=len(self.target.std) - 1)

    def _move(self, prediction: Tensor) -> None:
        target, step = self.target, self.step
        if isinstance(target, AffineTarget) and self.x.is_cuda and kernels.available():
            from foresample.kernels.round import transition

            return transition(target, self.x, prediction, self.previous, self.key, step, self.fault)
        both = self.x.unsqueeze(1), prediction.unsqueeze(1)
        self.fault.copy_(note_fault(self.fault, *both, step.unsqueeze(1), self.needed))
        mean = transition_mean(target, self.x, prediction, step, self.previous)
        zero = torch.zeros_like(self.key)
        noise = streams.normal(self.key, target.shape, self.x.dtype, step=step, draw=zero)
        self.x.copy_(mean + target.std[step].view(-1, *(1,) * len(target.shape)) * noise)
        self.previous.copy_(prediction)

    def _commit(self, k: int) -> Commit:
        step, one = torch.full_like(self.row, k), torch.ones_like(self.row)
        x = self.x.clone()
        nothing = self.target.std.new_zeros(len(x), 0)
        return Commit(self.row, step, one, x.unsqueeze(1), x, nothing, one - 1)


def sequential(
    target: Target,
    count: int | None = None,
    *,
    seed: int = 0,
    seeds: Sequence[int] | Tensor | None = None,
    graph: bool = False,
    observe: Observer | None = None,
) -> Run:
    """Draw samples one step after the other: N calls each. Arguments as for `sample`."""
    require_target(target)
    key = resolve_seeds(count, seed, seeds).to(target.std.device)
    return Sequential(target, len(key), graph=graph).sample(key, observe)
