"""DDPM and DDIM against derivations that share nothing with the library's."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from foresample.chains import vp_chain
from tests.chains.common import LINEAR, alpha_bars, every_step, f64, few, states, weights


@few
@given(alpha_bars, st.integers(0, 100))
def test_ddpm_is_bayes_rule_for_the_forward_process(alpha_bar: Tensor, seed: int) -> None:
    chain = vp_chain(alpha_bar, predicts="x0")
    x, x0 = states(len(alpha_bar), seed=seed), states(len(alpha_bar), seed=seed + 1000)
    mean = chain.mean(x, x0, every_step(chain))
    for k in range(len(alpha_bar) - 1):
        noisy, cleaner = alpha_bar[k].item(), alpha_bar[k + 1].item()
        # q(x_s | x_t, x0) ∝ q(x_t | x_s) q(x_s | x0): as functions of x_s, two Gaussians. Precisions add.
        shrink = noisy / cleaner
        precision_likelihood, at_likelihood = shrink / (1 - shrink), x[k] / math.sqrt(shrink)
        precision_prior, at_prior = 1 / (1 - cleaner), math.sqrt(cleaner) * x0[k]
        precision = precision_likelihood + precision_prior
        expected = (precision_likelihood * at_likelihood + precision_prior * at_prior) / precision
        torch.testing.assert_close(mean[k], expected, rtol=1e-9, atol=1e-11)
        assert chain.std[k].item() == pytest.approx(precision**-0.5, rel=1e-9)
    torch.testing.assert_close(mean[-1], x0[-1])  # the last transition goes to the denoised estimate
    assert chain.std[-1] == 0


@few
@given(alpha_bars, st.floats(0.01, 1))
def test_ddim_keeps_the_marginals_of_the_forward_process(alpha_bar: Tensor, eta: float) -> None:
    chain = vp_chain(alpha_bar, eta=eta, predicts="x0")
    on_state, on_x0 = weights(chain)
    to = torch.cat([alpha_bar[1:], torch.ones(1, dtype=f64)])
    # x_t ~ N(√ᾱ_t x0, 1 − ᾱ_t) goes to N(√ᾱ_s x0, 1 − ᾱ_s).
    torch.testing.assert_close(on_state * alpha_bar.sqrt() + on_x0, to.sqrt())
    torch.testing.assert_close(on_state**2 * (1 - alpha_bar) + chain.std**2, 1 - to, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(chain.std, eta * vp_chain(alpha_bar).std)


@pytest.mark.parametrize(
    "alpha_bar",
    [[0.9, 0.5, 0.1], [0.1, 0.1, 0.5], [0.0, 0.5], [0.5, 1.0], [-0.1, 0.5], [0.1, math.nan], [[0.1, 0.5]]],
)
def test_an_alpha_bar_that_does_not_rise_within_zero_and_one_is_refused(alpha_bar: list) -> None:
    with pytest.raises(ValueError, match="flip the schedule"):
        vp_chain(torch.tensor(alpha_bar))


@pytest.mark.parametrize("eta", [0, -0.5, 1.01, math.nan])
def test_an_eta_outside_zero_to_one_is_refused(eta: float) -> None:
    with pytest.raises(ValueError, match="eta must be in"):
        vp_chain(LINEAR[[900, 100]], eta=eta)
