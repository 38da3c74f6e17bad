"""Throughput against latency, on the machine of `test_tuning`: a call costs `fixed + each × states`."""

from __future__ import annotations

from dataclasses import replace

import pytest

import foresample as fs
from foresample.engine.tuning import Frontier, Trial, Tuning
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
    assert tuning.achieved is not None
    assert ours.samples_per_second == pytest.approx(tuning.achieved * 2 / 20)


def test_a_deadline_that_no_setting_meets_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    frontier = fs.tune(Machine(monkeypatch, fixed=1.0, each=0.0).target(steps=20), slots=[1], windows=[4])
    with pytest.raises(
        ValueError,
        match=r"no way to sample is within 100 ms here; allow more time: the fastest is 1 at a time, with",
    ):
        frontier.best(within=0.1)


def test_the_best_point_is_the_advice_of_its_tuning() -> None:
    """A prediction is the best of several, and so too high: the final measurement corrects it."""
    trials = [Trial(w, w + 1, 1e-3, 1e-3, 9.0, gain, 12.0) for w, gain in ((4, 1.4), (8, 1.47))]
    gains = Tuning(16, 1, 1e-3, trials, 8, 1.3, [1.2, 1.3, 1.4])
    assert Frontier([gains]).best().window == 8
    assert [p.samples_per_second * 0.016 for p in Frontier([gains]).points] == pytest.approx(
        [1, 1.4 * 1.3 / 1.47, 1.3]
    )
    tie = replace(gains, window=None, achieved=1.04, turns=[0.97, 1.04, 1.08])
    assert Frontier([tie]).best().window is None
    assert Frontier([tie, replace(gains, slots=4)]).best().slots == 4
    with pytest.raises(ValueError, match=r"within 1 ms here; allow more time: the fastest is 1 at a time, seq"):
        Frontier([tie]).best(within=0.001)
