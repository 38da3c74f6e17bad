"""diffusers schedulers as chains of Gaussian transitions.

A scheduler's `step` fuses mean and noise and walks one index for a whole batch. Here its formulas are written
out as coefficients, one set for each step, so that states at different steps can share a call:

    x0     = from_state · x + from_output · network output
    x_next = state · x + clean · limit(x0) + raw · x0 + previous · x0 of the step before + std · z

`limit` clips or thresholds the denoised estimate. `raw` is only used by DDIM, which derives its direction from
the estimate before clipping; `previous` only by multistep solvers. Tests replay each scheduler's own `step`
with the same noise.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from foresample.targets.affine import per_row

Limit = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Chain:
    """Coefficients [N] of a scheduler on its timesteps, in float64 until `to` is called."""

    time: Tensor
    """What the network is told of each step."""
    scale: Tensor
    """What the network sees is scale · x."""
    from_state: Tensor
    from_output: Tensor
    state: Tensor
    clean: Tensor
    raw: Tensor
    previous: Tensor
    std: Tensor
    limit: Limit | None = None

    @cached_property
    def multistep(self) -> bool:
        return bool((self.previous != 0).any())

    def to(self, device: torch.device | str, dtype: torch.dtype) -> Chain:
        """The same on a device; `time` keeps its dtype."""
        moved: dict[str, Any] = {name: value.to(device, dtype) for name, value in self._coefficients().items()}
        return replace(self, **moved | {"time": self.time.to(device)})

    def since(self, start: int) -> Chain:
        """The same from a later step on."""
        late: dict[str, Any] = {name: value[start:] for name, value in self._coefficients().items()}
        return replace(self, **late)

    def _coefficients(self) -> dict[str, Tensor]:
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        return {name: value for name, value in values.items() if isinstance(value, Tensor)}

    def denoise(self, x: Tensor, output: Tensor, step: Tensor) -> Tensor:
        """The prediction worth reusing: x0, limited unless the transition needs it raw."""
        x0 = per_row(self.from_state, step, x) * x + per_row(self.from_output, step, x) * output.to(x.dtype)
        return x0 if self.limit is None or self.needs_raw else self.limit(x0)

    def mean(self, x: Tensor, prediction: Tensor, step: Tensor, previous: Tensor | None = None) -> Tensor:
        """The transition's mean at (x, step), given predictions."""
        clean = self.limit(prediction) if self.limit is not None and self.needs_raw else prediction
        mean = per_row(self.state, step, x) * x + per_row(self.clean, step, x) * clean
        if self.needs_raw:
            mean = mean + per_row(self.raw, step, x) * prediction
        if previous is not None:
            mean = mean + per_row(self.previous, step, x) * previous
        return mean

    @cached_property
    def needs_raw(self) -> bool:
        """Whether the mean also takes the prediction as it is before it was limited."""
        return bool((self.raw != 0).any())


@dataclass(frozen=True)
class SchedulerTarget:
    """A target that walks a scheduler's chain with a network; see `foresample.Target`."""

    chain: Chain
    shape: torch.Size
    network: Callable[[Tensor, Tensor, Tensor], Tensor]
    """network(x scaled as the scheduler scales it, time, row) -> output."""
    start_scale: float = 1.0

    @property
    def std(self) -> Tensor:
        return self.chain.std

    @property
    def multistep(self) -> bool:
        return self.chain.multistep

    @property
    def state_weight(self) -> Tensor | None:
        return None if self.chain.needs_raw else self.chain.state

    @property
    def prediction_weight(self) -> Tensor:
        return self.chain.clean

    @property
    def previous_weight(self) -> Tensor | None:
        return self.chain.previous if self.multistep else None

    def start(self, noise: Tensor) -> Tensor:
        return self.start_scale * noise

    def predict(self, x: Tensor, step: Tensor, row: Tensor) -> Tensor:
        output = self.network(per_row(self.chain.scale, step, x) * x, self.chain.time[step], row)
        return self.chain.denoise(x, output, step)

    def mean(self, x: Tensor, prediction: Tensor, step: Tensor, previous: Tensor | None = None) -> Tensor:
        return self.chain.mean(x, prediction, step, previous)


def read(scheduler: Any, *, eta: float = 0.0, use_clipped: bool = False, start: int = 0) -> Chain:
    """The chain of a scheduler after `set_timesteps`, from its timestep number `start` on.

    `eta` and `use_clipped` are what a pipeline would pass to DDIM's `step`.
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
    chain = _READERS[name](scheduler, eta, use_clipped, start)
    return replace(chain.since(start), limit=_limit(scheduler))


def _ddpm(scheduler: Any, eta: float, use_clipped: bool, start: int) -> Chain:
    config = scheduler.config
    if config.variance_type not in ("fixed_small", "fixed_small_log", "fixed_large"):
        reason = "gives NaN" if config.variance_type == "fixed_large_log" else "has a state-dependent std"
        raise ValueError(
            f"DDPMScheduler(variance_type={config.variance_type!r}) {reason}, which has no exact coupling; "
            "use variance_type='fixed_small'"
        )
    time = scheduler.timesteps.cpu()
    here = scheduler.alphas_cumprod.double().cpu()[time]
    there = torch.cat([here[1:], torch.ones(1, dtype=torch.float64)])
    beta = 1 - here / there
    small = (1 - there) / (1 - here) * beta
    variance = beta if config.variance_type == "fixed_large" else small.clamp(min=1e-20)
    return _vp(
        config,
        time,
        here,
        state=(here / there).sqrt() * (1 - there) / (1 - here),
        clean=there.sqrt() * beta / (1 - here),
        std=torch.where(time > 0, variance.sqrt(), 0.0),
    )


def _ddim(scheduler: Any, eta: float, use_clipped: bool, start: int) -> Chain:
    if not eta > 0:
        raise ValueError(
            "DDIMScheduler with eta=0 adds no noise, so there is nothing to speculate on; pass eta=1.0 to the "
            "pipeline or use DDPMScheduler"
        )
    config, time = scheduler.config, scheduler.timesteps.cpu()
    levels = scheduler.alphas_cumprod.double().cpu()
    before = time - config.num_train_timesteps // scheduler.num_inference_steps
    here = levels[time]
    there = torch.where(before >= 0, levels[before.clamp(min=0)], float(scheduler.final_alpha_cumprod))
    std = eta * ((1 - there) / (1 - here) * (1 - here / there)).clamp(min=0).sqrt()
    towards = (1 - there - std**2).clamp(min=0).sqrt() / (1 - here).sqrt()  # times x − √ᾱ x0: the direction
    direction = -towards * here.sqrt()
    limited = _limit(scheduler) is not None and not use_clipped
    return _vp(
        config,
        time,
        here,
        state=towards,
        clean=there.sqrt() + (0 if limited else direction),
        raw=direction if limited else None,
        std=std,
    )


def _vp(
    config: Any,
    time: Tensor,
    here: Tensor,
    *,
    state: Tensor,
    clean: Tensor,
    std: Tensor,
    raw: Tensor | None = None,
) -> Chain:
    """A chain on x = √ᾱ x0 + √(1 − ᾱ) ξ."""
    alpha, sigma = here.sqrt(), (1 - here).sqrt()
    from_state, from_output = _conversion(config.prediction_type, alpha, sigma)
    zero = torch.zeros_like(here)
    return Chain(time, zero + 1, from_state, from_output, state, clean, zero if raw is None else raw, zero, std)


def _euler_ancestral(scheduler: Any, eta: float, use_clipped: bool, start: int) -> Chain:
    sigmas = scheduler.sigmas.double().cpu()
    here, there = sigmas[:-1], sigmas[1:]
    std = (there**2 * (here**2 - there**2) / here**2).clamp(min=0).sqrt()
    down = (there**2 - std**2).clamp(min=0).sqrt() / here
    room = here**2 + 1
    zero = torch.zeros_like(here)
    kinds = {"epsilon": (zero + 1, -here), "v_prediction": (1 / room, -here / room.sqrt())}
    kind = scheduler.config.prediction_type
    if kind not in kinds:
        raise ValueError(f"EulerAncestralDiscreteScheduler does not implement prediction_type={kind!r}")
    from_state, from_output = kinds[kind]
    time = scheduler.timesteps.cpu()
    return Chain(time, room.rsqrt(), from_state, from_output, down, 1 - down, zero, zero, std)


def _dpm_multistep(scheduler: Any, eta: float, use_clipped: bool, start: int) -> Chain:
    config = scheduler.config
    if config.algorithm_type != "sde-dpmsolver++":
        raise ValueError(
            f"DPMSolverMultistepScheduler(algorithm_type={config.algorithm_type!r}) is not supported; "
            "use algorithm_type='sde-dpmsolver++'"
        )
    if config.solver_order > 2:
        raise ValueError("a third-order solver needs two earlier predictions; use solver_order=2")
    sigmas = scheduler.sigmas.double().cpu()
    if config.use_flow_sigmas:
        alpha, sigma = 1 - sigmas, sigmas
    else:
        alpha = (sigmas**2 + 1).rsqrt()
        sigma = sigmas * alpha
    log_ratio = alpha.log() - sigma.log()
    h = log_ratio[1:] - log_ratio[:-1]  # infinite where the chain ends at σ = 0
    gain = alpha[1:] * -torch.expm1(-2 * h)
    state = sigma[1:] / sigma[:-1] * torch.exp(-h)
    std = sigma[1:] * (-torch.expm1(-2 * h)).sqrt()

    # Second order adds weight · (x0 − previous x0)/r, r being the ratio of the last two steps in log-SNR.
    steps = len(h)
    second = torch.zeros_like(h)
    if config.solver_order == 2:
        midpoint = config.solver_type == "midpoint"
        weight = 0.5 * gain if midpoint else alpha[1:] * (torch.expm1(-2 * h) / (2 * h) + 1)
        second[1:] = weight[1:] * h[1:] / h[:-1]
        few = config.lower_order_final and steps < 15
        if config.euler_at_final or few or config.final_sigmas_type == "zero":
            second[-1] = 0
        second[start] = 0
    kind = config.prediction_type
    from_state, from_output = _conversion(kind, alpha[:-1], sigma[:-1])
    zero = torch.zeros_like(h)
    time = scheduler.timesteps.cpu()
    return Chain(time, zero + 1, from_state, from_output, state, gain + second, zero, -second, std)


def _flow_match(scheduler: Any, eta: float, use_clipped: bool, start: int) -> Chain:
    if not scheduler.config.stochastic_sampling:
        raise ValueError(
            "FlowMatchEulerDiscreteScheduler adds no noise unless stochastic_sampling=True: "
            "FlowMatchEulerDiscreteScheduler.from_config(scheduler.config, stochastic_sampling=True)"
        )
    sigmas = scheduler.sigmas.double().cpu()
    here, there = sigmas[:-1], sigmas[1:]
    zero = torch.zeros_like(here)
    return Chain(scheduler.timesteps.cpu(), zero + 1, zero + 1, -here, zero, 1 - there, zero, zero, there)


def _conversion(kind: str, alpha: Tensor, sigma: Tensor) -> tuple[Tensor, Tensor]:
    """(from_state, from_output) of x0 on x = α x0 + σ ξ."""
    one, zero = torch.ones_like(alpha), torch.zeros_like(alpha)
    kinds = {
        "epsilon": lambda: (1 / alpha, -sigma / alpha),
        "sample": lambda: (zero, one),
        "v_prediction": lambda: (alpha, -sigma),
        "flow_prediction": lambda: (one, -sigma),
    }
    if kind not in kinds:
        raise ValueError(f"prediction_type={kind!r} is none of {', '.join(kinds)}")
    return kinds[kind]()


def _limit(scheduler: Any) -> Limit | None:
    """What the scheduler does to the denoised estimate, row by row."""
    config = scheduler.config
    if config.get("thresholding", False):
        return scheduler._threshold_sample
    if config.get("clip_sample", False):
        bound = config.clip_sample_range
        return lambda x0: x0.clamp(-bound, bound)
    return None


_READERS: dict[str, Callable[[Any, float, bool, int], Chain]] = {
    "DDPMScheduler": _ddpm,
    "DDIMScheduler": _ddim,
    "EulerAncestralDiscreteScheduler": _euler_ancestral,
    "DPMSolverMultistepScheduler": _dpm_multistep,
    "FlowMatchEulerDiscreteScheduler": _flow_match,
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
}
_REFUSED = {
    "DPMSolverSDEScheduler": "correlates the noise of its two half steps",
    "ScoreSdeVeScheduler": "has a corrector that depends on norms over the batch",
    "KDPM2AncestralDiscreteScheduler": "takes two network calls a step, with one noise between them",
}
