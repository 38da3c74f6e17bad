"""`foresample.core.coupling` as device functions, on vectors of one dimension, float64.

The formulas and their reasons are there; the names are the same. The 16 nodes of a Gauss–Legendre integral are
a second dimension, so that their 16 terms are taken at once.
"""

from __future__ import annotations

import math

import triton
import triton.language as tl
from triton.language.extra import libdevice

from foresample.core import coupling

_SMALL = tl.constexpr(coupling.SMALL)
_BEYOND = tl.constexpr(coupling.BEYOND)
_NEWTON_STEPS = tl.constexpr(coupling.NEWTON_STEPS)
_NEAR = tl.constexpr(coupling.NEAR)
_TINY = tl.constexpr(coupling.TINY)
_BELOW_ONE = tl.constexpr(1 - coupling.ULP)
_ROOT_HALF = tl.constexpr(math.sqrt(0.5))
_ROOT_HALF_PI = tl.constexpr(math.sqrt(math.pi / 2))
_DENSITY_AT_0 = tl.constexpr(1 / math.sqrt(2 * math.pi))
_HALF_LOG_2PI = tl.constexpr(0.5 * math.log(2 * math.pi))


@triton.jit
def normcdfinv(level):
    return libdevice.normcdfinv(level)


@triton.jit
def normal_cdf(x):
    return 0.5 * libdevice.erfc(x * -_ROOT_HALF)


@triton.jit
def _density(x):
    return tl.exp(-0.5 * x * x) * _DENSITY_AT_0


@triton.jit
def _mills(x):
    return libdevice.erfcx(x * _ROOT_HALF) * _ROOT_HALF_PI


@triton.jit
def _mills_drop(x, width, nodes, weights):
    v = x[:, None] + width[:, None] * nodes[None, :]
    return width * tl.sum((1.0 - v * _mills(v)) * weights[None, :], 1)


@triton.jit
def _mills_difference(x, width, nodes, weights):
    narrow = tl.minimum(width, _SMALL)
    return tl.where(width < _SMALL, _mills_drop(x, narrow, nodes, weights), _mills(x) - _mills(x + width))


@triton.jit
def threshold(mismatch, log_p):
    return 0.5 * mismatch + tl.where(log_p < 0, -log_p / mismatch, 0.0)


@triton.jit
def surplus(mismatch, log_p, nodes, weights):
    t = threshold(mismatch, log_p)
    near = tl.minimum(t, _BEYOND)
    narrow = tl.minimum(mismatch, _SMALL)
    small = _density(near) * _mills_drop(near - narrow, narrow, nodes, weights)
    large = tl.maximum(tl.exp(log_p) * normal_cdf(mismatch - t) - normal_cdf(-t), 0.0)
    value = tl.where(mismatch < _SMALL, small, large)
    return tl.where(log_p < 0, value, libdevice.erf(mismatch * (0.5 * _ROOT_HALF)))


@triton.jit
def acceptance(mismatch, log_p, nodes, weights):
    s = surplus(mismatch, log_p, nodes, weights)
    return tl.where(log_p < 0, s / (s - libdevice.expm1(log_p)), 1.0)


@triton.jit
def inside(level):
    """Strictly within (0, 1). The bound is spelt out because a literal given to tl.minimum would be float32."""
    below_one = tl.full(level.shape, _BELOW_ONE, tl.float64)
    return tl.minimum(tl.maximum(level, _TINY), below_one)


@triton.jit
def tilted_cdf(s, mismatch, log_p, nodes, weights):
    narrow = tl.minimum(mismatch, _SMALL)
    at = s[:, None] - narrow[:, None] * nodes[None, :]
    small = narrow * tl.sum(_density(at) * weights[None, :], 1)
    between = tl.where(mismatch < _SMALL, small, normal_cdf(s) - normal_cdf(s - mismatch))
    one_minus_p = -libdevice.expm1(log_p)
    c = surplus(mismatch, log_p, nodes, weights) + one_minus_p
    value = (between + one_minus_p * normal_cdf(s - mismatch)) / c
    return inside(tl.where(c > 0, value, normal_cdf(s)))


@triton.jit
def residual(level, mismatch, log_p, nodes, weights):
    t = threshold(mismatch, log_p)
    mass = surplus(mismatch, log_p, nodes, weights)
    a = t - mismatch
    aim = tl.log(tl.maximum(level * mass, _TINY)) - log_p
    y_right = tl.maximum(-libdevice.normcdfinv(inside(tl.exp(aim))) - a, _TINY)
    y_near = 1.2 * tl.sqrt(2.0 * (1.0 - level) * mass / (_density(t) * mismatch))
    near = (level > _NEAR) & (y_near > 0) & (y_near < y_right) & (y_near * (mismatch + t) < 1.0)
    y = tl.where(near, y_near, y_right)
    # A fixed number of steps: lanes round differently, so some would see it settle before others. Counted down, since
    # Triton passes y through shared memory at every turn of a `for`.
    left = tl.full([], _NEWTON_STEPS, tl.int32)
    while left > 0:
        w = a + y
        fall = libdevice.expm1(-mismatch * y)
        bracket = _mills_difference(w, mismatch, nodes, weights) - _mills(w + mismatch) * fall
        excess = tl.log(bracket) - 0.5 * w * w - _HALF_LOG_2PI - aim
        step = y - excess * bracket / fall
        y = tl.where((step > 0) & (step <= y_right), step, y)
        left -= 1
    return t + y
