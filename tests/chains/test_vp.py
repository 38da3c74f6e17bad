"""DDPM and DDIM against derivations that share nothing with the library's."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import foresample as fs
from foresample.chains import vp_chain
from foresample.checks.samples import samples_law
from tests.chains.common import LINEAR, alpha_bars, every_step, f64, few, states, weights
from tests.support.small_chains import mixture


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


@few
@given(alpha_bars)
def test_the_larger_variance_has_the_same_mean(alpha_bar: Tensor) -> None:
    large, small = (vp_chain(alpha_bar, variance=variance) for variance in ("large", "small"))
    torch.testing.assert_close(weights(large), weights(small))
    beta = 1 - alpha_bar[:-1] / alpha_bar[1:]
    torch.testing.assert_close(large.std[:-1], beta.sqrt())
    assert large.std[-1] == 0


def test_the_larger_variance_is_that_of_improved_diffusion() -> None:
    """The package's `fixed_large`, betas from data to noise: `np.append(posterior_variance[1], betas[1:])`."""
    betas = torch.linspace(1e-4, 0.02, 1000, dtype=f64)
    nonzero_mask = (torch.arange(1000) != 0).double()
    std = vp_chain(LINEAR.flip(0), variance="large").std.flip(0)
    torch.testing.assert_close(std, nonzero_mask * betas.sqrt(), rtol=1e-9, atol=1e-12)


@pytest.mark.law
def test_speculation_with_the_larger_variance_is_exact() -> None:
    def x0(x: Tensor, level: Tensor, row: Tensor) -> Tensor:
        return mixture().denoise(x, level.sqrt(), (1 - level).sqrt())

    grid = LINEAR[torch.linspace(990, 5, 14).long()]
    target, small = (
        fs.targets.vp(x0, grid, (2,), predicts="x0", variance=v, dtype=f64) for v in ("large", "small")
    )
    result = fs.check(target, window=5, samples=2000, slots=2000)
    assert result.passed, str(result)
    drawn, plain = fs.sample(target, 6000, window=5, seed=1).samples, fs.sequential(small, 6000, seed=2).samples
    assert not samples_law(plain, [drawn]).passed  # the other variance is another distribution


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"variance": "huge"}, "'small' or 'large', not 'huge'"),
        ({"variance": torch.ones(3)}, "not Tensor: for stds of your own.*replace"),
        ({"clip": torch.ones(3)}, "clip must be one number, not a tensor of 3"),
        ({"variance": "large", "eta": 0.5}, "use eta=1"),
        ({"variance": "large", "learned_base": 0.9}, "no learned_base"),
    ],
)
def test_an_unknown_variance_is_refused(change: dict, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        vp_chain(LINEAR[[900, 100]], **change)
