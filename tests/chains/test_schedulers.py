"""Each scheduler's chain against its own `step`, with the same noise, over the whole chain."""

from __future__ import annotations

import functools
from typing import Any
from unittest import mock

import pytest
import torch

import foresample as fs
from foresample.chains import scheduler_chain
from foresample.contracts import affine_chain, no_history, remember, transition_mean
from foresample.integrations.diffusers.watch import drawn_noise, following, path_noise
from foresample.targets import ChainTarget, from_scheduler

diffusers = pytest.importorskip("diffusers")

SPACINGS = ["leading", "trailing", "linspace"]
KINDS = ["epsilon", "sample", "v_prediction"]
LIMITS = [{"clip_sample": False}, {"clip_sample": True}, {"thresholding": True, "clip_sample": False}]
CASES: list[tuple[str, dict[str, Any], dict[str, Any]]] = []
for spacing in SPACINGS:
    for kind in KINDS:
        base = {"timestep_spacing": spacing, "prediction_type": kind}
        for limit in LIMITS:
            CASES.append(("DDPMScheduler", base | limit, {}))
            CASES.append(("DDIMScheduler", base | limit, {"eta": 0.7}))
        for order in (1, 2, 3):
            more = {"algorithm_type": "sde-dpmsolver++", "solver_order": order}
            CASES.append(("DPMSolverMultistepScheduler", base | more, {}))
        if kind != "sample":
            CASES.append(("EulerAncestralDiscreteScheduler", base, {}))
for kind in KINDS:
    for limit in LIMITS:
        CASES.append(("LCMScheduler", {"prediction_type": kind} | limit, {}))
    CASES += [
        ("DDPMParallelScheduler", {"prediction_type": kind}, {}),
        ("DDIMParallelScheduler", {"prediction_type": kind}, {"eta": 0.7}),
        ("TCDScheduler", {"prediction_type": kind, "beta_schedule": "scaled_linear"}, {"eta": 0.3}),
        ("TCDScheduler", {"prediction_type": kind}, {"eta": 1.0}),
        ("CogVideoXDPMScheduler", {"prediction_type": kind}, {}),
        (
            "DPMSolverSinglestepScheduler",
            {"prediction_type": kind, "algorithm_type": "sde-dpmsolver++", "solver_order": 1},
            {},
        ),
    ]
for kind in ("epsilon", "v_prediction"):
    for order in (1, 2):
        for solver in ("midpoint", "heun"):
            more = {"prediction_type": kind, "solver_order": order, "solver_type": solver}
            CASES.append(("EDMDPMSolverMultistepScheduler", {"algorithm_type": "sde-dpmsolver++"} | more, {}))
for variance in ("fixed_small_log", "fixed_large"):
    CASES.append(("DDPMScheduler", {"variance_type": variance, "clip_sample": False}, {}))
CASES += [
    ("DDIMScheduler", {"set_alpha_to_one": False, "clip_sample": False}, {"eta": 1.0}),
    ("DDIMScheduler", {"clip_sample": True}, {"eta": 1.0, "use_clipped_model_output": True}),
    ("EulerAncestralDiscreteScheduler", {"beta_schedule": "scaled_linear"}, {}),
    ("DPMSolverMultistepScheduler", {"algorithm_type": "sde-dpmsolver++", "solver_type": "heun"}, {}),
    ("DPMSolverMultistepScheduler", {"algorithm_type": "sde-dpmsolver++", "use_karras_sigmas": True}, {}),
    ("DPMSolverMultistepScheduler", {"algorithm_type": "sde-dpmsolver++", "thresholding": True}, {}),
    ("DPMSolverMultistepScheduler", {"algorithm_type": "sde-dpmsolver++", "euler_at_final": True}, {}),
    (
        "DPMSolverMultistepScheduler",
        {"algorithm_type": "sde-dpmsolver++", "final_sigmas_type": "sigma_min"},
        {},
    ),
    (
        "DPMSolverMultistepScheduler",
        {
            "algorithm_type": "sde-dpmsolver++",
            "use_flow_sigmas": True,
            "prediction_type": "flow_prediction",
            "flow_shift": 3.0,
        },
        {},
    ),
    (
        "DPMSolverMultistepScheduler",
        {"algorithm_type": "sde-dpmsolver++", "solver_order": 3, "use_karras_sigmas": True},
        {},
    ),
    (
        "DPMSolverSinglestepScheduler",
        {
            "algorithm_type": "sde-dpmsolver++",
            "solver_order": 1,
            "use_flow_sigmas": True,
            "prediction_type": "flow_prediction",
        },
        {},
    ),
    (
        "EDMDPMSolverMultistepScheduler",
        {"algorithm_type": "sde-dpmsolver++", "final_sigmas_type": "sigma_min"},
        {},
    ),
    ("CosineDPMSolverMultistepScheduler", {}, {}),
    ("CosineDPMSolverMultistepScheduler", {"solver_type": "heun", "sigma_data": 0.5}, {}),
    ("CosineDPMSolverMultistepScheduler", {"prediction_type": "epsilon", "sigma_schedule": "karras"}, {}),
    ("CosineDPMSolverMultistepScheduler", {"solver_order": 1}, {}),
    ("UnCLIPScheduler", {"variance_type": "fixed_small_log"}, {}),
    ("UnCLIPScheduler", {"prediction_type": "sample", "clip_sample_range": 5.0}, {}),
    ("CogVideoXDPMScheduler", {"prediction_type": "v_prediction", "rescale_betas_zero_snr": True}, {}),
    ("FlowMatchLCMScheduler", {"shift": 3.0}, {}),
    ("FlowMatchEulerDiscreteScheduler", {"stochastic_sampling": True}, {}),
    ("FlowMatchEulerDiscreteScheduler", {"stochastic_sampling": True, "shift": 3.0}, {}),
]


def output_of(x: torch.Tensor) -> torch.Tensor:
    """Some network: smooth, bounded, of the size of its input."""
    return torch.tanh(0.7 * x + 0.2) - 0.1 * x.roll(1, -1)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Should have")  # of torchsde: the first σ is a rounding above the path's end
@pytest.mark.parametrize("steps", [7, 20])
@pytest.mark.parametrize(("name", "config", "arguments"), CASES, ids=lambda v: v if isinstance(v, str) else "")
def test_replaying_step_with_the_same_noise(name: str, config: dict, arguments: dict, steps: int) -> None:
    scheduler = getattr(diffusers, name)(**config)
    scheduler.set_timesteps(steps)
    chain = scheduler_chain(
        scheduler, eta=arguments.get("eta", 0.0), use_clipped=arguments.get("use_clipped_model_output", False)
    ).to("cpu", torch.float64)
    scale = float(getattr(scheduler, "init_noise_sigma", 1))
    x = scale * torch.randn(2, 3, 4, 4, generator=torch.Generator().manual_seed(3))
    target = ChainTarget(chain, x.shape[1:], lambda x, time, row: x)
    previous, old = no_history(target, x.double()), None
    for k, timestep in enumerate(scheduler.timesteps):
        step = torch.full((2,), k)
        seen = scheduler.scale_model_input(x, timestep) if hasattr(scheduler, "scale_model_input") else x
        ours_seen = x if chain.scale is None else chain.scale[k] * x
        torch.testing.assert_close(ours_seen.float(), seen, rtol=1e-5, atol=1e-6)
        output = output_of(seen)
        torch.manual_seed(k)  # not every version of every scheduler takes a generator
        with drawn_noise() as draws:
            told = following(scheduler, k, old)
            result = scheduler.step(model_output=output, timestep=timestep, sample=x, **told, **arguments)
        theirs, old = (result if isinstance(result, tuple) else (result.prev_sample, None))[:2]
        noise = [torch.zeros_like(x), *draws, *path_noise(scheduler)][-1]
        prediction = chain.predict(x.double(), output.double(), step)
        mean = transition_mean(target, x.double(), prediction, step, previous)
        ours = mean + chain.std[k] * noise.double()
        scale = float(theirs.abs().max())
        torch.testing.assert_close(ours.float(), theirs, rtol=1e-4, atol=2e-5 * scale)
        x, previous = theirs, remember(target, prediction, previous)


def test_a_chain_that_starts_late_has_no_history_there() -> None:
    """Image-to-image starts late; the first step taken is of first order."""
    scheduler = diffusers.DPMSolverMultistepScheduler(algorithm_type="sde-dpmsolver++")
    scheduler.set_timesteps(20)
    chain = scheduler_chain(scheduler, start=8)
    assert len(chain.std) == 12
    assert chain.previous_weight is not None
    assert chain.previous_weight[0] == 0
    assert (chain.previous_weight[1:-1] != 0).all()


@pytest.mark.parametrize("steps", [7, 20])
@pytest.mark.parametrize("clip", [True, False])
def test_a_learned_variance_is_drawn_as_two_noises_one_of_them_extra(clip: bool, steps: int) -> None:
    """The scheduler's own step with noise n, where √v·n = √(v − base)·ξ + √base·z."""
    scheduler = diffusers.DDPMScheduler(variance_type="learned_range", clip_sample=clip)
    scheduler.set_timesteps(steps)
    chain = scheduler_chain(scheduler).to("cpu", torch.float64)
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(2, 3, 4, 4, generator=generator)
    for k, timestep in enumerate(scheduler.timesteps):
        step = torch.full((2,), k)
        output = torch.cat([output_of(x), 1.1 * torch.tanh(x)], 1)
        extra, noise = torch.randn(2, *x.shape, generator=generator, dtype=torch.float64)
        variance = chain.variance(output.double(), step)
        total = (variance - chain.std[k] ** 2).clamp(min=0).sqrt() * extra + chain.std[k] * noise
        prediction = chain.predict(x.double(), output.double(), step, extra)
        ours = chain.mean(x.double(), prediction, step, None, extra) + chain.std[k] * noise
        drawn = (total / variance.sqrt()).float()
        with mock.patch(f"{type(scheduler).__module__}.randn_tensor", return_value=drawn):
            theirs = scheduler.step(output, timestep, x).prev_sample
        torch.testing.assert_close(ours.float(), theirs, rtol=1e-4, atol=2e-5 * float(theirs.abs().max()))
        x = theirs


@pytest.mark.parametrize(
    ("scheduler", "sentence"),
    [
        (
            lambda: diffusers.DDPMScheduler(variance_type="learned"),
            "nothing bounds from below.*'learned_range'",
        ),
        (lambda: diffusers.DDPMScheduler(variance_type="fixed_large_log"), "gives NaN"),
        (lambda: diffusers.DDIMScheduler(), "eta=0 adds no noise"),
        (lambda: diffusers.UniPCMultistepScheduler(), "adds no noise"),
        (lambda: diffusers.EulerDiscreteScheduler(), "adds no noise"),
        (lambda: diffusers.DPMSolverMultistepScheduler(), "use algorithm_type='sde-dpmsolver\\+\\+'"),
        (
            lambda: diffusers.CosineDPMSolverMultistepScheduler(final_sigmas_type="sigma_min"),
            "use its defaults",
        ),
        (lambda: diffusers.FlowMatchEulerDiscreteScheduler(), "stochastic_sampling=True"),
        (lambda: diffusers.ScoreSdeVeScheduler(), "norms over the batch"),
        (lambda: diffusers.RePaintScheduler(), "jumps back .* use one of DDPMScheduler"),
        (lambda: diffusers.EDMEulerScheduler(), "adds no noise"),
        (lambda: diffusers.TCDScheduler(), "pass eta=0.3"),
        (
            lambda: diffusers.UnCLIPScheduler(variance_type="learned_range"),
            "use variance_type='fixed_small_log'",
        ),
        (
            lambda: diffusers.DPMSolverSinglestepScheduler(algorithm_type="sde-dpmsolver++", solver_order=2),
            "from the state before last.*solver_order=1",
        ),
        (
            lambda: diffusers.EDMDPMSolverMultistepScheduler(algorithm_type="sde-dpmsolver++", solver_order=3),
            "use solver_order=2",
        ),
        (lambda: diffusers.AmusedScheduler(mask_token_id=1), "not known to be a chain"),
        *(
            (lambda make=make: make(prediction_type="flow_prediction"), "use_flow_sigmas=True")
            for make in (
                diffusers.DDPMScheduler,
                functools.partial(diffusers.DPMSolverMultistepScheduler, algorithm_type="sde-dpmsolver++"),
                functools.partial(
                    diffusers.DPMSolverSinglestepScheduler, algorithm_type="sde-dpmsolver++", solver_order=1
                ),
            )
        ),
        (
            lambda: diffusers.EDMDPMSolverMultistepScheduler(
                algorithm_type="sde-dpmsolver++", prediction_type="sample"
            ),
            "EDMDPMSolverMultistepScheduler does not implement prediction_type='sample'; use 'epsilon'",
        ),
        (lambda: diffusers.UnCLIPScheduler(prediction_type="v_prediction"), "use 'epsilon' or 'sample'"),
    ],
)
def test_unsupported_settings_are_refused_with_an_alternative(scheduler: Any, sentence: str) -> None:
    instance = scheduler()
    instance.set_timesteps(10)
    with pytest.raises(ValueError, match=sentence):
        scheduler_chain(instance)


@pytest.mark.parametrize("name", ["DDIMScheduler", "DDIMParallelScheduler", "TCDScheduler"])
def test_an_eta_above_one_is_refused(name: str) -> None:
    """DDIM's own loop gives NaN there."""
    scheduler = getattr(diffusers, name)()
    scheduler.set_timesteps(10)
    with pytest.raises(ValueError, match=rf"{name} with eta=1.5 (adds more noise|goes beyond)"):
        scheduler_chain(scheduler, eta=1.5)


def test_an_eta_a_little_above_one_is_served_where_the_next_state_has_room() -> None:
    options = {"beta_schedule": "scaled_linear", "beta_start": 0.00085, "beta_end": 0.012, "steps_offset": 1}
    scheduler = diffusers.DDIMScheduler(**options, clip_sample=False, set_alpha_to_one=False)
    scheduler.set_timesteps(50)
    assert scheduler_chain(scheduler, eta=1.02).std.isfinite().all()


class Noted(diffusers.DDPMScheduler):  # type: ignore[name-defined]
    """A user's subclass: a grid of its own, and a method that no step calls."""

    def set_timesteps(self, *args: Any, **kwargs: Any) -> None:
        super().set_timesteps(timesteps=[900, 500, 300, 40])

    def note(self) -> str:
        return "mine"


def test_a_subclass_that_keeps_the_step_has_the_chain_of_its_base() -> None:
    own, base = Noted(clip_sample=True), diffusers.DDPMScheduler(clip_sample=True)
    own.set_timesteps(10)
    base.set_timesteps(timesteps=[900, 500, 300, 40])
    chains = [scheduler_chain(scheduler) for scheduler in (own, base)]
    for name in ("std", "state_weight", "prediction_weight", "time"):
        one, two = (getattr(chain, name) for chain in chains)
        assert torch.equal(one, two)


@pytest.mark.parametrize("name", ["step", "previous_timestep", "_get_variance"])
def test_a_subclass_that_overrides_a_part_of_the_step_is_refused(name: str) -> None:
    kind = type("Mine", (diffusers.DDPMScheduler,), {name: lambda self, *args, **kwargs: 0})
    scheduler = kind()
    scheduler.set_timesteps(10)
    with pytest.raises(ValueError, match=rf"Mine overrides {name} of DDPMScheduler.*use DDPMScheduler"):
        scheduler_chain(scheduler)


@pytest.mark.law
@pytest.mark.parametrize(
    "name", ["DPMSolverMultistepScheduler", "EulerAncestralDiscreteScheduler", "DDPMScheduler"]
)
def test_speculation_on_a_scheduler_s_chain_is_exact(name: str) -> None:
    """Two of these end in sharp clusters, where a self-test that centres each side by its own mean errs."""
    config = {"algorithm_type": "sde-dpmsolver++"} if name.startswith("DPM") else {}
    scheduler = getattr(diffusers, name)(**config)
    scheduler.set_timesteps(12)
    target = from_scheduler(scheduler, lambda x, time, row: torch.tanh(x) - 0.1 * x, (2,), dtype=torch.float64)
    result = fs.check(target, window=5, samples=3000, slots=3000)
    assert result.passed, str(result)
    assert fs.sample(target, 200, window=5).speedup > 1.2


@pytest.mark.parametrize("multistep", [False, True])
def test_a_chain_that_is_affine_offers_its_weights(multistep: bool) -> None:
    """Fused rounds on a GPU use these weights, so they must give the mean."""
    if multistep:
        scheduler = diffusers.DPMSolverMultistepScheduler(algorithm_type="sde-dpmsolver++", solver_order=2)
    else:
        scheduler = diffusers.DDPMScheduler(clip_sample=True)
    scheduler.set_timesteps(9)
    target = from_scheduler(scheduler, lambda x, time, row: x, (3,), dtype=torch.float64)
    chain = affine_chain(target)
    assert chain is not None
    x, prediction, previous = torch.randn(3, 9, 3, dtype=torch.float64)
    step = torch.arange(9)
    mean = chain.state_weight[:, None] * x + chain.prediction_weight[:, None] * prediction
    assert (chain.previous_weight is not None) == multistep
    if chain.previous_weight is not None:
        mean = mean + chain.previous_weight[:, None] * previous
    torch.testing.assert_close(transition_mean(target, x, prediction, step, previous), mean)


def test_a_chain_that_needs_the_unlimited_estimate_offers_no_weights() -> None:
    scheduler = diffusers.DDIMScheduler(clip_sample=True)
    scheduler.set_timesteps(9)
    chain = scheduler_chain(scheduler, eta=1.0).to("cpu", torch.float64)
    assert affine_chain(ChainTarget(chain, torch.Size([3]), lambda x, time, row: x)) is None
