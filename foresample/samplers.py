"""k-diffusion's stochastic samplers, drawn speculatively: the same names, arguments and distribution.

    from k_diffusion.sampling import sample_euler_ancestral       # before
    from foresample.samplers import sample_euler_ancestral        # after

x holds the states at sigmas[0], [R, *shape]; `model(x, sigma, **extra_args)` returns denoised states and is given
states at different levels in one call; tensors of R rows in extra_args go with their samples. By keyword the samplers
also take the settings of `foresample.sample` (`window`, `drafter`, `slots`, …) and

    seed      of the samples' noise; torch's global generator by default, as in k-diffusion
    seeds     a seed for each sample instead
    report    a function that receives the costs of the run (`foresample.Report`)

Two arguments are refused: `callback`, which expects every step once and in order, and `noise_sampler`, because the
noise of rejected drafts is reused and must be N(0, I).
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from functools import partial
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


class SamplerKeywords(RunKeywords, total=False):
    """The keywords of the samplers, each taking those of k-diffusion's sampler of its name; see the module."""

    extra_args: dict[str, Any] | None
    callback: None
    disable: bool | None
    s_churn: float
    s_tmin: float
    s_tmax: float
    s_noise: float
    eta: float
    noise_sampler: None
    r: float
    solver_type: Literal["midpoint", "heun"]
    seed: int | None
    seeds: Sequence[int] | Tensor | None
    report: Callable[[Report], None] | None


class Sampler:
    """A sampler of k-diffusion: the chain it walks, made of (sigmas, **own), and the defaults of these arguments."""

    def __init__(self, chain: Callable[..., Chain], **own: Any) -> None:
        self.chain, self.own = chain, [name for name in own if name != "noise_sampler"]
        defaults: dict[str, Any] = dict.fromkeys(["model", "x", "sigmas"], inspect.Parameter.empty)
        defaults |= {"extra_args": None, "callback": None, "disable": None, **own}
        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        parameters = [inspect.Parameter(name, kind, default=value) for name, value in defaults.items()]
        rest = inspect.Parameter("settings", inspect.Parameter.VAR_KEYWORD)
        self.__signature__ = inspect.Signature([*parameters, rest])

    def __call__(
        self,
        model: Callable[..., Tensor],
        x: Tensor,
        sigmas: Tensor,
        *positional: Any,
        **keywords: Unpack[SamplerKeywords],
    ) -> Tensor:
        bound = self.__signature__.bind(model, x, sigmas, *positional, **keywords)
        bound.apply_defaults()
        given = bound.arguments
        settings, count, arguments = given["settings"], len(x), given["extra_args"] or {}
        seed, seeds, report = (settings.pop(name, None) for name in ("seed", "seeds", "report"))
        chain = self.chain(sigmas, **{name: given[name] for name in self.own})
        for name in ("callback", "noise_sampler"):
            if given.get(name) is not None:
                raise ValueError(
                    f"{name} cannot be had with speculative samples: leave it out, or use k-diffusion's own"
                )
        require_fixed(model)
        if not count:
            return x

        def denoiser(states: Tensor, sigma: Tensor, row: Tensor) -> Tensor:
            theirs = {name: for_rows(value, row, count) for name, value in arguments.items()}
            return model(states.to(x.dtype), sigma.to(x.dtype), **theirs)

        dtype = torch.promote_types(x.dtype, torch.float32)
        target = from_chain(denoiser, chain, x.shape[1:], start=x, dtype=dtype, device=x.device)
        if seed is None and seeds is None:
            seeds = torch.randint(2**62, (count,))
        run = sample(target, seeds=resolve_seeds(count, seed or 0, seeds), **settings)
        if report is not None:
            report(run.report)
        return run.samples.to(x.dtype)


def _churn_chain(steps: Literal["euler", "heun", "midpoint"], sigmas: Tensor, **own: float) -> Chain:
    """EDM's stochastic sampler; without s_churn it adds no noise and is refused."""
    if not own["s_churn"] > 0:
        raise ValueError(
            "without s_churn this sampler is an ODE, which adds no noise to speculate on; pass s_churn, or use "
            "sample_euler_ancestral"
        )
    if float(sigmas[-1]) != 0:
        raise ValueError("sigmas must end with 0 for this sampler, as k-diffusion's schedules do")
    churn, low, high = own["s_churn"], own["s_tmin"], own["s_tmax"]
    return chains.edm_chain(sigmas, steps=steps, churn=churn, s_min=low, s_max=high, s_noise=own["s_noise"])


_CHURN = {"s_churn": 0.0, "s_tmin": 0.0, "s_tmax": math.inf, "s_noise": 1.0}
_NOISE = {"eta": 1.0, "s_noise": 1.0, "noise_sampler": None}

sample_euler = Sampler(partial(_churn_chain, "euler"), **_CHURN)
"""EDM's stochastic sampler with Euler steps."""
sample_heun = Sampler(partial(_churn_chain, "heun"), **_CHURN)
"""EDM's stochastic sampler with Heun steps, two network calls each."""
sample_dpm_2 = Sampler(partial(_churn_chain, "midpoint"), **_CHURN)
"""EDM's stochastic sampler with midpoint steps, two network calls each."""
sample_euler_ancestral = Sampler(chains.euler_ancestral_chain, **_NOISE)
"""Euler ancestral sampling."""
sample_dpm_2_ancestral = Sampler(chains.dpm_2_ancestral_chain, **_NOISE)
"""Ancestral sampling with midpoint steps, two network calls each."""
sample_dpmpp_2s_ancestral = Sampler(chains.dpmpp_2s_ancestral_chain, **_NOISE)
"""Ancestral sampling with DPM-Solver++(2S) steps, two network calls each."""
sample_dpmpp_sde = Sampler(chains.dpmpp_sde_chain, **_NOISE, r=0.5)
"""DPM-Solver++ SDE, two network calls and two noises a step."""
sample_dpmpp_2m_sde = Sampler(chains.dpmpp_2m_sde_chain, **_NOISE, solver_type="midpoint")
"""DPM-Solver++(2M) SDE."""
sample_dpmpp_3m_sde = Sampler(chains.dpmpp_3m_sde_chain, **_NOISE)
"""DPM-Solver++(3M) SDE."""
