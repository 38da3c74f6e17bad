"""The engine's sequential mode, used if no window is faster."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor

from foresample.backends import extra_noise, normal
from foresample.baseline import Sequential
from foresample.contracts import Target, start_states
from foresample.core.look import FreeLook
from foresample.core.noise import START
from foresample.core.report import Observer, Run
from foresample.engine.slots import Finished

METHOD = "sequential"
"""The method that reports name; the window is 0."""


class SequentialDraws:
    """Draws as `Engine.draw` does, a batch of `slots` samples at a time; all samples take equally many calls."""

    def __init__(self, target: Target, slots: int, *, graph: bool = False, look: bool = True) -> None:
        self.target, self.slots, self.method = target, slots, METHOD
        self.sampler = Sequential(target, slots, graph=graph)
        self.look = FreeLook(getattr(target, "unrecorded", None)) if look else None

    def sample(self, rows: Tensor, seeds: Tensor, observe: Observer | None = None) -> Run:
        """All samples of these seeds, in the order of their rows, and their costs."""
        order = rows.argsort(stable=True)
        rows, seeds = rows[order], seeds[order]
        look = self._look(rows[: self.slots], seeds[: self.slots])
        run = self.sampler.sample(seeds, observe, rows=rows)
        if look is None:
            run.report.evidence.trusted.append("look=False")
        else:
            run.report.look_calls, run.report.evidence = look.calls, look.evidence
        return run

    def draw(
        self,
        parts: Iterable[tuple[Tensor, Tensor]],
        observe: Observer | None = None,
        *,
        stop: Callable[[], bool] | None = None,
    ) -> Iterator[Finished]:
        """Samples as they finish, batch by batch. `stop` is called before each batch."""
        for index, seeds in _batches(parts, self.slots, stop):
            self._look(index, seeds)
            x, fault = self.sampler.draw(index, seeds, observe)
            cost = torch.full_like(index, len(self.target.std))
            yield Finished(index, x, cost, cost.clone(), fault)

    def _look(self, index: Tensor, seeds: Tensor) -> FreeLook | None:
        """Check at two first states of a batch that the target's answers depend on the state alone."""
        if self.look is None:
            return None
        look, std = self.look.of_one_draw(), self.target.std
        row, seed = (values[:2].to(std.device) for values in (index, seeds))
        zero = torch.zeros_like(row)
        with torch.no_grad():
            unit = normal(seed, self.target.shape, std.dtype, stream=START, step=zero, draw=zero)
            x = start_states(self.target, unit, row)
            look.predict(self.target, x, zero, row, extra_noise(self.target, seed, zero))
        return look


def _batches(
    parts: Iterable[tuple[Tensor, Tensor]], size: int, stop: Callable[[], bool] | None
) -> Iterator[tuple[Tensor, Tensor]]:
    """The parts' samples in batches of this size; the last one may be smaller."""
    coming, waiting = iter(parts), (torch.empty(0, dtype=torch.int64),) * 2
    while stop is None or not stop():
        while len(waiting[0]) < size and (part := next(coming, None)) is not None:
            waiting = torch.cat([waiting[0], part[0]]), torch.cat([waiting[1], part[1]])
        if not len(waiting[0]):
            return
        yield waiting[0][:size], waiting[1][:size]
        waiting = waiting[0][size:], waiting[1][size:]
