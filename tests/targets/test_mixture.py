"""The mixture's denoiser and score against quadrature, Tweedie's formula and autograd."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import integrate
from torch import Tensor

from foresample.chains import flow_chain, vp_chain
from foresample.targets.mixture import GaussianMixture
from tests.chains.common import LINEAR, f64, few, states


def some_mixture(dim: int, components: int = 3, seed: int = 0) -> GaussianMixture:
    rng = np.random.default_rng(seed)
    weights = rng.uniform(0.2, 1, components)
    parts = rng.normal(size=(components, dim)), rng.uniform(0.1, 0.8, components), weights / weights.sum()
    return GaussianMixture(*(torch.from_numpy(v) for v in parts))


def log_density(mixture: GaussianMixture, x: Tensor, alpha: float, sigma: float) -> Tensor:
    """ln p(x) of α x0 + σ ξ, one component and one dimension after the other."""
    terms = []
    for mean, std, weight in zip(mixture.means, mixture.stds, mixture.weights, strict=True):
        component = torch.distributions.Normal(alpha * mean, ((alpha * std) ** 2 + sigma**2).sqrt())
        terms.append(weight.log() + component.log_prob(x).sum())
    return torch.stack(terms).logsumexp(0)


def gradient(f: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    x = x.clone().requires_grad_()
    return torch.autograd.grad(f(x), x)[0]


@pytest.mark.parametrize(("alpha", "sigma"), [(0.7, 0.3), (0.1, 0.99), (0.99, 0.05), (0.5, 1.5)])
def test_mixture_denoiser_is_the_posterior_mean(alpha: float, sigma: float) -> None:
    mixture = some_mixture(1)
    means, stds, weights = mixture.means[:, 0].numpy(), mixture.stds.numpy(), mixture.weights.numpy()
    level = torch.tensor([alpha], dtype=f64), torch.tensor([sigma], dtype=f64)
    for x in (-1.5, -0.2, 0.0, 0.8, 2.0):

        def joint(x0: float, x: float = x) -> float:
            prior = (weights / stds * np.exp(-0.5 * ((x0 - means) / stds) ** 2)).sum()
            return prior * math.exp(-0.5 * ((x - alpha * x0) / sigma) ** 2)

        options = {"limit": 400, "epsabs": 1e-14, "epsrel": 1e-12, "points": [x / alpha, *means]}
        bounds = min(-12, x / alpha - 1), max(12, x / alpha + 1)
        mass, _ = integrate.quad(joint, *bounds, **options)
        moment, _ = integrate.quad(lambda x0, joint=joint: x0 * joint(x0), *bounds, **options)
        found = mixture.denoise(torch.tensor([[x]], dtype=f64), *level).item()
        assert found == pytest.approx(moment / mass, rel=1e-8, abs=1e-8)


@few
@given(st.integers(1, 6), st.integers(1, 4), st.floats(0.05, 1), st.floats(0.05, 2), st.integers(0, 100))
def test_mixture_denoiser_obeys_tweedie(
    dim: int, components: int, alpha: float, sigma: float, seed: int
) -> None:
    # E[x0 | x] = (x + σ² ∇ ln p(x))/α
    mixture = some_mixture(dim, components, seed)
    x = states(1, dim, seed)
    slope = gradient(lambda v: log_density(mixture, v[0], alpha, sigma), x)
    level = torch.tensor([alpha], dtype=f64), torch.tensor([sigma], dtype=f64)
    expected = (x + sigma**2 * slope) / alpha
    torch.testing.assert_close(mixture.denoise(x, *level), expected, rtol=1e-7, atol=1e-7)


@few
@given(st.integers(1, 6), st.integers(1, 4), st.integers(0, 100))
def test_mixture_score_is_the_gradient_of_its_log_density(dim: int, components: int, seed: int) -> None:
    mixture = some_mixture(dim, components, seed)
    x = states(1, dim, seed)
    slope = gradient(lambda v: log_density(mixture, v[0], 1.0, 0.0), x)
    torch.testing.assert_close(mixture.score(x), slope)


@few
@given(st.data(), st.integers(1, 30), st.sampled_from([1, 2, 3, 17, 64, 500]), st.integers(1, 5))
def test_mixture_is_the_same_bits_in_any_batch(
    data: st.DataObject, batch: int, dim: int, components: int
) -> None:
    mixture, x = GaussianMixture.of_draft_trees(dim, components), states(batch, dim)
    alpha = torch.linspace(0.01, 0.99, batch, dtype=f64)
    sigma = (1 - alpha**2).sqrt()
    chosen = data.draw(st.lists(st.integers(0, batch - 1), min_size=1, max_size=batch))
    whole = mixture.denoise(x, alpha, sigma)
    assert torch.equal(whole[chosen], mixture.denoise(x[chosen], alpha[chosen], sigma[chosen]))
    assert torch.equal(mixture.score(x)[chosen], mixture.score(x[chosen]))


def test_mixture_of_the_draft_trees_is_drawn_means_first() -> None:
    rng = np.random.default_rng(20260714)
    means = rng.uniform(-2.0, 2.0, size=(5, 500))
    stds = rng.uniform(0.10, 0.25, size=5)
    mixture = GaussianMixture.of_draft_trees(500)
    assert np.array_equal(mixture.means.numpy(), means)
    assert np.array_equal(mixture.stds.numpy(), stds)
    assert mixture.weights.tolist() == [0.2] * 5


def test_mixture_flow_is_the_chain_of_the_draft_tree_papers() -> None:
    mixture = some_mixture(2)
    target = mixture.flow(30, 0.1)
    x, step = states(30, 2), torch.arange(30)
    assert ((target.std == 0).nonzero().flatten() == torch.tensor([0, 29])).all()  # 28 stochastic steps
    sigma = torch.linspace(1, 0.001, 30, dtype=f64)
    velocity = (x - mixture.denoise(x, 1 - sigma, sigma)) / sigma.unsqueeze(1)
    torch.testing.assert_close(target.predict(x, step, step), velocity)
    plain = flow_chain(sigma, churn=0.1)
    torch.testing.assert_close(target.mean(x, velocity, step), plain.mean(x, velocity, step))


def test_mixture_vp_and_langevin_use_its_denoiser_and_its_score() -> None:
    mixture, grid = some_mixture(2), LINEAR[[900, 500, 100, 10]]
    x, step = states(4, 2), torch.arange(4)
    target = mixture.vp(grid, eta=0.5)
    torch.testing.assert_close(
        target.predict(x, step, step), mixture.denoise(x, grid.sqrt(), (1 - grid).sqrt())
    )
    assert torch.equal(target.std, vp_chain(grid, eta=0.5).std)
    assert torch.equal(mixture.langevin(4, 0.01).predict(x, step, step), mixture.score(x))
