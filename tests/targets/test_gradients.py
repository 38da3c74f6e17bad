"""Guidance by a gradient, against OpenAI's `condition_mean`, and networks that differentiate, in every kind of mode."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import foresample as fs
from foresample.checks.samples import samples_law
from foresample.targets import guided, vp, with_gradients
from tests.chains.common import LINEAR, f64
from tests.support.small_chains import mixture

ALPHA_BAR = LINEAR[[980, 880, 760, 640, 500, 380, 260, 150, 70, 30, 10]]
STEPS = len(ALPHA_BAR)
WANTED = torch.tensor([[1.0, 0.5], [-1.0, 0.0]], dtype=f64)


def x0(x: Tensor, k: Tensor, row: Tensor) -> Tensor:
    level = ALPHA_BAR[k]
    return mixture().denoise(x, level.sqrt(), (1 - level).sqrt())


def plain(**how: Any) -> fs.targets.ChainTarget:
    return vp(x0, ALPHA_BAR, (2,), time=torch.arange(STEPS), predicts="x0", dtype=f64, **how)


def log_likelihood(x: Tensor, step: Tensor, row: Tensor) -> Tensor:
    """A classifier that wants every second sample elsewhere."""
    return -((x - WANTED[row % 2]) ** 2).sum(1) * (0.3 + 0.1 * step / STEPS)


def cond_fn(x: Tensor, step: Tensor, row: Tensor) -> Tensor:
    """guided-diffusion's: the gradient of the classifier's log-probability."""
    with torch.enable_grad():
        x_in = x.detach().requires_grad_(True)
        return torch.autograd.grad(log_likelihood(x_in, step, row).sum(), x_in)[0]


def loop(start: Tensor, noise: Tensor, scale: float, variance: str) -> Tensor:
    """guided-diffusion's `p_sample_loop` with `condition_mean`: mean + variance · gradient."""
    target = plain(variance=variance)
    row, x = torch.arange(len(start)), start
    for k, std in enumerate(target.std):
        step = torch.full_like(row, k)
        mean = target.mean(x, target.predict(x.clone(), step, row), step)
        x = mean + std**2 * scale * cond_fn(x, step, row) + std * noise[k]
    return x


@pytest.mark.parametrize("variance", ["small", "large"])
def test_guidance_with_the_same_noise(variance: str) -> None:
    draws = torch.randn(STEPS + 1, 5, 2, dtype=f64, generator=torch.Generator().manual_seed(0))
    target, row = guided(plain(variance=variance), log_likelihood, 2.5), torch.arange(5)
    x = target.start(draws[-1], row)
    with torch.no_grad():
        for k, std in enumerate(target.std):
            step = torch.full_like(row, k)
            x = target.mean(x, target.predict(x.clone(), step, row), step) + std * draws[k]
    torch.testing.assert_close(x, loop(draws[-1], draws, 2.5, variance), rtol=1e-10, atol=1e-10)


@pytest.mark.law
def test_guided_samples_have_the_distribution_of_the_guided_loop() -> None:
    """The broken twin is guided a little less."""
    target, count = guided(plain(), log_likelihood), 6000
    result = fs.check(target, window=5, samples=2000, slots=2000)
    assert result.passed, str(result)
    run = fs.sample(target, count, window=5, seed=1)
    assert run.speedup > 1.3
    draws = torch.randn(STEPS + 1, count, 2, dtype=f64, generator=torch.Generator().manual_seed(3))
    theirs = loop(draws[-1], draws, 1.0, "small")
    for wanted in (0, 1):
        assert samples_law(theirs[wanted::2], [run.samples[wanted::2]]).passed
    weaker = fs.sample(guided(plain(), log_likelihood, 0.7), count, window=5, seed=1).samples
    assert not samples_law(theirs[0::2], [weaker[0::2]]).passed


def energy_score(x: Tensor, step: Tensor, row: Tensor) -> Tensor:
    """A network that is the gradient of something, and does not know in which mode it is called."""
    return torch.autograd.grad(-((x**2 - 1) ** 2).sum(), x)[0] * (1 + 0.1 * row.view(-1, 1))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_a_network_that_differentiates_runs_in_every_mode(mode: Any) -> None:
    target = fs.targets.langevin(with_gradients(energy_score), (2,), step_size=0.05, steps=12, dtype=f64)
    known = fs.targets.langevin(
        lambda x, step, row: -4 * x * (x**2 - 1) * (1 + 0.1 * row.view(-1, 1)),
        (2,),
        step_size=0.05,
        steps=12,
        dtype=f64,
    )
    with mode():
        runs = [fs.sample(each, 4, window=4, seed=1) for each in (target, known)]
    torch.testing.assert_close(runs[0].samples, runs[1].samples)
    assert torch.equal(runs[0].calls, runs[1].calls)
    assert not runs[0].samples.requires_grad
    torch.testing.assert_close(
        fs.sequential(target, 4, seed=1).samples, fs.sequential(known, 4, seed=1).samples
    )


def test_an_error_without_gradients_names_the_remedy() -> None:
    target = fs.targets.langevin(energy_score, (2,), step_size=0.05, steps=12)
    with pytest.raises(RuntimeError, match=r"wrap the network with foresample\.targets.with_gradients"):
        fs.sample(target, 2, window=4)


def test_chains_and_likelihoods_that_do_not_allow_guidance_are_refused() -> None:
    two = fs.targets.from_chain(x0, fs.chains.dpmpp_sde_chain([3.0, 1.0, 0.0]), (2,))
    with pytest.raises(ValueError, match="the prediction cannot carry the gradient"):
        guided(two, log_likelihood)
    levels = fs.chains.karras_sigmas(6, 0.05, 10.0)
    multistep = fs.targets.from_chain(x0, fs.chains.dpmpp_2m_sde_chain(levels), (2,))
    with pytest.raises(ValueError, match=r"reuses predictions in later steps.*guide a one-step chain"):
        guided(multistep, log_likelihood)
    inside = fs.targets.constrained(plain(), lambda x, row: 0 * x)
    for target in (inside, fs.targets.replicated([inside, inside])):
        with pytest.raises(
            ValueError, match="constrained already: guide the target inside it, then constrain it"
        ):
            guided(target, log_likelihood)
    pictures = fs.targets.vp(lambda x, time, row: 0.1 * x, ALPHA_BAR, (1, 2, 2), dtype=f64)
    with pytest.raises(ValueError, match="states are frequencies here: guide the target inside it"):
        guided(fs.targets.in_frequencies(pictures), log_likelihood)
    with pytest.raises(ValueError, match=r"a number for each state, .* do not average"):
        fs.sample(guided(plain(), lambda x, step, row: log_likelihood(x, step, row).mean()), 2, window=3)
