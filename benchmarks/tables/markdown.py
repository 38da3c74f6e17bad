"""Tables in Markdown, and what their cells share."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

from benchmarks.kinds.rivals import CurvePoint
from benchmarks.result_files import BenchRow

Row = TypeVar("Row")


def table(heads: Sequence[str], rows: Iterable[Iterable[str]]) -> str:
    """The table with these heads."""
    head, *lines = [f"| {' | '.join(cells)} |" for cells in (heads, *rows)]
    return "\n".join([head, "|---" * len(heads) + "|", *lines])


def table_of(rows: Iterable[Mapping[str, str]]) -> str:
    """The table of rows whose cells are named by the heads of their columns."""
    lines = list(rows)
    return table(list(lines[0]), (line.values() for line in lines))


def only(rows: Iterable[Row], **wanted: Any) -> Row:
    """The one row with these values."""
    (found,) = [row for row in rows if all(getattr(row, k) == v for k, v in wanted.items())]
    return found


def speedup(row: BenchRow | CurvePoint) -> str:
    """A speed-up with its error."""
    return f"{row.speedup:.2f} ± {row.speedup_error:.2f}"
