"""diffusers schedulers as chains of Gaussian transitions.

A scheduler's `step` fuses mean and noise and walks one index for a whole batch. Here its formulas are written
out as the coefficients of a `Chain`, so that states at different steps can share a call. Tests replay each
scheduler's own `step` with the same noise. Nothing is imported from diffusers: a scheduler is known by its class's
name, and read by its attributes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from foresample.chains import vp
from foresample.chains.chain import Chain, Clip, Kind, Levels, Limit, denoising_chain
from foresample.chains.multistep import second_order, third_order

_KINDS: dict[str, Kind] = {"epsilon": "eps", "sample": "x0", "v_prediction": "v", "flow_prediction": "v"}
"""diffusers' names of what a network predicts."""

LEARNED_BASE = 0.9
"""The part of the posterior variance that a learned one is taken never to fall below (`vp.learned_range`)."""


@dataclass(frozen=True)
class Options:
    """What a pipeline passes to `step`, and what is asked of the chain."""

    eta: float
    use_clipped: bool
    start: int
    reuse: Kind


def scheduler_chain(
    scheduler: Any, *, eta: float = 0.0, use_clipped: bool = False, start: int = 0, reuse: Kind = "x0"
) -> Chain:
    """The chain of a scheduler after `set_timesteps`, from its timestep number `start` on.

    `eta` and `use_clipped` are what a pipeline would pass to DDIM's `step`; `reuse` is what drafters reuse.
    """
    name = type(scheduler).__name__
    if name in _WITHOUT_NOISE:
        raise ValueError(
            f"{name} adds no noise, so there is nothing to speculate on; use DDPMScheduler, "
            "EulerAncestralDiscreteScheduler or DPMSolverMultistepScheduler(algorithm_type='sde-dpmsolver++')"
        )
    if name not in _READERS:
        why = _REFUSED.get(name, "is not known to be a chain of Gaussian transitions with fixed std")
        raise ValueError(f"{name} {why}; use one of {', '.join(_READERS)}")
    return _READERS[name](scheduler, Options(eta, use_clipped, start, reuse)).since(start)


def _ddpm(scheduler: Any, options: Options) -> Chain:
    config = scheduler.config
    if config.variance_type not in ("fixed_small", "fixed_small_log", "fixed_large", "learned_range"):
        reason = (
            "gives NaN"
            if config.variance_type == "fixed_large_log"
            else "has a std that nothing bounds from below"
        )
        raise ValueError(
            f"{_name(scheduler)}(variance_type={config.variance_type!r}) {reason}, which has no exact coupling; "
            "use variance_type='fixed_small' or 'learned_range'"
        )
    time = scheduler.timesteps.cpu()
    here = scheduler.alphas_cumprod.double().cpu()[time]
    there = torch.cat([here[1:], torch.ones(1, dtype=torch.float64)])
    state_weight, x0_weight, std = vp.transition(here, there, 1.0)
    std = (1 - here / there).sqrt() if config.variance_type == "fixed_large" else std.clamp(min=1e-10)
    chain = denoising_chain(
        vp.levels(here),
        state_weight=state_weight,
        x0_weight=x0_weight,
        std=torch.where(time > 0, std, 0.0),
        predicts=_predicts(config),
        reuse=options.reuse,
        time=time,
        limit=_limit(scheduler),
    )
    if config.variance_type == "learned_range":
        return vp.learned_range(chain, 1 - here / there, LEARNED_BASE)
    return chain


def _ddim(scheduler: Any, options: Options) -> Chain:
    if not options.eta > 0:
        raise ValueError(
            f"{_name(scheduler)} with eta=0 adds no noise, so there is nothing to speculate on; pass eta=1.0 to the "
            "pipeline or use DDPMScheduler"
        )
    config, time = scheduler.config, scheduler.timesteps.cpu()
    levels = scheduler.alphas_cumprod.double().cpu()
    before = time - config.num_train_timesteps // scheduler.num_inference_steps
    here = levels[time]
    there = torch.where(before >= 0, levels[before.clamp(min=0)], float(scheduler.final_alpha_cumprod))
    towards, x0_weight, std = vp.transition(here, there, options.eta)
    # The direction, towards·(x − √ᾱ x0), is taken from the estimate before it is limited, unless told otherwise.
    apart = _limit(scheduler) is not None and not options.use_clipped
    return denoising_chain(
        vp.levels(here),
        state_weight=towards,
        x0_weight=there.sqrt() if apart else x0_weight,
        unlimited_weight=-towards * here.sqrt() if apart else None,
        std=std,
        predicts=_predicts(config),
        reuse=options.reuse,
        time=time,
        limit=_limit(scheduler),
    )


def _euler_ancestral(scheduler: Any, options: Options) -> Chain:
    sigmas = scheduler.sigmas.double().cpu()
    here, there = sigmas[:-1], sigmas[1:]
    std = (there**2 * (here**2 - there**2) / here**2).clamp(min=0).sqrt()
    down = (there**2 - std**2).clamp(min=0).sqrt() / here
    norm = (here**2 + 1).sqrt()
    kind = scheduler.config.prediction_type
    if kind not in ("epsilon", "v_prediction"):
        raise ValueError(f"EulerAncestralDiscreteScheduler does not implement prediction_type={kind!r}")
    return denoising_chain(
        Levels(torch.ones_like(here), here, norm=norm),
        state_weight=down,
        x0_weight=1 - down,
        std=std,
        predicts=_predicts(scheduler.config),
        reuse=options.reuse,
        time=scheduler.timesteps.cpu(),
        scale=1 / norm,
    )


def _dpm_multistep(scheduler: Any, options: Options) -> Chain:
    config = scheduler.config
    _require_sde(scheduler)
    sigmas = scheduler.sigmas.double().cpu()
    if config.use_flow_sigmas:
        alpha, sigma = 1 - sigmas, sigmas
    else:
        alpha = (sigmas**2 + 1).rsqrt()
        sigma = sigmas * alpha
    log_ratio = alpha.log() - sigma.log()
    h = log_ratio[1:] - log_ratio[:-1]  # infinite where the chain ends at σ = 0
    gain = alpha[1:] * -torch.expm1(-2 * h)

    now, previous, older = _solver_weights(config, h, alpha[1:], gain, options.start)
    return denoising_chain(
        Levels(alpha[:-1], sigma[:-1], flow=config.prediction_type == "flow_prediction"),
        state_weight=sigma[1:] / sigma[:-1] * torch.exp(-h),
        x0_weight=gain + now,
        previous_weight=previous if (previous != 0).any() else None,
        older_weight=older if (older != 0).any() else None,
        std=sigma[1:] * (-torch.expm1(-2 * h)).sqrt(),
        predicts=_predicts(config),
        reuse=options.reuse,
        time=scheduler.timesteps.cpu(),
        limit=_limit(scheduler),
    )


def _solver_weights(
    config: Any, h: Tensor, alpha: Tensor, gain: Tensor, start: int
) -> tuple[Tensor, Tensor, Tensor]:
    """What a multistep solver adds to the weights of the estimate, the one before and the one before that.

    The first step taken is of first order, the second at most of second; so are the last one and the one before it
    where a scheduler says so. `h`: steps in log-SNR; `gain`: the weight of the estimate in a first-order step.
    """
    none = torch.zeros_like(h)
    if config.solver_order == 1:
        return none, none, none
    second = alpha * (torch.expm1(-2 * h) / (2 * h) + 1)
    lower = 0.5 * gain if config.solver_type == "midpoint" else second
    now, previous = second_order(h, lower)
    older = none.clone()
    few = config.lower_order_final and len(h) < 15
    if config.solver_order == 3:
        third = -alpha * ((torch.expm1(-2 * h) + 2 * h) / (2 * h) ** 2 + 0.5)
        of_third = torch.arange(len(h)) >= start + 2
        if few:
            of_third[-2:] = False
        weights = third_order(h, second, third)
        now, previous, older = (
            torch.where(of_third, a, b) for a, b in zip(weights, (now, previous, older), strict=True)
        )
    first = torch.arange(len(h)) <= start
    first[-1] |= config.euler_at_final or few or config.final_sigmas_type == "zero"
    return torch.where(first, 0.0, now), torch.where(first, 0.0, previous), torch.where(first, 0.0, older)


def _cosine_dpm(scheduler: Any, options: Options) -> Chain:
    """Stable Audio's: DPM++ 2M SDE on σ, around a network that is preconditioned as EDM's."""
    config = scheduler.config
    if config.prediction_type not in ("epsilon", "v_prediction"):
        raise ValueError(f"CosineDPMSolverMultistepScheduler does not implement {config.prediction_type!r}")
    if config.solver_order > 2 or config.final_sigmas_type != "zero":
        raise ValueError(
            "CosineDPMSolverMultistepScheduler itself fails with solver_order=3 and gives NaN with "
            "final_sigmas_type='sigma_min'; use its defaults, solver_order=2 and 'zero'"
        )
    sigmas, data = scheduler.sigmas.double().cpu(), float(config.sigma_data)
    here, there = sigmas[:-1], sigmas[1:]
    h, one = (here / there).log(), torch.ones_like(here)
    gain = -torch.expm1(-2 * h)
    now, previous, _ = _solver_weights(config, h, one, gain, options.start)
    norm = (here**2 + data**2).sqrt()
    chain = denoising_chain(
        Levels(one, here, norm=(here**2 + 1).sqrt()),
        state_weight=1 - gain,
        x0_weight=gain + now,
        previous_weight=previous if (previous != 0).any() else None,
        std=there * gain.sqrt(),
        predicts="x0",
        reuse="x0",
        time=scheduler.timesteps.cpu(),
        scale=1 / norm,
    )
    sign = -1 if config.prediction_type == "v_prediction" else 1
    return replace(
        chain,
        from_state=(data / norm) ** 2,
        from_output=sign * here * data / norm,
        predicts=_predicts(config),
    )


def _edm_dpm(scheduler: Any, options: Options) -> Chain:
    """The multistep solver on states x0 + σ ξ: its states are 1/α times those of a variance-preserving one."""
    config = scheduler.config
    _require_sde(scheduler)
    if config.solver_order > 2:
        raise ValueError(
            "a third-order solver of EDMDPMSolverMultistepScheduler adds no noise; use solver_order=2"
        )
    if options.reuse != "x0":
        raise ValueError(f"this sampler's mean is made of denoised estimates: reuse x0, not {options.reuse}")
    same = SimpleNamespace(**{**config, "prediction_type": "sample", "use_flow_sigmas": False})
    same.get = vars(same).get
    like = SimpleNamespace(
        config=same,
        sigmas=scheduler.sigmas,
        timesteps=scheduler.timesteps,
        _threshold_sample=scheduler._threshold_sample,
    )
    chain = _dpm_multistep(like, options)
    sigmas, spread = scheduler.sigmas.double().cpu(), float(config.sigma_data)
    grown = (sigmas**2 + 1).sqrt()
    here, norm = sigmas[:-1], (sigmas[:-1] ** 2 + spread**2).sqrt()
    sign = -1 if config.prediction_type == "v_prediction" else 1
    return replace(
        chain,
        std=chain.std * grown[1:],
        state_weight=chain.state_weight * grown[1:] / grown[:-1],
        prediction_weight=chain.prediction_weight * grown[1:],
        previous_weight=None if chain.previous_weight is None else chain.previous_weight * grown[1:],
        levels=Levels(torch.ones_like(here), here),
        scale=1 / norm,
        from_state=spread**2 / norm**2,
        from_output=sign * here * spread / norm,
        predicts=config.prediction_type,
    )


def _dpm_singlestep(scheduler: Any, options: Options) -> Chain:
    config = scheduler.config
    _require_sde(scheduler, " and solver_order=1" if config.solver_order > 1 else "")
    if config.solver_order > 1:
        raise ValueError(
            "DPMSolverSinglestepScheduler starts its steps of higher order from the state before last, so its states "
            "are no chain; use solver_order=1, or DPMSolverMultistepScheduler with solver_order=2"
        )
    return _dpm_multistep(scheduler, options)


def _cogvideox_dpm(scheduler: Any, options: Options) -> Chain:
    config, time = scheduler.config, scheduler.timesteps.cpu()
    levels = scheduler.alphas_cumprod.double().cpu()
    before = time - config.num_train_timesteps // scheduler.num_inference_steps
    here = levels[time]
    there = torch.where(before >= 0, levels[before.clamp(min=0)], float(scheduler.final_alpha_cumprod))
    log_ratio = [(level / (1 - level)).log() / 2 for level in (here, there)]
    h = log_ratio[1] - log_ratio[0]  # infinite at pure noise and at the end
    gain = there.sqrt() * -torch.expm1(-2 * h)
    second = torch.zeros_like(h)
    last = log_ratio[0][1:] - log_ratio[0][:-1]
    second[1:] = torch.where(before[1:] >= 0, gain[1:] * h[1:] / (2 * last), 0.0)
    second[options.start] = 0
    return denoising_chain(
        vp.levels(here),
        state_weight=((1 - there) / (1 - here)).sqrt() * torch.exp(-h),
        x0_weight=gain + second,
        previous_weight=-second if (second != 0).any() else None,
        std=(1 - there).sqrt() * (-torch.expm1(-2 * h)).sqrt(),
        predicts=_predicts(config),
        reuse=options.reuse,
        time=time,
    )


def _lcm(scheduler: Any, options: Options) -> Chain:
    """Noise is added anew to each denoised estimate; the last is the result."""
    time = scheduler.timesteps.cpu()
    here = scheduler.alphas_cumprod.double().cpu()[time]
    there = torch.cat([here[1:], torch.ones(1, dtype=torch.float64)])
    scaled = time.double() * scheduler.config.timestep_scaling
    skip, out = 0.25 / (scaled**2 + 0.25), scaled / (scaled**2 + 0.25).sqrt()
    return denoising_chain(
        vp.levels(here),
        state_weight=there.sqrt() * skip,
        x0_weight=there.sqrt() * out,
        std=(1 - there).sqrt(),
        predicts=_predicts(scheduler.config),
        reuse=options.reuse,
        time=time,
        limit=_limit(scheduler),
    )


def _tcd(scheduler: Any, options: Options) -> Chain:
    """Down to a level below the next, without noise, and up to the next with it."""
    if not options.eta > 0:
        raise ValueError(
            "TCDScheduler with eta=0 adds no noise, so there is nothing to speculate on; pass eta=0.3 to the pipeline"
        )
    time = scheduler.timesteps.cpu()
    levels = scheduler.alphas_cumprod.double().cpu()
    following = torch.cat([time[1:], torch.zeros(1, dtype=time.dtype)])
    here, there = levels[time], levels[following]
    below = levels[torch.floor((1 - options.eta) * following).long()]
    towards = ((1 - below) / (1 - here)).sqrt()
    up = (there / below).sqrt()
    return denoising_chain(
        vp.levels(here),
        state_weight=up * towards,
        x0_weight=up * (below.sqrt() - towards * here.sqrt()),
        std=(1 - there / below).clamp(min=0).sqrt(),
        predicts=_predicts(scheduler.config),
        reuse=options.reuse,
        time=time,
    )


def _unclip(scheduler: Any, options: Options) -> Chain:
    """DDPM's chain, if each step is told the next, as pipelines do."""
    if scheduler.config.variance_type != "fixed_small_log":
        raise ValueError(
            f"UnCLIPScheduler(variance_type={scheduler.config.variance_type!r}) has a state-dependent std, which has "
            "no exact coupling; use variance_type='fixed_small_log'"
        )
    # At the last steps 1 − ᾱ and β disagree in single precision, and what the scheduler computes is its law.
    time, alpha_bar = scheduler.timesteps.cpu(), scheduler.alphas_cumprod.float().cpu()
    here = alpha_bar[time]
    there = torch.cat([here[1:], torch.ones(1)])
    adjacent = time - 1 == torch.cat([time[1:], -torch.ones(1, dtype=time.dtype)])
    beta = torch.where(adjacent, scheduler.betas.float().cpu()[time], 1 - here / there)
    variance = (1 - there) / (1 - here) * beta
    return denoising_chain(
        vp.levels(here.double()),
        state_weight=((1 - beta).sqrt() * (1 - there) / (1 - here)).double(),
        x0_weight=(there.sqrt() * beta / (1 - here)).double(),
        std=torch.where(time > 0, variance.clamp(min=1e-20).sqrt(), 0.0).double(),
        predicts=_predicts(scheduler.config),
        reuse=options.reuse,
        time=time,
        limit=_limit(scheduler),
    )


def _flow_lcm(scheduler: Any, options: Options) -> Chain:
    if scheduler.config.get("scale_factors"):
        raise ValueError(
            "FlowMatchLCMScheduler with scale_factors changes the size of its states; leave them out"
        )
    return _noised_flow(scheduler, options)


def _flow_match(scheduler: Any, options: Options) -> Chain:
    if not scheduler.config.stochastic_sampling:
        raise ValueError(
            "FlowMatchEulerDiscreteScheduler adds no noise unless stochastic_sampling=True: "
            "FlowMatchEulerDiscreteScheduler.from_config(scheduler.config, stochastic_sampling=True)"
        )
    return _noised_flow(scheduler, options)


def _noised_flow(scheduler: Any, options: Options) -> Chain:
    """Noise is added anew to each denoised estimate."""
    sigmas = scheduler.sigmas.double().cpu()
    here, there = sigmas[:-1], sigmas[1:]
    return denoising_chain(
        Levels(1 - here, here, flow=True),
        state_weight=torch.zeros_like(here),
        x0_weight=1 - there,
        std=there,
        predicts="v",
        reuse=options.reuse,
        time=scheduler.timesteps.cpu(),
    )


def _name(scheduler: Any) -> str:
    """The class that a refusal is about: several share a reader."""
    return type(scheduler).__name__


def _require_sde(scheduler: Any, more: str = "") -> None:
    """Refuse a DPM-Solver that solves the ODE."""
    kind = scheduler.config.algorithm_type
    if kind != "sde-dpmsolver++":
        raise ValueError(
            f"{_name(scheduler)}(algorithm_type={kind!r}) is not supported; use algorithm_type='sde-dpmsolver++'{more}"
        )


def _predicts(config: Any) -> Kind:
    if config.prediction_type not in _KINDS:
        raise ValueError(f"prediction_type={config.prediction_type!r} is none of {', '.join(_KINDS)}")
    return _KINDS[config.prediction_type]


def _limit(scheduler: Any) -> Limit | None:
    """What the scheduler does to the denoised estimate, row by row."""
    config = scheduler.config
    if config.get("thresholding", False):
        return scheduler._threshold_sample
    return Clip(config.clip_sample_range) if config.get("clip_sample", False) else None


_READERS: dict[str, Callable[[Any, Options], Chain]] = {
    "DDPMScheduler": _ddpm,
    "DDPMParallelScheduler": _ddpm,
    "DDIMScheduler": _ddim,
    "DDIMParallelScheduler": _ddim,
    "EulerAncestralDiscreteScheduler": _euler_ancestral,
    "DPMSolverMultistepScheduler": _dpm_multistep,
    "CosineDPMSolverMultistepScheduler": _cosine_dpm,
    "DPMSolverSinglestepScheduler": _dpm_singlestep,
    "EDMDPMSolverMultistepScheduler": _edm_dpm,
    "CogVideoXDPMScheduler": _cogvideox_dpm,
    "FlowMatchEulerDiscreteScheduler": _flow_match,
    "FlowMatchLCMScheduler": _flow_lcm,
    "LCMScheduler": _lcm,
    "TCDScheduler": _tcd,
    "UnCLIPScheduler": _unclip,
}
_WITHOUT_NOISE = {
    "EulerDiscreteScheduler",
    "HeunDiscreteScheduler",
    "FlowMatchHeunDiscreteScheduler",
    "LMSDiscreteScheduler",
    "PNDMScheduler",
    "UniPCMultistepScheduler",
    "DEISMultistepScheduler",
    "IPNDMScheduler",
    "KDPM2DiscreteScheduler",
    "SASolverScheduler",
    "EDMEulerScheduler",
    "CogVideoXDDIMScheduler",
}
_REFUSED = {
    "DPMSolverSDEScheduler": "correlates the noise of its two half steps",
    "ScoreSdeVeScheduler": "has a corrector that depends on norms over the batch",
    "RePaintScheduler": "jumps back to earlier noise levels and blends the original image into every step",
    "KDPM2AncestralDiscreteScheduler": "takes two network calls a step, with one noise between them",
}
