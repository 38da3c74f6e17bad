"""A target may look something up by `row` (a label, a prompt, a start state) and has as many as there are samples.

Whoever draws samples of its own accord, to measure or to fit, asks for no other rows than the run does.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

import foresample as fs
from foresample.targets import ChainTarget
from tests.support.small_chains import flow

ROWS = 4


class Rows:
    """Records every row it is called for; it has labels or start states for four rows."""

    def __init__(self, kind: str) -> None:
        self.asked: set[int] = set()
        base, labels = flow(), torch.linspace(-0.3, 0.3, ROWS, dtype=torch.float64)

        def network(x: Tensor, time: Tensor, row: Tensor) -> Tensor:
            self.asked.update(row.tolist())
            known = labels[row] if kind == "labels" else labels[row % ROWS]
            return base.network(x, time, row) + known.unsqueeze(1)

        starts = None if kind == "labels" else torch.randn(ROWS, 2, dtype=torch.float64)
        self.target: ChainTarget = replace(base, network=network, start_states=starts)


DRAWS: dict[str, Callable[[fs.Target], object]] = {
    "sample, auto": lambda t: fs.sample(t, ROWS, window="auto"),
    "sample, auto, fewer slots": lambda t: fs.sample(t, ROWS, window="auto", slots=2),
    "sample, auto, another network drafts": lambda t: fs.sample(
        t, ROWS, window="auto", drafter=fs.DraftModel(t), look=False
    ),
    "tune": lambda t: fs.tune(t, slots=ROWS),
    "tune, many samples": lambda t: fs.tune(t, slots=2, samples=30, windows=[3, 5]),
    "frontier": lambda t: fs.tune(t, slots=[1, ROWS], windows=[3]),
    "fit_prior": lambda t: fs.fit_prior(t, window=4, rows=ROWS),
    "fit_prior, a path a row": lambda t: fs.fit_prior(t, window=4, pilots=9, rows=ROWS, paths=ROWS, slots=3),
    "fit_prior, few pilots": lambda t: fs.fit_prior(t, window=4, pilots=ROWS),
    "check": lambda t: fs.check(t, window=4, samples=20, rows=ROWS),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["labels", "starts"])
@pytest.mark.parametrize("draw", DRAWS)
def test_only_rows_of_the_run_are_used(draw: str, kind: str) -> None:
    rows = Rows(kind)
    DRAWS[draw](rows.target)
    assert rows.asked <= set(range(ROWS))
    if "fewer" not in draw and "many" not in draw:
        assert rows.asked == set(range(ROWS))


@pytest.mark.parametrize("kind", ["labels", "starts"])
@pytest.mark.parametrize("draw", ["fit_prior", "check"])
def test_the_error_for_a_missing_row_names_the_argument_rows(draw: str, kind: str) -> None:
    draws = {
        "fit_prior": lambda t: fs.fit_prior(t, window=4),
        "check": lambda t: fs.check(t, window=4, samples=20),
    }
    with pytest.raises(
        ValueError, match=r"cannot look up one of rows 0 … \d+ .*give their number, as in rows="
    ):
        draws[draw](Rows(kind).target)


def test_pilots_of_each_path_are_fitted_apart() -> None:
    """Two pilots of one row are two paths: with a row a path, tables differ as the rows do."""
    rows = Rows("starts")
    prior = fs.fit_prior(rows.target, window=4, pilots=40, rows=ROWS, paths=ROWS)
    assert rows.target.start_states is not None
    torch.testing.assert_close(prior.states[:, 0], rows.target.start_states)


@pytest.mark.parametrize("kind", ["labels", "starts"])
def test_samples_drawn_with_a_measured_window_are_those_of_that_window(kind: str) -> None:
    target = Rows(kind).target
    run = fs.sample(target, ROWS, window="auto", slots=3, seed=5)
    if run.report.method == "sequential":
        plain = fs.sequential(target, ROWS, seed=5)
    else:
        plain = fs.sample(target, ROWS, window=run.report.window, slots=3, seed=5)
    assert torch.equal(run.samples, plain.samples)
