"""Drop-ins for k-diffusion: its arguments and more, and its distribution."""

from __future__ import annotations

import inspect
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import foresample as fs
from foresample import samplers
from foresample.checks.kolmogorov import ks_two_sample
from tests.chains.test_sigmas import LEVELS, denoise, k_diffusion

f64 = torch.float64
CHURN = {"s_churn": 4.0}
CALLS: dict[str, dict[str, float]] = {
    name: CHURN if name in ("sample_euler", "sample_heun", "sample_dpm_2") else {} for name in samplers.__all__
}


def start(count: int, seed: int) -> Tensor:
    return 10 * torch.randn(count, 2, dtype=f64, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("name", CALLS)
def test_arguments_have_the_names_and_order_of_k_diffusion(name: str) -> None:
    theirs = inspect.signature(getattr(k_diffusion(), name)).parameters
    ours = [
        p for p in inspect.signature(getattr(samplers, name)).parameters.values() if p.kind != p.VAR_KEYWORD
    ]
    assert [(p.name, p.default) for p in ours] == [(p.name, p.default) for p in theirs.values()]


@pytest.mark.law
@pytest.mark.filterwarnings("ignore:Should have t:UserWarning")  # of a level and its logarithm's exponential
@pytest.mark.parametrize("name", CALLS)
def test_samples_have_the_distribution_of_theirs(name: str) -> None:
    torch.manual_seed(0)
    theirs = getattr(k_diffusion(), name)(denoise, start(5000, 1), LEVELS, disable=True, **CALLS[name])
    ours = getattr(samplers, name)(denoise, start(5000, 2), LEVELS, **CALLS[name], window=6, seed=3)
    views = [(v[:, 0], v[:, 1], v.sum(1)) for v in (ours, theirs)]
    assert min(ks_two_sample(a.numpy(), b.numpy()) for a, b in zip(*views, strict=True)) > 1e-3 / 27


def test_each_sample_keeps_its_condition_and_its_start() -> None:
    """A denoiser that pulls towards a place of its own for each sample, given as an extra argument."""
    places = torch.tensor([[5.0, 5.0], [-5.0, 5.0], [0.0, -7.0]])

    def model(x: Tensor, sigma: Tensor, place: Tensor, more: dict[str, Any]) -> Tensor:
        assert len(place) == len(x) == len(more["same"][0])
        assert more["scale"] == 2.0
        return torch.where(sigma.unsqueeze(1) < 5, place, x / 2)

    reports: list[fs.Report] = []
    extra = {"place": places, "more": {"same": [places], "scale": 2.0}}
    x = samplers.sample_euler_ancestral(
        model, start(3, 0).float(), LEVELS, extra, seed=1, report=reports.append
    )
    torch.testing.assert_close(x, places)
    assert x.dtype == torch.float32
    assert reports[0].count == 3


@pytest.mark.parametrize("name", CALLS)
def test_no_states_give_no_samples(name: str) -> None:
    assert getattr(samplers, name)(denoise, start(0, 0), LEVELS, **CALLS[name]).shape == (0, 2)


def test_the_seed_is_an_argument_or_drawn_from_torch_s_generator() -> None:
    def draw(**seed: Any) -> Tensor:
        return samplers.sample_euler_ancestral(denoise, start(2, 0), LEVELS, window=4, **seed)

    assert torch.equal(draw(seed=4), draw(seed=4))
    torch.manual_seed(7)
    first = draw()
    assert not torch.equal(first, draw())
    torch.manual_seed(7)
    assert torch.equal(first, draw())


@pytest.mark.parametrize(
    ("name", "arguments", "sentence"),
    [
        ("sample_euler", {}, "pass s_churn, or use sample_euler_ancestral"),
        ("sample_heun", {**CHURN, "sigmas": LEVELS[:-1]}, "must end with 0"),
        ("sample_euler_ancestral", {"callback": print}, "callback cannot be had"),
        ("sample_dpmpp_sde", {"noise_sampler": print}, "noise_sampler cannot be had"),
        (
            "sample_euler_ancestral",
            {"model": torch.nn.Dropout(0.5)},
            r"has Dropout: call its eval\(\)",
        ),
    ],
)
def test_samplers_that_cannot_be_exact_are_refused(name: str, arguments: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        getattr(samplers, name)(**{"model": denoise, "x": start(2, 0), "sigmas": LEVELS} | arguments)


def test_settings_are_the_same_as_those_of_sample() -> None:
    """Each is taken and passed on; a misspelt one is refused by its name."""
    reports: list[fs.Report] = []
    more: dict[str, Any] = {
        "window": 3,
        "slots": 2,
        "block": 1,
        "recycle": False,
        "drafter": fs.Frozen("nearest"),
    }
    samplers.sample_heun(denoise, start(4, 0), LEVELS, s_churn=4.0, seed=1, report=reports.append, **more)
    assert (reports[0].window, reports[0].slots) == (3, 2)
    assert "block 1, fresh noise" in reports[0].method
    assert "Frozen" in reports[0].method
    wrong: dict[str, Any] = {"windw": 3}
    with pytest.raises(TypeError, match="windw is not a setting here: did you mean window"):
        samplers.sample_euler_ancestral(denoise, start(2, 0), LEVELS, **wrong)


def test_each_sample_may_have_its_own_seed() -> None:
    levels, x = fs.chains.karras_sigmas(6, 0.1, 5.0), 5 * torch.ones(2, 3)
    draw = partial(samplers.sample_euler_ancestral, lambda x, sigma: 0.5 * x, x, levels)
    both = draw(seeds=[4, 7])
    assert torch.equal(both, torch.stack([draw(seeds=[4, 9])[0], draw(seeds=[9, 7])[1]]))
    with pytest.raises(ValueError, match="3 seeds for count=2"):
        draw(seeds=[1, 2, 3])
