"""The engine: many samples through few slots.

Memory is O(slots × window × state), whatever the number of samples and the length of the chain. Each sample has its
own noise and its own steps: what comes out does not depend on how many slots there are, on the order, or on who sits
in the slot beside. `slots` has the two ways to keep them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from time import perf_counter

import torch
from torch import Tensor

from foresample.contracts import (
    Drafter,
    Target,
    at_least_one,
    calls_per_step,
    drafter_for,
    require_own_chain,
    require_target,
    resolve_window,
)
from foresample.core.look import FreeLook
from foresample.core.noise import resolve_seeds
from foresample.core.report import Observer, Report, Run
from foresample.core.round import Packed, Padded, Speculation, last_draftable
from foresample.drafters import Replay
from foresample.engine.slots import Finished, FixedSlots, LooseSlots, RoundRunner, Slots, in_order, round_for
from foresample.faults import raise_faults
from foresample.kernels.graphs import require_cuda


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
    """Slots for one target, kept between runs: what was compiled and captured once serves every later run.

    Each draw has slots of its own. Draws may be interleaved, and run in several threads as far as the target allows it;
    on a GPU every further draw under way takes as much memory again, and is captured again.

    Args:
        target: the chain to sample.
        window: transitions drafted in a round, L; a call evaluates at most L + 1 states of each sample.
        slots: samples under way at a time.
        drafter: where guesses come from; `Replay()` by default.
        block: transitions verified as one block; the whole window by default. 1 is the per-step test.
        recycle: turn rejected noise back into fresh noise; False draws fresh noise instead.
        graph: replay rounds as one CUDA graph: no launch overhead, on a target whose network can be captured.
        look: make sure that the target treats each row by itself and gives a state the same answer whenever it is
            evaluated, and refuse it otherwise. At calls 1, 4, 16, 64 of the engine and then every 128th, one more
            call on two states is made; `report.look_calls` counts these, `report.evidence` has what they found.
            With `graph=True`, at the start of runs 2, 4, 8, 16 and then every 16th. See `core.look`.
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
        look: bool = True,
    ) -> None:
        require_target(target)
        require_own_chain(target)
        self.slots = at_least_one("slots", slots)
        window = resolve_window(window, len(target.std))
        block = None if block is None else at_least_one("block", block)
        drafter = drafter_for(Replay() if drafter is None else drafter, target)
        if graph:
            require_cuda(target)
        self.target, self.graph = target, graph
        layout = Padded() if target.std.device.type == "cuda" else Packed()
        self.how = Speculation(drafter, window, block, recycle, last_draftable(target.std), layout)
        round_for(target, self.how)  # compiles, where that is to be done, before any clock runs
        noise = "recycled" if recycle else "fresh"
        self.method = f"{drafter}, block {block or 'window'}, {noise} noise"
        asked = getattr(target, "unrecorded", None)  # the look bypasses the recording
        self.look = FreeLook(asked) if look else None
        self._idle: list[FixedSlots] = []
        """Fixed slots that no draw uses."""

    def finished(self, seeds: Tensor, observe: Observer | None = None, *, first: int = 0) -> Iterator[Finished]:
        """Samples as they are done, several at a time; sample `first` + i has seeds[i]. Broken ones come with a fault.

        Those that are done first are no fair sample (`stream`): take all of them.
        """
        return self.draw([(torch.arange(first, first + len(seeds)), seeds)], observe, at_most=len(seeds))

    def draw(
        self,
        parts: Iterable[tuple[Tensor, Tensor]],
        observe: Observer | None = None,
        *,
        at_most: int | None = None,
        stop: Callable[[], bool] | None = None,
    ) -> Iterator[Finished]:
        """`finished`, of samples given in parts, (indices, seeds), each asked for when a slot is free for it.

        So slots never run empty between parts, and nobody holds all seeds. `at_most`: how many come, if known.
        `stop` is asked before samples are begun; once it says yes, no more are, and those under way are finished.
        Whether a sample is among them is thus decided before it is drawn, and says nothing of it.
        """
        with self._lease(self.slots if at_most is None else min(self.slots, at_most)) as slots:
            yield from _advance(slots, iter(parts), observe, stop)

    def stream(self, seeds: Sequence[int] | Tensor, *, ordered: bool = True) -> Iterator[Sample]:
        """Samples one by one, in the order of their seeds: any number of them, said beforehand, is a fair sample.

        One that is done before its turn is held: at most slots × (window + 1) of them, no more states than the noise of
        the rows under way, and no slot ever waits for it (theory, "Finishing first is not fair").

        With `ordered=False` each comes as soon as it is done. **The first of those are not a fair sample**: what needs
        few rounds comes first, and how many a sample needs depends on the sample. Only all of them together are.
        """
        seeds = resolve_seeds(seeds=seeds)
        return self.stream_parts([(torch.arange(len(seeds)), seeds)], ordered=ordered)

    def stream_parts(self, parts: Iterable[tuple[Tensor, Tensor]], *, ordered: bool) -> Iterator[Sample]:
        """`stream`, of samples 0, 1, … given in parts, (indices, seeds), each asked for when a slot is free for it."""
        seed_of: dict[int, int] = {}  # of the samples begun and the rest of their part

        def begun() -> Iterator[tuple[Tensor, Tensor]]:
            for index, seeds in parts:
                seed_of.update(zip(index.tolist(), seeds.tolist(), strict=True))
                yield index, seeds

        held: dict[int, Sample] = {}
        turn = 0
        for done in self.draw(begun()):
            raise_faults(done.fault, done.index, self.target)
            costs = torch.stack([done.index, done.calls, done.evaluations], 1).tolist()
            for x, (index, calls, evaluations) in zip(done.x, costs, strict=True):
                sample = Sample(index, seed_of.pop(index), x, calls, evaluations)
                if not ordered:
                    yield sample
                elif index != turn:
                    held[index] = replace(sample, x=x.clone())  # not all that finished with it
                else:
                    yield sample
                    turn += 1
                    while turn in held:
                        yield held.pop(turn)
                        turn += 1

    def sample(self, seeds: Sequence[int] | Tensor, observe: Observer | None = None, *, first: int = 0) -> Run:
        """All samples of these seeds, in order, and what they cost; to the target they are number `first` and on."""
        seeds = resolve_seeds(seeds=seeds)
        return self.sample_rows(torch.arange(first, first + len(seeds)), seeds, observe)

    def sample_rows(self, rows: Tensor, seeds: Tensor, observe: Observer | None = None) -> Run:
        """`sample`, of samples that are these rows to the target and the drafter; several may be the same row.

        They come in the order of their rows, those of one row in any order.
        """
        started, parts = perf_counter(), []
        with self._lease(min(self.slots, len(seeds))) as slots:
            for done in _advance(slots, iter([(rows, seeds)]), observe):
                raise_faults(done.fault, done.index, self.target)
                parts.append(done)
            done, runner = in_order(parts), slots.runner
            report = Report(self.method, runner.steps, len(seeds), self.how.window, slots=slots.capacity)
            report.calls_per_step = calls_per_step(self.target)
            run = runner.tally.close(report, done.x, done.calls, done.evaluations)
            report.occupancy = report.rounds / (slots.capacity * slots.rounds)
            report.seconds, report.target_seconds = perf_counter() - started, runner.timed.seconds
            if runner.look is None:
                report.evidence.trusted.append("look=False")
            else:
                report.look_calls, report.evidence = runner.look.calls, runner.look.evidence
        return run

    def forget(self) -> None:
        """Compare no answer with those of earlier runs: call it when the target's conditions change between runs."""
        if self.look is not None:
            self.look.forget()

    @contextmanager
    def _lease(self, capacity: int) -> Iterator[Slots]:
        """Empty slots for one draw: new ones, or fixed ones that no other draw uses, with what was captured in them."""
        look = None if self.look is None else self.look.of_one_draw()
        if isinstance(self.how.layout, Packed):
            yield LooseSlots(RoundRunner(self.target, self.how, look), capacity)
            return
        with torch.no_grad():
            try:
                slots, used_before = self._idle.pop(), True  # one operation: another thread gets other slots
                slots.runner.look = look
            except IndexError:
                runner = RoundRunner(self.target, self.how, look)
                slots, used_before = FixedSlots(runner, self.slots, graph=self.graph), False
        slots.clear()
        try:
            if used_before and self.graph and look is not None:  # replayed rounds do not pass through it
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
