"""diffusers schedulers as chains of Gaussian transitions.

A scheduler's `step` fuses mean and noise and walks one index for a whole batch. Here its formulas are written
out as the coefficients of a `Chain`, so that states at different steps can share a call. Tests replay each
scheduler's own `step` with the same noise. Nothing is imported from diffusers: a scheduler is known by its class's
name, and read by its attributes.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from foresample.chains import vp
from foresample.chains.chain import Chain, Clip, Kind, Levels, Limit, denoising_chain
from foresample.chains.multistep import second_order, third_order

_KINDS: dict[str, Kind] = {"epsilon": "eps", "sample": "x0", "v_prediction": "v", "flow_prediction": "v"}
"""The quantities that a network predicts, by their names in diffusers."""

LEARNED_BASE = 0.9
"""The part of the posterior variance that bounds a learned variance from below (`vp.learned_range`)."""


def scheduler_chain(
    scheduler: Any, *, eta: float = 0.0, use_clipped: bool = False, start: int = 0, reuse: Kind = "x0"
) -> Chain:
    """The chain of a scheduler after `set_timesteps`, from its timestep number `start` on.

    `eta` and `use_clipped` are the arguments of DDIM's `step`; `reuse` is the quantity that drafters reuse.
    """
    name = _known_name(type(scheduler))
    if name in _WITHOUT_NOISE:
        raise ValueError(
            f"{name} adds no noise, so there is nothing to speculate on; use DDPMScheduler, "
            "EulerAncestralDiscreteScheduler or DPMSolverMultistepScheduler(algorithm_type='sde-dpmsolver++')"
        )
    if name not in _READERS:
        why = _REFUSED.get(name, "is not known to be a chain of Gaussian transitions with fixed std")
        raise ValueError(f"{name} {why}; use one of {', '.join(_READERS)}")
    return _READERS[name](_Reading(scheduler, eta, use_clipped, start, reuse)).since(start)


_READ_AS_DATA = ("__init__", "set_timesteps", "add_noise", "scale_noise", "get_velocity")
"""Methods that a subclass may override: the chain reads their results, or does not need them."""


def _known_name(kind: type) -> str:
    """The name of the scheduler class whose chain this class has: its own, or that of the class it extends.

    A subclass that overrides what a step computes has another chain, so it is refused.
    """
    names = [base.__name__ for base in kind.__mro__]
    known = next((i for i, name in enumerate(names) if name in {*_READERS, *_WITHOUT_NOISE, *_REFUSED}), 0)
    base, code = kind.__mro__[known], (property, types.FunctionType)
    for name in {name: None for below in kind.__mro__[:known] for name in vars(below)}:
        if (
            name not in _READ_AS_DATA
            and not name.startswith("__")
            and isinstance(getattr(base, name, None), code)
        ):
            raise ValueError(
                f"{kind.__name__} overrides {name} of {names[known]}, so its chain may be another one; use "
                f"{names[known]}, or write its step as a target (foresample.targets.from_step)"
            )
    return names[known]


@dataclass(frozen=True)
class _Reading:
    """A scheduler, the arguments of its `step`, and the quantity that drafters reuse."""

    scheduler: Any
    eta: float
    use_clipped: bool
    start: int
    reuse: Kind

    @property
    def name(self) -> str:
        """The class to name in a refusal: several share a reader."""
        return type(self.scheduler).__name__

    @property
    def config(self) -> Any:
        return self.scheduler.config

    @property
    def time(self) -> Tensor:
        return self.scheduler.timesteps.cpu()

    @property
    def sigmas(self) -> Tensor:
        return self.scheduler.sigmas.double().cpu()

    @property
    def alpha_bar(self) -> Tensor:
        """ᾱ of all training timesteps."""
        return self.scheduler.alphas_cumprod.double().cpu()

    def visited(self) -> tuple[Tensor, Tensor]:
        """ᾱ before and after each step, the last of which goes to data."""
        here = self.alpha_bar[self.time]
        return here, torch.cat([here[1:], torch.ones(1, dtype=torch.float64)])

    def evenly(self) -> tuple[Tensor, Tensor, Tensor]:
        """The timesteps that even steps lead to, negative past the first one, and ᾱ before and after each step."""
        before = self.time - self.config.num_train_timesteps // self.scheduler.num_inference_steps
        there = torch.where(
            before >= 0, self.alpha_bar[before.clamp(min=0)], float(self.scheduler.final_alpha_cumprod)
        )
        return before, self.alpha_bar[self.time], there

    @property
    def predicts(self) -> Kind:
        kind = self.config.prediction_type
        if kind not in _KINDS:
            raise ValueError(f"prediction_type={kind!r} is not one of {', '.join(_KINDS)}")
        if kind == "flow_prediction" and not self.config.get("use_flow_sigmas", False):
            raise ValueError(
                f"{self.name}(prediction_type='flow_prediction') does not have the states of flow matching; use "
                "DPMSolverMultistepScheduler with use_flow_sigmas=True, or another prediction_type"
            )
        return _KINDS[kind]

    @property
    def limit(self) -> Limit | None:
        """The scheduler's limit on the denoised estimate, row by row."""
        if self.config.get("thresholding", False):
            return self.scheduler._threshold_sample
        return Clip(self.config.clip_sample_range) if self.config.get("clip_sample", False) else None

    def chain(self, levels: Levels, *, predicts: Kind | None = None, **coefficients: Any) -> Chain:
        """The chain with these coefficients, see `denoising_chain`."""
        same: dict[str, Any] = {"predicts": predicts or self.predicts, "reuse": self.reuse, "time": self.time}
        return denoising_chain(levels, **same, **coefficients)

    def require_prediction(self, *kinds: str) -> None:
        """Refuse a kind of prediction that the scheduler's `step` does not implement."""
        kind = self.config.prediction_type
        if kind not in kinds:
            raise ValueError(
                f"{self.name} does not implement prediction_type={kind!r}; use {' or '.join(map(repr, kinds))}"
            )

    def require_eta(self, remedy: str) -> None:
        """Refuse an eta that adds no noise."""
        if not self.eta > 0:
            raise ValueError(
                f"{self.name} with eta=0 adds no noise, so there is nothing to speculate on; {remedy}"
            )

    def require_sde(self, more: str = "") -> None:
        """Refuse a DPM-Solver that solves the ODE."""
        kind = self.config.algorithm_type
        if kind != "sde-dpmsolver++":
            raise ValueError(
                f"{self.name}(algorithm_type={kind!r}) is not supported; use algorithm_type='sde-dpmsolver++'{more}"
            )


def _ddpm(reading: _Reading) -> Chain:
    kind = reading.config.variance_type
    if kind not in ("fixed_small", "fixed_small_log", "fixed_large", "learned_range"):
        reason = "gives NaN" if kind == "fixed_large_log" else "has a std that nothing bounds from below"
        raise ValueError(
            f"{reading.name}(variance_type={kind!r}) {reason}, which has no exact coupling; "
            "use variance_type='fixed_small' or 'learned_range'"
        )
    here, there = reading.visited()
    state_weight, x0_weight, std = vp.transition(here, there, 1.0)
    std = (1 - here / there).sqrt() if kind == "fixed_large" else std.clamp(min=1e-10)
    chain = reading.chain(
        vp.levels(here),
        state_weight=state_weight,
        x0_weight=x0_weight,
        std=torch.where(reading.time > 0, std, 0.0),
        limit=reading.limit,
    )
    return vp.learned_range(chain, 1 - here / there, LEARNED_BASE) if kind == "learned_range" else chain


def _ddim(reading: _Reading) -> Chain:
    remedy = "pass eta=1.0 to the pipeline or use DDPMScheduler"
    reading.require_eta(remedy)
    _, here, there = reading.evenly()
    towards, x0_weight, std = vp.transition(here, there, reading.eta)
    if (std**2 > 1 - there).any():
        raise ValueError(
            f"{reading.name} with eta={reading.eta:g} adds more noise than its next state contains; {remedy}"
        )
    # The direction, towards·(x − √ᾱ x0), uses the estimate before it is limited, unless use_clipped is given.
    apart = reading.limit is not None and not reading.use_clipped
    return reading.chain(
        vp.levels(here),
        state_weight=towards,
        x0_weight=there.sqrt() if apart else x0_weight,
        unlimited_weight=-towards * here.sqrt() if apart else None,
        std=std,
        limit=reading.limit,
    )


def _euler_ancestral(reading: _Reading) -> Chain:
    here, there = reading.sigmas[:-1], reading.sigmas[1:]
    std = (there**2 * (here**2 - there**2) / here**2).clamp(min=0).sqrt()
    down = (there**2 - std**2).clamp(min=0).sqrt() / here
    reading.require_prediction("epsilon", "v_prediction")
    levels = Levels.exploding(here)
    return reading.chain(levels, state_weight=down, x0_weight=1 - down, std=std, scale=1 / levels.norm)


def _dpm_multistep(reading: _Reading) -> Chain:
    reading.require_sde()
    return _solver(reading, flow=reading.config.use_flow_sigmas)


def _solver(reading: _Reading, flow: bool = False, predicts: Kind | None = None) -> Chain:
    """DPM-Solver++ on states of preserved variance, or on those of flow matching."""
    sigmas = reading.sigmas
    alpha = 1 - sigmas if flow else (sigmas**2 + 1).rsqrt()
    sigma = sigmas if flow else sigmas * alpha
    log_ratio = alpha.log() - sigma.log()
    # Infinite where the chain ends at σ = 0; below 0 by rounding where its last two levels are the same.
    h = log_ratio[1:] - log_ratio[:-1]
    gain = alpha[1:] * -torch.expm1(-2 * h)
    now, previous, older = _solver_weights(reading, h, alpha[1:], gain)
    return reading.chain(
        Levels(alpha[:-1], sigma[:-1], flow=reading.config.prediction_type == "flow_prediction"),
        state_weight=sigma[1:] / sigma[:-1] * torch.exp(-h),
        x0_weight=gain + now,
        previous_weight=_if_any(previous),
        older_weight=_if_any(older),
        std=sigma[1:] * (-torch.expm1(-2 * h)).clamp(min=0).sqrt(),
        predicts=predicts,
        limit=reading.limit,
    )


def _if_any(weight: Tensor) -> Tensor | None:
    return weight if (weight != 0).any() else None


def _solver_weights(reading: _Reading, h: Tensor, alpha: Tensor, gain: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The numbers that a multistep solver adds to the weights of an estimate and of the two before it.

    The first step taken is of first order, the second at most of second; so are the last one and the one before it
    where a scheduler says so. `h`: steps in log-SNR; `gain`: the weight of the estimate in a first-order step.
    """
    config, start, none = reading.config, reading.start, torch.zeros_like(h)
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


def _cosine_dpm(reading: _Reading) -> Chain:
    """Stable Audio's scheduler: DPM++ 2M SDE on σ, with EDM's preconditioning of the network."""
    config = reading.config
    if config.solver_order > 2 or config.final_sigmas_type != "zero":
        raise ValueError(
            "CosineDPMSolverMultistepScheduler itself fails with solver_order=3 and gives NaN with "
            "final_sigmas_type='sigma_min'; use its defaults, solver_order=2 and 'zero'"
        )
    here, there = reading.sigmas[:-1], reading.sigmas[1:]
    h = (here / there).log()
    gain = -torch.expm1(-2 * h)
    now, previous, _ = _solver_weights(reading, h, torch.ones_like(here), gain)
    chain = replace(reading, reuse="x0").chain(
        Levels.exploding(here),
        state_weight=1 - gain,
        x0_weight=gain + now,
        previous_weight=_if_any(previous),
        std=there * gain.sqrt(),
        predicts="x0",
    )
    return replace(_preconditioned(reading, chain), predicts=reading.predicts)


def _preconditioned(reading: _Reading, chain: Chain) -> Chain:
    """The chain with EDM's preconditioning of the network, which then predicts x0."""
    reading.require_prediction("epsilon", "v_prediction")
    config, here = reading.config, reading.sigmas[:-1]
    data = float(config.sigma_data)
    norm = (here**2 + data**2).sqrt()
    sign = -1 if config.prediction_type == "v_prediction" else 1
    return replace(
        chain,
        scale=1 / norm,
        from_state=data**2 / norm**2,
        from_output=sign * here * data / norm,
        predicts=config.prediction_type,
    )


def _edm_dpm(reading: _Reading) -> Chain:
    """The multistep solver on states x0 + σ ξ: its states are 1/α times those of a variance-preserving one."""
    reading.require_sde()
    if reading.config.solver_order > 2:
        raise ValueError(
            "a third-order solver of EDMDPMSolverMultistepScheduler adds no noise; use solver_order=2"
        )
    if reading.reuse != "x0":
        raise ValueError(f"this sampler's mean is made of denoised estimates: reuse x0, not {reading.reuse}")
    chain = _solver(reading, predicts="x0")
    sigmas = reading.sigmas
    grown = (sigmas**2 + 1).sqrt()
    chain = replace(
        chain,
        std=chain.std * grown[1:],
        state_weight=chain.state_weight * grown[1:] / grown[:-1],
        prediction_weight=chain.prediction_weight * grown[1:],
        previous_weight=None if chain.previous_weight is None else chain.previous_weight * grown[1:],
        levels=Levels.exploding(sigmas[:-1]),
    )
    return _preconditioned(reading, chain)


def _dpm_singlestep(reading: _Reading) -> Chain:
    higher = reading.config.solver_order > 1
    reading.require_sde(" and solver_order=1" if higher else "")
    if higher:
        raise ValueError(
            "DPMSolverSinglestepScheduler starts its steps of higher order from the state before last, so its states "
            "are no chain; use solver_order=1, or DPMSolverMultistepScheduler with solver_order=2"
        )
    return _dpm_multistep(reading)


def _cogvideox_dpm(reading: _Reading) -> Chain:
    before, here, there = reading.evenly()
    log_ratio = [(level / (1 - level)).log() / 2 for level in (here, there)]
    h = log_ratio[1] - log_ratio[0]  # infinite at pure noise and at the end
    gain = there.sqrt() * -torch.expm1(-2 * h)
    second = torch.zeros_like(h)
    last = log_ratio[0][1:] - log_ratio[0][:-1]
    second[1:] = torch.where(before[1:] >= 0, gain[1:] * h[1:] / (2 * last), 0.0)
    second[reading.start] = 0
    return reading.chain(
        vp.levels(here),
        state_weight=((1 - there) / (1 - here)).sqrt() * torch.exp(-h),
        x0_weight=gain + second,
        previous_weight=_if_any(-second),
        std=(1 - there).sqrt() * (-torch.expm1(-2 * h)).sqrt(),
    )


def _lcm(reading: _Reading) -> Chain:
    """A chain that adds noise anew to each denoised estimate; the last estimate is the result."""
    here, there = reading.visited()
    scaled = reading.time.double() * reading.config.timestep_scaling
    skip, out = 0.25 / (scaled**2 + 0.25), scaled / (scaled**2 + 0.25).sqrt()
    return reading.chain(
        vp.levels(here),
        state_weight=there.sqrt() * skip,
        x0_weight=there.sqrt() * out,
        std=(1 - there).sqrt(),
        limit=reading.limit,
    )


def _tcd(reading: _Reading) -> Chain:
    """A chain of steps down to a level below the next, without noise, and up to the next with noise."""
    remedy = "pass eta=0.3 to the pipeline"
    reading.require_eta(remedy)
    if reading.eta > 1:
        raise ValueError(f"{reading.name} with eta={reading.eta:g} goes beyond the data; {remedy}")
    following = torch.cat([reading.time[1:], torch.zeros(1, dtype=reading.time.dtype)])
    here, there = reading.alpha_bar[reading.time], reading.alpha_bar[following]
    below = reading.alpha_bar[torch.floor((1 - reading.eta) * following).long()]
    towards = ((1 - below) / (1 - here)).sqrt()
    up = (there / below).sqrt()
    return reading.chain(
        vp.levels(here),
        state_weight=up * towards,
        x0_weight=up * (below.sqrt() - towards * here.sqrt()),
        std=(1 - there / below).clamp(min=0).sqrt(),
    )


def _unclip(reading: _Reading) -> Chain:
    """DDPM's chain, if each step is given the next timestep, as pipelines do."""
    if reading.config.variance_type != "fixed_small_log":
        raise ValueError(
            f"UnCLIPScheduler(variance_type={reading.config.variance_type!r}) has a state-dependent std, which has "
            "no exact coupling; use variance_type='fixed_small_log'"
        )
    reading.require_prediction("epsilon", "sample")
    # At the last steps 1 − ᾱ and β disagree in single precision; the scheduler's own numbers define its distribution.
    time = reading.time
    here, there = (level.float() for level in reading.visited())
    adjacent = time - 1 == torch.cat([time[1:], -torch.ones(1, dtype=time.dtype)])
    beta = torch.where(adjacent, reading.scheduler.betas.float().cpu()[time], 1 - here / there)
    variance = (1 - there) / (1 - here) * beta
    return reading.chain(
        vp.levels(here.double()),
        state_weight=((1 - beta).sqrt() * (1 - there) / (1 - here)).double(),
        x0_weight=(there.sqrt() * beta / (1 - here)).double(),
        std=torch.where(time > 0, variance.clamp(min=1e-20).sqrt(), 0.0).double(),
        limit=reading.limit,
    )


def _flow_lcm(reading: _Reading) -> Chain:
    if reading.config.get("scale_factors"):
        raise ValueError(
            "FlowMatchLCMScheduler with scale_factors changes the size of its states; leave them out"
        )
    return _noised_flow(reading)


def _flow_match(reading: _Reading) -> Chain:
    if not reading.config.stochastic_sampling:
        raise ValueError(
            "FlowMatchEulerDiscreteScheduler adds no noise unless stochastic_sampling=True: "
            "FlowMatchEulerDiscreteScheduler.from_config(scheduler.config, stochastic_sampling=True)"
        )
    return _noised_flow(reading)


def _noised_flow(reading: _Reading) -> Chain:
    """A chain that adds noise anew to each denoised estimate."""
    here, there = reading.sigmas[:-1], reading.sigmas[1:]
    return reading.chain(
        Levels(1 - here, here, flow=True),
        state_weight=torch.zeros_like(here),
        x0_weight=1 - there,
        std=there,
        predicts="v",
    )


_READERS: dict[str, Callable[[_Reading], Chain]] = {
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
