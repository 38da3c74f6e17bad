"""Flow matching with churn: the probability-flow ODE plus Langevin noise that leaves its marginals unchanged.

Interpolant x_σ = (1 − σ) x0 + σ ξ, velocity v = (x − E[x0|x])/σ, σ falling from 1 to 0. With g² = 2σ/(1 − σ),
score = −(x + (1 − σ) v)/σ and churn ε, an Euler–Maruyama step over dt < 0 is

    x_next = x + dt (v − ½ ε² g² score) + ε g √(−dt) z
           = (1 + dt ε²/(1 − σ)) x + dt (1 + ε²) v + ε g √(−dt) z.

The first transition where σ = 1 (g is infinite) and the last, to σ = 0, are plain Euler steps with v alone.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from foresample.chains.chain import Chain, Kind, Levels, denoising_chain


def flow_chain(
    sigmas: Tensor | Sequence[float],
    *,
    churn: float,
    time: Tensor | None = None,
    predicts: Kind = "v",
    reuse: Kind = "v",
) -> Chain:
    """Stochastic flow matching on this grid, with a velocity network or any other denoiser.

    Args:
        sigmas: noise levels of the states the chain visits, [N], falling within (0, 1]; the last transition
            goes to 0.
        churn: ε, how much noise the chain adds.
        time: the network's time input at each step, [N]; σ itself by default. Integers stay integers.
        predicts: the quantity that the network returns: "x0", "eps" or "v" (= ξ − x0).
        reuse: the quantity that drafters reuse.
    """
    here = torch.as_tensor(sigmas, dtype=torch.float64).cpu()
    if here.ndim != 1 or not ((here > 0) & (here <= 1)).all() or not (here.diff() < 0).all():
        raise ValueError("sigmas must fall strictly within (0, 1], from noise to data, without the final 0")
    if not churn > 0:
        raise ValueError(f"churn must be positive, not {churn}; without noise there is nothing to speculate on")
    there = torch.cat([here[1:], torch.zeros(1, dtype=torch.float64)])
    dt = there - here
    stochastic = (here < 1) & (there > 0)
    room = torch.where(stochastic, 1 - here, 1.0)  # 1 − σ where it is divided by
    std = torch.where(stochastic, churn * (2 * here / room * -dt).sqrt(), 0.0)
    v_weight = torch.where(stochastic, dt * (1 + churn**2), dt)
    # In terms of x0 = x − σ v, as `denoising_chain` takes it.
    state_weight = torch.where(stochastic, 1 + dt * churn**2 / room, 1.0) + v_weight / here
    return denoising_chain(
        Levels(1 - here, here, flow=True),
        state_weight=state_weight,
        x0_weight=-v_weight / here,
        std=std,
        predicts=predicts,
        reuse=reuse,
        time=here if time is None else time,
    )
