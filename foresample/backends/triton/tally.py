"""`core.report.Tally.count` as a kernel: a round counted without reading anything back."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

if TYPE_CHECKING:
    from foresample.core.report import Commit


# fmt: off
@triton.jit
def _count(
    step,                              # [R], `stride` apart
    committed,                         # [R]
    drafted,                           # [R]
    mismatch,                          # [R, W]
    lengths,                           # in place, [window + 1]
    drafted_total,                     # in place, []
    mismatch_total,                    # in place, [2, N]
    stride,
    width,                             # W
    steps,                             # N
    LANES: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, LANES)
    moves = tl.load(committed + row)
    active = moves > 0
    one_more = active.to(tl.int64)
    length = tl.load(drafted + row)
    tl.atomic_add(lengths + tl.maximum(moves - 1, 0), one_more)
    tl.atomic_add(drafted_total, one_more * length)
    measured = (i < width) & (i < length) & active
    at = mismatch_total + tl.load(step + row * stride) + i
    tl.atomic_add(at, tl.load(mismatch + row * width + i, mask=measured, other=0.0), mask=measured)
    tl.atomic_add(at + steps, tl.full([LANES], 1.0, tl.float64), mask=measured)


def count(commit: Commit, lengths: Tensor, drafted: Tensor, mismatch: Tensor) -> None:
    """Add one round to the counters, in place."""
    width = commit.mismatch.shape[1]
    with torch.cuda.device_of(lengths):
        _count[(len(commit.committed),)](
            commit.step, commit.committed, commit.drafted, commit.mismatch, lengths, drafted, mismatch,
            commit.step.stride(0), width, mismatch.shape[1], LANES=triton.next_power_of_2(max(1, width)),
        )
