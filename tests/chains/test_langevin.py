"""Unadjusted Langevin chains, and their stationary distribution for a Gaussian."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from foresample.chains import langevin_chain
from tests.chains.common import f64, states, weights


def test_langevin_follows_the_score() -> None:
    sizes = torch.tensor([0.1, 0.02, 0.3], dtype=f64)
    x, score = states(3), states(3, seed=1)
    chain = langevin_chain(sizes)
    mean = chain.mean(x, score, torch.arange(3))
    for k, h in enumerate((0.1, 0.02, 0.3)):
        torch.testing.assert_close(mean[k], x[k] + h * score[k])
        assert chain.std[k].item() == pytest.approx(math.sqrt(2 * h))
    torch.testing.assert_close(langevin_chain(0.02, 4).std, torch.full((4,), 0.2, dtype=f64))


def test_langevin_keeps_a_gaussian_up_to_its_step_size() -> None:
    # On N(0, 1), whose score is −x, the chain's stationary variance is 1/(1 − h/2), from A² V + std² = V.
    h = 0.1
    chain = langevin_chain(h, 1)
    on_state, on_score = weights(chain)
    slope = float(on_state - on_score)
    assert chain.std.item() ** 2 / (1 - slope**2) == pytest.approx(1 / (1 - h / 2))


@pytest.mark.parametrize(
    ("options", "remedy"),
    [
        ({"step_size": 0.0, "steps": 3}, "positive and finite"),
        ({"step_size": -0.1, "steps": 3}, "positive and finite"),
        ({"step_size": math.nan, "steps": 3}, "positive and finite"),
        ({"step_size": math.inf, "steps": 3}, "positive and finite"),
        ({"step_size": torch.tensor([0.1, 0.0])}, "positive and finite"),
        ({"step_size": 0.1}, "needs steps=N"),
        ({"step_size": 0.1, "steps": 0}, "needs steps=N"),
        ({"step_size": torch.tensor([0.1, 0.2]), "steps": 3}, "leave steps out"),
    ],
)
def test_step_sizes_outside_their_range_are_refused(options: dict[str, Any], remedy: str) -> None:
    with pytest.raises(ValueError, match=remedy):
        langevin_chain(**options)
