"""A page around sections: everything inside one file, nothing fetched."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from html import escape
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Any

from benchmarks.report.markup import Card, Section


def assemble(
    *,
    title: str,
    head: str,
    cards: Sequence[Card],
    sections: Sequence[Section],
    colophon: str,
    style: str = "",
    script: str = "",
    data: Mapping[str, Any] | None = None,
) -> str:
    """The page.

    Args:
        title: of the window, plain text.
        head: markup at the top, with the h1.
        cards: the figures under it.
        sections: what follows.
        colophon: markup at the end.
        style: CSS beyond the page's own.
        script: JavaScript beyond the page's own, in its scope (`put`, `make`, `digits`, …).
        data: for that script, beside the plots.
    """
    shown = {"plots": [plot.to_json() for section in sections for plot in section.plots], **(data or {})}
    return Template(_part("page.html")).substitute(
        title=escape(title),
        style=_part("page.css") + style,
        head=head,
        cards="".join(card.html() for card in cards),
        contents="".join(
            f'<li><a href="#{escape(s.id)}">{escape(s.short or s.title)}</a></li>' for s in sections
        ),
        sections="".join(section.html() for section in sections),
        colophon=colophon,
        # A closing tag inside a string must not close the element.
        data=json.dumps(shown, ensure_ascii=False, allow_nan=False).replace("<", "\\u003c"),
        script=_part("page.js") + script,
    )


def write_page(out: Path, page: str) -> None:
    """Save a page; what cannot be written as text, as names of files sometimes cannot, is replaced."""
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(page, encoding="utf-8", errors="replace")


def _part(name: str) -> str:
    return files(__package__).joinpath(name).read_text(encoding="utf-8")
