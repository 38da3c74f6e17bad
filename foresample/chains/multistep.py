"""Weights of multistep solvers: means that extrapolate the denoised estimate from one or two earlier ones.

With λ the log of the signal-to-noise ratio, h_k = λ_{k+1} − λ_k and estimates D_k, a second-order step adds

    c₁ (D_k − D_{k−1})/r₀,        r₀ = h_{k−1}/h_k,

and a third-order one, with differences Δ₀ = (D_k − D_{k−1})/r₀, Δ₁ = (D_{k−1} − D_{k−2})/r₁, r₁ = h_{k−2}/h_k,

    c₁ [Δ₀ + (Δ₀ − Δ₁) r₀/(r₀ + r₁)] + c₂ (Δ₀ − Δ₁)/(r₀ + r₁).

c₁ and c₂ are the solver's. Both functions return the numbers added to the weights of D_k, D_{k−1} (and D_{k−2}).
"""

from __future__ import annotations

import torch
from torch import Tensor


def second_order(h: Tensor, c1: Tensor) -> tuple[Tensor, Tensor]:
    """Weights of a second-order step, at every step; the first step has no earlier estimate and adds nothing."""
    weight = torch.zeros_like(h)
    weight[1:] = c1[1:] * h[1:] / h[:-1]
    return weight, -weight


def third_order(h: Tensor, c1: Tensor, c2: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Weights of a third-order step, at every step; the first adds nothing, the second is of second order."""
    now, previous = second_order(h, c1)
    older = torch.zeros_like(h)
    r0, r1 = h[1:-1] / h[2:], h[:-2] / h[2:]
    first = c1[2:] * (1 + r0 / (r0 + r1)) + c2[2:] / (r0 + r1)  # of Δ₀
    second = -(c1[2:] * r0 + c2[2:]) / (r0 + r1)  # of Δ₁
    now[2:], previous[2:], older[2:] = first / r0, second / r1 - first / r0, -second / r1
    return now, previous, older
