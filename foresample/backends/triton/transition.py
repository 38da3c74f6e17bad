"""One transition of the sequential sampler as a kernel: `baseline` for affine chains, on CUDA."""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from foresample.backends.triton.noise import normals
from foresample.contracts import AffineChain
from foresample.core import noise as streams
from foresample.faults import BROKEN_STATE, NO_FAULT

_BLOCK = 256  # elements a program takes at a time
_STEP = tl.constexpr(streams.STEP)
_NO_FAULT = tl.constexpr(NO_FAULT)
_BROKEN_STATE = tl.constexpr(BROKEN_STATE)


# fmt: off
@triton.jit
def _transition(
    x,                                 # in place, [R, size]
    prediction,                        # [R, size]
    previous,                          # in place, [R, size]
    seed,                              # [R]
    step,                              # [R]
    fault,                             # in place, [R]
    std,                               # [N]
    state_weight,                      # [N]
    prediction_weight,                 # [N]
    previous_weight,                   # [N]
    steps,                             # N
    size,                              # elements of a state
    MULTISTEP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    element = part * BLOCK + tl.arange(0, BLOCK)
    inside = element < size
    at = row * size + element
    k = tl.minimum(tl.load(step + row), steps - 1)
    here = tl.load(x + at, mask=inside, other=0.0)
    p = tl.load(prediction + at, mask=inside, other=0.0)
    mean = tl.load(state_weight + k) * here + tl.load(prediction_weight + k) * p
    if MULTISTEP:
        mean += tl.load(previous_weight + k) * tl.load(previous + at, mask=inside, other=0.0)
    z = normals(tl.load(seed + row), size, element, k, k * 0, _STEP).to(here.dtype)
    tl.store(x + at, mean + tl.load(std + k) * z, mask=inside)
    tl.store(previous + at, p, mask=inside)
    bad_output = tl.max(tl.where(tl.abs(p) < float("inf"), 0, 1), 0)
    bad_state = tl.max(tl.where(tl.abs(here) < float("inf"), 0, 1), 0)
    if bad_output + bad_state > 0:
        code = tl.where(bad_state > 0, _BROKEN_STATE - k, k)
        tl.atomic_cas(fault + row, tl.full([], _NO_FAULT, tl.int64), code)


def transition(
    chain: AffineChain,
    x: Tensor,
    prediction: Tensor,
    previous: Tensor,
    seed: Tensor,
    step: Tensor,
    fault: Tensor,
) -> None:
    """One step of the sequential sampler, in place; `step` itself is not moved on."""
    size = math.prod(x.shape[1:])
    with torch.cuda.device_of(x):
        _transition[(len(x), triton.cdiv(size, _BLOCK))](
            x, prediction.contiguous(), previous, seed, step, fault, *coefficients(chain), len(chain.std),
            size, MULTISTEP=chain.previous_weight is not None, BLOCK=_BLOCK,
        )


def coefficients(chain: AffineChain) -> tuple[Tensor, ...]:
    """std, then the weights of state, prediction and previous prediction (any tensor where there is none)."""
    previous = chain.prediction_weight if chain.previous_weight is None else chain.previous_weight
    weights = chain.std, chain.state_weight, chain.prediction_weight, previous
    return tuple(weight.contiguous() for weight in weights)
