"""The sampler's decisions in one dimension, about two unit Gaussians a distance δ apart.

At one transition the draft and the target are Gaussians with the same scale and means a *mismatch* δ apart
(in units of that scale). Along the line through both means the draft is N(0, 1) and the target N(δ, 1);
in all other directions they agree. So every decision of the sampler is about the coordinate s along that line, with

    ratio r(s) = target/draft = exp(δ s − δ²/2).

A block that has reached acceptance level p ∈ (0, 1] compares p·N(δ, 1) with N(0, 1). They cross at the
threshold t = δ/2 − ln(p)/δ, and

    surplus  S = ∫ (p·target − draft)₊ = p Φ̄(t − δ) − Φ̄(t)        mass to add on s > t
    deficit  c = ∫ (draft − p·target)₊ = S + 1 − p                  mass to remove on s < t

The functions here are pure, elementwise and float64, and take ln p (`log_p` ≤ 0), never p: p = 1e-300 is
ordinary. They keep a relative error below 1e-9 for δ from 0 to 1e4 wherever the value can influence a sample.
The value cannot influence one where the acceptance probability S/c is under 2⁻⁵³ (no uniform falls below it), where
s < −8.5 (Φ(s) < 1e-17), and for 1 − F under 2⁻⁵³, the spacing of float64 numbers below 1. docs/theory.md,
"Numerics", explains the form of each formula.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache

import numpy as np
import torch
from torch import Tensor
from torch.special import erfcx, ndtri

SMALL = 0.5  # below this mismatch, differences of Φ are taken as integrals over their width
BEYOND = 40.0  # φ(40) = 0 in float64: thresholds are not followed further out than this
NEWTON_STEPS = 8
NEAR = 0.75  # above this survival level, Newton starts close to the threshold
TINY = torch.finfo(torch.float64).tiny
ULP = 2.0**-53  # spacing of float64 below 1


def normal_cdf(x: Tensor) -> Tensor:
    """Φ(x), with its relative accuracy in the lower tail (torch's own ndtr loses it below −5)."""
    return 0.5 * torch.erfc(x * -math.sqrt(0.5))


def log_ratio(mismatch: Tensor, s: Tensor) -> Tensor:
    """ln(target/draft) at coordinate s: δ s − δ²/2."""
    return mismatch * (s - 0.5 * mismatch)


def threshold(mismatch: Tensor, log_p: Tensor) -> Tensor:
    """The coordinate where p·target = draft: t = δ/2 − ln(p)/δ (δ/2 at p = 1, ∞ at δ = 0 with p < 1)."""
    slope = torch.where(log_p < 0, -log_p / mismatch, torch.zeros_like(log_p))
    return 0.5 * mismatch + slope


def surplus(mismatch: Tensor, log_p: Tensor) -> Tensor:
    """S = ∫ (p·target − draft)₊ = p Φ̄(t − δ) − Φ̄(t)."""
    t = threshold(mismatch, log_p).clamp(max=BEYOND)
    narrow = mismatch.clamp(max=SMALL)
    small = _density(t) * _mills_drop(t - narrow, narrow)
    t = threshold(mismatch, log_p)
    large = log_p.exp() * normal_cdf(mismatch - t) - normal_cdf(-t)
    value = torch.where(mismatch < SMALL, small, large.clamp(min=0.0))
    return torch.where(log_p < 0, value, torch.erf(mismatch / (2 * math.sqrt(2))))


def deficit(mismatch: Tensor, log_p: Tensor) -> Tensor:
    """c = ∫ (draft − p·target)₊ = S + (1 − p)."""
    return surplus(mismatch, log_p) - torch.expm1(log_p)


def acceptance(mismatch: Tensor, log_p: Tensor) -> Tensor:
    """h = S/c: the probability of stopping at a state of level p, before a transition of mismatch δ.

    h = 1 at p = 1.
    """
    s = surplus(mismatch, log_p)
    return torch.where(log_p < 0, s / (s - torch.expm1(log_p)), torch.ones_like(s))


def tilted_cdf(s: Tensor, mismatch: Tensor, log_p: Tensor) -> Tensor:
    """F(s) = [Φ(s) − p Φ(s − δ)] / c on s ≤ t: the distribution of the coordinate of a rejected draft.

    Given that the draft was rejected at this transition, F(s) is uniform on (0, 1). The value returned lies
    strictly inside, so that Φ⁻¹ and the residual of it are finite. Where c = 0 nothing is ever rejected and
    Φ(s) is returned: nothing moves.
    """
    narrow = mismatch.clamp(max=SMALL)
    small = narrow * _integral(lambda u: _density(s.unsqueeze(-1) - narrow.unsqueeze(-1) * u), s.device)
    between = torch.where(mismatch < SMALL, small, normal_cdf(s) - normal_cdf(s - mismatch))
    c = deficit(mismatch, log_p)
    value = (between - torch.expm1(log_p) * normal_cdf(s - mismatch)) / c
    return torch.where(c > 0, value, normal_cdf(s)).clamp(TINY, 1 - ULP)


def residual(level: Tensor, mismatch: Tensor, log_p: Tensor) -> Tensor:
    """The s > t at survival level U of the residual density (p φ(s − δ) − φ(s))₊ / S.

    Solves p Φ̄(s − δ) − Φ̄(s) = U S. With y = s − t, w = t − δ + y and Mills' ratio M, the left side over p is

        φ(w) · {[M(w) − M(w + δ)] − M(w + δ)·expm1(−δ y)},

    whose logarithm is concave and falls with y: after its first step Newton's method approaches the root from the
    right, so it needs no bracket, and a fixed number of steps suffices.
    """
    t = threshold(mismatch, log_p)
    S = surplus(mismatch, log_p)
    a = t - mismatch
    aim = (level * S).clamp(min=TINY).log() - log_p
    w_right = -ndtri(aim.exp().clamp(TINY, 1 - ULP))
    # Near the threshold the survival function is S − φ(t) δ y²/2 + …, which gives a closer start.
    y_near = 1.2 * (2 * (1 - level) * S / (_density(t) * mismatch)).sqrt()
    y_right = (w_right - a).clamp(min=TINY)
    near = (level > NEAR) & (y_near > 0) & (y_near < y_right) & (y_near * (mismatch + t) < 1)
    y = torch.where(near, y_near, y_right)
    for _ in range(NEWTON_STEPS):
        w = a + y
        fall = torch.expm1(-mismatch * y)
        bracket = _mills_difference(w, mismatch) - _mills(w + mismatch) * fall
        excess = bracket.log() - 0.5 * w * w - 0.5 * math.log(2 * math.pi) - aim
        step = y - excess * bracket / fall
        y = torch.where((step > 0) & (step <= y_right), step, y)  # outside: rounding at the root, stay
    return t + y


def _density(x: Tensor) -> Tensor:
    return torch.exp(-0.5 * x * x) / math.sqrt(2 * math.pi)


def _mills(x: Tensor) -> Tensor:
    """M(x) = Φ̄(x)/φ(x)."""
    return math.sqrt(math.pi / 2) * erfcx(x / math.sqrt(2))


def _mills_drop(x: Tensor, width: Tensor) -> Tensor:
    """M(x) − M(x + width) for small widths: ∫ (1 − v M(v)) dv, since M' = v M − 1."""

    def slope(u: Tensor) -> Tensor:
        v = x.unsqueeze(-1) + width.unsqueeze(-1) * u
        return 1 - v * _mills(v)

    return width * _integral(slope, x.device)


def _mills_difference(x: Tensor, width: Tensor) -> Tensor:
    """M(x) − M(x + width), by whichever form keeps its digits."""
    narrow = width.clamp(max=SMALL)
    return torch.where(width < SMALL, _mills_drop(x, narrow), _mills(x) - _mills(x + width))


@cache
def quadrature(device: torch.device) -> tuple[Tensor, Tensor]:
    """Nodes and weights of 16-point Gauss–Legendre on [0, 1]."""
    nodes, weights = np.polynomial.legendre.leggauss(16)
    return torch.from_numpy((nodes + 1) / 2).to(device), torch.from_numpy(weights / 2).to(device)


def _integral(f: Callable[[Tensor], Tensor], device: torch.device) -> Tensor:
    """∫₀¹ f(u) du, f giving a last dimension for the nodes; summed in a fixed order."""
    nodes, weights = quadrature(device)
    terms = weights * f(nodes)
    for half in (8, 4, 2, 1):
        terms = terms[..., :half] + terms[..., half:]
    return terms.squeeze(-1)
