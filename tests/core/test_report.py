"""Tests of the reports of runs."""

from __future__ import annotations

import json
import math
from time import perf_counter

import pytest
import torch

import foresample as fs
from foresample.core.report import Tally, on_the_clock
from tests.support.small_chains import flow


def test_report_prints_and_serialises() -> None:
    run = fs.sample(flow(), 6, window=5)
    assert f"{run.speedup:.2f}" in str(run.report)
    data = json.loads(run.report.to_json())
    assert data["steps"] == 16
    assert data["count"] == 6
    assert data["speedup"] == pytest.approx(16 / run.calls.double().mean().item())
    assert data["mismatch"][0] is None  # the first step is deterministic: never drafted
    assert "±" in str(run.report)
    alone = str(fs.sample(flow(), 1, window=5).report)  # of one sample there is no standard error
    assert "nan" not in alone
    assert "±" not in alone
    one = json.loads(fs.sequential(flow(), 1).report.to_json())
    assert one["calls_mean"] == 16
    assert one["calls_error"] is None


@pytest.mark.parametrize("plainly", ["0", "1"], ids=["compiled", "plain"])
def test_rounds_are_counted_correctly(plainly: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two rows under way, and between them one that is not."""
    monkeypatch.setenv("FORESAMPLE_PLAIN", plainly)
    commit = fs.Commit(
        sample=torch.tensor([0, 1, 2]),
        step=torch.tensor([0, 1, 4]),
        committed=torch.tensor([3, 0, 1]),
        path=torch.zeros(3, 4, 1),
        x=torch.zeros(3, 1),
        mismatch=torch.tensor([[0.1, 0.2, 9.0], [5.0, 5.0, 5.0], [0.4, 9.0, 9.0]], dtype=torch.float64),
        drafted=torch.tensor([2, 1, 1]),
    )
    tally = Tally(3, 6, torch.device("cpu"))
    for _ in range(2):
        tally.count(commit)
    calls = torch.tensor([3, 5])
    report = tally.close(fs.Report("by hand", 6, 2, 3), torch.zeros(2, 1), calls, 2 * calls).report
    assert report.accepted_lengths == [2, 0, 2, 0]
    assert (report.drafted, report.accepted, report.rounds, report.evaluations) == (6, 4, 8, 16)
    assert report.mismatch[:2] == pytest.approx([0.1, 0.2])
    assert report.mismatch[4] == pytest.approx(0.4)
    assert all(math.isnan(report.mismatch[k]) for k in (2, 3, 5))
    assert report.accepted_mean == 0.5
    assert (report.calls_mean, report.calls_error, report.evaluations_mean) == (4, 1, 8)
    assert (report.speedup, report.speedup_error) == (1.5, 1.5 / 4)


def test_the_sequential_sampler_reports_the_same() -> None:
    began = perf_counter()
    report = fs.sequential(flow(), 5, slots=2).report
    assert report.accepted_lengths == [5 * 16]
    assert (report.rounds, report.evaluations, report.drafted, report.window) == (80, 80, 0, 0)
    assert report.occupancy == 5 / 6
    assert 0 < report.target_seconds < report.seconds <= perf_counter() - began


def test_steps_of_two_network_calls_are_reported() -> None:
    report = fs.Report("by hand", 6, 2, 3, calls_mean=4.0)
    assert "network calls" not in str(report)
    assert "calls that check" not in str(report)
    report.calls_per_step = 2
    assert "4.00, each 2 network calls (8.00)" in str(report)


@pytest.mark.parametrize(
    ("ratio", "told"), [(2.5, "2.50× faster"), (0.4, "2.50× slower"), (1.004, "as fast"), (0.997, "as fast")]
)
def test_times_are_compared_in_words(ratio: float, told: str) -> None:
    assert on_the_clock(ratio) == told
