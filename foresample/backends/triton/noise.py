"""`foresample.core.noise` as kernels: the same numbers from the same counters."""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import libdevice

from foresample.core.noise import STEP

_BLOCK = 256


@triton.jit
def unit(high, low):
    """Two 32-bit words as a multiple of 2⁻⁵³ in [0, 1)."""
    bits = (high >> 5).to(tl.int64) * 67108864 + (low >> 6).to(tl.int64)
    return bits.to(tl.float64) * 1.1102230246251565e-16


@triton.jit
def normals(seed, size, element, step, draw, stream):
    """Standard normals for these elements, float64 (Box–Muller; a pair is split half-way through the state)."""
    half = (size + 1) // 2
    pair = tl.where(element < half, element, element - half).to(tl.uint32)
    zero = pair * 0
    words = tl.philox(seed, pair, zero + step.to(tl.uint32), zero + draw.to(tl.uint32), zero + stream)
    radius = tl.sqrt(-2.0 * libdevice.log1p(-unit(words[0], words[1])))
    turn = 2.0 * unit(words[2], words[3])
    return radius * tl.where(element < half, libdevice.cospi(turn), libdevice.sinpi(turn))


@triton.jit
def _normal_kernel(seed, step, draw, out, size, stream, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    element = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    value = normals(tl.load(seed + row), size, element, tl.load(step + row), tl.load(draw + row), stream)
    tl.store(out + row * size + element, value, mask=element < size)


def normal(
    seed: Tensor, shape: torch.Size, dtype: torch.dtype, *, stream: int = STEP, step: Tensor, draw: Tensor
) -> Tensor:
    """See `foresample.core.noise.normal`."""
    size = math.prod(shape)
    out = torch.empty((len(seed), *shape), dtype=dtype, device=seed.device)
    if len(seed):
        grid = (len(seed), triton.cdiv(size, _BLOCK))
        seed, step, draw = seed.contiguous(), step.contiguous(), draw.contiguous()
        with torch.cuda.device_of(out):
            _normal_kernel[grid](seed, step, draw, out, size, stream, BLOCK=_BLOCK)
    return out
