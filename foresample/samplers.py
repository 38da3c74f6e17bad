"""k-diffusion's stochastic samplers, drawn speculatively: the same names, the same arguments, the same law.

    from k_diffusion.sampling import sample_euler_ancestral       # before
    from foresample.samplers import sample_euler_ancestral        # after

x holds the states at sigmas[0], [R, *shape]; `model(x, sigma, **extra_args)` returns denoised states and is given
states at different levels in one call; what extra_args hold for each sample, tensors of R rows, goes with it. By
keyword they also take the settings of `foresample.sample` (`window`, `drafter`, `slots`, …) and

    seed      of the samples' noise; torch's global generator otherwise, as in k-diffusion
    report    a function that is told what the run cost (`foresample.Report`)

Not taken: `callback`, which sees the states of a step that is taken once, and `noise_sampler`, since a rejected draft's
noise is used again and must be known to be N(0, I).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, Unpack

import torch
from torch import Tensor

from foresample import chains
from foresample.chains import Chain
from foresample.core.noise import resolve_seeds
from foresample.core.report import Report
from foresample.engine import sample
from foresample.integrations.networks import for_rows, require_fixed
from foresample.settings import RunKeywords
from foresample.targets import from_chain

__all__ = [
    "sample_dpm_2",
    "sample_dpm_2_ancestral",
    "sample_dpmpp_2m_sde",
    "sample_dpmpp_2s_ancestral",
    "sample_dpmpp_3m_sde",
    "sample_dpmpp_sde",
    "sample_euler",
    "sample_euler_ancestral",
    "sample_heun",
]

Model = Callable[..., Tensor]
Options = dict[str, Any] | None


class SamplerKeywords(RunKeywords, total=False):
    """What the samplers take besides k-diffusion's arguments; see the module."""

    seed: int | None
    report: Callable[[Report], None] | None


@dataclass(frozen=True)
class ChurnSampler:
    """EDM's stochastic sampler; without s_churn it adds no noise and is refused."""

    steps: Literal["euler", "heun", "midpoint"]

    def __call__(
        self,
        model: Model,
        x: Tensor,
        sigmas: Tensor,
        extra_args: Options = None,
        callback: None = None,
        disable: bool | None = None,
        s_churn: float = 0.0,
        s_tmin: float = 0.0,
        s_tmax: float = math.inf,
        s_noise: float = 1.0,
        **ours: Unpack[SamplerKeywords],
    ) -> Tensor:
        if not s_churn > 0:
            raise ValueError(
                "without s_churn this sampler is an ODE, which adds no noise to speculate on; pass s_churn, or use "
                "sample_euler_ancestral"
            )
        if float(sigmas[-1]) != 0:
            raise ValueError("sigmas must end with 0 for this sampler, as k-diffusion's schedules do")
        churn = {"churn": s_churn, "s_min": s_tmin, "s_max": s_tmax, "s_noise": s_noise}
        return _draw(
            model, x, chains.edm_chain(sigmas, steps=self.steps, **churn), extra_args, callback, None, **ours
        )


@dataclass(frozen=True)
class NoiseSampler:
    """A sampler that adds noise at every step but the last, scaled by eta."""

    chain: Callable[..., Chain]
    """Made of (sigmas, eta=, s_noise=)."""

    def __call__(
        self,
        model: Model,
        x: Tensor,
        sigmas: Tensor,
        extra_args: Options = None,
        callback: None = None,
        disable: bool | None = None,
        eta: float = 1.0,
        s_noise: float = 1.0,
        noise_sampler: None = None,
        **ours: Unpack[SamplerKeywords],
    ) -> Tensor:
        chain = self.chain(sigmas, eta=eta, s_noise=s_noise)
        return _draw(model, x, chain, extra_args, callback, noise_sampler, **ours)


sample_euler = ChurnSampler("euler")
"""EDM's stochastic sampler with Euler steps."""
sample_heun = ChurnSampler("heun")
"""EDM's stochastic sampler with Heun steps, two network calls each."""
sample_dpm_2 = ChurnSampler("midpoint")
"""EDM's stochastic sampler with midpoint steps, two network calls each."""
sample_euler_ancestral = NoiseSampler(chains.euler_ancestral_chain)
"""Euler ancestral sampling."""
sample_dpm_2_ancestral = NoiseSampler(chains.dpm_2_ancestral_chain)
"""Ancestral sampling with midpoint steps, two network calls each."""
sample_dpmpp_2s_ancestral = NoiseSampler(chains.dpmpp_2s_ancestral_chain)
"""Ancestral sampling with DPM-Solver++(2S) steps, two network calls each."""
sample_dpmpp_3m_sde = NoiseSampler(chains.dpmpp_3m_sde_chain)
"""DPM-Solver++(3M) SDE."""


def sample_dpmpp_sde(
    model: Model,
    x: Tensor,
    sigmas: Tensor,
    extra_args: Options = None,
    callback: None = None,
    disable: bool | None = None,
    eta: float = 1.0,
    s_noise: float = 1.0,
    noise_sampler: None = None,
    r: float = 0.5,
    **ours: Unpack[SamplerKeywords],
) -> Tensor:
    """DPM-Solver++ SDE, two network calls and two noises a step."""
    chain = chains.dpmpp_sde_chain(sigmas, eta=eta, s_noise=s_noise, r=r)
    return _draw(model, x, chain, extra_args, callback, noise_sampler, **ours)


def sample_dpmpp_2m_sde(
    model: Model,
    x: Tensor,
    sigmas: Tensor,
    extra_args: Options = None,
    callback: None = None,
    disable: bool | None = None,
    eta: float = 1.0,
    s_noise: float = 1.0,
    noise_sampler: None = None,
    solver_type: Literal["midpoint", "heun"] = "midpoint",
    **ours: Unpack[SamplerKeywords],
) -> Tensor:
    """DPM-Solver++(2M) SDE."""
    chain = chains.dpmpp_2m_sde_chain(sigmas, eta=eta, s_noise=s_noise, solver_type=solver_type)
    return _draw(model, x, chain, extra_args, callback, noise_sampler, **ours)


def _draw(
    model: Model,
    x: Tensor,
    chain: Chain,
    extra_args: Options,
    callback: object,
    noise_sampler: object,
    *,
    seed: int | None = None,
    report: Callable[[Report], None] | None = None,
    **settings: Unpack[RunKeywords],
) -> Tensor:
    """Samples of the chain, from states x."""
    for name, given in (("callback", callback), ("noise_sampler", noise_sampler)):
        if given is not None:
            raise ValueError(
                f"{name} cannot be had with speculative samples: leave it out, or use k-diffusion's own"
            )
    require_fixed(model)
    arguments, count = extra_args or {}, len(x)

    def denoiser(states: Tensor, sigma: Tensor, row: Tensor) -> Tensor:
        told = {name: for_rows(value, row, count) for name, value in arguments.items()}
        return model(states.to(x.dtype), sigma.to(x.dtype), **told)

    dtype = torch.promote_types(x.dtype, torch.float32)
    target = from_chain(denoiser, chain, x.shape[1:], start=x, dtype=dtype, device=x.device)
    seeds = torch.randint(2**62, (count,)) if seed is None else resolve_seeds(count, seed)
    run = sample(target, seeds=seeds, **settings)
    if report is not None:
        report(run.report)
    return run.samples.to(x.dtype)
