"""Slots hold the samples under way and take them through their rounds.

When a sample is done, the next one takes its slot at once, so no slot waits for slow samples. There are two kinds:

    loose    on a CPU: rows come and go, a call evaluates only the states needed, and the host checks every round.
    fixed    on a GPU: rows stay where they are and every call has the same shape. So a round never waits for the
             host and can be replayed as a CUDA graph. A round commits at most window + 1 transitions, so the host
             knows a number of rounds that must pass before any sample can be done; it queues that many before it
             reads results. At a cold start or near the end of the chains no row can draft the whole window: a
             narrower round, of one of a few widths, then evaluates fewer states. The first round of a width runs
             uncaptured, the second is captured.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from foresample.backends import backend_of
from foresample.backends.graphs import record, warm_up
from foresample.backends.rounds import round_for
from foresample.contracts import Target, expand, predict
from foresample.core.look import FreeLook
from foresample.core.preparation import compile_seconds
from foresample.core.report import Commit, Observer, Tally, TimedTarget
from foresample.core.round import Call, Padded, Rows, Speculation, begin
from foresample.faults import NO_FAULT, raise_faults

STATES = (2, 4, 6, 8, 12, 16, 20, 26, 32, 40, 50, 64, 80, 104, 128)
"""States per row in a padded round narrower than the window."""


@dataclass(frozen=True)
class Finished:
    """Samples that left their slots after one round, [n] each. All but the states may be on the host."""

    index: Tensor
    x: Tensor  # [n, *shape]
    calls: Tensor
    evaluations: Tensor
    fault: Tensor  # code of NaN or infinity in the sample (`faults`)


def leave(rows: Rows, done: Tensor) -> tuple[Rows | None, Finished]:
    """The rows that go on, or None, and the rows marked in `done`, [R], as finished samples."""
    index, kept = done.nonzero().squeeze(1), (~done).nonzero().squeeze(1)
    fields = rows.sample, rows.x, rows.round, rows.evaluations, rows.fault
    finished = Finished(*(value[index] for value in fields))
    return rows.map(lambda v: v[kept]) if len(kept) else None, finished


def in_order(parts: list[Finished]) -> Finished:
    """All finished samples, in the order of their index."""
    if len(parts) == 1 and len(parts[0].index) == 1:  # one sample, which somebody waits for: no copies
        return parts[0]
    order = torch.cat([part.index for part in parts]).argsort(stable=True)
    columns = zip(*(vars(part).values() for part in parts), strict=True)
    return Finished(*(torch.cat(column)[order] for column in columns))


class RoundRunner:
    """Takes rows through rounds with the target's predictions, and counts and times them."""

    def __init__(self, target: Target, speculation: Speculation, look: FreeLook | None = None) -> None:
        self.target, self.speculation, self.steps = target, speculation, len(target.std)
        self.look = look
        self.tally = Tally(speculation.window, self.steps, target.std.device, backend_of(target).count)
        self.timed = TimedTarget(target)
        self._round = round_for(target, speculation)

    def begin(self, sample: Tensor, seed: Tensor) -> Rows:
        return begin(self.target, self.speculation, seed, sample=sample)

    def round(self, rows: Rows, drafts: int | None = None) -> tuple[Rows, Commit]:
        """One round; `drafts` limits a padded round when no row can draft more."""
        speculation = self.speculation if drafts is None else replace(self.speculation, layout=Padded(drafts))
        draft = self._round.propose(self.target, rows, speculation)
        call = draft.call
        asked = predict if self.look is None else self.look.predict
        predictions = asked(self.timed, call.x, call.step, call.row, call.extra)
        rows, commit = self._round.settle(self.target, rows, draft, predictions, speculation)
        self.tally.count(commit)
        return rows, commit


class LooseSlots:
    """Slots whose rows come and go, for a CPU; see the module."""

    def __init__(self, runner: RoundRunner, capacity: int) -> None:
        self.runner, self.capacity = runner, capacity
        self.rows: Rows | None = None
        self.rounds = 0

    def __len__(self) -> int:
        """Number of rows under way, at most `capacity`."""
        return 0 if self.rows is None else len(self.rows.sample)

    def admit(self, sample: Tensor, seed: Tensor) -> None:
        """Begin these samples, at most as many as slots are free; both tensors are on the host."""
        device = self.runner.target.std.device
        rows = self.runner.begin(sample.to(device), seed.to(device))
        self.rows = rows if self.rows is None else self.rows.map(lambda *parts: torch.cat(parts), rows)

    def advance(self, observe: Observer | None) -> Finished | None:
        """Run one round; return the samples that finished or broke in it, or None."""
        assert self.rows is not None
        self.rows, commit = self.runner.round(self.rows)
        self.rounds += 1
        if observe is not None:  # copies, because an observer may write into what it is shown
            observe(Commit(**{name: value.clone() for name, value in vars(commit).items()}))
        left = (self.rows.step == self.runner.steps) | (self.rows.fault != NO_FAULT)
        if not left.any():
            return None
        self.rows, finished = leave(self.rows, left)
        return finished


class FixedSlots:
    """Slots whose rows stay in place, for a GPU; see the module."""

    def __init__(self, runner: RoundRunner, capacity: int, *, graph: bool) -> None:
        self.runner, self.capacity, self.most = runner, capacity, runner.speculation.window + 1
        device = runner.target.std.device
        # Pinned buffer with one column per slot: sample index, seed, and whether to begin.
        self.asked = _pinned((3, capacity), device)
        self.fresh = self.asked.numpy()[2]
        self.rows = runner.begin(*self.asked[:2].to(device)).map(_own)
        # One piece of memory, so that `_look` needs one copy; padding keeps each row of it aligned for kernels.
        names = ("step", "fault", "sample", "round", "evaluations")
        each = torch.stack([getattr(self.rows, name) for name in names])
        self.numbers = torch.nn.functional.pad(each, (0, capacity % 2))
        self.rows = replace(self.rows, **dict(zip(names, self.numbers[:, :capacity], strict=True)))
        self.read = _pinned(self.numbers.shape, device)
        window = runner.speculation.window
        # Transitions that a row can draft in its first round.
        self.reach = int(runner.speculation.drafter.reach(self.rows.memory, window).max())
        self.widths = sorted({*(states - 1 for states in STATES if states <= window), window})
        # By width, None for the start of samples; None until the second use, which captures.
        self.graphs: dict[int | None, torch.cuda.CUDAGraph | None] | None = {} if graph else None
        self.preparation_seconds = 0.0  # spent on first uses and captures, without compilation
        self.left = [self.runner.steps] * capacity  # transitions left in each slot; 0: the slot is free
        self.clear()

    def clear(self) -> None:
        """Free all slots and reset the counters."""
        self.runner.tally.clear()
        self.runner.timed.seconds = 0.0
        if any(self.left):  # rows of samples that are no longer wanted
            self.rows.step.fill_(self.runner.steps)
        self.left = [0] * self.capacity
        self.fresh[:] = 0
        self.pace = float(self.most)  # recent average of transitions committed per row and round
        self.rounds, self.preparation_seconds = 0, 0.0

    def prepare(self) -> None:
        """Capture the rounds of all widths, on samples that nobody wants; for slots that are all free."""
        if self.graphs is None:
            return
        for drafts in self.widths:
            while self.graphs.get(drafts) is None:
                self.fresh[:] = 1
                self._run(None)
                self._run(drafts)
        self.left = [self.runner.steps] * self.capacity
        self.clear()

    def __len__(self) -> int:
        return sum(left > 0 for left in self.left)

    def admit(self, sample: Tensor, seed: Tensor) -> None:
        asked, free = self.asked.numpy(), [slot for slot, left in enumerate(self.left) if not left]
        for slot, *begun in zip(free, sample.tolist(), seed.tolist(), strict=False):
            asked[:, slot] = *begun, 1
            self.left[slot] = self.runner.steps

    def _admit(self) -> None:
        sample, seed, begins = self.asked.to(self.rows.x.device, non_blocking=True)
        new, begins = self.runner.begin(sample, seed), begins.bool()

        def replaced(mine: Tensor, other: Tensor) -> Tensor:
            return torch.where(expand(begins, mine), other, mine, out=mine)

        self.rows.map(replaced, new)

    def advance(self, observe: Observer | None) -> Finished:
        finished = None
        if self.fresh.any():
            self._run(None)
        while finished is None:
            drafts, queued = self._plan()
            if observe is not None:
                queued = 1
            for _ in range(queued):
                self._run(drafts, observe)
            self.rounds += queued
            finished = self._look(queued)
        return finished

    def _plan(self) -> tuple[int, int]:
        """The narrowest round that fits the drafts of every row, and how many such rounds to queue.

        The number is limited by the first round that may finish a sample and, at the recent pace, by the first for
        which a narrower round would do.
        """
        busy = [
            (left, self.reach if fresh else self.most)
            for left, fresh in zip(self.left, self.fresh.tolist(), strict=True)
            if left
        ]
        longest = max(min(left - 1, reach) for left, reach in busy)
        drafts = next((width for width in self.widths if width >= longest), self.widths[-1])
        if drafts < self.widths[-1]:
            return drafts, 1
        certain = min(-(-left // self.most) for left, _ in busy)
        wide = (max(left for left, _ in busy) - self.most) / self.pace + 1
        return drafts, min(certain, max(1, int(wide)))

    def _run(self, drafts: int | None, observe: Observer | None = None) -> None:
        """Start the fresh samples (None), or run a round of this width; captured, unless it is observed."""
        work = self._admit if drafts is None else partial(self._round, drafts, observe)
        if self.graphs is None or observe is not None:
            work()
        elif (graph := self.graphs.get(drafts)) is not None:
            graph.replay()
        elif drafts not in self.graphs:
            with self._preparing():
                warm_up(work, self.rows.x.device)
                self.graphs[drafts] = None
        else:
            with self._preparing():
                self.graphs[drafts] = graph = record(work, self.rows.x.device)
            graph.replay()

    @contextmanager
    def _preparing(self) -> Iterator[None]:
        """Count this time as preparation; compilation is counted elsewhere."""
        started, compiled, timed = perf_counter(), compile_seconds(), self.runner.timed.seconds
        yield
        torch.cuda.synchronize(self.rows.x.device)
        self.preparation_seconds += perf_counter() - started - (compile_seconds() - compiled)
        self.runner.timed.seconds = timed

    def _round(self, drafts: int, observe: Observer | None = None) -> None:
        after, commit = self.runner.round(self.rows, drafts)
        if observe is not None:  # of the rows under way; indexing copies, because the rows change below
            busy = commit.committed.nonzero().squeeze(1)
            observe(Commit(**{name: value[busy] for name, value in vars(commit).items()}))
        self.rows.map(lambda mine, new: mine if mine is new else mine.copy_(new), after)

    def _look(self, rounds: int) -> Finished | None:
        """The samples finished by the last `rounds` rounds, or None. Only here does the host wait for the device."""
        steps, rows = self.runner.steps, self.rows
        step, fault, *costs = self.read.copy_(self.numbers).tolist()
        busy = [slot for slot, left in enumerate(self.left) if left]
        broken = [slot for slot in busy if fault[slot] != NO_FAULT]
        for slot in broken:
            rows.step[slot] = step[slot] = steps
        committed = sum(self.left[slot] - (steps - step[slot]) for slot in busy)
        self.pace = max(1.0, committed / (rounds * len(busy)))
        for slot in busy:
            self.left[slot] = steps - step[slot]
        self.fresh[:] = 0
        gone = [slot for slot in busy if not self.left[slot]]
        if not gone:
            return None
        faults, samples, calls, evaluations = (torch.tensor([row[i] for i in gone]) for row in (fault, *costs))
        x = rows.x.clone() if len(gone) == self.capacity else rows.x[gone]
        return Finished(samples, x, calls, evaluations, faults)


Slots = LooseSlots | FixedSlots


def _pinned(shape: Sequence[int], device: torch.device) -> Tensor:
    """An int64 tensor of zeros on the host, pinned for a GPU so that copies do not block."""
    return torch.zeros(*shape, dtype=torch.int64, pin_memory=device.type == "cuda")


def _own(value: Tensor) -> Tensor:
    return value.clone(memory_format=torch.contiguous_format)


class HandedRounds:
    """Rounds of all rows at once, whose calls the caller evaluates, such as a pipeline's own loop.

    While `call` is not None, pass its predictions to `answer`; afterwards `finished` holds the samples, in order.
    """

    def __init__(
        self, target: Target, rows: Rows, speculation: Speculation, tally: Tally, observe: Observer
    ) -> None:
        self.target, self.speculation, self.tally, self.observe = target, speculation, tally, observe
        self.finished: Finished | None = None
        self._round, self._rows, self._parts = round_for(target, speculation), rows, list[Finished]()
        self._draft: Any = self._round.propose(target, rows, speculation)

    @property
    def call(self) -> Call | None:
        """The states to evaluate next; None when all samples are finished."""
        return None if self.finished is not None else self._draft.call

    def answer(self, predictions: Tensor) -> None:
        """Settle the current round with these predictions, and propose the next round."""
        rows, commit = self._round.settle(self.target, self._rows, self._draft, predictions, self.speculation)
        self.tally.count(commit)
        self.observe(commit)
        raise_faults(rows.fault, rows.sample, self.target)
        done = rows.step == len(self.target.std)
        going: Rows | None = rows
        if done.any():
            going, finished = leave(rows, done)
            self._parts.append(finished)
        if going is None:
            self.finished = in_order(self._parts)
        else:
            self._rows, self._draft = going, self._round.propose(self.target, going, self.speculation)
