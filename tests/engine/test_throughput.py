"""Throughput against latency, on the machine of `test_tuning`: a call costs `fixed + each × states`."""

from __future__ import annotations

import pytest

import foresample as fs
from tests.engine.test_tuning import Machine


def test_one_sample_is_faster_with_speculation_and_many_have_more_throughput_without(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    machine = Machine(monkeypatch, fixed=8.0, each=1.0)
    frontier = fs.tune(machine.target(steps=20), slots=(64, 1), windows=(2, 4))
    assert [tuning.slots for tuning in frontier.tunings] == [1, 64]
    most = frontier.best()
    assert (most.slots, most.window) == (64, None)
    alone = next(p for p in frontier.points if p.window is None and p.slots == 1)
    soon = frontier.best(within=0.9 * alone.p95_seconds)
    assert soon.slots == 1
    assert soon.window is not None
    assert f"with window {soon.window}" in str(soon)
    assert "64 at a time, sequentially" in str(most)


def test_the_figures_follow_from_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch, fixed=1.0, each=0.0)
    frontier = fs.tune(machine.target(steps=20), slots=[2], windows=[4])
    (tuning,), (plain, ours) = frontier.tunings, frontier.points
    assert plain.p95_seconds == pytest.approx(20)
    assert plain.samples_per_second == pytest.approx(2 / 20)
    (trial,) = tuning.trials
    assert trial.calls_p95 is not None
    assert trial.calls_p95 >= trial.calls
    assert ours.p95_seconds == pytest.approx(trial.calls_p95)
    assert ours.samples_per_second == pytest.approx(trial.gain * 2 / 20)


def test_a_deadline_that_no_setting_meets_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    frontier = fs.tune(Machine(monkeypatch, fixed=1.0, each=0.0).target(steps=20), slots=[1], windows=[4])
    with pytest.raises(
        ValueError,
        match=r"no way to sample is within 0\.1 s here; allow more time: the fastest is 1 at a time, with",
    ):
        frontier.best(within=0.1)
