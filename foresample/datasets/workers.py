"""The worker that draws shards in this process; `cluster` runs many on Ray."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Literal

import torch
from torch import Tensor

from foresample.baseline import Sequential
from foresample.checks.samples import SamplesLaw, samples_law
from foresample.contracts import Target, require_target
from foresample.core.noise import seeds_of
from foresample.core.round import can_draft
from foresample.datasets.dataset import read_sound
from foresample.datasets.fingerprint import Fingerprint, difference, fingerprint
from foresample.datasets.shards import Entry, Failure, Plan, Unsound, read_shard, write_shard
from foresample.engine import Engine
from foresample.engine.sequential import SequentialDraws
from foresample.engine.slots import Finished
from foresample.engine.tuning import Tuning, measure
from foresample.faults import NO_FAULT, fault_error, fault_step
from foresample.settings import Settings, Window
from foresample.sizes import require_memory, round_bytes, state_bytes
from foresample.text import printable

Factory = Callable[[], Target]
"""A function that makes the target; on Ray it is pickled and called in each worker."""
Stop = Callable[[], bool]
"""A function called before samples are begun; once it returns True, no more are begun."""
_WRITING = 2  # full shards that may wait for the disk before drawing stops to wait
_MISSING = -(2**62)  # in the place of a fault: a sample that is not drawn yet


@dataclass(frozen=True)
class Description:
    """Facts about a target and its sampler, for the manifest; `choice` is the reason for a measured window."""

    settings: dict[str, Any]
    fingerprint: Fingerprint
    choice: str | None


class LocalWorker:
    """A process with one target: the only one of a plain run, or one worker of a cluster.

    The window of `settings` is not used: the dataset's plan has the window.
    """

    def __init__(self, target: Target | Factory, settings: Settings) -> None:
        made = target if isinstance(target, Target) or not callable(target) else target()
        require_target(made)
        self.target, self.settings, self.slots = made, settings, settings.slots or 1
        self.fingerprint = cache(lambda count: fingerprint(made, count))
        self._draws = cache(self._made)

    def describe(
        self, window: Window, count: int, say: Callable[[str], None] = lambda what: None
    ) -> Description:
        """Describe the target; "auto" measures the window here, and `say` is called with what is measured."""
        std, choice = self.target.std, None
        if not isinstance(window, int):
            window, choice = self._choose(window, say)
        settings = {
            "shape": list(self.target.shape),
            "steps": len(std),
            "dtype": str(std.dtype).removeprefix("torch."),
            "std": hashlib.sha256(std.cpu().view(torch.uint8).numpy().data).hexdigest()[:16],
            "method": re.sub(r" at 0x[0-9a-f]+", "", self._draws(window).method),
            "window": window,  # as requested: the engine cuts it to the chain
        }
        return Description(settings, self.fingerprint(count), choice)

    def draw(
        self, plan: Plan, numbers: Iterable[int], stop: Stop | None = None, worker: int = 0
    ) -> Iterator[Progress]:
        """Draw these shards, or the part of them that is begun before `stop`."""
        self._require_target_of(plan)
        return draw_shards(self._draws(plan.window), plan, iter(numbers), worker, stop)

    def law(self, plan: Plan, count: int) -> SamplesLaw:
        """Compare the whole dataset with `count` sequential samples; refused while any sample is missing."""
        self._require_target_of(plan)
        seeds = seeds_of(plan.seed, count, plan.count)  # seeds that the dataset does not use
        rows = torch.arange(count) % plan.count  # a target may know no others
        plain = Sequential(self.target, min(self.slots, count)).sample(seeds, rows=rows)
        return samples_law(plain.samples, _whole(plan))

    def _choose(self, window: Literal["auto"] | Tuning, say: Callable[[str], None]) -> tuple[int, str]:
        """The fastest window, 0 if the sequential sampler is faster, and why."""
        if window == "auto":
            if not can_draft(self.target):
                return 0, "Sample sequentially: this chain has no transition that can be drafted"
            self._require_memory(1)
            window = measure(self.target, self.settings, progress=say)
        return window.window_for(len(self.target.std), self.slots) or 0, window.advice

    def _made(self, window: int) -> Engine | SequentialDraws:
        self._require_memory(min(window, max(1, len(self.target.std) - 1)))
        if not window:
            return SequentialDraws(self.target, self.slots, graph=self.settings.graph, look=self.settings.look)
        return Engine(self.target, replace(self.settings, window=window, slots=self.slots))

    def _require_memory(self, window: int) -> None:
        std = self.target.std
        require_memory(
            round_bytes(self.slots, window, state_bytes(self.target.shape, std.dtype)),
            f"{self.slots} samples under way at a time, each with a window of {window},",
            "give fewer slots or a smaller window",
            std.device,
        )

    def _require_target_of(self, plan: Plan) -> None:
        """Refuse to draw for a dataset of another target: workers make their own."""
        own = self.fingerprint(plan.count)
        if plan.fingerprint is not None and (other := difference(plan.fingerprint, own)):
            raise ValueError(
                f"a worker made another target than the dataset's ({other}): give all machines the same code and files"
            )


def _whole(plan: Plan) -> Iterator[Tensor]:
    """All samples of the plan, for the distribution test; an error if any is missing."""
    for number in range(plan.shards):
        shard = read_sound(plan, number)
        if shard.entry.samples < plan.size(number):
            missing = number * plan.shard + shard.entry.in_order
            raise ValueError(
                f"sample {missing} is missing in {printable(plan.out)}, and without it the others are a biased "
                "selection, whose distribution is not checked: run the same command again to complete the dataset"
            )
        yield shard.done.x


@dataclass(frozen=True)
class Progress:
    """A worker's report: finished samples of unwritten shards, their calls, and shards written since the last."""

    worker: int
    samples: int
    calls: int
    written: tuple[Entry, ...]


class Filling:
    """A shard under way: samples from its file and samples drawn since, each in its place."""

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
        """Add samples of this shard, finished or broken."""
        self._put(done)
        good = done.fault == NO_FAULT
        self.left -= len(good)
        self.samples += int(good.sum())
        self.calls += int(done.calls[good].sum())

    def write(self) -> Entry:
        """Write the file with all finished samples, unless it holds them already."""
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
    """Draw the missing samples of these shards, and write each shard once it is full, while the next are drawn.

    The next number is taken when a slot is free for it, so slots stay busy between shards. If drawing ends early, by
    `stop` (`Engine.draw`) or an error, the finished samples of incomplete shards are written, too.
    """
    under_way: dict[int, Filling] = {}
    writing: dict[int, Future[Entry]] = {}

    def parts() -> Iterator[tuple[Tensor, Tensor]]:
        for number in numbers:
            shard = under_way[number] = Filling(plan, number, engine.target)
            yield shard.waiting

    def progress(most: int) -> Progress:
        """Pass full shards to the writer, wait until it holds at most `most`, and report those written."""
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
                shard.left = 0  # the rest was not begun
            yield progress(0)
        except BaseException:
            for n, shard in under_way.items():
                if shard.samples and n not in writing:
                    with suppress(OSError):  # the disk may have failed
                        shard.write()
            raise


def _only(done: Finished, which: Tensor) -> Finished:
    return Finished(*(value[which] for value in vars(done).values()))
