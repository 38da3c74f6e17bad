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

from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
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
    expand,
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
    def of(rows: Rows, index: Tensor) -> Finished:
        """Those rows."""
        fields = rows.sample, rows.x, rows.round, rows.evaluations, rows.fault
        return Finished(*(value[index] for value in fields))


def in_order(parts: list[Finished]) -> Finished:
    """All of them, by their index."""
    order = torch.cat([part.index for part in parts]).argsort()
    names = ("index", "x", "calls", "evaluations", "fault")
    return Finished(*(torch.cat([getattr(part, name) for part in parts])[order] for name in names))


class Work:
    """What slots do with rows: begin them, and take them through a round, the call answered by the target."""

    def __init__(self, target: Target, settings: Settings) -> None:
        self.target, self.settings, self.steps = target, settings, len(target.std)
        self.tally = Tally(settings.window, self.steps, target.std.device)
        self.timed = Timed(target)
        self._round = round_for(target, settings)

    def begin(self, sample: Tensor, seed: Tensor) -> Rows:
        return begin(self.target, self.settings.drafter, self.settings.window, seed, sample=sample)

    def round(self, rows: Rows) -> tuple[Rows, Commit]:
        rounds = self._round(self.target, rows, self.settings, self.tally)
        call = next(rounds)
        try:
            rounds.send(predict(self.timed, call.x, call.step, call.row))
        except StopIteration as end:
            return cast(tuple[Rows, Commit], end.value)
        raise AssertionError("a round makes one call")


class Slots(Protocol):
    """Rows under way, at most `capacity` of them."""

    work: Work
    capacity: int
    rounds: int

    def __len__(self) -> int:
        """Rows under way."""

    def admit(self, sample: Tensor, seed: Tensor) -> None:
        """Begin these samples, no more than there is room for."""

    def advance(self, observe: Observer | None) -> Finished | None:
        """A round or several, until a row is done or broken; those that are leave."""


class LooseSlots:
    """Rows come and go; see the module."""

    def __init__(self, work: Work, capacity: int) -> None:
        self.work, self.capacity = work, capacity
        self.rows: Rows | None = None
        self.rounds = 0

    def __len__(self) -> int:
        return 0 if self.rows is None else len(self.rows.sample)

    def admit(self, sample: Tensor, seed: Tensor) -> None:
        rows = self.work.begin(sample, seed)
        self.rows = rows if self.rows is None else self.rows.map(lambda *parts: torch.cat(parts), rows)

    def advance(self, observe: Observer | None) -> Finished | None:
        assert self.rows is not None
        self.rows, commit = self.work.round(self.rows)
        self.rounds += 1
        if observe is not None:
            observe(commit)
        left = (self.rows.step == self.work.steps) | (self.rows.fault != NO_FAULT)
        if not left.any():
            return None
        finished = Finished.of(self.rows, left.nonzero().squeeze(1))
        kept = (~left).nonzero().squeeze(1)
        self.rows = self.rows.map(lambda v: v[kept]) if len(kept) else None
        return finished


class FixedSlots:
    """Rows stay in place, and rounds are queued without waiting; see the module."""

    def __init__(self, work: Work, capacity: int, *, graph: bool) -> None:
        self.work, self.capacity, self.most = work, capacity, work.settings.window + 1
        device = work.target.std.device
        # For each slot: the sample to begin, its seed, and whether to begin it.
        self.incoming = torch.zeros(3, capacity, dtype=torch.int64, device=device)
        self.rows = work.begin(self.incoming[0], self.incoming[1]).map(_own)
        self.graphs = (capture(self._admit, device), capture(self._round, device)) if graph else None
        self.clear()

    def clear(self) -> None:
        """Free all slots, and count from the start."""
        self.work.tally.clear()
        self.work.timed.seconds = 0.0
        self.left = [0] * self.capacity  # transitions left of the row in each slot; 0: free
        self.rounds = 0
        self.rows.step.fill_(self.work.steps)

    def __len__(self) -> int:
        return sum(left > 0 for left in self.left)

    def admit(self, sample: Tensor, seed: Tensor) -> None:
        free = [slot for slot, left in enumerate(self.left) if not left][: len(sample)]
        incoming = torch.zeros(3, self.capacity, dtype=torch.int64)
        incoming[:, free] = torch.stack([sample.cpu(), seed.cpu(), torch.ones_like(seed.cpu())])
        self.incoming.copy_(incoming)
        self.graphs[0].replay() if self.graphs else self._admit()
        for slot in free:
            self.left[slot] = self.work.steps

    def _admit(self) -> None:
        sample, seed, begins = self.incoming
        new, begins = self.work.begin(sample, seed), begins.bool()

        def replaced(mine: Tensor, other: Tensor) -> Tensor:
            return mine.copy_(torch.where(expand(begins, mine), other, mine))

        self.rows.map(replaced, new)

    def advance(self, observe: Observer | None) -> Finished | None:
        if observe is not None:
            self._round(observe)
            self.rounds += 1
            return self._look()
        certain = min(-(-left // self.most) for left in self.left if left)
        for _ in range(certain):
            self.graphs[1].replay() if self.graphs else self._round()
        self.rounds += certain
        return self._look()

    def _round(self, observe: Observer | None = None) -> None:
        after, commit = self.work.round(self.rows)
        if observe is not None:  # of the rows under way, in tensors of their own: these are about to change
            busy = commit.committed.nonzero().squeeze(1)
            observe(Commit(**{name: value[busy] for name, value in vars(commit).items()}))
        for mine, new in zip(self.rows.tensors(), after.tensors(), strict=True):
            if mine is not new:
                mine.copy_(new)

    def _look(self) -> Finished | None:
        """The one place that waits for the device."""
        steps = self.work.steps
        step, fault = torch.stack([self.rows.step, self.rows.fault]).tolist()
        gone = [
            slot
            for slot, left in enumerate(self.left)
            if left and (step[slot] == steps or fault[slot] != NO_FAULT)
        ]
        self.left = [steps - step[slot] if left else 0 for slot, left in enumerate(self.left)]
        if not gone:
            return None
        for slot in gone:
            self.left[slot] = 0
        index = torch.tensor(gone, device=self.rows.step.device)
        finished = Finished.of(self.rows, index)
        self.rows.step.index_fill_(0, index, steps)
        return finished


def _own(value: Tensor) -> Tensor:
    return value.clone(memory_format=torch.contiguous_format)


@cache
def _stream_aside(device: torch.device) -> torch.cuda.Stream:
    """One stream for all warm-ups: libraries keep a workspace for every stream they have seen."""
    return torch.cuda.Stream(device)


def require_cuda(target: Target) -> None:
    """Refuse to capture what does not run on a CUDA device, before any work."""
    if target.std.device.type != "cuda":
        raise ValueError("graph=True needs a target on a CUDA device; leave it out on others")


def capture(work: Callable[[], object], device: torch.device) -> torch.cuda.CUDAGraph:
    """A CUDA graph of the work, run a few times before (compilers, caches)."""
    graph, aside = torch.cuda.CUDAGraph(), _stream_aside(device)
    with torch.cuda.device(device), torch.no_grad():
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):
            for _ in range(3):
                work()
        torch.cuda.current_stream().wait_stream(aside)
        try:
            with torch.cuda.graph(graph):
                work()
        except RuntimeError as error:
            raise RuntimeError(
                f"the target cannot be captured in a CUDA graph ({str(error).splitlines()[0]}): it must not "
                "read values back from the device or depend on them; or leave graph=True out"
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
        self.capacity = at_least_one("slots", slots)
        window = at_least_one("window", window)
        block = None if block is None else at_least_one("block", block)
        drafter = Replay() if drafter is None else drafter
        require_drafter(drafter)
        if graph:
            require_cuda(target)
        fixed = target.std.device.type == "cuda"
        self.target, self.graph = target, graph
        self.settings = Settings(drafter, window, block, recycle, last_draftable(target.std), fixed)
        noise = "recycled" if recycle else "fresh"
        self.method = f"{drafter}, block {block or 'window'}, {noise} noise"
        self._fixed: FixedSlots | None = None

    def finished(self, seeds: Tensor, observe: Observer | None = None, *, first: int = 0) -> Iterator[Finished]:
        """Samples as they are done, several at a time; sample `first` + i has seeds[i].

        Broken ones come with a fault.
        """
        return self.flow([(first + torch.arange(len(seeds)), seeds)], observe, at_most=len(seeds))

    def flow(
        self,
        parts: Iterable[tuple[Tensor, Tensor]],
        observe: Observer | None = None,
        *,
        at_most: int | None = None,
    ) -> Iterator[Finished]:
        """`finished`, of samples given in parts, (indices, seeds), each asked for when a slot is free for it.

        So slots never run empty between parts, and nobody holds all seeds. `at_most`: how many come, if known.
        """
        device, coming = self.target.std.device, iter(parts)
        self.slots = slots = self._slots(self.capacity if at_most is None else min(self.capacity, at_most))
        waiting: tuple[Tensor, Tensor] | None = None
        while True:
            with torch.no_grad():
                while room := slots.capacity - len(slots):
                    if waiting is None or not len(waiting[0]):
                        waiting = next(coming, None)
                        if waiting is None:
                            break
                    index, seeds = waiting
                    if len(index):
                        slots.admit(index[:room].to(device), seeds[:room].to(device))
                    waiting = index[room:], seeds[room:]
                if not len(slots):
                    return
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
        started = perf_counter()
        parts = []
        for done in self.finished(seeds, observe):
            raise_faults(done.fault, done.index)
            parts.append(done)
        done = in_order(parts)
        require_finite(done.x, done.index)
        slots, work, settings = self.slots, self.slots.work, self.settings
        report = Report(self.method, work.steps, len(seeds), settings.window, slots=slots.capacity)
        run = work.tally.close(report, done.x, done.calls, done.evaluations)
        report.occupancy = report.rounds / (slots.capacity * slots.rounds)
        report.seconds, report.target_seconds = perf_counter() - started, work.timed.seconds
        return run

    def _slots(self, capacity: int) -> Slots:
        if not self.settings.padded:
            return LooseSlots(Work(self.target, self.settings), capacity)
        if self._fixed is None:
            with torch.no_grad():
                self._fixed = FixedSlots(Work(self.target, self.settings), self.capacity, graph=self.graph)
        self._fixed.clear()
        return self._fixed


def round_for(target: Target, settings: Settings) -> Round:
    """The fused round where it serves, else the plain one."""
    if settings.drafter == Replay() and settings.recycle and kernels.serve(target):
        from foresample.kernels.round import one_round

        return cast(Round, one_round)
    return speculate.one_round


def all_rounds(
    target: Target, rows: Rows, settings: Settings, tally: Tally, observe: Observer
) -> Generator[Call, Tensor, Finished]:
    """Rounds until every row is at its end, for those who make the calls: yields them, is sent predictions."""
    parts: list[Finished] = []
    one_round = round_for(target, settings)
    while len(rows.sample):
        rows, commit = yield from one_round(target, rows, settings, tally)
        observe(commit)
        raise_faults(rows.fault, rows.sample)
        done = rows.step == len(target.std)
        if done.any():
            parts.append(Finished.of(rows, done.nonzero().squeeze(1)))
            kept = (~done).nonzero().squeeze(1)
            rows = rows.map(lambda v, index=kept: v[index])
    return in_order(parts)


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


def resolve_slots(slots: int | None, count: int) -> int:
    """Samples under way at a time: all by default, and never more than there are."""
    return count if slots is None else min(at_least_one("slots", slots), count)


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
