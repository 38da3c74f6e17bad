"""The turns of `benchmarks.clock latency` and `throughput`, on a small network."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from torch import Tensor

import foresample as fs
from benchmarks import clock, ways
from benchmarks.kinds.clock import Latency
from benchmarks.results import load
from foresample.baseline import Sequential
from foresample.core.noise import seeds_of
from foresample.pretrained import EMBEDDED


def test_a_window_is_chosen_on_other_samples_than_those_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[int] = []

    def noted(seed: int, count: int, first: int) -> Tensor:
        drawn.append(seed)
        return seeds_of(seed, count, first)

    monkeypatch.setattr(clock, "seeds_of", noted)
    target = clock._dense(4, 20, 16)
    engines = {window: fs.Engine(target, window=window, slots=1) for window in (8, 4)}
    plain, *ours = clock._latencies(Sequential(target, 1), engines, 1, 8)
    assert set(drawn) == {clock.PILOT_SEED, 1, 2}  # the sequential sampler's seeds differ
    assert (plain.window, plain.calls, plain.gain, plain.faster, plain.chosen) == (0, 20, 1, None, False)
    assert [row.window for row in ours] == [4, 8]
    assert [row.chosen for row in ours].count(True) == 1
    for row in ours:
        assert row.calls < 20
        assert row.faster is not None
        assert row.faster.ratio == row.gain == pytest.approx(plain.ms / row.ms)
        assert row.law is not None
        assert row.law.passed
        assert row.law.samples == row.law.sequential == row.faster.turns


def test_slots_and_fixed_batches_draw_as_many_samples_in_turns() -> None:
    target = clock._dense(4, 20, 16)
    row = clock._throughput(Sequential(target, 4), fs.Engine(target, window=4, slots=4), 2, 8, 3)
    assert row.faster is not None
    assert row.faster_than_fixed is not None
    assert row.faster.turns == row.faster_than_fixed.turns == 3
    assert row.faster.ratio == pytest.approx(row.samples_per_second / row.sequential_samples_per_second)
    assert row.gain_over_fixed == pytest.approx(row.samples_per_second / row.fixed_samples_per_second)


def test_windows_are_for_all_chains_or_for_those_of_one_length() -> None:
    assert clock._windows(["100:25", "31", "100:19", "250:49"], 100) == [19, 25, 31]
    assert clock._windows(["22", "79"], 250) == [22, 79]
    for given in (["100:25"], ["a:25"], ["25:"]):
        with pytest.raises(typer.BadParameter):
            clock._windows(given, 250)


def test_the_way_of_the_fastest_sampler_is_chosen() -> None:
    short, long = (Sequential(clock._dense(4, steps, 16), 1) for steps in (10, 200))
    slow, quick = ways.WAYS["compiled"], ways.WAYS["max-autotune"]
    best, rows = clock._quickest({slow: long, quick: short})
    assert best is quick
    assert [(row.way, row.chosen, row.window) for row in rows] == [
        ("compiled", False, 0),
        ("max-autotune", True, 0),
    ]


def test_a_way_changes_how_the_network_runs_and_not_what_it_returns() -> None:
    tried = [ways.EAGER, ways.Way(name="other", compiled=False, channels_last=True, search=True)]
    tried.append(ways.Way(name="searching", compiled=False, search=True))
    found = ways.networks(EMBEDDED, tried, "cpu")
    x, time = torch.randn(2, 1, 28, 28), torch.tensor([3, 700])
    one, other = (found[way]._evaluated(x.bfloat16(), time, torch.tensor([0, 1])) for way in tried[:2])
    torch.testing.assert_close(one, other, atol=0.1, rtol=0.1)
    assert found[tried[0]] is found[tried[2]]  # cuDNN's search is no property of the network
    with tried[1].chosen():
        assert torch.backends.cudnn.benchmark
    assert not torch.backends.cudnn.benchmark


def test_latency_saves_the_ways_tried_and_the_one_timed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def on_cpu(model: Path, tried: Any) -> Any:
        return ways.networks(model, tried, "cpu")

    monkeypatch.setattr(clock, "networks", on_cpu)
    clock.latency(EMBEDDED, [4], ["4:2"], samples=8, pilots=20, eager=True, out=tmp_path)
    saved = load(Latency, f"{EMBEDDED.name}-latency-eager", tmp_path)
    assert [(row.way, row.window, row.chosen) for row in saved.ways] == [("eager", 0, True), ("eager", 2, True)]
    assert [(row.steps, row.window, row.way) for row in saved.rows] == [(4, 0, "eager"), (4, 2, "eager")]
    assert saved.rows[1].law is not None
