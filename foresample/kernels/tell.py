"""What the host waits to know of a round, written into its memory by the device as part of the round.

A copy queued behind a round begins only when that has ended; so the host would wait for one thing more.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from foresample.faults import BROKEN_STATE, NO_FAULT

if TYPE_CHECKING:
    from foresample.core.round import Rows

_BLOCK = 1024
_NO_FAULT = tl.constexpr(NO_FAULT)
_BROKEN_STATE = tl.constexpr(BROKEN_STATE)


# fmt: off
@triton.jit
def _tell(
    x,                                 # [R, size]
    step,                              # [R]
    fault,                             # [R]
    sample,                            # [R]
    round,                             # [R]
    evaluations,                       # [R]
    told,                              # out, [5, R], of the host
    count,                             # R
    size,                              # elements of a state
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    wrong = tl.zeros([BLOCK], tl.int32)
    for start in range(0, size, BLOCK):
        element = start + tl.arange(0, BLOCK)
        value = tl.load(x + row * size + element, mask=element < size, other=0.0)
        wrong = tl.maximum(wrong, tl.where(tl.abs(value) < float("inf"), 0, 1))
    at = tl.load(step + row)
    code = tl.load(fault + row)
    code = tl.where((code == _NO_FAULT) & (tl.max(wrong, 0) > 0), _BROKEN_STATE - at, code)
    tl.store(told + row, at)
    tl.store(told + count + row, code)
    tl.store(told + 2 * count + row, tl.load(sample + row))
    tl.store(told + 3 * count + row, tl.load(round + row))
    tl.store(told + 4 * count + row, tl.load(evaluations + row))
# fmt: on


def tell(rows: Rows, told: Tensor) -> None:
    """Of each row its step, fault (`faults.note_state`), sample, round and evaluations, into `told`, [5, R], which is
    pinned."""
    size = rows.x[0].numel()
    block = min(_BLOCK, triton.next_power_of_2(size))
    values = rows.x, rows.step, rows.fault, rows.sample, rows.round, rows.evaluations
    with torch.cuda.device_of(rows.x):
        _tell[(len(rows.step),)](*values, told, told.shape[1], size, BLOCK=block)
