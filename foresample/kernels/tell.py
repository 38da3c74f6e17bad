"""What the host waits to know of a round, written into its memory by the device as part of the round.

A copy queued behind a round begins only when that has ended; so the host would wait for one thing more.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 1024


# fmt: off
@triton.jit
def _tell(
    first, second, third, fourth, fifth,  # [n]
    told,                                 # out, [5, n], of the host
    count,                                # n
    BLOCK: tl.constexpr,
):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = i < count
    tl.store(told + i, tl.load(first + i, mask=inside), mask=inside)
    tl.store(told + count + i, tl.load(second + i, mask=inside), mask=inside)
    tl.store(told + 2 * count + i, tl.load(third + i, mask=inside), mask=inside)
    tl.store(told + 3 * count + i, tl.load(fourth + i, mask=inside), mask=inside)
    tl.store(told + 4 * count + i, tl.load(fifth + i, mask=inside), mask=inside)


def tell(values: Sequence[Tensor], told: Tensor) -> None:
    """Five tensors of whole numbers, [n] each, into `told`, [5, n], which is pinned."""
    count = told.shape[1]
    block = min(_BLOCK, triton.next_power_of_2(count))
    with torch.cuda.device_of(values[0]):
        _tell[(triton.cdiv(count, block),)](*values, told, count, BLOCK=block)
