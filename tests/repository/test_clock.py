"""The turns of `benchmarks.clock latency` and `throughput`, on a small network."""

from __future__ import annotations

import pytest
from torch import Tensor

import foresample as fs
from benchmarks import clock
from foresample.baseline import Sequential
from foresample.core.noise import seeds_of


def test_a_window_is_chosen_on_other_samples_than_those_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[int] = []

    def noted(seed: int, count: int, first: int) -> Tensor:
        drawn.append(seed)
        return seeds_of(seed, count, first)

    monkeypatch.setattr(clock, "seeds_of", noted)
    target = clock._dense(4, 20, 16)
    engines = {window: fs.Engine(target, window=window, slots=1) for window in (8, 4)}
    plain, *ours = clock._latencies(Sequential(target, 1), engines, 1, 8)
    assert set(drawn) == {clock.PILOT_SEED, 1}
    assert (plain.window, plain.calls, plain.gain, plain.faster, plain.chosen) == (0, 20, 1, None, False)
    assert [row.window for row in ours] == [4, 8]
    assert [row.chosen for row in ours].count(True) == 1
    for row in ours:
        assert row.calls < 20
        assert row.faster is not None
        assert row.faster.ratio == row.gain == pytest.approx(plain.ms / row.ms)


def test_slots_and_fixed_batches_draw_as_many_samples_in_turns() -> None:
    target = clock._dense(4, 20, 16)
    row = clock._throughput(Sequential(target, 4), fs.Engine(target, window=4, slots=4), 2, 8, 3)
    assert row.faster is not None
    assert row.faster_than_fixed is not None
    assert row.faster.turns == row.faster_than_fixed.turns == 3
    assert row.faster.ratio == pytest.approx(row.samples_per_second / row.sequential_samples_per_second)
    assert row.gain_over_fixed == pytest.approx(row.samples_per_second / row.fixed_samples_per_second)
