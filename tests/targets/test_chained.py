"""A chain and a network: the arguments of the network, and a diffusers scheduler around your own network."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from diffusers import DDPMScheduler
from diffusers.models.unets.unet_2d import UNet2DOutput
from torch import Tensor

import foresample as fs
from foresample.targets import ChainTarget, flow, from_scheduler, vp
from tests.chains.common import LINEAR, f64, states
from tests.support.small_chains import CHAINS

GRIDS: dict[Callable[..., ChainTarget], tuple[Tensor, dict[str, Any]]] = {
    vp: (LINEAR[[900, 500, 100, 10]], {}),
    flow: (torch.tensor([0.9, 0.5, 0.2, 0.01], dtype=f64), {"churn": 0.4}),
}


@pytest.mark.parametrize("process", list(GRIDS), ids=["vp", "flow"])
def test_the_network_gets_the_time_of_each_row(process: Callable[..., ChainTarget]) -> None:
    grid, options = GRIDS[process]
    heard = []

    def listening(x: Tensor, time: Tensor, row: Tensor) -> Tensor:
        heard.append((time.tolist(), row.tolist()))
        return x

    step, row = torch.tensor([2, 0, 3]), torch.tensor([7, 8, 9])
    process(listening, grid, (3,), dtype=f64, **options).predict(states(3), step, row)
    times = torch.tensor([999, 500, 20, 0])
    process(listening, grid, (3,), time=times, dtype=f64, **options).predict(states(3), step, row)
    assert heard == [(grid[step].tolist(), [7, 8, 9]), ([20, 999, 0], [7, 8, 9])]


def test_the_chain_has_the_dtype_it_was_given_whatever_the_network_returns() -> None:
    target = vp(lambda x, time, row: x.bfloat16(), GRIDS[vp][0], (3,), dtype=torch.float32)
    x, step = states(4).float(), torch.arange(4)
    prediction = target.predict(x, step, step)
    assert {target.std.dtype, prediction.dtype, target.mean(x, prediction, step).dtype} == {torch.float32}


def test_samples_start_at_the_given_states() -> None:
    target = vp(lambda x, time, row: 0.1 * x, GRIDS[vp][0], (3,), dtype=f64)
    start = states(4, seed=5)
    noise = states(4)
    assert torch.equal(target.start(noise, torch.arange(4)), noise)
    there = replace(target, start_states=start)
    assert torch.equal(there.start(noise[:2], torch.tensor([3, 0])), start[[3, 0]])
    assert not torch.equal(fs.sample(there, 4, window=2).samples, fs.sample(target, 4, window=2).samples)


@pytest.mark.parametrize("slots", [1, 3, 5])
def test_every_sample_keeps_its_own_start_however_few_slots_there_are(slots: int) -> None:
    chain = fs.chains.vp_chain(GRIDS[vp][0])
    start = 100.0 * torch.arange(5.0).unsqueeze(1) + torch.zeros(5, 3)
    target = fs.targets.from_chain(lambda x, time, row: 0.1 * x, chain, (3,), start=start)
    everything = fs.sample(target, 5, window=2).samples
    torch.testing.assert_close(fs.sample(target, 5, window=2, slots=slots).samples, everything)
    torch.testing.assert_close(fs.sequential(target, 5, slots=slots).samples, fs.sequential(target, 5).samples)
    assert (everything.mean(1).diff() > 10).all()


def test_more_samples_than_starts_are_refused() -> None:
    chain = fs.chains.vp_chain(GRIDS[vp][0])
    target = fs.targets.from_chain(lambda x, time, row: 0.1 * x, chain, (3,), start=torch.zeros(4, 3))
    with pytest.raises(ValueError, match="sample 4 has no start: start holds 4 states"):
        fs.sample(target, 5, window=2)


# ------------------------------------------------------------------ what a network returns

RETURNS: dict[str, tuple[Callable[[Tensor], Any], type[Exception], str]] = {
    "fewer channels": (lambda x: x[:, :1], ValueError, r"shape \(\d, 3, 8, 8\) .* not \(\d, 1, 8, 8\)$"),
    "fewer rows": (lambda x: x[:1], ValueError, r"shape \(\d, 3, 8, 8\) .* not \(1, 3, 8, 8\)$"),
    "variances": (lambda x: torch.cat([x, x], 1), ValueError, r"not \(\d, 6, 8, 8\); .*return the first half"),
    "diffusers": (lambda x: UNet2DOutput(sample=x), TypeError, "returned UNet2DOutput: return its .sample"),
    "a tuple": (lambda x: (x,), TypeError, r"returned tuple: return its first element, \[0\]"),
    "nothing": (lambda x: None, TypeError, "returned NoneType: return a tensor"),
    "integers": (lambda x: x.long(), TypeError, "floating-point numbers, not torch.int64"),
}


@pytest.mark.parametrize("returns", RETURNS)
def test_outputs_of_a_network_are_not_broadcast(returns: str) -> None:
    make, kind, sentence = RETURNS[returns]
    scheduler = DDPMScheduler()
    scheduler.set_timesteps(5)
    targets = [
        vp(lambda x, time, row: make(x), GRIDS[vp][0], (3, 8, 8)),
        vp(lambda x, time, row: make(x), GRIDS[vp][0], (3, 8, 8), predicts="x0"),
        from_scheduler(scheduler, lambda x, time, row: make(x), (3, 8, 8)),
    ]
    for target in targets:
        for draw in (
            lambda t: fs.sample(t, 2, window=2),
            lambda t: fs.sequential(t, 2),
            lambda t: fs.check(t, window=2, samples=10),
        ):
            with pytest.raises(kind, match=sentence):
                draw(target)


# ------------------------------------------------------------------ from_scheduler


def network(x: Tensor, time: Tensor, row: Tensor) -> Tensor:
    """Bounded, of the size of its input, and different at every time and row."""
    shift = (time / 1000 + 0.1 * row).view(-1, *(1,) * (x.ndim - 1)).to(x.dtype)
    return torch.tanh(0.7 * x + shift) - 0.1 * x.roll(1, -1)


DPM = {"algorithm_type": "sde-dpmsolver++"}
SCHEDULERS: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("DDPMScheduler", {"clip_sample": True}, {}),
    ("DDPMScheduler", {"variance_type": "fixed_large", "prediction_type": "v_prediction"}, {}),
    ("DDPMScheduler", {"thresholding": True, "clip_sample": False}, {}),
    ("DDIMScheduler", {"clip_sample": True}, {"eta": 0.6}),
    ("EulerAncestralDiscreteScheduler", {}, {}),
    ("DPMSolverMultistepScheduler", DPM, {}),
    ("FlowMatchEulerDiscreteScheduler", {"stochastic_sampling": True, "shift": 3.0}, {}),
]


def scheduler_of(name: str, steps: int | None, **config: Any) -> Any:
    scheduler = getattr(pytest.importorskip("diffusers"), name)(**config)
    if steps is not None:
        scheduler.set_timesteps(steps)
    return scheduler


@pytest.mark.parametrize(
    ("name", "config", "options"), SCHEDULERS, ids=lambda v: v if isinstance(v, str) else ""
)
def test_the_chain_of_a_scheduler_is_its_own_loop(
    name: str, config: dict[str, Any], options: dict[str, Any]
) -> None:
    """The loop of a pipeline (scale the input, call the network, `scheduler.step`) with the same noise."""
    scheduler = scheduler_of(name, 13, **config)
    target = from_scheduler(scheduler, network, (3, 4, 4), **options)
    noise = torch.randn(14, 2, 3, 4, 4, generator=torch.Generator().manual_seed(3))
    row = torch.arange(2)
    theirs = float(getattr(scheduler, "init_noise_sigma", 1)) * noise[13]
    ours, previous = target.start(noise[13], torch.arange(len(noise[13]))), torch.zeros_like(noise[13])
    for k, timestep in enumerate(scheduler.timesteps):
        seen = (
            scheduler.scale_model_input(theirs, timestep) if hasattr(scheduler, "scale_model_input") else theirs
        )
        output = network(seen, timestep.expand(2), row)
        torch.manual_seed(k)  # not every scheduler takes a generator
        theirs = scheduler.step(output, timestep, theirs, **options).prev_sample
        torch.manual_seed(k)
        drawn = torch.randn(theirs.shape)
        step = torch.full((2,), k)
        prediction = target.predict(ours, step, row)
        ours = target.mean(ours, prediction, step, previous) + target.std[k] * drawn
        previous = prediction
        size = float(theirs.abs().max())
        torch.testing.assert_close(ours, theirs, rtol=2e-4, atol=2e-4 * size)


@pytest.mark.parametrize("reuse", ["x0", "v", "eps"])
def test_the_reused_prediction_changes_the_calls_and_not_the_chain(reuse: Any) -> None:
    scheduler = scheduler_of("DDPMScheduler", 12, clip_sample=True)
    plain, other = (from_scheduler(scheduler, network, (3,), reuse=kind, dtype=f64) for kind in ("x0", reuse))
    run = fs.sequential(plain, 3, seed=1)
    torch.testing.assert_close(fs.sequential(other, 3, seed=1).samples, run.samples, rtol=1e-6, atol=1e-8)


def test_a_half_precision_network_leaves_the_chain_as_it_is() -> None:
    scheduler = scheduler_of("DDPMScheduler", 8)
    target = from_scheduler(scheduler, lambda x, time, row: network(x.bfloat16(), time, row), (3,))
    run = fs.sample(target, 4, window=4)
    assert run.samples.dtype == torch.float32


@pytest.mark.law
def test_speculation_on_a_scheduler_and_a_network_is_exact() -> None:
    target = from_scheduler(scheduler_of("DPMSolverMultistepScheduler", 12, **DPM), network, (2,), dtype=f64)
    result = fs.check(target, window=5, samples=2000, slots=2000)
    assert result.passed, str(result)


def test_a_scheduler_without_timesteps_is_refused() -> None:
    for name in ("DDPMScheduler", "EulerAncestralDiscreteScheduler"):
        with pytest.raises(ValueError, match=r"call scheduler\.set_timesteps\(steps\) first"):
            from_scheduler(scheduler_of(name, None), network, (3,))


def test_schedulers_without_noise_are_refused() -> None:
    with pytest.raises(ValueError, match="eta=0 adds no noise, so there is nothing to speculate on"):
        from_scheduler(scheduler_of("DDIMScheduler", 10), network, (3,), eta=0)
    with pytest.raises(ValueError, match="UniPCMultistepScheduler adds no noise"):
        from_scheduler(scheduler_of("UniPCMultistepScheduler", 10), network, (3,))


@pytest.mark.parametrize(
    ("name", "config"),
    [("DPMSolverMultistepScheduler", DPM), ("DDIMScheduler", {"clip_sample": True})],
    ids=["earlier estimates", "unlimited estimates"],
)
def test_means_of_denoised_estimates_reuse_the_estimate(name: str, config: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="made of denoised estimates: reuse x0, not v"):
        from_scheduler(scheduler_of(name, 10, **config), network, (3,), reuse="v")


def test_a_first_order_solver_reuses_the_prediction_it_is_given() -> None:
    scheduler = scheduler_of("DPMSolverMultistepScheduler", 10, solver_order=1, **DPM)
    one, other = (from_scheduler(scheduler, network, (3,), reuse=kind, dtype=f64) for kind in ("x0", "v"))
    assert not one.multistep
    torch.testing.assert_close(
        fs.sequential(other, 3).samples, fs.sequential(one, 3).samples, rtol=1e-6, atol=1e-8
    )


def test_an_object_that_is_not_a_scheduler_is_refused() -> None:
    with pytest.raises(ValueError, match=r"no timesteps yet: call scheduler\.set_timesteps"):
        from_scheduler(object(), network, (3,))


# ------------------------------------------------------------------ what the network is handed

SIGMAS = torch.tensor([8.0, 3.0, 1.0, 0.2, 0.0], dtype=f64)
MAKERS: dict[str, Callable[..., ChainTarget]] = {
    "vp": lambda network, **how: vp(network, GRIDS[vp][0], (3,), **how),
    "vp, times": lambda network, **how: vp(network, GRIDS[vp][0], (3,), time=torch.rand(4, dtype=f64), **how),
    "flow": lambda network, **how: flow(network, GRIDS[flow][0], (3,), churn=0.4, **how),
    "from_edm": lambda network, **how: fs.targets.from_edm(network, SIGMAS, (3,), churn=4, **how),
    "from_edm, heun": lambda network, **how: fs.targets.from_edm(
        network, SIGMAS, (3,), churn=4, steps="heun", **how
    ),
    "reverse_sde": lambda network, **how: fs.targets.reverse_sde(
        network, fs.chains.VE(0.1, 8.0), 5, (3,), **how
    ),
    "from_chain": lambda network, **how: fs.targets.from_chain(
        network, fs.chains.dpmpp_sde_chain(SIGMAS), (3,), **how
    ),
    "langevin": lambda network, **how: fs.targets.langevin(network, (3,), step_size=0.1, steps=5, **how),
    "DDPM": lambda network, **how: from_scheduler(scheduler_of("DDPMScheduler", 5), network, (3,), **how),
    "Euler": lambda network, **how: from_scheduler(
        scheduler_of("EulerAncestralDiscreteScheduler", 5), network, (3,), **how
    ),
    "flow matching": lambda network, **how: from_scheduler(
        scheduler_of("FlowMatchEulerDiscreteScheduler", 5, stochastic_sampling=True), network, (3,), **how
    ),
}
WHOLE = ("langevin", "DDPM")
"""Targets whose network gets whole numbers: the step, or a timestep."""


@pytest.mark.parametrize("dtype", [torch.float32, f64])
@pytest.mark.parametrize("maker", MAKERS)
def test_the_network_gets_states_and_times_in_the_chain_s_dtype(maker: str, dtype: torch.dtype) -> None:
    """A network in float32 breaks on float64 times, or answers in float64; whole numbers stay whole."""
    handed: list[tuple[torch.dtype, torch.dtype, torch.dtype]] = []

    def network(x: Tensor, time: Tensor, row: Tensor) -> Tensor:
        handed.append((x.dtype, time.dtype, row.dtype))
        return 0.1 * x

    target = MAKERS[maker](network, dtype=dtype)
    for draw in (fs.sequential(target, 2), fs.sample(target, 2, window=3)):
        assert draw.samples.dtype == dtype
    whole = torch.int64 if maker in WHOLE else dtype
    assert set(handed) == {(dtype, whole, torch.int64)}


@pytest.mark.parametrize("process", list(GRIDS), ids=["vp", "flow"])
@pytest.mark.parametrize("kind", [torch.int64, torch.int32])
def test_whole_times_stay_whole(process: Callable[..., ChainTarget], kind: torch.dtype) -> None:
    grid, options = GRIDS[process]
    target = process(lambda x, time, row: x, grid, (3,), time=torch.tensor([9, 5, 2, 0], dtype=kind), **options)
    assert target.chain.time is not None
    assert target.chain.time.dtype == kind


@pytest.mark.parametrize("chain", CHAINS)
def test_a_network_that_writes_into_its_input_changes_no_sample(chain: str) -> None:
    """The chain makes its prediction of the state as it was, and of the network's output."""
    target = CHAINS[chain]()

    def untidy(x: Tensor, time: Tensor, row: Tensor) -> Tensor:
        answer = target.network(x, time, row)
        x.mul_(0.5)
        return answer

    for draw in (fs.sequential, lambda t, n: fs.sample(t, n, window=4)):
        one, two = (draw(t, 5).samples for t in (target, replace(target, network=untidy)))
        assert torch.equal(one, two)


@pytest.mark.parametrize("start", [torch.zeros(2), torch.zeros(3, 1, 2), torch.zeros(3, 3)], ids=str)
def test_starts_of_another_shape_are_refused(start: Tensor) -> None:
    one = torch.ones(4)
    with pytest.raises(ValueError, match=r"start must hold one state of shape \(2,\) for each sample"):
        fs.targets.from_chain(lambda x, time, row: x, fs.chains.Chain(one, one, one), (2,), start=start)
