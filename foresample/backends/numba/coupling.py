"""`foresample.core.coupling` on numbers, float64. The formulas and their reasons are there; the names are the same.

Two special functions are built here from those of a C library. Mills' ratio needs erfcx, which is exp(x²)·erfc(x) with
the square taken without rounding, and its asymptotic series from x = 12 on. Φ⁻¹ is Newton's method on ln Φ, which is
concave, so that from the left of the root it converges without a bracket.
"""

from __future__ import annotations

import math

import numpy as np
import torch

from foresample.backends.numba.compiling import compiled
from foresample.core import coupling

NODES, WEIGHTS = (values.numpy() for values in coupling.quadrature(torch.device("cpu")))
SMALL, BEYOND, NEAR = coupling.SMALL, coupling.BEYOND, coupling.NEAR
NEWTON_STEPS, TINY, BELOW_ONE = coupling.NEWTON_STEPS, coupling.TINY, 1 - coupling.ULP
ROOT_HALF, ROOT_HALF_PI, ROOT_PI = math.sqrt(0.5), math.sqrt(math.pi / 2), math.sqrt(math.pi)
DENSITY_AT_0, HALF_LOG_2PI = 1 / math.sqrt(2 * math.pi), 0.5 * math.log(2 * math.pi)
ASYMPTOTIC, TERMS = 12.0, 12  # from there on, these terms of the series leave less than rounding does


@compiled
def erfcx(x):
    """exp(x²) erfc(x)."""
    if x >= ASYMPTOTIC:  # Σ (−1)^k (2k − 1)!! / (2x²)^k, from the last term inwards
        total, y = 1.0, 0.5 / (x * x)
        for k in range(TERMS, 0, -1):
            total = 1.0 - (2 * k - 1) * y * total
        return total / (x * ROOT_PI)
    high = np.float64(np.float32(x))  # its square is exact
    return math.exp(high * high) * math.exp((x - high) * (x + high)) * math.erfc(x)


@compiled
def normal_cdf(x):
    return 0.5 * math.erfc(-ROOT_HALF * x)


@compiled
def ndtri(level):
    """Φ⁻¹, for levels within (0, 1)."""
    if level == 0.5:
        return 0.0
    tail = min(level, 1.0 - level)
    log_tail = math.log(tail)
    y = -math.sqrt(max(-2.0 * (log_tail + math.log(2.0)), 0.0))  # Φ(y) ≤ exp(−y²/2)/2: left of the root
    for _ in range(8):
        ratio = _mills(-y)
        y -= (math.log(ratio) - 0.5 * y * y - HALF_LOG_2PI - log_tail) * ratio
    return y if level < 0.5 else -y


@compiled
def _density(x):
    return math.exp(-0.5 * x * x) * DENSITY_AT_0


@compiled
def _mills(x):
    return ROOT_HALF_PI * erfcx(ROOT_HALF * x)


@compiled
def _mills_drop(x, width):
    total = 0.0
    for i in range(len(NODES)):
        v = x + width * NODES[i]
        total += (1.0 - v * _mills(v)) * WEIGHTS[i]
    return width * total


@compiled
def _mills_difference(x, width):
    if width < SMALL:
        return _mills_drop(x, width)
    return _mills(x) - _mills(x + width)


@compiled
def threshold(mismatch, log_p):
    return 0.5 * mismatch + (-log_p / mismatch if log_p < 0 else 0.0)


@compiled
def surplus(mismatch, log_p):
    if not log_p < 0:
        return math.erf(mismatch * (0.5 * ROOT_HALF))
    t = threshold(mismatch, log_p)
    if mismatch < SMALL:
        near = min(t, BEYOND)
        return _density(near) * _mills_drop(near - mismatch, mismatch)
    return max(math.exp(log_p) * normal_cdf(mismatch - t) - normal_cdf(-t), 0.0)


@compiled
def acceptance(mismatch, log_p):
    if not log_p < 0:
        return 1.0
    s = surplus(mismatch, log_p)
    return s / (s - math.expm1(log_p))


@compiled
def inside(level):
    """Strictly within (0, 1)."""
    return min(max(level, TINY), BELOW_ONE)


@compiled
def tilted_cdf(s, mismatch, log_p):
    if mismatch < SMALL:
        between = 0.0
        for i in range(len(NODES)):
            between += _density(s - mismatch * NODES[i]) * WEIGHTS[i]
        between *= mismatch
    else:
        between = normal_cdf(s) - normal_cdf(s - mismatch)
    one_minus_p = -math.expm1(log_p)
    c = surplus(mismatch, log_p) + one_minus_p
    if not c > 0:
        return inside(normal_cdf(s))
    return inside((between + one_minus_p * normal_cdf(s - mismatch)) / c)


@compiled
def residual(level, mismatch, log_p):
    t = threshold(mismatch, log_p)
    mass = surplus(mismatch, log_p)
    a = t - mismatch
    aim = math.log(max(level * mass, TINY)) - log_p
    y_right = max(-ndtri(inside(math.exp(aim))) - a, TINY)
    y_near = 1.2 * math.sqrt(2.0 * (1.0 - level) * mass / (_density(t) * mismatch))
    near = level > NEAR and 0 < y_near < y_right and y_near * (mismatch + t) < 1.0
    y = y_near if near else y_right
    for _ in range(NEWTON_STEPS):
        w = a + y
        fall = math.expm1(-mismatch * y)
        bracket = _mills_difference(w, mismatch) - _mills(w + mismatch) * fall
        excess = math.log(bracket) - 0.5 * w * w - HALF_LOG_2PI - aim
        step = y - excess * bracket / fall
        if 0 < step <= y_right:  # outside: rounding at the root, stay
            y = step
    return t + y
