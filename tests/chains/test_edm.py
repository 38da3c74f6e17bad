"""EDM's sampler as a chain on churned states, against the sampler as its paper writes it."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor

import foresample as fs
from foresample.chains import karras_sigmas
from foresample.targets import from_edm
from tests.support.small_chains import mixture

f64 = torch.float64


def denoise(x: Tensor, sigma: Tensor, row: Tensor | None = None) -> Tensor:
    return mixture().denoise(x, torch.ones_like(sigma), sigma)


def edm_sampler(
    sigmas: list[float], start: Tensor, noise: list[Tensor], churn: float, low: float, high: float, scale: float
) -> Tensor:
    """Karras et al.'s algorithm 2 without its second-order correction; `sigmas` end with 0."""
    x = start * sigmas[0]
    steps = len(sigmas) - 1
    for i, (t_cur, t_next) in enumerate(itertools.pairwise(sigmas)):
        gamma = min(churn / steps, math.sqrt(2) - 1) if low <= t_cur <= high else 0
        t_hat = t_cur + gamma * t_cur
        x_hat = x + math.sqrt(t_hat**2 - t_cur**2) * scale * noise[i]
        d_cur = (x_hat - denoise(x_hat, torch.full((len(x),), t_hat, dtype=f64))) / t_hat
        x = x_hat + (t_next - t_hat) * d_cur
    return x


@pytest.mark.parametrize("final", [True, False])
@pytest.mark.parametrize(
    ("churn", "low", "high", "scale"), [(5.0, 0.0, math.inf, 1.0), (80.0, 0.1, 3.0, 1.007), (2.0, 0.5, 99, 0.9)]
)
def test_the_whole_chain_with_the_same_noise(
    churn: float, low: float, high: float, scale: float, final: bool
) -> None:
    levels = karras_sigmas(12, 0.05, 10)[:-1].tolist()
    target = from_edm(
        denoise,
        levels + [0.0] * final,
        (2,),
        churn=churn,
        s_min=low,
        s_max=high,
        s_noise=scale,
        dtype=f64,
    )
    generator = torch.Generator().manual_seed(0)
    draws = [torch.randn(5, 2, dtype=f64, generator=generator) for _ in range(14)]
    theirs = edm_sampler([*levels, 0.0], draws[0], draws[1:], churn, low, high, scale)

    gamma = min(churn / 12, math.sqrt(2) - 1) if low <= levels[0] <= high else 0
    first = levels[0] * math.sqrt((1 + gamma) ** 2 - 1) * scale
    x = levels[0] * draws[0] + first * draws[1]  # the start state, churned
    assert target.chain.start_scale == pytest.approx(math.hypot(levels[0], first))
    for k, std in enumerate(target.std):
        step = torch.full((5,), k)
        x = target.mean(x, target.predict(x, step, torch.arange(5)), step) + std * draws[k + 2 if k < 11 else 0]
    assert target.std[-1] == 0
    torch.testing.assert_close(x, theirs, rtol=1e-10, atol=1e-12)


def test_the_denoiser_receives_the_churned_level_of_each_row() -> None:
    seen = []

    def watch(x: Tensor, sigma: Tensor, row: Tensor) -> Tensor:
        seen.append((sigma, row))
        return x

    target = from_edm(watch, [4.0, 2.0, 1.0], (3,), churn=0.3)
    target.predict(torch.zeros(3, 3), torch.tensor([2, 0, 1]), torch.tensor([5, 6, 7]))
    torch.testing.assert_close(seen[0][0], torch.tensor([1.1, 4.4, 2.2]))
    assert seen[0][1].tolist() == [5, 6, 7]


def test_karras_levels() -> None:
    sigmas = karras_sigmas(18)
    assert len(sigmas) == 19
    assert sigmas[0] == pytest.approx(80)
    assert sigmas[-2] == pytest.approx(0.002)
    assert sigmas[-1] == 0
    roots = sigmas[:-1].pow(1 / 7)
    torch.testing.assert_close(roots.diff(), roots.diff().mean().expand(17))


@pytest.mark.law
@pytest.mark.parametrize("range_", [{}, {"s_min": 0.1, "s_max": 2.0}], ids=["all steps", "some steps"])
def test_speculation_is_exact(range_: dict[str, Any]) -> None:
    target = from_edm(denoise, karras_sigmas(14, 0.05, 10), (2,), churn=4, dtype=f64, **range_)
    result = fs.check(target, window=5, samples=3000, slots=3000)
    assert result.passed, str(result)
    assert fs.sample(target, 200, window=6).speedup > 1.3


@pytest.mark.law
def test_samples_follow_the_mixture() -> None:
    """With many steps the sampler draws from the data, up to the variance that Euler steps lose."""
    target = from_edm(denoise, karras_sigmas(300, 0.01, 20), (2,), churn=10, dtype=f64)
    x = fs.sample(target, 3000, window=30).samples
    data = mixture()
    mean = data.means.mean(0)
    assert ((x.mean(0) - mean).abs() < 4 * x.std(0) / math.sqrt(3000) + 0.02).all()
    variance = (data.stds**2).mean() + data.means.var(0, correction=0)
    torch.testing.assert_close(x.var(0), variance, rtol=0.1, atol=0)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"sigmas": [1.0, 2.0]}, "fall strictly"),
        ({"sigmas": [2.0, 1.0, -1.0]}, "fall strictly"),
        ({"sigmas": [math.inf, 1.0]}, "fall strictly"),
        ({"sigmas": [[2.0, 1.0]]}, "fall strictly"),
        ({"churn": 0.0}, "churn must be positive.*nothing to speculate on"),
        ({"churn": math.nan}, "churn must be positive"),
        ({"s_noise": 0.0}, "s_noise must be positive"),
        ({"s_min": 50.0}, "widen that range"),
        ({"sigmas": [3.0, 0.0]}, "no step adds noise"),
    ],
)
def test_bad_input_is_refused_with_the_remedy(change: dict[str, Any], sentence: str) -> None:
    arguments: dict[str, Any] = {"sigmas": [4.0, 2.0, 1.0], "shape": (2,), "churn": 1.0}
    with pytest.raises(ValueError, match=sentence):
        from_edm(denoise, **arguments | change)


@pytest.mark.parametrize("arguments", [(1,), (10, 3.0, 2.0), (10, 0.0, 2.0), (10, 0.1, 2.0, 0.0)])
def test_karras_levels_refuse_bad_input(arguments: tuple[Any, ...]) -> None:
    with pytest.raises(ValueError, match="use at least 2 steps"):
        karras_sigmas(*arguments)
