"""What a run tells of itself."""

from __future__ import annotations

import json

import pytest

import foresample as fs
from foresample.core.report import on_the_clock
from tests.small_chains import flow


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


@pytest.mark.parametrize(
    ("ratio", "told"), [(2.5, "2.50× faster"), (0.4, "2.50× slower"), (1.004, "as fast"), (0.997, "as fast")]
)
def test_times_are_compared_in_words(ratio: float, told: str) -> None:
    assert on_the_clock(ratio) == told
