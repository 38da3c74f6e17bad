"""Variance-preserving diffusion: DDPM ancestral sampling and DDIM, on any sub-grid of the schedule.

With x_t = √ᾱ_t x0 + √(1 − ᾱ_t) ξ, the transition from ᾱ_t to the less noisy ᾱ_s is

    std  = η √((1 − ᾱ_s)/(1 − ᾱ_t)) √(1 − ᾱ_t/ᾱ_s)
    mean = √ᾱ_s x0 + √(1 − ᾱ_s − std²) · (x − √ᾱ_t x0)/√(1 − ᾱ_t).

At η = 1 this is the posterior q(x_s | x_t, x0), i.e. DDPM; at 0 < η < 1, stochastic DDIM. DDPM's larger variance
("fixed_large") keeps the mean of η = 1 and has std = √(1 − ᾱ_t/ᾱ_s), but the last transition adds no noise.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor

from foresample.chains.chain import Chain, Clip, Kind, Levels, denoising_chain

_LEAVES = 0.1  # part of its range by which a learned variance may fall below the range


def vp_chain(
    alpha_bar: Tensor | Sequence[float],
    *,
    time: Tensor | None = None,
    eta: float = 1.0,
    predicts: Kind = "eps",
    reuse: Kind = "x0",
    clip: float | None = None,
    variance: Literal["small", "large"] = "small",
    learned_base: float | None = None,
) -> Chain:
    """DDPM (eta = 1) or DDIM on this grid.

    Args:
        alpha_bar: ᾱ at the states the chain visits, [N], rising from noise to data; the last transition
            goes to ᾱ = 1 and is deterministic.
        time: the network's time input at each step, [N]; ᾱ itself by default. Integers stay integers.
        eta: noise of the chain, 0 < eta ≤ 1.
        predicts: the quantity that the network returns: "x0", "eps" or "v" (= α ξ − σ x0).
        reuse: the quantity that drafters reuse.
        clip: clamp the denoised estimate to ±clip.
        variance: "small", DDPM's posterior variance β̃, or "large", β (OpenAI's fixed_large); the latter needs eta = 1.
        learned_base: for a network with a learned variance ("learned_range": it returns 2C channels, the second half
            gives the variance between β̃ and β as −1 … 1): its lower bound as a part of the variance at the lower
            end of its range (`learned_range`), for example 0.9. Sampling stops with an error if the variance falls
            below the bound; `foresample.check` reports how near it comes.
    """
    here = torch.as_tensor(alpha_bar, dtype=torch.float64).cpu()
    if here.ndim != 1 or not ((here > 0) & (here < 1)).all() or not (here.diff() > 0).all():
        raise ValueError("alpha_bar must rise strictly within (0, 1), from noise to data; flip the schedule?")
    if not 0 < eta <= 1:
        raise ValueError(f"eta must be in (0, 1], not {eta}; without noise there is nothing to speculate on")
    if variance not in ("small", "large"):
        name = repr(variance) if isinstance(variance, str) else type(variance).__name__
        raise ValueError(
            f"variance must be 'small' or 'large', not {name}: for stds of your own, make the chain with variance="
            "'small' and replace them, dataclasses.replace(chain, std=std)"
        )
    if isinstance(clip, Tensor) and clip.numel() != 1:
        raise ValueError(
            f"clip must be one number, not a tensor of {clip.numel()}: for a clip of its own at each step, use "
            "foresample.targets.from_step"
        )
    if variance == "large" and (eta != 1 or learned_base is not None):
        raise ValueError("variance='large' is DDPM's: use eta=1 and no learned_base with it")
    there = torch.cat([here[1:], torch.ones(1, dtype=torch.float64)])
    towards, x0_weight, std = transition(here, there, eta)
    if variance == "large":
        std = torch.where(there < 1, 1 - here / there, 0.0).sqrt()
    chain = denoising_chain(
        levels(here),
        state_weight=towards,
        x0_weight=x0_weight,
        std=std,
        predicts=predicts,
        reuse=reuse,
        time=here if time is None else time,
        limit=None if clip is None else Clip(clip),
    )
    if learned_base is None:
        return chain
    if eta != 1:
        raise ValueError(f"a learned variance is DDPM's: use eta=1, not {eta}")
    return learned_range(chain, 1 - here / there, learned_base)


def learned_range(chain: Chain, beta: Tensor, base: float) -> Chain:
    """DDPM with a learned variance between the chain's own, β̃, and β = 1 − ᾱ_t/ᾱ_s, in its logarithm.

    Networks sometimes leave that range a little. The std² of the chain, below which the variance must not fall, is
    `base`, less than 1, times the variance a tenth of the range below β̃.
    """
    if not 0 < base < 1:
        raise ValueError(
            f"base must lie within (0, 1), not {base}: it is the part of the posterior variance that the learned one "
            "never falls below"
        )
    noisy = chain.std > 0
    low, high = (torch.where(noisy, v, 1.0).log() for v in (chain.std**2, beta))
    std = torch.where(noisy, (base * (low - _LEAVES * (high - low)).exp()).sqrt(), 0.0)
    typical = torch.where(noisy, (((low + high) / 2).exp() - std**2).sqrt(), 0.0)
    return replace(chain, std=std, extra_weight=typical, low_variance=low, high_variance=high)


def transition(here: Tensor, there: Tensor, eta: float) -> tuple[Tensor, Tensor, Tensor]:
    """Weights of x and x0, and std, of the transitions from ᾱ = here to ᾱ = there."""
    std = eta * ((1 - there) / (1 - here)).clamp(min=0).sqrt() * (1 - here / there).clamp(min=0).sqrt()
    towards = (1 - there - std**2).clamp(min=0).sqrt() / (1 - here).sqrt()
    return towards, there.sqrt() - towards * here.sqrt(), std


def levels(alpha_bar: Tensor) -> Levels:
    """x = √ᾱ x0 + √(1 − ᾱ) ξ."""
    return Levels(alpha_bar.sqrt(), (1 - alpha_bar).sqrt())
