"""`core.report.Tally.count` compiled."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from foresample.backends.numba.compiling import compiled

if TYPE_CHECKING:
    from foresample.core.report import Commit


# fmt: off
@compiled
def _count(
    step,                              # [R]
    committed,                         # [R]
    drafted,                           # [R]
    mismatch,                          # [R, W]
    lengths,                           # in place, [window + 1]
    mismatch_total,                    # in place, [2, N]
):
    """Transitions drafted."""
    total = 0
    for row in range(len(step)):
        if committed[row] > 0:
            lengths[committed[row] - 1] += 1
            total += drafted[row]
            for i in range(drafted[row]):
                mismatch_total[0, step[row] + i] += mismatch[row, i]
                mismatch_total[1, step[row] + i] += 1
    return total
# fmt: on


def count(commit: Commit, lengths: Tensor, drafted: Tensor, mismatch: Tensor) -> None:
    """Add one round to the counters, in place."""
    of_rows = (commit.step, commit.committed, commit.drafted, commit.mismatch)
    drafted += _count(*(v.contiguous().numpy() for v in of_rows), lengths.numpy(), mismatch.numpy())
