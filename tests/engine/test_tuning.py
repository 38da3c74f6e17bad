"""Tuning against a clock of our own: a call costs `fixed + each × states`, all else nothing."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import foresample as fs
from foresample.engine import tuning as tuning_module
from foresample.engine.tuning import Trial
from foresample.targets import ChainTarget
from tests.support.small_chains import flow


class Machine:
    """A target whose calls take time on a clock that nothing else moves."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, fixed: float, each: float) -> None:
        self.now, self.fixed, self.each = 0.0, fixed, each
        monkeypatch.setattr(tuning_module, "perf_counter", lambda: self.now)

    def target(self, steps: int = 40) -> ChainTarget:
        base = fs.GaussianMixture.of_draft_trees(2).langevin(steps, 0.01)

        def network(x: Tensor, step: Tensor, row: Tensor) -> Tensor:
            self.now += self.fixed + self.each * len(x)
            return base.network(x, step, row)

        return replace(base, network=network)


def test_wide_windows_win_where_calls_cost_the_same_at_any_width(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch, fixed=1.0, each=0.0)
    tuning = fs.tune(machine.target())
    assert tuning.window is not None
    assert tuning.window >= 8
    best = max(tuning.trials, key=lambda trial: trial.gain)
    assert best.gain == pytest.approx(40 / best.calls)
    assert {(trial.call_seconds, trial.round_seconds) for trial in tuning.trials} == {(1.0, 1.0)}
    assert tuning.predicted == best.gain
    assert tuning.achieved == pytest.approx(tuning.predicted, rel=0.5)
    assert f"{tuning.achieved:.2f}× achieved" in tuning.advice
    assert "take window" in tuning.advice


def test_sequential_sampling_wins_where_calls_cost_as_much_as_their_states(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tuning = fs.tune(Machine(monkeypatch, fixed=0.0, each=1.0).target())
    assert tuning.window is None
    assert tuning.achieved is None
    assert tuning.predicted < 1
    assert "Sample sequentially" in tuning.advice
    assert re.search(
        r"no window gains \(the best is \d+: 0\.\d\d× predicted; of its round the network takes", tuning.advice
    )


def test_the_advice_gives_predicted_and_achieved_gain_apart() -> None:
    """A window that was predicted to gain and does not is no contradiction in one sentence; a tie is called a tie."""
    trial = Trial(8, 9, 0.004, 0.005, 20.0, 1.24)
    slower = fs.Tuning(40, 1, 0.002, [trial], None, 0.94, [0.93, 0.94, 0.95])
    assert slower.advice == (
        "Sample sequentially: with 1 sample at a time no window gains (the best is 8: 1.24× predicted, 0.94× achieved; "
        "of its round the network takes 4 ms and the rest 1 ms, a sequential step takes 2 ms)"
    )
    tie = replace(slower, achieved=1.01, turns=[0.98, 1.01, 1.03]).advice
    assert tie == (
        "Sample sequentially: with 1 sample at a time window 8 is a tie (1.24× predicted, 1.01× achieved, between "
        "0.98× and 1.03× in turns)"
    )


def test_the_best_window_and_the_sequential_sampler_run_in_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    tuning = fs.tune(Machine(monkeypatch, fixed=1.0, each=0.0).target(), windows=[8])
    assert len(tuning.turns) == 3
    assert tuning.achieved == sorted(tuning.turns)[1]
    assert tuning.step_seconds == 1.0


def test_widening_stops_where_the_gain_has_fallen(monkeypatch: pytest.MonkeyPatch) -> None:
    tuning = fs.tune(Machine(monkeypatch, fixed=0.0, each=1.0).target(), windows=(2, 30))
    assert [trial.window for trial in tuning.trials] == [2, 30]
    assert len(fs.tune(Machine(monkeypatch, fixed=1.0, each=1.0).target()).trials) < 6


def test_one_sample_gains_where_many_already_fill_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same machine, one sample or many at a time."""
    machine = Machine(monkeypatch, fixed=8.0, each=1.0)
    one, many = (fs.tune(machine.target(steps=20), slots=slots) for slots in (1, 64))
    assert one.window is not None
    assert many.window is None
    states = [trial.states for trial in many.trials]
    assert states == [64 * (trial.window + 1) for trial in many.trials]


def test_auto_samples_with_the_window_found_or_sequentially(monkeypatch: pytest.MonkeyPatch) -> None:
    cheap = Machine(monkeypatch, fixed=1.0, each=0.0)
    target = cheap.target(steps=16)
    run = fs.sample(target, 3, window="auto", seed=4)
    assert run.report.window == fs.tune(target, slots=3).window
    assert torch.equal(run.samples, fs.sample(target, 3, window=run.report.window, seed=4).samples)
    dear = Machine(monkeypatch, fixed=0.0, each=1.0)
    run = fs.sample(dear.target(steps=16), 3, window="auto", seed=4)
    assert run.report.method == "sequential"
    assert torch.equal(run.samples, fs.sequential(dear.target(steps=16), 3, seed=4).samples)


def test_a_tuning_can_be_saved_and_read(monkeypatch: pytest.MonkeyPatch) -> None:
    tuning = fs.tune(Machine(monkeypatch, fixed=1.0, each=0.1).target(), slots=2, windows=[3])
    data = json.loads(tuning.to_json())
    assert data["slots"] == 2
    assert data["trials"][0]["window"] == 3
    assert data["predicted"] == tuning.predicted


def test_windows_longer_than_the_chain_are_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    tuning = fs.tune(Machine(monkeypatch, fixed=1.0, each=0.0).target(steps=6), windows=tuning_module.WINDOWS)
    assert [trial.window for trial in tuning.trials] == [2, 4, 5]


def test_neighbours_are_those_on_either_side() -> None:
    places = {1: [2], 2: [1, 4], 4: [2, 8], 8: [4]}
    assert {window: tuning_module._neighbours([1, 2, 4, 8], window) for window in places} == places


def test_windows_between_the_powers_of_two_are_tried_around_the_best(monkeypatch: pytest.MonkeyPatch) -> None:
    tuning = fs.tune(Machine(monkeypatch, fixed=1.0, each=0.1).target())
    tried = [trial.window for trial in tuning.trials]
    assert tried == sorted(tried)
    between = set(tried) - set(tuning_module.WINDOWS)
    assert between
    best = max((t for t in tuning.trials if t.window in tuning_module.WINDOWS), key=lambda t: t.gain).window
    assert between <= {best * 3 // 4, best * 3 // 2}
    given = fs.tune(Machine(monkeypatch, fixed=1.0, each=0.1).target(), windows=(2, 4, 8))
    assert [trial.window for trial in given.trials] == [2, 4, 8]


def test_a_saved_tuning_is_used_without_measuring(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    target = Machine(monkeypatch, fixed=1.0, each=0.0).target(steps=16)
    tuning = fs.tune(target, slots=3)
    tuning.save(tmp_path / "tuning.json")
    kept = fs.Tuning.load(tmp_path / "tuning.json")
    assert kept == tuning
    assert kept.window is not None
    monkeypatch.setattr(tuning_module, "tune", None)
    run = fs.sample(target, 3, window=kept, seed=4)
    assert torch.equal(run.samples, fs.sample(target, 3, window=kept.window, seed=4).samples)
    none = fs.sample(target, 3, window=replace(kept, window=None), seed=4)
    assert none.report.method == "sequential"


def test_a_tuning_of_another_run_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    target = Machine(monkeypatch, fixed=1.0, each=0.0).target(steps=16)
    tuning = fs.tune(target, slots=3, windows=[2])
    with pytest.raises(
        ValueError,
        match=r"of 16 steps with 3 samples at a time, not of 16 steps with 4: draw 3 at a time .* or measure",
    ):
        fs.sample(target, 4, window=tuning)
    with pytest.raises(ValueError, match="window is given, but achieved is null"):
        replace(tuning, window=2, achieved=None)
    (tmp_path / "tuning.json").write_text("{}")
    with pytest.raises(ValueError, match=r"holds no tuning .*: measure again"):
        fs.Tuning.load(tmp_path / "tuning.json")
    with pytest.raises(
        ValueError, match="of 16 steps with 1 sample at a time, not of 17 steps with 1: measure"
    ):
        replace(tuning, slots=1).window_for(17, 1)
    (tmp_path / "tuning.json").write_text('{"tunings": []}')
    with pytest.raises(
        ValueError, match="tunings for several numbers of slots, and a window is of one: measure"
    ):
        fs.Tuning.load(tmp_path / "tuning.json")


@pytest.mark.parametrize(
    ("name", "value"), [("windows", 4), ("windows", []), ("slots", []), ("samples", -1), ("samples", 1.5)]
)
def test_numbers_that_cannot_be_measured_are_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"^{name} must be"):
        fs.tune(flow(), **{name: value})
