"""Tables in Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence


def table(heads: Sequence[str], rows: Iterable[Iterable[str]]) -> str:
    """The table with these heads."""
    head, *lines = [f"| {' | '.join(cells)} |" for cells in (heads, *rows)]
    return "\n".join([head, "|---" * len(heads) + "|", *lines])


def table_of(rows: Iterable[Mapping[str, str]]) -> str:
    """The table of rows whose cells are named by the heads of their columns."""
    lines = list(rows)
    return table(list(lines[0]), (line.values() for line in lines))
