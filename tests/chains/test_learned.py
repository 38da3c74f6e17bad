"""A learned variance as extra noise: samples of a chain with a known variance, and broken twins that must be caught."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import foresample as fs
from foresample.chains.vp import transition
from foresample.checks.kolmogorov import ks_two_sample
from foresample.contracts import affine_chain
from foresample.targets import ChainTarget, vp
from tests.support.small_chains import mixture

pytestmark = pytest.mark.law

f64 = torch.float64
GRID = torch.linspace(0.02, 0.98, 10, dtype=f64)
SAMPLES = 20_000
LEVEL = 1e-3 / 20


def output_of(x: Tensor, level: Tensor, row: Tensor | None = None, depth: float = 1.0) -> Tensor:
    """x0, and where between β̃ and β the variance is: it changes over the plane. [B, 2] -> [B, 4]."""
    x0 = mixture().denoise(x, level.sqrt(), (1 - level).sqrt())
    return torch.cat([x0, depth * torch.sin(2 * x)], 1)


def learned(depth: float = 1.0, base: float = 0.9) -> ChainTarget:
    def network(x: Tensor, level: Tensor, row: Tensor) -> Tensor:
        return output_of(x, level, depth=depth)

    return vp(network, GRID, (2,), predicts="x0", learned_base=base, dtype=f64)


def plain_samples(fixed: bool = False) -> Tensor:
    """The sampler as it is written down everywhere: mean + √variance(x)·noise."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(SAMPLES, 2, dtype=f64, generator=generator)
    there = torch.cat([GRID[1:], torch.ones(1, dtype=f64)])
    for here, after in zip(GRID, there, strict=True):
        towards, weight, std = transition(here, after, 1.0)
        x0, fraction = output_of(x, here.expand(SAMPLES)).chunk(2, dim=1)
        variance = torch.exp(
            (std**2).log() * (1 - fraction) / 2 + (1 - here / after).log() * (fraction + 1) / 2
        )
        scale = std if fixed or std == 0 else variance.sqrt()
        x = towards * x + weight * x0 + scale * torch.randn(x.shape, dtype=f64, generator=generator)
    return x


def smallest_p_value(one: Tensor, two: Tensor) -> float:
    """The smallest p-value of the coordinates, their sum and the norm."""
    views = [(v[:, 0], v[:, 1], v.sum(1), v.norm(dim=1)) for v in (one, two)]
    return min(ks_two_sample(a.numpy(), b.numpy()) for a, b in zip(*views, strict=True))


def test_samples_have_the_distribution_of_the_published_sampler() -> None:
    run = fs.sample(learned(), SAMPLES, window=5)
    assert smallest_p_value(run.samples, plain_samples()) > LEVEL
    assert run.speedup > 1.3


def test_a_fixed_variance_in_place_of_the_learned_one_is_caught() -> None:
    assert smallest_p_value(fs.sample(learned(), SAMPLES, window=5).samples, plain_samples(fixed=True)) < LEVEL


class Clipped(ChainTarget):
    """The mistake to catch where the base lies above the variance: the missing part is ignored."""

    def predict(self, x: Tensor, step: Tensor, row: Tensor, extra: Tensor | None = None) -> Tensor:
        prediction = super().predict(x, step, row, extra)
        assert extra is not None
        chain = self.chain
        assert chain.extra_weight is not None
        output = self.network(x, step if chain.time is None else chain.time[step], row)
        without = (
            output.chunk(2, 1)[0] - (chain.extra_weight / chain.prediction_weight)[step].unsqueeze(1) * extra
        )
        return torch.where(prediction.isnan(), without, prediction)


def test_a_base_above_the_variance_that_is_clipped_is_caught() -> None:
    sound = learned()
    chain = replace(sound.chain, std=1.2 * sound.chain.std)
    broken = Clipped(chain, sound.shape, sound.network)
    assert smallest_p_value(fs.sample(broken, SAMPLES, window=5).samples, plain_samples()) < LEVEL


def test_check_passes_and_reports_how_near_the_variance_came_to_its_base() -> None:
    result = fs.check(learned(), window=5, samples=2000, slots=2000)
    assert result.passed, str(result)
    finding = result.findings[-1]
    assert finding.question == "variance is above its base"
    assert "of values are below 1.05" in finding.detail


@pytest.mark.parametrize("sampler", [lambda t: fs.sample(t, 50, window=5), lambda t: fs.sequential(t, 50)])
def test_a_base_above_the_variance_is_refused_in_one_sentence(sampler: Any) -> None:
    """The network leaves its range by far more than it may."""
    with pytest.raises(FloatingPointError, match=r"its variance lies below.*give a smaller learned_base"):
        sampler(learned(depth=3.0))


def test_kernels_do_not_draw_a_learned_variance() -> None:
    assert affine_chain(learned()) is None


@pytest.mark.parametrize("base", [0.0, 1.0, 1.5])
def test_a_base_must_lie_between_zero_and_one(base: float) -> None:
    with pytest.raises(ValueError, match=r"base must lie within \(0, 1\)"):
        learned(base=base)


def test_ddim_has_no_learned_variance() -> None:
    with pytest.raises(ValueError, match="use eta=1"):
        vp(output_of, GRID, (2,), eta=0.5, learned_base=0.9)


def test_a_network_without_the_channels_is_refused() -> None:
    target = vp(lambda x, t, row: x, GRID, (2,), learned_base=0.9, dtype=f64)
    with pytest.raises(ValueError, match=r"returns 2 channels for states of 2.*use a fixed variance"):
        fs.sample(target, 1, window=3)


@pytest.mark.parametrize("output", [torch.zeros(3, 4, 1, 4), torch.zeros(3, 4, 4, 4, dtype=torch.long)])
def test_an_output_that_would_be_broadcast_is_refused(output: Tensor) -> None:
    target = vp(lambda x, t, row: output[: len(x)], GRID, (2, 4, 4), learned_base=0.9)
    with pytest.raises(
        ValueError, match=r"floating-point numbers of shape \(\d, 4, 4, 4\), with a learned variance"
    ):
        fs.sample(target, 3, window=4)
