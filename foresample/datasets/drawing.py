"""Shards drawn in slots: each is written as soon as it is full, while the next are drawn."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass

import torch
from torch import Tensor

from foresample.contracts import Target
from foresample.datasets.shards import Entry, Failure, Plan, Unsound, read_shard, write_shard
from foresample.engine import Engine
from foresample.engine.sequential import SequentialDraws
from foresample.engine.slots import Finished
from foresample.faults import NO_FAULT, fault_error, fault_step

_WRITING = 2  # full shards that may wait for the disk before drawing does
_MISSING = -(2**62)  # in the place of a fault: a sample that is not drawn yet


@dataclass(frozen=True)
class Progress:
    """A worker's news: finished samples of shards not written yet, their calls, and the shards written since."""

    worker: int
    samples: int
    calls: int
    written: tuple[Entry, ...]


class Filling:
    """A shard under way: what its file had and what was drawn since, each sample in its place."""

    def __init__(self, plan: Plan, number: int, target: Target) -> None:
        self.plan, self.number, self.target = plan, number, target
        index, self.seeds = plan.index(number), plan.seeds(number)
        x = torch.empty((len(index), *target.shape), dtype=target.std.dtype)
        costs = torch.zeros_like(index), torch.zeros_like(index)
        self.done = Finished(index, x, *costs, torch.full_like(index, _MISSING))
        try:
            self.file = read_shard(plan, number)
        except Unsound:  # drawn again
            self.file = None
        if self.file is not None:
            self._put(self.file.done)
        lacks = self.done.fault == _MISSING
        self.waiting, self.left = (index[lacks], self.seeds[lacks]), int(lacks.sum())
        self.samples, self.calls = 0, 0

    def _put(self, done: Finished) -> None:
        place = done.index - self.done.index[0]
        for mine, new in zip(vars(self.done).values(), vars(done).values(), strict=True):
            mine[place] = new

    def add(self, done: Finished) -> None:
        """Samples of this shard, finished or broken."""
        self._put(done)
        good = done.fault == NO_FAULT
        self.left -= len(good)
        self.samples += int(good.sum())
        self.calls += int(done.calls[good].sum())

    def write(self) -> Entry:
        """Write the file with all there is; a file that has it all already stays."""
        good = self.done.fault == NO_FAULT
        broken = (~good & (self.done.fault != _MISSING)).nonzero().flatten().tolist()
        if self.file is not None and not self.samples and not broken:
            return self.file.entry
        return write_shard(self.plan, self.number, _only(self.done, good), tuple(map(self._failure, broken)))

    def _failure(self, i: int) -> Failure:
        index, seed, fault = (int(values[i]) for values in (self.done.index, self.seeds, self.done.fault))
        error = fault_error(fault, index, getattr(self.target, "fault_hint", ""))
        return Failure(index, seed, fault_step(fault), str(error))


def draw_shards(
    engine: Engine | SequentialDraws,
    plan: Plan,
    numbers: Iterator[int],
    worker: int = 0,
    stop: Callable[[], bool] | None = None,
) -> Iterator[Progress]:
    """Draw what these shards lack and write each as soon as it is full, while the next are drawn.

    The next number is taken when a slot is free for it: slots do not run empty between shards. If drawing stops early,
    by `stop` (`Engine.draw`) or by an error, finished samples of unfinished shards are written too.
    """
    under_way: dict[int, Filling] = {}
    writing: dict[int, Future[Entry]] = {}

    def parts() -> Iterator[tuple[Tensor, Tensor]]:
        for number in numbers:
            shard = under_way[number] = Filling(plan, number, engine.target)
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
    return Finished(*(value[which] for value in vars(done).values()))
