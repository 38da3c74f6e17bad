"""Samplers on noise levels σ, x = x0 + σ ξ, in k-diffusion's convention: a denoiser model(x, σ) -> x0.

Levels σ_0 > … > σ_N ≥ 0 make N transitions. From σ to σ' < σ an **ancestral step** goes down to

    σ_down = √(σ'² − σ_up²),      σ_up = min(σ', η σ' √(σ² − σ'²)/σ),

on a straight line towards the estimate D, and up again by noise:

    x' = (σ_down/σ) x + (1 − σ_down/σ) D + s_noise σ_up z.

Euler takes D at x. The second-order steps (module `chain`) take the estimate also at an inner state:

    DPM-2 ancestral     y at √(σ σ_down)             D + (D₂ − D) √(σ/σ_down)
    DPM++ 2S ancestral  y at √(σ σ_down)             D₂
    DPM++ SDE           y at σ_s = σ^{1−r} σ'^r,      D + (D₂ − D)/(2r)
                        itself an ancestral step with noise ξ

In DPM++ SDE the two noises of a step are increments of one Brownian path in σ: the outer one is ρ ξ + √(1 − ρ²) z with
ρ² = (σ − σ_s)/(σ − σ'): given the extra noise ξ the step has the fixed std s_noise σ_up √(1 − ρ²).

**DPM++ 2M and 3M SDE** have one estimate a step and extrapolate it from earlier ones (module `multistep`). With
h = ln(σ/σ'),

    x' = e^{−(1+η)h} x + (1 − e^{−(1+η)h}) D + … + s_noise σ' √(1 − e^{−2ηh}) z.

A transition to σ' = 0 is D itself, without noise. Levels that do not end at 0 leave noise in the samples: that is
allowed, with a warning.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor

from foresample.chains.chain import Chain, Levels, denoising_chain
from foresample.chains.multistep import second_order, third_order

Sigmas = Tensor | Sequence[float]
"""Noise levels of a chain, [N + 1], falling; the last may be 0."""


def euler_ancestral_chain(sigmas: Sigmas, *, eta: float = 1.0, s_noise: float = 1.0) -> Chain:
    """Euler ancestral sampling."""
    here, there = _pairs(sigmas, eta)
    down, up = _ancestral(here, there, eta)
    return _chain(here, down / here, s_noise * up)


def dpm_2_ancestral_chain(sigmas: Sigmas, *, eta: float = 1.0, s_noise: float = 1.0) -> Chain:
    """Ancestral sampling with midpoint steps: two network calls a step."""
    here, there = _pairs(sigmas, eta)
    down, up = _ancestral(here, there, eta)
    towards = down / here
    # Where a step goes down to 0, k-diffusion's takes it with Euler and adds no noise.
    chain = _chain(here, towards, torch.where(down > 0, s_noise * up, 0.0))
    return two_calls(chain, here, towards.sqrt(), torch.where(down > 0, towards.rsqrt(), 0.0))


def dpmpp_2s_ancestral_chain(sigmas: Sigmas, *, eta: float = 1.0, s_noise: float = 1.0) -> Chain:
    """Ancestral sampling with DPM-Solver++(2S) steps: two network calls a step."""
    here, there = _pairs(sigmas, eta)
    down, up = _ancestral(here, there, eta)
    chain = _chain(here, down / here, s_noise * up)
    return two_calls(chain, here, (down / here).sqrt(), torch.ones_like(here))


def dpmpp_sde_chain(sigmas: Sigmas, *, eta: float = 1.0, s_noise: float = 1.0, r: float = 0.5) -> Chain:
    """DPM-Solver++ SDE: two network calls a step, and two noises, the inner of which is extra noise."""
    if not 0 < r < 1:
        raise ValueError(f"r must lie within (0, 1), not {r}: the inner state stands between the two levels")
    here, there = _pairs(sigmas, eta)
    down, up = _ancestral(here, there, eta)
    inner = torch.where(there > 0, here ** (1 - r) * there**r, here)
    inner_down, inner_up = _ancestral(here, inner, eta)
    rho = ((here - inner) / (here - there)).sqrt()
    outer = s_noise * up
    chain = _chain(here, down / here, outer * (1 - rho**2).sqrt())
    half = torch.full_like(here, 1 / (2 * r))
    chain = two_calls(chain, here, inner_down / here, half, inner, once=there == 0)
    return replace(chain, inner_extra=s_noise * inner_up, extra_weight=outer * rho)


def dpmpp_2m_sde_chain(
    sigmas: Sigmas,
    *,
    eta: float = 1.0,
    s_noise: float = 1.0,
    solver_type: Literal["midpoint", "heun"] = "midpoint",
) -> Chain:
    """DPM-Solver++(2M) SDE."""
    if solver_type not in ("midpoint", "heun"):
        raise ValueError(f"solver_type must be 'midpoint' or 'heun', not {solver_type!r}")
    here, there = _pairs(sigmas, eta)
    h = (here / there).log()
    gain = -torch.expm1(-(1 + eta) * h)
    c1 = 0.5 * gain if solver_type == "midpoint" else 1 - gain / ((1 + eta) * h)
    return _multistep(here, there, eta, s_noise, *second_order(h, c1))


def dpmpp_3m_sde_chain(sigmas: Sigmas, *, eta: float = 1.0, s_noise: float = 1.0) -> Chain:
    """DPM-Solver++(3M) SDE: its mean needs two earlier estimates."""
    here, there = _pairs(sigmas, eta)
    h = (here / there).log()
    c1 = 1 + torch.expm1(-(1 + eta) * h) / ((1 + eta) * h)
    c2 = 0.5 - c1 / ((1 + eta) * h)
    return _multistep(here, there, eta, s_noise, *third_order(h, c1, c2))


def karras_sigmas(steps: int, sigma_min: float = 0.002, sigma_max: float = 80.0, rho: float = 7.0) -> Tensor:
    """Noise levels from sigma_max down to sigma_min, even in σ^(1/ρ), and 0, as k-diffusion's: [steps + 1], float64."""
    if not 0 < sigma_min < sigma_max or steps < 2 or not rho > 0:
        raise ValueError(
            f"cannot lay {steps} levels from sigma_max={sigma_max:g} to sigma_min={sigma_min:g} with "
            f"rho={rho:g}: use at least 2 steps, 0 < sigma_min < sigma_max and rho > 0"
        )
    ramp = torch.linspace(0, 1, steps, dtype=torch.float64)
    top, bottom = sigma_max ** (1 / rho), sigma_min ** (1 / rho)
    return torch.cat([(top + ramp * (bottom - top)) ** rho, ramp.new_zeros(1)])


def two_calls(
    chain: Chain,
    here: Tensor,
    weight: Tensor,
    second: Tensor,
    time: Tensor | None = None,
    once: Tensor | None = None,
) -> Chain:
    """The chain with a second estimate at weight·x + (1 − weight)·D, which is at level weight·σ unless given.

    The steps in `once`, by default those that go down to 0 at once, are of first order: their second estimate is not
    used.
    """
    once = chain.state_weight == 0 if once is None else once
    return replace(
        chain,
        inner_weight=torch.where(once, 1.0, weight),
        second_weight=torch.where(once, 0.0, second),
        inner_time=torch.where(once, here, weight * here if time is None else time),
    )


def check_levels(sigmas: Sigmas) -> Tensor:
    """The levels in float64, or an error."""
    levels = torch.as_tensor(sigmas, dtype=torch.float64).cpu()
    falls = levels.ndim == 1 and len(levels) > 1 and bool((levels.diff() < 0).all())
    if not falls or not torch.isfinite(levels).all() or levels[-1] < 0:
        raise ValueError(
            "sigmas must fall strictly from noise to data: at least two levels, all positive but perhaps a final 0"
        )
    return levels


def _pairs(sigmas: Sigmas, eta: float) -> tuple[Tensor, Tensor]:
    """The levels before and after each step of a sampler that adds noise."""
    if not eta > 0:
        raise ValueError(f"eta must be positive, not {eta}: without noise there is nothing to speculate on")
    levels = check_levels(sigmas)
    if levels[-1] > 0:
        warnings.warn(
            f"sigmas end at {float(levels[-1]):g}, so samples keep noise of that level: append a 0, as "
            "k-diffusion's schedules and karras_sigmas do",
            stacklevel=3,
        )
    return levels[:-1], levels[1:]


def _ancestral(here: Tensor, there: Tensor, eta: float) -> tuple[Tensor, Tensor]:
    """σ_down and σ_up of the module."""
    up = torch.minimum(there, eta * there * (here**2 - there**2).sqrt() / here)
    return (there**2 - up**2).clamp(min=0).sqrt(), up


def _multistep(here: Tensor, there: Tensor, eta: float, s_noise: float, now: Tensor, *earlier: Tensor) -> Chain:
    """The exponential step with these weights added; a step to σ' = 0 returns the estimate itself."""
    h = (here / there).log()  # infinite where σ' = 0
    chain = _chain(here, 1 + torch.expm1(-(1 + eta) * h), s_noise * there * (-torch.expm1(-2 * eta * h)).sqrt())
    now, previous, *older = (torch.where(there > 0, weight, 0.0) for weight in (now, *earlier))
    return replace(
        chain,
        prediction_weight=chain.prediction_weight + now,
        previous_weight=previous,
        older_weight=older[0] if older else None,
    )


def _chain(here: Tensor, towards: Tensor, std: Tensor) -> Chain:
    """x' = towards·x + (1 − towards)·D + std·z, with σ as the network's time."""
    if not (std > 0).any():
        raise ValueError(
            "no step of these levels adds noise, so there is nothing to speculate on; use more levels, and s_noise "
            "above 0"
        )
    return denoising_chain(
        Levels.exploding(here),
        state_weight=towards,
        x0_weight=1 - towards,
        std=std,
        predicts="x0",
        reuse="x0",
        time=here,
        start_scale=float(here[0]),
    )
