"""EDM's stochastic sampler (Karras et al. 2022, algorithm 2) around any denoiser model(x, σ).

The sampler adds noise at level σ_k ("churn") and then steps down:

    σ̂_k = σ_k (1 + γ_k)
    x̂_k = x_k + s_noise √(σ̂_k² − σ_k²) z_k
    x_{k+1} = x̂_k + (σ_{k+1} − σ̂_k) (x̂_k − D(x̂_k, σ̂_k))/σ̂_k,      σ_N = 0.

From x_k to x_{k+1} the noise passes through the network, so that transition is not Gaussian. From x̂_k to
x̂_{k+1} it is added last. The chain therefore runs on the churned states:

    x̂_{k+1} = (σ_{k+1}/σ̂_k) x̂_k + (1 − σ_{k+1}/σ̂_k) D(x̂_k, σ̂_k) + std_k z,
    std_k   = s_noise √(σ̂_{k+1}² − σ_{k+1}²),   0 for the last transition and where γ_{k+1} = 0.

It starts at x̂_0 ~ N(0, (σ_0² + s_noise² (σ̂_0² − σ_0²)) I) and ends at x_N = D(x̂_{N−1}, σ̂_{N−1}).

Second-order steps call the network again at an inner state y on the line from x̂ to D, at level ρ σ̂, and go on with an
effective estimate in place of D (module `chain`):

    Heun      ρ = σ_{k+1}/σ̂_k         D + (D₂ − D)/(2ρ)      the slope is the mean of those at both ends
    midpoint  ρ = √(σ_{k+1}/σ̂_k)      D + (D₂ − D)/ρ         the slope is that at y
"""

from __future__ import annotations

import math
from typing import Literal

import torch

from foresample.chains.chain import Chain, Levels, denoising_chain
from foresample.chains.sigmas import Sigmas, check_levels, two_calls


def edm_chain(
    sigmas: Sigmas,
    *,
    churn: float,
    s_min: float = 0.0,
    s_max: float = math.inf,
    s_noise: float = 1.0,
    steps: Literal["euler", "heun", "midpoint"] = "euler",
) -> Chain:
    """EDM's stochastic sampler on the churned states; the network gets their levels and returns denoised x0.

    Args:
        sigmas: the schedule's noise levels, [N], falling; the final 0 may be given or left out.
        churn: S_churn; a step's level is raised by γ = min(churn/N, √2 − 1).
        s_min: levels below are not churned.
        s_max: levels above are not churned.
        s_noise: scales the noise added.
        steps: "euler", one network call a step; "heun" (the paper's) or "midpoint", two.
    """
    if steps not in ("euler", "heun", "midpoint"):
        raise ValueError(f"steps must be 'euler', 'heun' or 'midpoint', not {steps!r}")
    levels = check_levels(sigmas)
    here = levels[levels > 0]
    if not s_noise > 0:
        raise ValueError(f"s_noise must be positive, not {s_noise}; EDM uses 1 to 1.007")
    if not churn > 0:
        raise ValueError(
            f"churn must be positive, not {churn}: without it the sampler is an ODE and there is nothing to "
            "speculate on; EDM uses 5 to 80"
        )
    if (
        isinstance(sigmas, torch.Tensor) and sigmas.is_floating_point()
    ):  # a bound on a level counts as that level
        s_min, s_max = (float(torch.tensor(bound, dtype=sigmas.dtype)) for bound in (s_min, s_max))
    gamma = min(churn / len(here), math.sqrt(2) - 1)
    churned = torch.where((here >= s_min) & (here <= s_max), here * (1 + gamma), here)
    added = s_noise * (churned**2 - here**2).sqrt()
    if not (added[1:] > 0).any():
        raise ValueError(
            f"no level after the first lies within s_min={s_min:g} … s_max={s_max:g}, so no step adds noise; "
            "widen that range"
        )
    zero = here.new_zeros(1)
    there = torch.cat([here[1:], zero])
    towards = there / churned
    chain = denoising_chain(
        Levels.exploding(churned),
        state_weight=towards,
        x0_weight=1 - towards,
        std=torch.cat([added[1:], zero]),
        predicts="x0",
        reuse="x0",
        time=churned,
        start_scale=math.hypot(here[0], added[0]),
        start_added=float(added[0]),
    )
    if steps == "euler":
        return chain
    inner = towards if steps == "heun" else towards.sqrt()
    return two_calls(chain, churned, inner, 1 / inner if steps == "midpoint" else 0.5 / inner)
