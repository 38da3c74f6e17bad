"""What the host waits to know of a round, written into its memory by the device itself.

A copy queued behind a round comes after its end, and then a wait for the stream. A kernel that is part of the round
writes a few numbers to the host and counts; the host, which watches the count, goes on at once.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor


# fmt: off
@triton.jit
def _tell(
    first, second, third, fourth, fifth,  # [n]
    told,                                 # out, [5 n + 1], of the host: the five, then how often they were told
    count,                                # n
    LANES: tl.constexpr,                  # a power of 2 ≥ n
):
    i = tl.arange(0, LANES)
    inside = i < count
    tl.store(told + i, tl.load(first + i, mask=inside), mask=inside)
    tl.store(told + count + i, tl.load(second + i, mask=inside), mask=inside)
    tl.store(told + 2 * count + i, tl.load(third + i, mask=inside), mask=inside)
    tl.store(told + 3 * count + i, tl.load(fourth + i, mask=inside), mask=inside)
    tl.store(told + 4 * count + i, tl.load(fifth + i, mask=inside), mask=inside)
    tl.debug_barrier()  # all are there before they are counted, also for the host
    tl.atomic_add(told + 5 * count, 1, sem="release", scope="sys")


def tell(values: Sequence[Tensor], told: Tensor) -> None:
    """Five tensors of whole numbers, [n] each, into `told`, [5 n + 1], pinned; its last number goes up by 1."""
    count = len(values[0])
    with torch.cuda.device_of(values[0]):
        _tell[(1,)](*values, told, count, LANES=triton.next_power_of_2(count))
