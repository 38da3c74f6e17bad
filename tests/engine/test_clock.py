"""Samplers timed in turns, and the words for what the times show."""

from __future__ import annotations

import pytest

import foresample as fs
from foresample.engine.clock import Comparison, Times, ratio_interval, time_in_turns
from foresample.text import duration


def times(*seconds: float, network: float = 0.9) -> Times:
    found = Times()
    for value in seconds:
        found.add(value, network * value, 10)
    return found


def test_a_faster_sampler_is_reported_with_its_factor() -> None:
    found = Comparison(times(0.4, 0.41, 0.39, 0.4), times(0.1, 0.1, 0.1, 0.1))
    assert (found.verdict, found.detail) == ("4.00× faster", "")


def test_a_tie_is_called_a_tie() -> None:
    found = Comparison(times(1.0, 1.1, 0.9, 1.0), times(0.95, 1.0, 1.0, 1.05))
    assert (found.verdict, found.detail) == ("a tie", "the ratio is between 0.90 and 1.10")
    assert Comparison(times(1.001, 1.001), times(1.0, 1.0)).tie


def test_a_slower_sampler_is_reported_with_where_the_time_went() -> None:
    found = Comparison(times(0.2, 0.2, 0.2), times(0.4, 0.4, 0.4, network=0.5))
    assert found.verdict == "2.00× slower"
    assert found.detail == "the network took 200 ms instead of 180 ms, everything else 200 ms instead of 20 ms"


def test_both_samplers_run_in_turns_and_the_order_alternates() -> None:
    order = []

    def run(name: str) -> fs.Report:
        order.append(name)
        return fs.Report(name, 6, 2, 3, calls_mean=4.0, seconds=2.0, target_seconds=1.0, calls_per_step=2)

    found = time_in_turns(lambda: run("plain"), lambda: run("ours"), turns=2)
    assert order == ["plain", "ours", "ours", "plain"]
    assert (found.ours.seconds, found.ours.network, found.ours.calls) == ([2.0, 2.0], [1.0, 1.0], [8.0, 8.0])
    time_in_turns(lambda: run("plain"), lambda: run("ours"), turns=9, at_least=3, seconds=0.0, found=found)
    assert len(found.plain.seconds) == 2 + 3


def test_the_interval_of_a_ratio() -> None:
    assert ratio_interval([3.0]) == pytest.approx((3.0, 3.0))
    assert ratio_interval([5.0, 1.0, 3.0]) == pytest.approx((1.0, 5.0))
    low, high = ratio_interval(
        [2.0**k for k in range(9)]
    )  # pairs' means 0, ½, 1, 1, 1½ …: the fifth from either end
    assert (low, high) == pytest.approx((2**1.5, 2**6.5))


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.00042, "420 µs"),
        (3.2e-6, "3.2 µs"),
        (0.0179, "17.9 ms"),
        (0.9999, "1 s"),
        (0.4806, "481 ms"),
        (12.34, "12.3 s"),
        (1234.5, "1234 s"),
    ],
)
def test_durations_have_about_three_digits(seconds: float, text: str) -> None:
    assert duration(seconds) == text
