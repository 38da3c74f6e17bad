"""Churned flow matching against Euler–Maruyama, step by step."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from foresample.chains import flow_chain
from tests.chains.common import every_step, f64, few, levels, states


@few
@given(levels, st.floats(0.01, 2), st.booleans(), st.integers(0, 100))
def test_flow_is_euler_maruyama_on_the_churned_flow(
    sigmas: Tensor, churn: float, from_noise: bool, seed: int
) -> None:
    if from_noise:
        sigmas = torch.cat([torch.ones(1, dtype=f64), sigmas])
    chain = flow_chain(sigmas, churn=churn)
    x, v = states(len(sigmas), seed=seed), states(len(sigmas), seed=seed + 1000)
    mean = chain.mean(x, v, every_step(chain))
    grid = [*sigmas.tolist(), 0.0]
    for k, (s, to) in enumerate(itertools.pairwise(grid)):
        dt = to - s
        if s == 1 or to == 0:
            drift, noise = v[k], 0.0
        else:
            g = math.sqrt(2 * s / (1 - s))
            score = -(x[k] + (1 - s) * v[k]) / s
            drift = v[k] - 0.5 * churn**2 * g**2 * score
            noise = churn * g * math.sqrt(-dt)
        torch.testing.assert_close(mean[k], x[k] + dt * drift, rtol=1e-9, atol=1e-11)
        assert chain.std[k].item() == pytest.approx(noise, rel=1e-12)


def test_score_and_velocity_belong_to_one_interpolant() -> None:
    # What the churn formula assumes, on data that is one point: x = (1 − σ) x0 + σ ξ has score −ξ/σ.
    s, (x0, xi) = 0.3, states(2)
    x = (1 - s) * x0 + s * xi
    v = (x - x0) / s
    torch.testing.assert_close(v, xi - x0)
    torch.testing.assert_close(-(x + (1 - s) * v) / s, -xi / s)


@pytest.mark.parametrize(
    "sigmas", [[0.1, 0.5], [0.5, 0.5], [1.0, 0.5, 0.0], [1.1, 0.5], [math.nan, 0.5], [[0.5, 0.1]]]
)
def test_sigmas_that_do_not_fall_within_zero_and_one_are_refused(sigmas: list) -> None:
    with pytest.raises(ValueError, match="without the final 0"):
        flow_chain(torch.tensor(sigmas), churn=0.1)


@pytest.mark.parametrize("churn", [0, -1, math.nan])
def test_a_chain_without_noise_is_refused(churn: float) -> None:
    with pytest.raises(ValueError, match="churn must be positive"):
        flow_chain(torch.tensor([0.9, 0.5]), churn=churn)
