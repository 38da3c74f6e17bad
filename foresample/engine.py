"""The engine: many samples through few slots.

A slot holds one sample under way. When a sample is done, the next one waiting takes its slot at once, so nobody
waits for stragglers, and memory is O(slots × window × state), whatever the number of samples and the length of
the chain. Each sample has its own noise and its own steps: what comes out does not depend on how many slots
there are, on the order, or on who sits in the slot beside.

Two ways to keep slots, for two kinds of machine:

    loose    on a CPU: rows come and go, a call evaluates just the states needed, every round is looked at
    fixed    on a GPU: rows stay where they are and every call has the same shape, so that nothing in a round
             waits for the host and a round can be replayed as a CUDA graph. A round commits at most window + 1
             transitions, so the host knows how many rounds are certain to be needed before any sample can be
             done. It queues that many, and only then looks.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Protocol, cast

import torch
from torch import Tensor

from foresample import kernels, speculate
from foresample import noise as streams
from foresample.contracts import (
    NO_FAULT,
    Drafter,
    Target,
    at_least_one,
    is_multistep,
    predict,
    raise_faults,
    require_drafter,
    require_finite,
    require_target,
)
from foresample.drafters import Replay
from foresample.report import Report, Run, Tally
from foresample.speculate import Call, Commit, Rows, Settings, begin, last_draftable
from foresample.targets.affine import AffineTarget

Observer = Callable[[Commit], None]
Round = Callable[[Target, Rows, Settings, Tally], Generator[Call, Tensor, tuple[Rows, Commit]]]


@dataclass(frozen=True)
class Sample:
    """One finished sample."""

    index: int
    seed: int
    x: Tensor
    """[*shape]"""
    calls: int
    evaluations: int


@dataclass(frozen=True)
class Finished:
    """Samples that left their slots after one round, [n] each."""

    index: Tensor
    x: Tensor
    """[n, *shape]"""
    calls: Tensor
    evaluations: Tensor
    fault: Tensor
    """NO_FAULT, or why the sample was given up (`contracts.fault_error`)."""

    @staticmethod
    def of(rows: Rows) -> Finished:
        return Finished(rows.sample, rows.x, rows.round, rows.evaluations, rows.fault)


class Slots(Protocol):
    """Rows under way, at most `capacity` of them."""

    capacity: int
    rounds: int

    def __len__(self) -> int:
        """Rows under way."""

    def admit(self, rows: Rows) -> None:
        """Take in new rows, no more than there is room for."""

    def advance(self, observe: Observer | None) -> Finished | None:
        """A round or several, until a row is done or broken; those that are leave."""


class LooseSlots:
    """Rows come and go; see the module."""

    def __init__(self, one_round: Callable[[Rows], tuple[Rows, Commit]], steps: int, capacity: int) -> None:
        self.one_round, self.steps, self.capacity = one_round, steps, capacity
        self.rows: Rows | None = None
        self.rounds = 0

    def __len__(self) -> int:
        return 0 if self.rows is None else len(self.rows.sample)

    def admit(self, rows: Rows) -> None:
        self.rows = rows if self.rows is None else self.rows.map(lambda *parts: torch.cat(parts), rows)

    def advance(self, observe: Observer | None) -> Finished | None:
        assert self.rows is not None
        self.rows, commit = self.one_round(self.rows)
        self.rounds += 1
        if observe is not None:
            observe(commit)
        left = (self.rows.step == self.steps) | (self.rows.fault != NO_FAULT)
        if not left.any():
            return None
        gone, kept = left.nonzero().squeeze(1), (~left).nonzero().squeeze(1)
        finished = Finished.of(self.rows.map(lambda v: v[gone]))
        self.rows = self.rows.map(lambda v: v[kept]) if len(kept) else None
        return finished


class FixedSlots:
    """Rows stay in place, and rounds are queued without waiting; see the module."""

    def __init__(
        self,
        one_round: Callable[[Rows], tuple[Rows, Commit]],
        steps: int,
        window: int,
        idle: Rows,
        *,
        graph: bool,
    ) -> None:
        self.one_round, self.steps, self.most = one_round, steps, window + 1
        self.rows = idle.map(lambda v: v.clone(memory_format=torch.contiguous_format))
        self.capacity = len(idle.sample)
        self.graph = capture(self._round) if graph else None
        self.clear()

    def clear(self) -> None:
        """Free all slots."""
        self.left = [0] * self.capacity  # transitions left of the row in each slot; 0: free
        self.rounds = 0
        self.rows.step.fill_(self.steps)

    def __len__(self) -> int:
        return sum(left > 0 for left in self.left)

    def admit(self, rows: Rows) -> None:
        free = [slot for slot, left in enumerate(self.left) if not left][: len(rows.sample)]
        index = torch.tensor(free, device=rows.sample.device)
        for mine, new in zip(self.rows.tensors(), rows.tensors(), strict=True):
            mine.index_copy_(0, index, new)
        for slot in free:
            self.left[slot] = self.steps

    def advance(self, observe: Observer | None) -> Finished | None:
        certain = 1
        if observe is None:
            certain = min(-(-left // self.most) for left in self.left if left)
        for _ in range(certain):
            if self.graph is not None and observe is None:
                self.graph.replay()
            else:
                self._round(observe)
        self.rounds += certain
        return self._look()

    def _round(self, observe: Observer | None = None) -> None:
        after, commit = self.one_round(self.rows)
        if observe is not None:  # who gets tensors of their own: the rows' are about to change
            observe(replace(commit, sample=commit.sample.clone(), step=commit.step.clone()))
        torch._foreach_copy_(self.rows.tensors(), after.tensors())

    def _look(self) -> Finished | None:
        """The one place that waits for the device."""
        step, fault = torch.stack([self.rows.step, self.rows.fault]).tolist()
        gone = [
            slot
            for slot, left in enumerate(self.left)
            if left and (step[slot] == self.steps or fault[slot] != NO_FAULT)
        ]
        self.left = [self.steps - step[slot] if left else 0 for slot, left in enumerate(self.left)]
        if not gone:
            return None
        for slot in gone:
            self.left[slot] = 0
        index = torch.tensor(gone, device=self.rows.step.device)
        self.rows.step.index_fill_(0, index, self.steps)
        return Finished.of(self.rows.map(lambda v: v[index]))


def capture(work: Callable[[], object]) -> torch.cuda.CUDAGraph:
    """A CUDA graph of the work, run a few times before (compilers, caches)."""
    aside = torch.cuda.Stream()
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):
        for _ in range(3):
            work()
    torch.cuda.current_stream().wait_stream(aside)
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            work()
    except RuntimeError as error:
        raise RuntimeError(
            f"the target cannot be captured in a CUDA graph ({str(error).splitlines()[0]}): it must not read "
            "values back from the device or depend on them; or leave graph=True out"
        ) from error
    return graph


class Engine:
    """Slots for one target, kept between runs: what was compiled and captured once serves every later run.

    Args:
        target: the chain to sample.
        window: transitions drafted in a round, L; a call evaluates at most L + 1 states of each sample.
        slots: samples under way at a time.
        drafter: where guesses come from; `Replay()` by default.
        block: transitions verified as one block; the whole window by default. 1 is the per-step test.
        recycle: turn rejected noise back into fresh noise; False draws fresh noise instead.
        graph: replay rounds as one CUDA graph: no launch overhead, on a target whose network can be captured.
    """

    def __init__(
        self,
        target: Target,
        *,
        window: int,
        slots: int,
        drafter: Drafter | None = None,
        block: int | None = None,
        recycle: bool = True,
        graph: bool = False,
    ) -> None:
        require_target(target)
        self.window = at_least_one("window", window)
        self.capacity = at_least_one("slots", slots)
        block = None if block is None else at_least_one("block", block)
        self.drafter = Replay() if drafter is None else drafter
        require_drafter(self.drafter)
        self.target, self.steps, self.device = target, len(target.std), target.std.device
        fixed = self.device.type == "cuda"
        if graph and not fixed:
            raise ValueError("graph=True needs a target on a CUDA device; leave it out on others")
        self.graph = graph
        self.settings = Settings(self.drafter, self.window, block, recycle, last_draftable(target.std), fixed)
        self.tally = Tally(self.window, self.steps, self.device)
        self.timed = Timed(target)
        self._round = round_for(target, self.settings)
        self._fixed: FixedSlots | None = None
        noise = "recycled" if recycle else "fresh"
        self.method = f"{self.drafter}, block {block or 'window'}, {noise} noise"

    def finished(self, seeds: Tensor, observe: Observer | None = None) -> Iterator[Finished]:
        """Samples as they are done, several at a time; sample i has seeds[i]. Broken ones come with a fault."""
        seeds = seeds.to(self.device)
        self.slots = slots = self._slots(min(self.capacity, len(seeds)))
        self.tally.clear()
        waiting = 0
        while waiting < len(seeds) or len(slots):
            more = min(slots.capacity - len(slots), len(seeds) - waiting)
            if more:
                index = torch.arange(waiting, waiting + more, device=self.device)
                with torch.no_grad():
                    slots.admit(begin(self.target, self.drafter, self.window, seeds[index], sample=index))
                waiting += more
            with torch.no_grad():
                done = slots.advance(observe)
            if done is not None:
                yield done

    def stream(self, seeds: Tensor) -> Iterator[Sample]:
        """Samples one by one as they are done, in no particular order."""
        for done in self.finished(seeds):
            raise_faults(done.fault, done.index)
            require_finite(done.x, done.index)
            costs = torch.stack([done.index, done.calls, done.evaluations], 1).tolist()
            for x, (index, calls, evaluations) in zip(done.x, costs, strict=True):
                yield Sample(index, int(seeds[index]), x, calls, evaluations)

    def sample(self, seeds: Tensor, observe: Observer | None = None) -> Run:
        """All samples of these seeds, in order, and what they cost."""
        started, self.timed.seconds = perf_counter(), 0.0
        parts = []
        for done in self.finished(seeds, observe):
            raise_faults(done.fault, done.index)
            parts.append(done)
        index, x, calls, evaluations = (
            torch.cat([getattr(part, name) for part in parts])
            for name in ("index", "x", "calls", "evaluations")
        )
        order = index.argsort()
        samples = x[order]
        require_finite(samples, index[order])
        report = Report(self.method, self.steps, len(seeds), self.window, slots=self.slots.capacity)
        run = self.tally.close(report, samples, calls[order], evaluations[order])
        report.occupancy = report.rounds / (self.slots.capacity * self.slots.rounds)
        report.seconds, report.target_seconds = perf_counter() - started, self.timed.seconds
        return run

    def _slots(self, capacity: int) -> Slots:
        if not self.settings.padded:
            return LooseSlots(self._run_round, self.steps, capacity)
        if self._fixed is None:
            key = torch.zeros(self.capacity, dtype=torch.int64, device=self.device)
            with torch.no_grad():
                rows = begin(self.target, self.drafter, self.window, key)
                idle = replace(rows, step=rows.step + self.steps)
                self._fixed = FixedSlots(self._run_round, self.steps, self.window, idle, graph=self.graph)
        self._fixed.clear()
        return self._fixed

    def _run_round(self, rows: Rows) -> tuple[Rows, Commit]:
        """One round, its call answered with the target's prediction."""
        rounds = self._round(self.target, rows, self.settings, self.tally)
        call = next(rounds)
        try:
            rounds.send(predict(self.timed, call.x, call.step, call.row))
        except StopIteration as end:
            return cast(tuple[Rows, Commit], end.value)
        raise AssertionError("a round makes one call")


def round_for(target: Target, settings: Settings) -> Round:
    """The fused round where it serves, else the plain one."""
    fits = isinstance(target, AffineTarget) and settings.drafter == Replay() and settings.recycle
    if fits and target.std.is_cuda and kernels.available():
        from foresample.kernels.round import one_round

        return cast(Round, one_round)
    return speculate.one_round


def all_rounds(
    target: Target, rows: Rows, settings: Settings, tally: Tally, observe: Observer
) -> Generator[Call, Tensor, Finished]:
    """Rounds until every row is at its end, for those who make the calls: yields them, is sent predictions."""
    slots: list[Rows] = []
    one_round = round_for(target, settings)
    while len(rows.sample):
        rows, commit = yield from one_round(target, rows, settings, tally)
        observe(commit)
        raise_faults(rows.fault, rows.sample)
        done = rows.step == len(target.std)
        if done.any():
            gone, kept = done.nonzero().squeeze(1), (~done).nonzero().squeeze(1)
            slots.append(rows.map(lambda v, index=gone: v[index]))
            rows = rows.map(lambda v, index=kept: v[index])
    everything = slots[0].map(lambda *parts: torch.cat(parts), *slots[1:])
    order = everything.sample.argsort()
    return Finished.of(everything.map(lambda v: v[order]))


def resolve_seeds(
    count: int | None = None, seed: int = 0, seeds: Sequence[int] | Tensor | None = None
) -> Tensor:
    """One seed per sample."""
    if seeds is None:
        if count is None:
            raise ValueError("say how many samples to draw: count=64, or seeds=[…], one per sample")
        return streams.seeds_of(seed, at_least_one("count", count))
    key = streams.as_seeds(seeds)
    if count is not None and len(key) != count:
        raise ValueError(f"{len(key)} seeds for count={count} samples: give one seed per sample, or no count")
    if not len(key):
        raise ValueError("seeds is empty: give one seed per sample")
    return key


class Timed:
    """A target that clocks its own predictions."""

    def __init__(self, target: Target) -> None:
        self.shape, self.std, self.start, self.mean = target.shape, target.std, target.start, target.mean
        self.multistep = is_multistep(target)
        self._predict = target.predict
        self.seconds = 0.0

    def predict(self, x: Tensor, step: Tensor, row: Tensor) -> Tensor:
        started = perf_counter()
        prediction = self._predict(x, step, row)
        self.seconds += perf_counter() - started
        return prediction
