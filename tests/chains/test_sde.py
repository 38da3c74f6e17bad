"""Reverse SDEs against the steps of a score-SDE package (21cmPSDenoiser's, which are score_sde's), same noise."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import foresample as fs
from foresample.chains import VE, VP, SubVP, reverse_sde_chain
from foresample.targets import reverse_sde
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
def test_levels_are_the_process_s_own(name: str) -> None:
    process, t = PROCESSES[name], torch.tensor([0.01, 0.3, 1.0], dtype=f64)
    mean, std = reference(name).marginal_prob(torch.ones(3, 1, 1, 1, dtype=f64), t)
    levels = process.levels(t)
    torch.testing.assert_close(levels.alpha, mean.flatten())
    torch.testing.assert_close(levels.sigma, std)


@pytest.mark.parametrize("reuse", ["x0", "score", "eps"])
def test_what_is_reused_changes_nothing_else(reuse: Any) -> None:
    chain, plain = reverse_sde_chain(VP(), 9, reuse=reuse), reverse_sde_chain(VP(), 9, reuse="score")
    x, step = torch.randn(9, 2, dtype=f64), torch.arange(9)
    output = score(x, torch.ones(9, dtype=f64))
    means = [c.mean(x, c.predict(x, output, step), step) for c in (chain, plain)]
    torch.testing.assert_close(means[0], means[1])
    assert chain.std[-1] == 0


@pytest.mark.law
@pytest.mark.parametrize("predictor", PREDICTORS)
@pytest.mark.parametrize("name", PROCESSES)
def test_speculation_is_exact(name: str, predictor: Any) -> None:
    process, data = PROCESSES[name], mixture()

    def network(x: Tensor, t: Tensor, row: Tensor) -> Tensor:
        levels = process.levels(t)
        x0 = data.denoise(x, levels.alpha, levels.sigma)
        return (levels.alpha.unsqueeze(1) * x0 - x) / levels.sigma.unsqueeze(1) ** 2

    target = reverse_sde(network, process, 30, (2,), predictor=predictor, dtype=f64)
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
