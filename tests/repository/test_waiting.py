"""The benchmarks of waiting: slow plans are counted apart, and commands are timed in processes of their own."""

from __future__ import annotations

import pytest
import torch

from benchmarks.learning import PARTS, Plans
from benchmarks.start import COMMANDS, _command


def test_slow_plans_are_the_slowest_tenth_and_their_calls_are_counted_by_part() -> None:
    plans, begun = Plans(), torch.zeros(PARTS)
    begun[0], begun[-1] = 1, 3
    for _ in range(19):
        plans.calls.append(4)
        plans.begun.append(begun)
    plans.calls.append(9)
    plans.begun.append(begun + 5 * torch.eye(PARTS)[-1])
    plans.evaluations, plans.ms = [100.0] * 20, [1.0] * 20
    row = plans.row(32, "learned", 300)
    assert (row.plans, row.slow_plans) == (20, 1)
    assert (row.calls.median, row.calls.p90, row.calls.most) == (4, 4, 9)
    assert row.calls.mean == pytest.approx(4.25)
    assert row.slow_calls_by_part == [1] + [0] * (PARTS - 2) + [8]
    assert sum(row.calls_by_part) == pytest.approx(row.calls.mean)


@pytest.mark.slow
def test_usage_errors_take_less_than_seven_tenths_of_a_second() -> None:
    row = _command(COMMANDS[-1], 2)
    assert row.status == 2
    assert row.processor_seconds < 0.7
