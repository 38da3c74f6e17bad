"""Variance-preserving diffusion: DDPM ancestral sampling and DDIM, on any sub-grid of the schedule.

With x_t = √ᾱ_t x0 + √(1 − ᾱ_t) ξ, the transition from ᾱ_t to the less noisy ᾱ_s is

    std  = η √((1 − ᾱ_s)/(1 − ᾱ_t)) √(1 − ᾱ_t/ᾱ_s)
    mean = √ᾱ_s x0 + √(1 − ᾱ_s − std²) · (x − √ᾱ_t x0)/√(1 − ᾱ_t).

At η = 1 this is the posterior q(x_s | x_t, x0), i.e. DDPM; at 0 < η < 1, stochastic DDIM.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from foresample.targets.affine import AffineTarget, Denoiser, Grid, Kind, denoising_target


def vp(
    denoiser: Denoiser,
    alpha_bar: Tensor | Sequence[float],
    shape: Sequence[int],
    *,
    time: Tensor | None = None,
    eta: float = 1.0,
    predicts: Kind = "eps",
    reuse: Kind = "x0",
    clip: float | None = None,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> AffineTarget:
    """DDPM (eta = 1) or DDIM sampling with a denoiser.

    Args:
        denoiser: denoiser(x, time, row) -> what `predicts` names.
        alpha_bar: ᾱ at the states the chain visits, [N], rising from noise to data; the last transition
            goes to ᾱ = 1 and is deterministic.
        shape: of one state.
        time: what the network is told of each step, [N]; ᾱ itself by default.
        eta: noise of the chain, 0 < eta ≤ 1.
        predicts: what the network returns: "x0", "eps" or "v" (= α ξ − σ x0).
        reuse: what drafters reuse.
        clip: clamp the denoised estimate to ±clip.
        dtype: the chain's.
        device: the chain's.
    """
    here = torch.as_tensor(alpha_bar, dtype=torch.float64).cpu()
    if here.ndim != 1 or not ((here > 0) & (here < 1)).all() or not (here.diff() > 0).all():
        raise ValueError("alpha_bar must rise strictly within (0, 1), from noise to data; flip the schedule?")
    if not 0 < eta <= 1:
        raise ValueError(f"eta must be in (0, 1], not {eta}; without noise there is nothing to speculate on")
    there = torch.cat([here[1:], torch.ones(1, dtype=torch.float64)])
    alpha, sigma = here.sqrt(), (1 - here).sqrt()
    std = eta * ((1 - there) / (1 - here)).sqrt() * (1 - here / there).sqrt()
    state_weight = (1 - there - std**2).clamp(min=0).sqrt() / sigma
    return denoising_target(
        denoiser,
        Grid(alpha, sigma, here if time is None else time, flow=False),
        shape=torch.Size(shape),
        state_weight=state_weight,
        x0_weight=there.sqrt() - state_weight * alpha,
        std=std,
        predicts=predicts,
        reuse=reuse,
        clip=clip,
        dtype=dtype,
        device=device,
    )
