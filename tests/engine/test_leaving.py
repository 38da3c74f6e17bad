"""Samples leave their slots in time: a broken one at once, before it costs another call."""

from __future__ import annotations

import pytest
import torch

import foresample as fs
from foresample.core.noise import seeds_of
from foresample.engine.slots import FixedSlots, in_order
from foresample.faults import NO_FAULT
from tests.engine.test_engine import broken, engine, kinds
from tests.support.small_chains import flow


@kinds
@pytest.mark.parametrize("slots", [2, 8], ids=["others wait for its slot", "nobody waits"])
@pytest.mark.parametrize("window", [5, 15])
def test_a_broken_sample_leaves_in_the_round_that_broke_it(kind: str, window: int, slots: int) -> None:
    """The fault would be reported in the end; until then the sample would take a slot and states of every call."""
    commits: list[fs.Commit] = []
    parts = list(engine(broken(7, 3), kind, window=window, slots=slots).draw(seeds_of(0, 8), commits.append))
    steps = [
        (int(step), int(step + committed))
        for commit in commits
        for sample, step, committed in zip(commit.sample, commit.step, commit.committed, strict=True)
        if sample == 3
    ]
    assert [first <= 7 < last for first, last in steps] == [False] * (len(steps) - 1) + [True]
    calls = torch.cat([part.calls[part.index == 3] for part in parts])
    assert calls.tolist() == [len(steps)]


@kinds
def test_a_broken_sample_makes_room_for_the_next(kind: str) -> None:
    """With one slot and a window as wide as the chain, samples take turns; the next begins as soon as one breaks."""
    made = engine(broken(2, 0), kind, window=15, slots=1)
    parts = list(made.draw(seeds_of(0, 3)))
    assert [part.index.tolist() for part in parts] == [[0], [1], [2]]
    assert [bool(part.fault != NO_FAULT) for part in parts] == [True, False, False]
    assert int(parts[0].calls) <= 3


@kinds
def test_samples_under_way_are_finished_when_no_more_are_begun(kind: str) -> None:
    """They are the first samples of the run, unchanged."""
    target, seeds = flow(), seeds_of(0, 40)
    whole = engine(target, kind, window=5, slots=40).sample(seeds)
    begun: set[int] = set()
    now = 0

    def observe(commit: fs.Commit) -> None:
        nonlocal now
        begun.update(commit.sample.tolist())
        now += 1

    made = engine(target, kind, window=5, slots=4)
    parts = [(torch.arange(n, n + 10), seeds[n : n + 10]) for n in range(0, 40, 10)]
    done = in_order(list(made.draw(parts, observe, stop=lambda: now >= 15)))
    assert 4 < len(begun) < 40
    assert begun == set(range(len(begun)))
    assert done.index.tolist() == sorted(begun)
    assert torch.equal(done.x, whole.samples[: len(begun)])
    assert list(made.draw(parts, stop=lambda: True)) == []


@pytest.mark.parametrize(("left", "queued"), [([16, 16], 4), ([16, 9], 3), ([16, 4], 1), ([5, 5], 1)])
def test_fixed_slots_queue_the_rounds_that_are_certain_to_be_needed(left: list[int], queued: int) -> None:
    """A round commits at most four transitions here; looking after each would make the device wait for the host."""
    made = engine(flow(), "fixed", window=3, slots=2)
    with made._lease(2) as slots:
        assert isinstance(slots, FixedSlots)
        slots.left = left
        assert slots._plan() == (3, queued)
