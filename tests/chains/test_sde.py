"""Reverse SDEs against the steps of packages and the same noise: 21cmPSDenoiser's, which are score_sde's, and sbi's."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import foresample as fs
from foresample.chains import VE, VP, SubVP, reverse_sde_chain, sde_chain
from foresample.checks.samples import samples_law
from foresample.targets import from_sde, reverse_sde
from tests.support.packages import load
from tests.support.small_chains import mixture

f64 = torch.float64
PROCESSES: dict[str, Any] = {"VPSDE": VP(0.2, 15.0), "SubVPSDE": SubVP(0.2, 15.0), "VESDE": VE(0.02, 20.0)}
PREDICTORS: list[Any] = ["euler_maruyama", "reverse_diffusion"]
STEPS = 40


def score(x: Tensor, t: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Some score; the packages pass more than is needed."""
    return torch.tanh(x) - x + 0.1 * t.view(-1, *(1,) * (x.ndim - 1)) * x.roll(1, -1)


def reference(name: str) -> Any:
    """The package's own process."""
    process = PROCESSES[name]
    ends = (process.sigma_min, process.sigma_max) if name == "VESDE" else (process.beta_min, process.beta_max)
    return getattr(load("psdenoiser.sde"), name)(*ends, n=STEPS)


@pytest.mark.parametrize("predictor", PREDICTORS)
@pytest.mark.parametrize("name", PROCESSES)
def test_the_whole_chain_with_the_same_noise(name: str, predictor: Any) -> None:
    process, forward = PROCESSES[name], reference(name)
    backward = forward.reverse(score)
    target = reverse_sde(
        score, process, STEPS, (1, 2, 3), predictor=predictor, end=1e-2, denoise=False, dtype=f64
    )
    generator = torch.Generator().manual_seed(0)
    ours = theirs = target.start(torch.randn(4, 1, 2, 3, dtype=f64, generator=generator), torch.arange(4))
    row = torch.arange(4)
    for k, t in enumerate(torch.linspace(1, 1e-2, STEPS, dtype=f64)):
        noise = torch.randn(ours.shape, dtype=f64, generator=generator)
        at, step = t.expand(4), torch.full_like(row, k)
        if predictor == "euler_maruyama":
            drift, diffusion = backward.sde(theirs, at)
            theirs = theirs - drift / STEPS + diffusion.view(-1, 1, 1, 1) / STEPS**0.5 * noise
        else:
            f, g = backward.discretize(theirs, at)
            theirs = theirs - f + g.view(-1, 1, 1, 1) * noise
        ours = target.mean(ours, target.predict(ours, step, row), step) + target.std[k] * noise
        # Their tables are float32.
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5 * float(theirs.abs().max()))
    prior = forward.prior_sampling((20_000,)).std()
    assert target.chain.start_scale == pytest.approx(float(prior), rel=0.05)


@pytest.mark.parametrize("name", PROCESSES)
def test_levels_are_those_of_the_process(name: str) -> None:
    process, t = PROCESSES[name], torch.tensor([0.01, 0.3, 1.0], dtype=f64)
    mean, std = reference(name).marginal_prob(torch.ones(3, 1, 1, 1, dtype=f64), t)
    levels = process.levels(t)
    torch.testing.assert_close(levels.alpha, mean.flatten())
    torch.testing.assert_close(levels.sigma, std)


@pytest.mark.parametrize("reuse", ["x0", "score", "eps"])
def test_the_reused_prediction_changes_no_mean(reuse: Any) -> None:
    chain, plain = reverse_sde_chain(VP(), 9, reuse=reuse), reverse_sde_chain(VP(), 9, reuse="score")
    x, step = torch.randn(9, 2, dtype=f64), torch.arange(9)
    output = score(x, torch.ones(9, dtype=f64))
    means = [c.mean(x, c.predict(x, output, step), step) for c in (chain, plain)]
    torch.testing.assert_close(means[0], means[1])
    assert chain.std[-1] == 0


def mixture_score(process: Any) -> Any:
    """The mixture's score under a process."""

    def network(x: Tensor, t: Tensor, row: Tensor) -> Tensor:
        levels = process.levels(t)
        x0 = mixture().denoise(x, levels.alpha, levels.sigma)
        return (levels.alpha.unsqueeze(1) * x0 - x) / levels.sigma.unsqueeze(1) ** 2

    return network


@pytest.mark.law
@pytest.mark.parametrize("predictor", PREDICTORS)
@pytest.mark.parametrize("name", PROCESSES)
def test_speculation_is_exact(name: str, predictor: Any) -> None:
    process = PROCESSES[name]
    target = reverse_sde(mixture_score(process), process, 30, (2,), predictor=predictor, dtype=f64)
    result = fs.check(target, window=8, samples=2000, slots=2000)
    assert result.passed, str(result)
    assert fs.sample(target, 100, window=8).speedup > 1.5


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"steps": 1}, "at least 2 steps"),
        ({"end": 0.0}, r"an end within \(0, 1\)"),
        ({"predictor": "heun"}, "'euler_maruyama' or 'reverse_diffusion'"),
    ],
)
def test_bad_input_is_refused_with_the_remedy(change: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        reverse_sde_chain(**dict[str, Any](process=VP(), steps=10) | change)


# ------------------------------------------------------------------ any grid of times

TIMES = torch.tensor([0.98, 0.9, 0.62, 0.6, 0.3, 0.11, 0.1, 0.04], dtype=f64)
"""A grid of no regularity."""


def sbi_euler_maruyama(
    theta: Tensor, t1: Tensor, t0: Tensor, process: Any, eta: float, noise: Tensor
) -> Tensor:
    """sbi's `EulerMaruyama.predict`, its functions being those of the process."""
    dt = t1 - t0
    f, g = process.drift(t1) * theta, process.diffusion(t1)
    f_backward = f - (1 + eta**2) / 2 * g**2 * score(theta, t1.expand(len(theta)))
    return theta - f_backward * dt + eta * g * noise * torch.sqrt(dt)


@pytest.mark.parametrize("known", [True, False], ids=["levels given", "levels integrated"])
@pytest.mark.parametrize("last", ["noisy", "noiseless", "denoised"])
@pytest.mark.parametrize(("name", "eta"), [("VPSDE", 1.0), ("SubVPSDE", 0.6), ("VESDE", 1.3)])
def test_any_grid_of_times_with_the_same_noise(name: str, eta: float, last: Any, known: bool) -> None:
    """The start has a mean and a std for each element, as in sbi."""
    if last == "denoised" and not known:
        return
    process: Any = PROCESSES[name]
    mean, std = torch.tensor([[1.0, -2.0, 0.5]], dtype=f64), torch.tensor([3.0, 1.0, 2.0], dtype=f64)
    options = {"levels": process.levels} if known else {}
    target = from_sde(
        score,
        TIMES,
        process.drift,
        process.diffusion,
        (2, 3),
        start_mean=mean,
        start_std=std,
        eta=eta,
        last=last,
        dtype=f64,
        **options,
    )
    noise = torch.randn(len(TIMES) + 1, 5, 2, 3, dtype=f64, generator=torch.Generator().manual_seed(1))
    row = torch.arange(5)
    ours, theirs = target.start(noise[-1], row), mean + std * noise[-1]
    for k in range(len(TIMES) - 1):
        z = noise[k] if k < len(TIMES) - 2 or last != "noiseless" else torch.zeros_like(noise[k])
        theirs = sbi_euler_maruyama(theirs, TIMES[k], TIMES[k + 1], process, eta, z)
    if last == "denoised":
        levels = process.levels(TIMES[-1:])
        theirs = (theirs + levels.sigma**2 * score(theirs, TIMES[-1:].expand(5))) / levels.alpha
    for k, scale in enumerate(target.std):
        step = torch.full_like(row, k)
        ours = target.mean(ours, target.predict(ours, step, row), step) + scale * noise[k]
    assert len(target.std) == len(TIMES) - (last != "denoised")
    torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10 * float(theirs.abs().max()))


@pytest.mark.parametrize("name", ["VPSDE", "SubVPSDE"])
def test_integrated_levels_are_the_process_s(name: str) -> None:
    process = PROCESSES[name]

    def pair(t: Tensor) -> tuple[Tensor, Tensor]:
        return process.levels(t).alpha, process.levels(t).sigma

    one = sde_chain(TIMES, process.drift, process.diffusion).levels
    two = sde_chain(TIMES, process.drift, process.diffusion, levels=pair).levels
    assert one is not None
    assert two is not None
    torch.testing.assert_close(one.alpha, two.alpha, rtol=1e-3, atol=0)
    torch.testing.assert_close(one.sigma, two.sigma, rtol=1e-3, atol=0)


def irregular(last: Any) -> Any:
    process = PROCESSES["VPSDE"]
    times = torch.cat([torch.linspace(1, 0.3, 9, dtype=f64), torch.tensor([0.28, 0.2, 0.1, 0.05, 0.02])])
    return from_sde(
        mixture_score(process), times, process.drift, process.diffusion, (2,), last=last, start_mean=0.5,
        levels=process.levels, dtype=f64,
    )  # fmt: skip


@pytest.mark.law
@pytest.mark.parametrize("last", ["noisy", "denoised"])
def test_speculation_on_any_grid_is_exact(last: Any) -> None:
    result = fs.check(irregular(last), window=6, samples=2000, slots=2000)
    assert result.passed, str(result)


@pytest.mark.law
def test_a_chain_with_noise_of_another_scale_is_caught() -> None:
    """The broken twin: a tenth more noise."""
    target = irregular("noisy")
    twin = replace(target, chain=replace(target.chain, std=1.1 * target.std))
    one, two = fs.sample(target, 6000, window=6, seed=1).samples, fs.sequential(twin, 6000, seed=2).samples
    assert not samples_law(two, [one]).passed
    assert samples_law(fs.sequential(target, 6000, seed=2).samples, [one]).passed


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"times": [0.1, 0.5]}, "flip them"),
        ({"times": [0.5]}, "at least two"),
        ({"eta": 0.0}, "nothing to speculate on"),
        ({"last": "tweedie"}, "'noisy', 'noiseless' or 'denoised'"),
        ({"last": "denoised"}, "last='denoised' needs the noise levels"),
        ({"predicts": "eps"}, "predicts='eps' needs the noise levels"),
        ({"diffusion": lambda t: 0.0}, "diffusion is 0 at all times but perhaps the last"),
        ({"drift": lambda t: torch.ones(len(t), 2)}, "drift must be a function of times"),
        ({"drift": lambda t: -1 / t}, "cannot be integrated from time 0: give levels"),
        ({"start_std": torch.ones(7)}, "broadcast to one state"),
        ({"start_std": 2.0, "start": torch.zeros(3, 2)}, "leave out start_mean and start_std"),
    ],
)
def test_a_bad_grid_is_refused_with_the_remedy(change: dict[str, Any], sentence: str) -> None:
    process: Any = PROCESSES["VPSDE"]
    given: dict[str, Any] = {
        "times": TIMES,
        "drift": process.drift,
        "diffusion": process.diffusion,
        "shape": (2,),
    }
    with pytest.raises(ValueError, match=sentence):
        from_sde(score, **given | change)


def test_one_step_and_the_denoising_one_make_a_chain() -> None:
    how: dict[str, Any] = {"levels": lambda t: (1.0, t), "last": "denoised"}
    target = from_sde(score, [10.0, 5.0], lambda t: 0.0, lambda t: (2 * t).sqrt(), (2,), **how)
    assert fs.sample(target, 3, window=2).samples.isfinite().all()
    with pytest.raises(ValueError, match="levels must be above 0 at all times"):
        from_sde(score, [10.0, 5.0, 0.0], lambda t: 0.0, lambda t: (2 * t).sqrt(), (2,), **how)
