"""A prefix of a stream in order has the chain's distribution; the first to finish have not (theory, "Finishing …")."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

import foresample as fs
from benchmarks.order import ended, first, stopped, uneven
from tests.law.test_law import SHARES, SUITE_LEVEL

pytestmark = pytest.mark.law
SEED, RUNS, MANY = 700, 20, 100_000


@pytest.fixture(scope="module")
def right() -> float:
    """P(x > 0), sequentially."""
    return float((fs.sequential(uneven(), MANY, seed=3).samples > 0).double().mean())


def p_value(chosen: Tensor, right: float) -> float:
    """The p-value of the two-sided test that the part of these with x > 0 is that of sequential samples."""
    found = float((chosen > 0).double().mean())
    spread = math.sqrt(right * (1 - right) * (1 / len(chosen) + 1 / MANY))
    return math.erfc(abs(found - right) / spread / math.sqrt(2))


def runs(count: int, *, ordered: bool) -> Tensor:
    return torch.cat([first(SEED + run, count, ordered=ordered) for run in range(RUNS)])


def test_the_chain_needs_more_rounds_on_its_right() -> None:
    run = fs.sample(uneven(), 400, window=8)
    slow = (run.samples > 0).flatten()
    assert run.calls[slow].double().mean() > 2 * run.calls[~slow].double().mean()


def test_a_prefix_in_order_is_a_fair_sample(right: float) -> None:
    assert p_value(runs(64, ordered=True), right) > SUITE_LEVEL / SHARES


def test_the_first_to_finish_are_not_a_fair_sample_and_are_caught(right: float) -> None:
    assert p_value(runs(64, ordered=False), right) < SUITE_LEVEL / SHARES


def test_samples_of_a_stopped_run_that_began_early_enough_are_a_fair_sample(right: float) -> None:
    kept = [stopped(SEED + run, 24) for run in range(RUNS // 2)]
    found = {rule: torch.cat([run[rule] for run in kept]) for rule in kept[0]}
    assert found["those begun N rounds before"].isfinite().all()  # all of them were done
    assert p_value(found["those begun N rounds before"], right) > SUITE_LEVEL / SHARES
    assert p_value(found["all that are finished"], right) < SUITE_LEVEL / SHARES


def test_a_run_that_begins_no_more_samples_and_finishes_those_under_way_is_a_fair_sample(right: float) -> None:
    """Even after as few rounds as here, where only the quick ones are done."""
    kept = torch.cat([ended(SEED + run, 6) for run in range(RUNS)])
    assert p_value(kept, right) > SUITE_LEVEL / SHARES
    cut = torch.cat([stopped(SEED + run, 6)["all that are finished"] for run in range(RUNS)])
    assert p_value(cut, right) < SUITE_LEVEL / SHARES
