"""The pieces a section is made of: plots as data, tables, pictures, sources, all escaped."""

from __future__ import annotations

import base64
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from html import escape
from pathlib import Path
from typing import Any, Literal, TypeVar

from benchmarks.result_files import Result
from foresample.provenance import Origin

Cell = str | float | int | None
Role = Literal["ours", "exact", "inexact", "reference"]
"""`ours` is drawn strongest, what is `inexact` with open marks, a `reference` as a line without marks."""


@dataclass(frozen=True)
class Point:
    """One value; x is a number, or the name of a category."""

    x: float | str
    y: float
    error: float | None = None
    """Standard error, or half the width of a range."""
    note: str = ""


@dataclass(frozen=True)
class Series:
    """Points of one method."""

    name: str
    points: list[Point]
    role: Role = "exact"
    line: bool = True


Row = TypeVar("Row")


def by_name(
    rows: Iterable[Row], name: Callable[[Row], str], point: Callable[[Row], Point], role: Callable[[Row], Role]
) -> list[Series]:
    """One series for each name, its points from left to right."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(name(row), []).append(row)
    return [
        Series(what, sorted(map(point, own), key=lambda point: point.x), role(own[0]))
        for what, own in groups.items()
    ]


@dataclass(frozen=True)
class Axis:
    """Label and scale of an axis."""

    label: str
    log: bool = False
    zero: bool = False
    """Start at 0."""


@dataclass(frozen=True)
class Plot:
    """Lines over numbers, or dots or stacked bars over categories."""

    id: str
    title: str
    x: Axis
    y: Axis
    series: list[Series]
    text: str = ""
    kind: Literal["lines", "dots", "bars"] = "lines"
    categories: list[str] = field(default_factory=list)
    """Names of dots or bars, from top to bottom."""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def html(self) -> str:
        """The figure: empty until the script draws it, with all its values in a table."""
        x = "" if self.kind == "lines" else self.x.label
        heads = ["", x or self.x.label, self.y.label, "±", "of"]
        rows = [(s.name, point.x, point.y, point.error, point.note) for s in self.series for point in s.points]
        keep = [i for i in range(5) if any(row[i] not in (None, "") for row in rows)]
        values = table([heads[i] for i in keep], ([row[i] for i in keep] for row in rows))
        return (
            f'<figure class="plot" id="{escape(self.id)}" aria-labelledby="{escape(self.id)}-title">'
            f'<figcaption><h3 id="{escape(self.id)}-title">{escape(self.title)}</h3>'
            f"{paragraph(self.text) if self.text else ''}</figcaption>"
            '<div class="canvas"></div><div class="legend" role="group" aria-label="Show or hide"></div>'
            f'<details class="values"><summary>All values</summary>{values}</details></figure>'
        )


@dataclass(frozen=True)
class Card:
    """One figure at the head of the page."""

    figure: str
    what: str
    where: str
    """The section it comes from."""

    def html(self) -> str:
        return (
            f'<li><a href="#{escape(self.where)}"><b>{escape(self.figure)}</b> '
            f"<span>{escape(self.what)}</span></a></li>"
        )


@dataclass(frozen=True)
class Section:
    """A chapter of the page."""

    id: str
    title: str
    body: list[str]
    plots: list[Plot] = field(default_factory=list)
    """The plots that the body shows."""
    results: Sequence[Result] = ()
    """The sources of its numbers."""
    short: str = ""
    """Its title in the contents, if another."""

    def html(self) -> str:
        return (
            f'<section id="{escape(self.id)}" aria-labelledby="{escape(self.id)}-title">'
            f'<h2 id="{escape(self.id)}-title">{escape(self.title)}</h2>'
            f"{''.join(self.body)}{sources(self.results)}</section>"
        )


def number(value: Cell) -> str:
    """A number for readers: about four digits, no exponent unless it is tiny."""
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    if isinstance(value, int):
        return f"{value}"
    if value == 0:
        return "0"
    size = abs(value)
    if size < 1e-3:
        return f"{value:.1e}"
    digits = 0 if size >= 1000 else 1 if size >= 100 else 2 if size >= 1 else 4
    return f"{value:.{digits}f}"


def plus_minus(value: float, error: float | None) -> str:
    """Value ± standard error, to two digits of the error."""
    if error is None or error <= 0:
        return number(value)
    places = min(6, max(0, 1 - math.floor(math.log10(error))))
    return f"{value:.{places}f} ± {error:.{places}f}"


def paragraph(*texts: str) -> str:
    """Plain text as a paragraph."""
    return f"<p>{escape(' '.join(texts))}</p>"


def table(heads: Sequence[str], rows: Iterable[Sequence[Cell]], caption: str = "") -> str:
    """A table that scrolls inside itself where the page is narrow; its first column heads the rows."""
    head = "".join(f'<th scope="col">{escape(h)}</th>' for h in heads)
    body = []
    for first, *others in rows:
        cells = "".join(f"<td{_digits(cell)}>{escape(number(cell))}</td>" for cell in others)
        body.append(f'<tr><th scope="row">{escape(number(first))}</th>{cells}</tr>')
    title = f"<caption>{escape(caption)}</caption>" if caption else ""
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(caption or "Table")}">'
        f"<table>{title}<thead><tr>{head}</tr></thead><tbody>{''.join(body)}</tbody></table></div>"
    )


def _digits(cell: Cell) -> str:
    return ' class="digits"' if isinstance(cell, (int, float)) else ""


def grid(*parts: str) -> str:
    """Side by side where there is room."""
    return f'<div class="grid">{"".join(parts)}</div>'


def picture(path: Path, alt: str, caption: str, *, wide: bool = False) -> str:
    """A PNG or a GIF, inside the page."""
    data = base64.b64encode(path.read_bytes()).decode()
    return (
        f'<figure class="picture{" wide" if wide else ""}">'
        f'<img src="data:image/{path.suffix[1:]};base64,{data}" alt="{escape(alt)}">'
        f"<figcaption>{escape(caption)} <code>{escape(path.name)}</code></figcaption></figure>"
    )


def sources(results: Sequence[Result]) -> str:
    """The sources of numbers: file, command, commit, versions and machine of each."""
    once = {result.name: result for result in results}
    items = "".join(f"<li>{_origin(r.name, origin)}</li>" for r in once.values() for origin in r.origins)
    return f'<footer class="sources"><h3>Sources</h3><ul>{items}</ul></footer>' if items else ""


def _origin(name: str, origin: Origin) -> str:
    threads = origin.machine.threads
    parts = [
        f"commit {origin.commit}" if origin.commit else "",
        *(f"{package} {version}" for package, version in origin.versions.items()),
        origin.machine.gpu or "",
        origin.machine.cpu or "",
        f"{threads} thread{'s' if threads != 1 else ''}" if threads else "",
    ]
    line = " · ".join(part for part in parts if part)
    note = f" ({origin.commit_note})" if origin.commit_note else ""
    ran = f"<code>{escape(origin.command)}</code>" if origin.command else "no command was saved with it"
    return f"<b>{escape(name)}.json</b> {ran}<br>{escape(line + note)}"
