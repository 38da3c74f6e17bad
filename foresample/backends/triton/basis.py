"""Pictures turned to another basis in one kernel, left · x · right for each: `targets.frequencies`, on CUDA."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_PART = 16  # rows of the result a program makes, the least a product may have
_MOST = 4096  # elements of a picture that one program holds, padded


# fmt: off
@triton.jit
def _turn(
    left,                              # [rows, rows]
    x,                                 # [B, rows, columns]
    right,                             # [columns, columns]
    out,                               # out, [B, rows, columns]
    rows,
    columns,
    PART: tl.constexpr,
    ROWS: tl.constexpr,                # a power of 2 ≥ rows
    COLUMNS: tl.constexpr,             # a power of 2 ≥ columns
):
    state = tl.program_id(0).to(tl.int64) * rows * columns
    place = (tl.program_id(1) * PART + tl.arange(0, PART))[:, None]
    row, row_across = tl.arange(0, ROWS)[:, None], tl.arange(0, ROWS)[None, :]
    column, column_down = tl.arange(0, COLUMNS)[None, :], tl.arange(0, COLUMNS)[:, None]
    some = tl.load(left + place * rows + row_across, mask=(place < rows) & (row_across < rows), other=0.0)
    picture = tl.load(x + state + row * columns + column, mask=(row < rows) & (column < columns), other=0.0)
    square = (column_down < columns) & (column < columns)
    across = tl.load(right + column_down * columns + column, mask=square, other=0.0)
    turned = tl.dot(tl.dot(some, picture, input_precision="ieee"), across, input_precision="ieee")
    tl.store(out + state + place * columns + column, turned, mask=(place < rows) & (column < columns))
# fmt: on


def change(left: Tensor, x: Tensor, right: Tensor) -> Tensor:
    """left · x · right for each of the pictures, [B, rows, columns]; the matrices are contiguous."""
    return turn(left, x, right) if _serves(x) else left @ x @ right


def _serves(x: Tensor) -> bool:
    """Whether such pictures are small enough, [B, rows, columns], and of single precision."""
    return x.dtype == torch.float32 and _padded(x.shape[1]) * _padded(x.shape[2]) <= _MOST


def turn(left: Tensor, x: Tensor, right: Tensor) -> Tensor:
    """The same in one kernel."""
    (count, rows, columns), x = x.shape, x.contiguous()
    out = torch.empty_like(x)
    with torch.cuda.device_of(x):
        _turn[(count, triton.cdiv(rows, _PART))](
            left, x, right, out, rows, columns, PART=_PART, ROWS=_padded(rows), COLUMNS=_padded(columns)
        )
    return out


def _padded(size: int) -> int:
    return max(_PART, triton.next_power_of_2(size))
