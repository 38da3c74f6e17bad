"""Samplers on noise levels against k-diffusion's own functions, over whole chains with the same noise."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import foresample as fs
from foresample import chains
from foresample.chains import Chain, karras_sigmas
from foresample.contracts import no_history, remember
from foresample.targets import ChainTarget, from_chain
from tests.support.packages import load
from tests.support.small_chains import mixture

f64 = torch.float64
LEVELS = karras_sigmas(9, 0.05, 10).clamp(max=10)
SAMPLERS: dict[str, tuple[Callable[..., Chain], list[dict[str, Any]]]] = {
    "euler_ancestral": (chains.euler_ancestral_chain, [{}, {"eta": 0.6, "s_noise": 1.1}, {"eta": 3.0}]),
    "dpm_2_ancestral": (chains.dpm_2_ancestral_chain, [{}, {"eta": 0.6, "s_noise": 1.1}, {"eta": 1.2}]),
    "dpmpp_2s_ancestral": (chains.dpmpp_2s_ancestral_chain, [{}, {"eta": 0.6, "s_noise": 1.1}]),
    "dpmpp_sde": (chains.dpmpp_sde_chain, [{}, {"eta": 0.6, "s_noise": 1.1}, {"r": 0.3}, {"eta": 1.5}]),
    "dpmpp_2m_sde": (chains.dpmpp_2m_sde_chain, [{}, {"eta": 0.6, "s_noise": 1.1}, {"solver_type": "heun"}]),
    "dpmpp_3m_sde": (chains.dpmpp_3m_sde_chain, [{}, {"eta": 0.6, "s_noise": 1.1}]),
}
CASES = [(name, options) for name, (_, several) in SAMPLERS.items() for options in several]


def k_diffusion() -> Any:
    return load(
        "k_diffusion.sampling",
        without=("torchvision", "torchvision.transforms", "scipy", "scipy.integrate", "PIL", "safetensors"),
    )


def denoise(x: Tensor, sigma: Tensor, row: Tensor | None = None) -> Tensor:
    return mixture().denoise(x, torch.ones_like(sigma), sigma)


def walk(target: ChainTarget, x: Tensor, noise: Tensor, extra: Tensor) -> Tensor:
    """The chain with this noise, [N, R, *shape], from states x."""
    row, previous = torch.arange(len(x)), no_history(target, x)
    for k, std in enumerate(target.std):
        step = torch.full_like(row, k)
        prediction = target.predict(x, step, row, extra[k])
        mean = target.mean(x, prediction, step, previous if target.multistep else None, extra[k])
        x, previous = mean + std * noise[k], remember(target, prediction, previous)
    return x


@pytest.mark.filterwarnings("ignore:sigmas end at")
@pytest.mark.parametrize("final", [True, False], ids=["to 0", "to sigma_min"])
@pytest.mark.parametrize(("name", "options"), CASES, ids=str)
def test_the_whole_chain_with_the_same_noise(name: str, options: dict[str, Any], final: bool) -> None:
    levels = LEVELS if final else LEVELS[:-1]
    target = from_chain(denoise, SAMPLERS[name][0](levels, **options), (2,), dtype=f64)
    steps = len(levels) - 1
    assert len(target.std) == steps
    generator = torch.Generator().manual_seed(0)
    x = 10 * torch.randn(5, 2, dtype=f64, generator=generator)
    noise, extra = torch.randn(2, steps, 5, 2, dtype=f64, generator=generator)

    def drawn(sigma: Tensor, sigma_next: Tensor) -> Tensor:
        """Increments of a Brownian path in σ: ξ to the inner level, which is part of the one to the next level."""
        k = int((levels - sigma).abs().argmin())
        if name != "dpmpp_sde":
            return noise[k]
        r = options.get("r", 0.5)
        inner = levels[k] ** (1 - r) * levels[k + 1] ** r
        if torch.isclose(sigma_next, inner):
            return extra[k]
        rho = ((levels[k] - inner) / (levels[k] - levels[k + 1])).sqrt()
        return rho * extra[k] + (1 - rho**2).sqrt() * noise[k]

    sampler = getattr(k_diffusion(), f"sample_{name}")
    theirs = sampler(denoise, x, levels, disable=True, noise_sampler=drawn, **options)
    torch.testing.assert_close(walk(target, x, noise, extra), theirs, rtol=1e-9, atol=1e-10)


def test_the_two_noises_of_a_step_are_increments_of_one_path_in_k_diffusion_too() -> None:
    """ρ² = (σ − σ_s)/(σ − σ'), which makes the outer noise given the inner one."""
    x = torch.zeros(40_000)
    path = k_diffusion().BrownianTreeNoiseSampler(x, 0.1, 10.0, seed=3)
    inner, outer = path(torch.tensor(8.0), torch.tensor(5.0)), path(torch.tensor(8.0), torch.tensor(2.0))
    rho = math.sqrt((8 - 5) / (8 - 2))
    assert float((inner * outer).mean()) == pytest.approx(rho, abs=5 / math.sqrt(40_000))
    left = (outer - rho * inner) / math.sqrt(1 - rho**2)
    assert float((left * inner).mean()) == pytest.approx(0, abs=5 / math.sqrt(40_000))
    assert float(left.std()) == pytest.approx(1, abs=5 / math.sqrt(2 * 40_000))


@pytest.mark.parametrize("steps", ["euler", "heun", "midpoint"])
@pytest.mark.parametrize(
    "churn", [{"s_churn": 4.0}, {"s_churn": 80.0, "s_tmin": 0.1, "s_tmax": 3.0, "s_noise": 1.007}]
)
def test_churned_samplers_with_the_same_noise(steps: Any, churn: dict[str, float]) -> None:
    ours = {"s_churn": "churn", "s_tmin": "s_min", "s_tmax": "s_max", "s_noise": "s_noise"}
    chain = chains.edm_chain(LEVELS, **{ours[k]: v for k, v in churn.items()}, steps=steps)
    x = 10 * torch.randn(5, 2, dtype=f64, generator=torch.Generator().manual_seed(1))
    target = from_chain(denoise, chain, (2,), start=x, dtype=f64)
    name = {"euler": "sample_euler", "heun": "sample_heun", "midpoint": "sample_dpm_2"}[steps]
    torch.manual_seed(2)
    theirs = getattr(k_diffusion(), name)(denoise, x, LEVELS, disable=True, **churn)
    torch.manual_seed(2)
    noise = torch.stack([torch.randn_like(x) for _ in LEVELS])
    churned = target.start(noise[0], torch.arange(len(noise[0])))
    torch.testing.assert_close(walk(target, churned, noise[1:], noise), theirs, rtol=1e-9, atol=1e-10)
    assert target.calls_per_step == (1 if steps == "euler" else 2)


@pytest.mark.law
@pytest.mark.parametrize("name", SAMPLERS)
def test_speculation_is_exact(name: str) -> None:
    """At seed 0 the 3000 samples of 3M SDE are odd by chance (p of 2e-6 among 90); 100 000 of that seed, and of two
    others, are not (4e-3, 3e-3, 3e-2), where an error of that size could not be missed."""
    target = from_chain(denoise, SAMPLERS[name][0](LEVELS), (2,), dtype=f64)
    result = fs.check(target, window=5, samples=3000, slots=3000, seed=1)
    assert result.passed, str(result)
    assert fs.sample(target, 200, window=6).speedup > 1.2


@pytest.mark.law
@pytest.mark.parametrize("steps", ["heun", "midpoint"])
def test_speculation_with_two_networks_a_step_is_exact(steps: Any) -> None:
    target = from_chain(denoise, chains.edm_chain(LEVELS, churn=4, steps=steps), (2,), dtype=f64)
    result = fs.check(target, window=5, samples=3000, slots=3000)
    assert result.passed, str(result)


def test_calls_of_two_networks_are_reported_as_such() -> None:
    seen: list[int] = []

    def counting(x: Tensor, sigma: Tensor, row: Tensor) -> Tensor:
        seen.append(len(x))
        return denoise(x, sigma)

    target = from_chain(counting, chains.dpmpp_2s_ancestral_chain(LEVELS), (2,), dtype=f64)
    run = fs.sample(target, 1, window=4)
    assert len(seen) == 2 * (int(run.calls) + run.report.look_calls)
    assert run.report.calls_per_step == 2
    assert f"each 2 network calls ({2 * int(run.calls)}.00)" in str(run.report)
    seen.clear()
    plain = fs.sequential(target, 1)
    assert len(seen) == 2 * int(plain.calls)
    assert plain.report.calls_per_step == 2


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (partial(chains.euler_ancestral_chain, [1.0, 2.0]), "fall strictly"),
        (partial(chains.euler_ancestral_chain, [1.0]), "at least two levels"),
        (partial(chains.euler_ancestral_chain, [2.0, 1.0, -1.0]), "all positive but perhaps a final 0"),
        (partial(chains.euler_ancestral_chain, [2.0, 0.0]), "no step of these levels adds noise"),
        (
            partial(chains.euler_ancestral_chain, LEVELS, eta=0.0),
            "eta must be positive.*nothing to speculate on",
        ),
        (partial(chains.dpmpp_2m_sde_chain, LEVELS, eta=0.0), "eta must be positive"),
        (lambda: SAMPLERS["dpmpp_2m_sde"][0](LEVELS, solver_type="euler"), "'midpoint' or 'heun'"),
        (partial(chains.dpmpp_sde_chain, LEVELS, r=1.0), r"within \(0, 1\)"),
        (
            lambda: chains.edm_chain(LEVELS, churn=1.0, steps="rk4"),  # type: ignore[arg-type]
            "'euler', 'heun' or 'midpoint'",
        ),
    ],
)
def test_bad_input_is_refused_with_the_remedy(make: Callable[[], Chain], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        make()


@pytest.mark.parametrize("make", [make for make, _ in SAMPLERS.values()])
def test_levels_that_do_not_end_at_zero_leave_noise_and_warn(make: Callable[..., Chain]) -> None:
    with pytest.warns(
        UserWarning, match=r"sigmas end at 0\.05, so samples keep noise of that level: append a 0"
    ):
        make(LEVELS[:-1])


def test_our_levels_are_k_diffusion_s() -> None:
    theirs = k_diffusion().get_sigmas_karras(11, 0.02, 30.0, rho=5.0)
    torch.testing.assert_close(karras_sigmas(11, 0.02, 30.0, 5.0).float(), theirs)


def test_a_bound_on_a_level_counts_as_that_level() -> None:
    """Also in single precision, in which k-diffusion compares them."""
    levels = torch.tensor([10.0, 3.0, 0.7, 0.1, 0.0])
    on, below = (chains.edm_chain(levels, churn=2.0, s_min=bound) for bound in (0.7, 0.69))
    assert torch.equal(on.std, below.std)
