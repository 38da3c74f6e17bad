"""Shards drawn in slots: each is written as soon as it is full, while the next are drawn."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from foresample.contracts import Target
from foresample.datasets.shards import Entry, Failure, Plan, Unsound, read_shard, write_shard
from foresample.engine.slots import Finished
from foresample.faults import NO_FAULT, fault_error, fault_step

_WRITING = 2  # full shards that may wait for the disk before drawing does


@dataclass(frozen=True)
class Progress:
    """A worker's progress."""

    worker: int
    samples: int
    calls: int
    """Calls of those samples, which are finished but in shards that are not written yet."""
    written: tuple[Entry, ...]
    """Shards written since the last word."""


class _Filling:
    """A shard under way: what its file had, and what has come since, each in its place."""

    def __init__(self, plan: Plan, number: int, target: Target) -> None:
        self.plan, self.number = plan, number
        self.hint = getattr(target, "fault_hint", "")
        self.index, self.seeds, size = plan.index(number), plan.seeds(number), plan.size(number)
        self.x = torch.empty((size, *target.shape), dtype=target.std.dtype)
        self.calls_of, self.evaluations_of = (torch.zeros(size, dtype=torch.int64) for _ in range(2))
        self.has = torch.zeros(size, dtype=torch.bool)
        try:
            kept = read_shard(plan, number)
        except Unsound:  # drawn again
            kept = None
        self.file = None if kept is None else kept.entry
        if kept is not None:
            self._put(kept.done)
        self.waiting = self.index[~self.has], self.seeds[~self.has]
        self.left = len(self.waiting[0])
        self.samples, self.calls = 0, 0
        self.failures: list[Failure] = []

    def _put(self, done: Finished) -> None:
        place = done.index - self.index[0]
        self.x[place], self.calls_of[place], self.evaluations_of[place] = done.x, done.calls, done.evaluations
        self.has[place] = True

    def add(self, done: Finished) -> None:
        """Samples of this shard, finished or broken."""
        self.left -= len(done.index)
        good = done.fault == NO_FAULT
        self.failures += [self._failure(done, i) for i in (~good).nonzero().flatten().tolist()]
        done = _only(done, good)
        self._put(done)
        self.samples += len(done.index)
        self.calls += int(done.calls.sum())

    def _failure(self, done: Finished, i: int) -> Failure:
        index, fault = int(done.index[i]), int(done.fault[i])
        seed = int(self.seeds[index - self.index[0]])
        return Failure(index, seed, fault_step(fault), str(fault_error(fault, index, self.hint)))

    def write(self) -> Entry:
        """All there is of it, as its file; a file that has it all already stays."""
        if self.file is not None and not self.samples and not self.failures:
            return self.file
        self.failures.sort(key=lambda failure: failure.index)
        fault = torch.full_like(self.index, NO_FAULT)
        done = Finished(self.index, self.x, self.calls_of, self.evaluations_of, fault)
        return write_shard(self.plan, self.number, _only(done, self.has), tuple(self.failures))


class Draws(Protocol):
    """Draws samples in slots: an `Engine`, or the sequential sampler."""

    @property
    def target(self) -> Target:
        """The chain."""

    @property
    def method(self) -> str:
        """How, in words; samples depend on it."""

    def draw(
        self, parts: Iterable[tuple[Tensor, Tensor]], *, stop: Callable[[], bool] | None = None
    ) -> Iterator[Finished]:
        """As `Engine.draw`."""


def draw_shards(
    engine: Draws,
    plan: Plan,
    numbers: Iterator[int],
    worker: int = 0,
    stop: Callable[[], bool] | None = None,
) -> Iterator[Progress]:
    """Draw what these shards lack and write each as soon as it is full, while the next are drawn.

    The next number is asked for when a slot is free for it: slots do not run empty between shards. If drawing
    stops early, by `stop` (`Engine.draw`) or by whatever is not the death of the process, finished samples of
    unfinished shards are written too.
    """
    under_way: dict[int, _Filling] = {}
    writing: dict[int, Future[Entry]] = {}

    def parts() -> Iterator[tuple[Tensor, Tensor]]:
        for number in numbers:
            shard = under_way[number] = _Filling(plan, number, engine.target)
            yield shard.waiting

    def progress(most: int) -> Progress:
        """Full shards go to the writer; those written leave, and at most so many stay with it."""
        for number, shard in under_way.items():
            if not shard.left and number not in writing:
                writing[number] = writer.submit(shard.write)
        waited = list(writing)[: max(0, len(writing) - most)]
        gone = [number for number, entry in writing.items() if number in waited or entry.done()]
        written = tuple(writing[number].result() for number in gone)
        for number in gone:
            del under_way[number], writing[number]
        samples, calls = (sum(getattr(s, n) for s in under_way.values()) for n in ("samples", "calls"))
        return Progress(worker, samples, calls, written)

    with ThreadPoolExecutor(1, thread_name_prefix="shards") as writer:
        try:
            for done in engine.draw(parts(), stop=stop):
                done = Finished(*(value.cpu() for value in vars(done).values()))
                number = done.index // plan.shard
                for n in set(number.tolist()):
                    under_way[n].add(_only(done, number == n))
                yield progress(_WRITING)
            for shard in under_way.values():
                shard.left = 0  # what was not begun will not come
            yield progress(0)
        except BaseException:
            for n, shard in under_way.items():
                if shard.samples and n not in writing:
                    with suppress(OSError):  # the disk may be what is wrong
                        shard.write()
            raise


def _only(done: Finished, which: Tensor) -> Finished:
    return done if which.all() else Finished(*(value[which] for value in vars(done).values()))
