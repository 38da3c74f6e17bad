"""`foresample.core.noise` compiled: the same numbers from the same counters, up to the rounding of log and cos."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from foresample.backends.numba.compiling import compiled
from foresample.core.noise import STEP

_MASK, _HALF = np.uint64(0xFFFFFFFF), np.uint64(32)
_MULTIPLIER_0, _MULTIPLIER_1 = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
_WEYL_0, _WEYL_1 = np.uint64(0x9E3779B9), np.uint64(0xBB67AE85)
_FIVE, _SIX, _TWENTY_SIX = np.uint64(5), np.uint64(6), np.uint64(26)


@compiled
def philox(seed, c0, c1, c2, c3):
    """Philox4x32-10; words are 64-bit integers that hold 32 bits."""
    c0, c1, c2, c3 = np.uint64(c0), np.uint64(c1), np.uint64(c2), np.uint64(c3)
    key = np.uint64(seed)
    k0, k1 = key & _MASK, key >> _HALF
    for _ in range(10):
        p0, p1 = c0 * _MULTIPLIER_0, c2 * _MULTIPLIER_1
        c0, c1, c2, c3 = (p1 >> _HALF) ^ c1 ^ k0, p1 & _MASK, (p0 >> _HALF) ^ c3 ^ k1, p0 & _MASK
        k0, k1 = (k0 + _WEYL_0) & _MASK, (k1 + _WEYL_1) & _MASK
    return c0, c1, c2, c3


@compiled
def unit(high, low):
    """Two 32-bit words as a multiple of 2⁻⁵³ in [0, 1)."""
    return np.float64(((high >> _FIVE) << _TWENTY_SIX) + (low >> _SIX)) * 2.0**-53


@compiled
def fill_normal(out, seed, step, draw, stream):
    """Standard normals for the elements of a state, [size] (Box–Muller; a pair is split half-way through)."""
    size = len(out)
    half = (size + 1) // 2
    for pair in range(half):
        w0, w1, w2, w3 = philox(seed, pair, step, draw, stream)
        radius = math.sqrt(-2.0 * math.log1p(-unit(w0, w1)))
        angle = (2.0 * math.pi) * unit(w2, w3)
        out[pair] = radius * math.cos(angle)
        if half + pair < size:
            out[half + pair] = radius * math.sin(angle)


@compiled
def _fill_normals(out, seed, step, draw, stream):
    for b in range(len(out)):
        fill_normal(out[b], seed[b], step[b], draw[b], stream)


def normal(
    seed: Tensor, shape: torch.Size, dtype: torch.dtype, *, stream: int = STEP, step: Tensor, draw: Tensor
) -> Tensor:
    """See `foresample.core.noise.normal`."""
    out = torch.empty((len(seed), math.prod(shape)), dtype=dtype)
    counters = (value.contiguous().numpy() for value in (seed, step, draw))
    _fill_normals(out.numpy(), *counters, stream)
    return out.view(len(seed), *shape)
