"""The sequential sampler: the baseline of every figure, and the reference of every distribution test.

As the reference it imports none of the code that it is compared with: no rounds, verification, drafters or engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from threading import RLock
from time import perf_counter

import torch
from torch import Tensor

from foresample.backends import backend_of, extra_noise
from foresample.backends.graphs import capture, require_cuda
from foresample.backends.own_chain import require_own_chain
from foresample.contracts import (
    Target,
    affine_chain,
    calls_per_step,
    expand,
    no_history,
    predict,
    remember,
    require_target,
    resolve_slots,
    start_states,
    transition_mean,
)
from foresample.core.noise import START, resolve_seeds
from foresample.core.preparation import compile_seconds
from foresample.core.report import Commit, Observer, Report, Run, Tally, TimedTarget
from foresample.faults import NO_FAULT, broken, note_fault, note_state, raise_faults

_LOOK_EVERY = 64  # steps between looks for NaN and infinity, on a device where looking means waiting


class Sequential:
    """The sequential sampler for one target, kept between runs: later runs reuse its captured graph.

    Its states are kept, too, so threads that draw with one sampler wait for one another.
    """

    def __init__(self, target: Target, slots: int, *, graph: bool = False) -> None:
        require_target(target)
        require_own_chain(target)
        device = target.std.device
        if graph:
            require_cuda(target)
        self.target, self.slots, self.timed = target, slots, TimedTarget(target)
        self.chain, self.backend, self._turn = affine_chain(target), backend_of(target), RLock()
        with torch.inference_mode(False):  # they are written to later, perhaps outside of that mode
            self.row, self.key, self.step, self.fault = (
                torch.zeros(slots, dtype=torch.int64, device=device) for _ in range(4)
            )
            self.used = torch.ones(slots, 1, dtype=torch.bool, device=device)
            self.x = torch.zeros((slots, *target.shape), dtype=target.std.dtype, device=device)
            self.previous = no_history(target, self.x)
        self.backend.prepare(target.std.dtype)
        self.graph = capture(self._transition, device) if graph else None

    def sample(self, seeds: Tensor, observe: Observer | None = None, *, rows: Tensor | None = None) -> Run:
        """The samples of these seeds, `slots` at a time; `rows` numbers them for the target, 0, 1, … by default."""
        with self._turn:
            return self._sample(seeds, observe, rows)

    def _sample(self, seeds: Tensor, observe: Observer | None, rows: Tensor | None) -> Run:
        started, steps, self.timed.seconds = perf_counter(), len(self.target.std), 0.0
        compiled = compile_seconds()
        index, seeds = torch.arange(len(seeds)), seeds.cpu()
        rows = index if rows is None else rows
        parts = [self.draw(rows[i], seeds[i], observe, strict=True)[0] for i in index.split(self.slots)]
        tally = Tally(0, steps, index.device)
        tally.lengths[0] = steps * len(seeds)
        report = Report("sequential", steps, len(seeds), 0, slots=self.slots)
        report.calls_per_step = calls_per_step(self.target)
        report.occupancy = len(seeds) / (self.slots * len(parts))
        run = tally.close(
            report, torch.cat(parts), torch.full_like(index, steps), torch.full_like(index, steps)
        )
        report.preparation_seconds = compile_seconds() - compiled
        report.seconds = perf_counter() - started - report.preparation_seconds
        report.target_seconds = self.timed.seconds - report.preparation_seconds
        return run

    def draw(
        self, row: Tensor, seeds: Tensor, observe: Observer | None = None, *, strict: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Samples `row` of these seeds, at most `slots`, and their faults (`faults`).

        A broken sample is given up; if `strict`, the first fault is raised. Slots left over repeat the last sample.
        """
        with self._turn:
            return self._draw(row, seeds, observe, strict)

    def _draw(
        self, row: Tensor, seeds: Tensor, observe: Observer | None, strict: bool
    ) -> tuple[Tensor, Tensor]:
        target, count = self.target, len(row)
        full = torch.arange(self.slots).clamp(max=count - 1)
        self.row.copy_(row[full])
        self.key.copy_(seeds[full])
        self.step.zero_()
        self.fault.fill_(NO_FAULT)
        zero = torch.zeros_like(self.key)
        unit = self.backend.normal(self.key, target.shape, target.std.dtype, stream=START, step=zero, draw=zero)
        with torch.no_grad():
            self.x.copy_(start_states(target, unit, self.row))
        look_every = _LOOK_EVERY if self.x.is_cuda else 1
        for k in range(len(target.std)):
            with torch.no_grad():
                self.graph.replay() if self.graph else self._transition()
            if not strict:
                self.x.masked_fill_(expand(self.fault != NO_FAULT, self.x), 0.0)
            elif (k + 1) % look_every == 0:
                raise_faults(self.fault, self.row, target)
            if observe is not None:
                x, rows = self.x[:count].clone(), self.row[:count].clone()
                one, none = torch.ones_like(rows), target.std.new_zeros(count, 0)
                observe(Commit(rows, k * one, one, x.unsqueeze(1), x, none, one - 1))
        fault = note_state(self.fault, self.x, len(target.std))
        if strict:
            raise_faults(fault, self.row, target)
        return self.x[:count].clone(), fault[:count].clone()

    def _transition(self) -> None:
        """One step of all rows, in place."""
        target, step, transition = self.target, self.step, self.backend.transition
        extra = extra_noise(target, self.key, step)
        prediction = predict(self.timed, self.x.clone(), step, self.row, extra)
        if transition is not None and self.chain is not None:
            transition(self.chain, self.x, prediction, self.previous, self.key, step, self.fault)
        else:
            network, state = (broken(v.unsqueeze(1)) for v in (prediction, self.x))
            self.fault.copy_(note_fault(self.fault, network, state, step.unsqueeze(1), self.used))
            mean = transition_mean(target, self.x, prediction, step, self.previous, extra)
            zero = torch.zeros_like(self.key)
            noise = self.backend.normal(self.key, target.shape, self.x.dtype, step=step, draw=zero)
            self.x.copy_(mean + expand(target.std[step], noise) * noise)
            self.previous.copy_(remember(target, prediction, self.previous))
        step.add_(1).clamp_(max=len(target.std) - 1)


def sequential(
    target: Target,
    count: int | None = None,
    *,
    seed: int = 0,
    seeds: Sequence[int] | Tensor | None = None,
    slots: int | None = None,
    graph: bool = False,
    observe: Observer | None = None,
) -> Run:
    """Draw samples one step after the other: N calls each. Arguments as for `sample`."""
    require_target(target)
    key = resolve_seeds(count, seed, seeds)
    return Sequential(target, resolve_slots(slots, len(key)), graph=graph).sample(key, observe)
