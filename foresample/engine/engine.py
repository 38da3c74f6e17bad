"""`sample`, `stream` and the engine behind them: many samples through few slots.

Memory is O(slots × window × state), for any number of samples and any length of the chain. Each sample has its own
noise and its own steps, so it does not depend on the number of slots, on the order, or on the samples in other slots.
`engine.slots` has the two kinds of slots.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter
from typing import Unpack

import torch
from torch import Tensor

from foresample.backends import backend_of
from foresample.backends.graphs import require_cuda
from foresample.backends.own_chain import require_own_chain
from foresample.backends.rounds import round_for
from foresample.contracts import (
    Target,
    at_least_one,
    calls_per_step,
    require_target,
    seed_number,
)
from foresample.core.look import FreeLook
from foresample.core.noise import resolve_seeds, seeds_of
from foresample.core.preparation import compile_seconds
from foresample.core.report import Observer, Report, Run
from foresample.core.round import Packed, Padded, Speculation, can_draft, last_draftable
from foresample.engine.sequential import METHOD, SequentialDraws
from foresample.engine.slots import Finished, FixedSlots, LooseSlots, RoundRunner, Slots, in_order
from foresample.faults import raise_faults
from foresample.settings import RunKeywords, Settings

_PART = 1024  # seeds of a stream made at a time


@dataclass(frozen=True)
class Sample:
    """One finished sample."""

    index: int
    seed: int
    x: Tensor
    """[*shape]"""
    calls: int
    evaluations: int


class Engine:
    """Slots for one target, kept between runs: later runs reuse what was compiled and captured.

    Each draw has slots of its own. Draws may be interleaved, and run in several threads as far as the target allows it;
    on a GPU every additional draw under way needs its own memory and captures its own graphs.

    Where `window` is "auto" or a tuning and no window gains, the engine draws sequentially.

    Args:
        target: the chain to sample.
        settings: the settings as one value; keywords override it.
        **keywords: `foresample.settings`: window, drafter, block, recycle; slots (1 by default), graph, look.
    """

    def __init__(
        self, target: Target, settings: Settings | None = None, **keywords: Unpack[RunKeywords]
    ) -> None:
        started = perf_counter()
        require_target(target)
        require_own_chain(target)
        settings = Settings.of(keywords, settings).for_target(target)
        if settings.graph:
            require_cuda(target)
        self.target, self.settings, self.slots = target, settings, settings.slots or 1
        window = chosen_window(target, settings)
        self.in_turn: SequentialDraws | None = None  # the sequential sampler, where no window gains
        if window is None:
            self.in_turn = SequentialDraws(target, self.slots, graph=settings.graph, look=settings.look)
        layout = Padded() if target.std.device.type == "cuda" else Packed()
        last, normal = last_draftable(target.std), backend_of(target).normal
        drafter, block, recycle = settings.drafter, settings.block, settings.recycle
        self.speculation = Speculation(drafter, window or 0, block, recycle, last, layout, normal)
        if window is not None:
            round_for(target, self.speculation)  # compiles, if necessary, before any clock runs
        self.method = settings.method if window is not None else METHOD
        self.look: FreeLook | None = None
        if self.in_turn is not None:
            self.look = self.in_turn.look
        elif settings.look:
            self.look = FreeLook(getattr(target, "unrecorded", None))  # the look bypasses the recording
        self._idle: list[FixedSlots] = []  # fixed slots that no draw uses
        self.preparation_seconds = perf_counter() - started  # not yet in a report

    def draw(
        self,
        seeds: Tensor | Iterable[tuple[Tensor, Tensor]],
        observe: Observer | None = None,
        *,
        stop: Callable[[], bool] | None = None,
    ) -> Iterator[Finished]:
        """Samples as they finish, several at a time; broken ones come with a fault.

        `seeds` is [count], or an iterable of parts, (indices, seeds), each requested when a slot is free for it. `stop`
        is called before samples are begun. Once it returns True, no more samples are begun and those under way are
        finished, so whether a sample is drawn is decided before its noise is used.

        **The first samples to finish are not a fair sample**: a sample that needs few rounds comes first, and how many
        it needs depends on the sample. Take all of them, or use `stream`.
        """
        parts = [(torch.arange(len(seeds)), seeds)] if isinstance(seeds, Tensor) else map(_part, seeds)
        if self.in_turn is not None:
            yield from self.in_turn.draw(parts, observe, stop=stop)
            return
        with self._lease(self.slots) as slots:
            yield from _advance(slots, iter(parts), observe, stop)

    def stream(self, seeds: Sequence[int] | Tensor | Iterator[tuple[Tensor, Tensor]]) -> Iterator[Sample]:
        """Samples one by one, in the order of their seeds: the first k are a fair sample, for any k fixed beforehand.

        A sample that finishes before its turn is held, at most slots × (window + 1) of them, and no slot waits for it
        (theory, "Finishing first is not fair").

        Args:
            seeds: one for each sample; or an iterator over parts, (indices, seeds), of samples 0, 1, …, as for `draw`.
        """
        if isinstance(seeds, Iterator):
            return self._in_order(seeds)
        key = resolve_seeds(seeds=seeds)
        return self._in_order([(torch.arange(len(key)), key)])

    def _in_order(self, parts: Iterable[tuple[Tensor, Tensor]]) -> Iterator[Sample]:
        seed_of: dict[int, int] = {}  # of the samples in the parts requested so far

        def begun() -> Iterator[tuple[Tensor, Tensor]]:
            for index, seeds in map(_part, parts):
                seed_of.update(zip(index.tolist(), seeds.tolist(), strict=True))
                yield index, seeds

        held: dict[int, Sample] = {}
        turn = 0
        for done in self.draw(begun()):
            raise_faults(done.fault, done.index, self.target)
            costs = torch.stack([done.index, done.calls, done.evaluations], 1).tolist()
            for x, (index, calls, evaluations) in zip(done.x, costs, strict=True):
                # A copy, so that a held sample does not keep the others of its tensor in memory.
                held[index] = Sample(index, seed_of.pop(index), x.clone(), calls, evaluations)
            while turn in held:
                yield held.pop(turn)
                turn += 1

    def sample(
        self,
        seeds: Sequence[int] | Tensor,
        observe: Observer | None = None,
        *,
        rows: Sequence[int] | Tensor | None = None,
    ) -> Run:
        """All samples of these seeds, in order, and their costs.

        Args:
            seeds: one for each sample.
            observe: called after every round with what it committed.
            rows: the index of each sample for the target and the drafter, [count]; 0, 1, … by default. Several may
                share one; samples come in the order of their rows, those of one row in any order.
        """
        seeds, started, parts = resolve_seeds(seeds=seeds), perf_counter(), []
        rows = torch.arange(len(seeds)) if rows is None else _row_numbers(rows, len(seeds))
        prepared, self.preparation_seconds = self.preparation_seconds, 0.0
        if self.in_turn is not None:
            run = self.in_turn.sample(rows, seeds, observe)
            run.report.preparation_seconds += prepared
            return run
        with self._lease(min(self.slots, len(seeds))) as slots:
            ready, compiled = perf_counter(), compile_seconds()
            for done in _advance(slots, iter([(rows, seeds)]), observe):
                raise_faults(done.fault, done.index, self.target)
                parts.append(done)
            done, runner = in_order(parts), slots.runner
            report = Report(
                self.method, runner.steps, len(seeds), self.speculation.window, slots=slots.capacity
            )
            report.calls_per_step = calls_per_step(self.target)
            run = runner.tally.close(report, done.x, done.calls, done.evaluations)
            report.occupancy = report.rounds / (slots.capacity * slots.rounds)
            compiled = compile_seconds() - compiled
            captured = slots.preparation_seconds if isinstance(slots, FixedSlots) else 0.0
            report.preparation_seconds = prepared + ready - started + compiled + captured
            report.seconds = perf_counter() - ready - compiled - captured
            report.target_seconds = max(0.0, runner.timed.seconds - compiled)
            if runner.look is None:
                report.evidence.trusted.append("look=False")
            else:
                report.look_calls, report.evidence = runner.look.calls, runner.look.evidence
        return run

    def prepare(self) -> None:
        """With `graph`, capture all rounds now; otherwise draws capture each width when they need it again."""
        if self.settings.graph and self.in_turn is None:
            started = perf_counter()
            with self._lease(self.slots) as slots:
                assert isinstance(slots, FixedSlots)
                slots.prepare()
            self.preparation_seconds += perf_counter() - started

    def forget(self) -> None:
        """Forget the answers of earlier runs, for `look`: call it when the target's conditions change between runs."""
        if self.look is not None:
            self.look.forget()

    @contextmanager
    def _lease(self, capacity: int) -> Iterator[Slots]:
        """Empty slots for one draw: new ones, or idle fixed slots with the graphs captured in them."""
        look = None if self.look is None else self.look.of_one_draw()
        if isinstance(self.speculation.layout, Packed):
            yield LooseSlots(RoundRunner(self.target, self.speculation, look), capacity)
            return
        with torch.no_grad():
            try:
                slots, used_before = self._idle.pop(), True  # one operation: another thread gets other slots
                slots.runner.look = look
            except IndexError:
                runner = RoundRunner(self.target, self.speculation, look)
                slots, used_before = FixedSlots(runner, self.slots, graph=self.settings.graph), False
        slots.clear()
        try:
            # Replayed rounds do not pass through the look.
            if used_before and self.settings.graph and look is not None:
                with torch.no_grad():
                    look.look_back(self.target)
            yield slots
        finally:
            self._idle.append(slots)


def _advance(
    slots: Slots,
    coming: Iterator[tuple[Tensor, Tensor]],
    observe: Observer | None,
    stop: Callable[[], bool] | None = None,
) -> Iterator[Finished]:
    """Take all samples through these slots; see `Engine.draw`."""
    waiting: tuple[Tensor, Tensor] | None = None
    while True:
        with torch.no_grad():
            while room := slots.capacity - len(slots):
                if stop is not None and stop():
                    break
                if waiting is None:
                    waiting = next(coming, None)
                    if waiting is None:
                        break
                index, seeds = waiting
                if len(index):
                    slots.admit(index[:room], seeds[:room])
                waiting = (index[room:], seeds[room:]) if len(index) > room else None
            if not len(slots):
                return
            done = slots.advance(observe)
        if done is not None:
            yield done


def chosen_window(target: Target, settings: Settings) -> int | None:
    """The window of these settings, None where the sequential sampler is faster; "auto" measures."""
    window = settings.window
    if window == "auto":
        if not can_draft(target):
            return None
        from foresample.engine.tuning import measure  # which measures with engines

        window = measure(target, settings)
    return window if isinstance(window, int) else window.window_for(len(target.std), settings.slots or 1)


def _part(part: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """A part of the seeds, checked."""
    if not isinstance(part, tuple) or len(part) != 2 or not all(isinstance(value, Tensor) for value in part):
        raise TypeError(
            f"each part of the seeds is a pair of tensors, (indices, seeds), not {part!r}; seeds alone may be a tensor"
        )
    return part


def _row_numbers(rows: Sequence[int] | Tensor, count: int) -> Tensor:
    """`rows` as a tensor, one row for each of `count` samples."""
    numbers = torch.as_tensor(rows)
    if numbers.shape != (count,) or numbers.dtype.is_floating_point or bool((numbers < 0).any()):
        raise ValueError(
            f"rows must hold a row number, 0 or more, for each of the {count} seeds; it begins with "
            f"{numbers.flatten()[:4].tolist()} and has shape {list(numbers.shape)}"
        )
    return numbers.long()


def sample(
    target: Target,
    count: int | None = None,
    *,
    seed: int = 0,
    seeds: Sequence[int] | Tensor | None = None,
    observe: Observer | None = None,
    **settings: Unpack[RunKeywords],
) -> Run:
    """Draw samples whose distribution is exactly that of `sequential`, with far fewer sequential calls.

    A sample depends on its seed and the settings, not on its batch-mates.

    Args:
        target: the chain to sample.
        count: number of samples; may be left out when `seeds` are given.
        seed: the run's seed, from which each sample's is derived.
        seeds: one seed per sample instead.
        observe: called after every round with what it committed.
        **settings: `foresample.settings`: window (16), drafter, block, recycle; slots (all samples), graph, look.
    """
    key = resolve_seeds(count, seed, seeds)
    return Engine(target, Settings.of(settings).for_count(len(key))).sample(key, observe)


def stream(
    target: Target,
    count: int | None = None,
    *,
    seed: int = 0,
    seeds: Sequence[int] | Tensor | None = None,
    **settings: Unpack[RunKeywords],
) -> Iterator[Sample]:
    """Draw the same samples one by one, in order: the first k are a fair sample, for any k fixed beforehand.

    A sample that finishes before its turn is held. Memory is O(slots × window × state), whatever the count, so give
    `slots`; the arguments are those of `sample`.
    """
    given = Settings.of(settings)
    if seeds is not None or count is None:
        key = resolve_seeds(count, seed, seeds)
        return Engine(target, given.for_count(len(key))).stream(key)
    count, seed = at_least_one("count", count), seed_number(seed)
    parts = (
        (torch.arange(first, last), seeds_of(seed, last - first, first))
        for first in range(0, count, _PART)
        for last in [min(first + _PART, count)]
    )
    return Engine(target, given.for_count(count)).stream(parts)
