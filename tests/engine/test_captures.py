"""Rounds are captured when their width is needed again; on a stand-in for a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import foresample as fs
from foresample.core.noise import seeds_of
from foresample.engine.slots import FixedSlots
from tests.engine.test_engine import WatchedEngine, engine, under_way
from tests.support.captures import Device
from tests.support.small_chains import flow


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    monkeypatch.setenv("FORESAMPLE_PLAIN", "1")
    return Device(monkeypatch)


def captured(**settings: Any) -> WatchedEngine:
    return engine(flow(), "fixed", window=6, graph=True, **settings)


def test_a_width_is_warmed_up_by_its_first_round_and_captured_by_its_second(device: Device) -> None:
    made = captured(slots=1)
    first = made.sample([0]).report
    assert set(device.recorded) < set(device.warmed)
    assert first.preparation_seconds > 0
    for seed in range(1, 20):
        made.sample([seed])
    assert len(device.warmed) == len(set(device.warmed))
    assert sorted(map(str, device.warmed)) == sorted(map(str, device.recorded))


@pytest.mark.parametrize("slots", [1, 3])
@pytest.mark.parametrize("prepared", [False, True])
def test_captured_rounds_draw_the_samples_of_uncaptured_ones(
    device: Device, slots: int, prepared: bool
) -> None:
    seeds, made = seeds_of(7, 12), captured(slots=slots)
    if prepared:
        made.prepare()
    ours = [made.sample(part) for part in seeds.split(4)]
    plain = engine(flow(), "fixed", window=6, slots=slots)
    for run, part in zip(ours, seeds.split(4), strict=True):
        other = plain.sample(part)
        assert torch.equal(run.samples, other.samples)
        assert torch.equal(run.calls, other.calls)
        assert run.report.rounds == other.report.rounds
        assert run.report.accepted_lengths == other.report.accepted_lengths


def test_a_prepared_engine_captures_nothing_later(device: Device) -> None:
    made = captured(slots=2)
    made.prepare()
    slots = under_way(made)
    assert isinstance(slots, FixedSlots)
    before = list(device.recorded)
    assert set(before) == {None, *slots.widths}
    made.sample(range(20))
    assert slots.preparation_seconds == 0
    made.prepare()
    assert device.recorded == before


def test_preparing_is_nothing_where_nothing_is_captured() -> None:
    made = fs.Engine(flow(), window=6)
    made.prepare()
    assert torch.equal(made.sample([3]).samples, fs.sample(flow(), seeds=[3], window=6).samples)


def test_an_observed_run_is_not_captured(device: Device) -> None:
    made = captured(slots=1)
    made.sample([0], lambda commit: None)
    assert set(device.warmed) <= {None}
