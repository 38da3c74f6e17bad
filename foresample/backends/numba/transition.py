"""One transition of the sequential sampler, compiled: `baseline` for affine chains, on a CPU."""

from __future__ import annotations

import math
from functools import cache
from types import SimpleNamespace
from typing import cast

import numpy as np
import torch
from torch import Tensor

from foresample.backends.numba.compiling import compiled
from foresample.backends.numba.noise import fill_normal, normal
from foresample.contracts import AffineChain
from foresample.core import noise as streams
from foresample.faults import BROKEN_STATE, NO_FAULT

_STEP = streams.STEP


# fmt: off
@compiled
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
    previous_weight,                   # [N], or empty
):
    size = x.shape[1]
    z = np.empty(size, x.dtype)
    for row in range(len(x)):
        k = min(step[row], len(std) - 1)
        fill_normal(z, seed[row], k, 0, _STEP)
        bad_output = bad_state = False
        for e in range(size):
            here, p = x[row, e], prediction[row, e]
            bad_output, bad_state = bad_output or not math.isfinite(p), bad_state or not math.isfinite(here)
            mean = state_weight[k] * here + prediction_weight[k] * p
            if len(previous_weight):
                mean += previous_weight[k] * previous[row, e]
            x[row, e], previous[row, e] = mean + std[k] * z[e], p
        if (bad_output or bad_state) and fault[row] == NO_FAULT:
            fault[row] = BROKEN_STATE - k if bad_state else k
# fmt: on


def transition(
    chain: AffineChain,
    x: Tensor,
    prediction: Tensor,
    previous: Tensor,
    seed: Tensor,
    step: Tensor,
    fault: Tensor,
) -> None:
    """One step of the sequential sampler, in place; `step` itself is not advanced."""
    none = chain.std.new_empty(0) if chain.previous_weight is None else chain.previous_weight
    weights = chain.std, chain.state_weight, chain.prediction_weight, none
    _transition(
        *(value.view(len(x), -1).numpy() for value in (x, prediction.detach().contiguous(), previous)),
        *(value.numpy() for value in (seed, step, fault)),
        *(value.contiguous().numpy() for value in weights),
    )  # fmt: skip


@cache
def prepare(dtype: torch.dtype) -> None:
    """Compile for chains of this dtype, before any clock runs."""
    ones = torch.ones(1, dtype=dtype)
    chain = SimpleNamespace(std=ones, state_weight=ones, prediction_weight=ones, previous_weight=None)
    state, zero = torch.zeros(1, 1, dtype=dtype), torch.zeros(1, dtype=torch.int64)
    transition(cast(AffineChain, chain), state, state.clone(), state.clone(), zero, zero, zero.clone())
    normal(zero, torch.Size([1]), dtype, step=zero, draw=zero)
