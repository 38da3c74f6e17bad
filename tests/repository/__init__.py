"""`foresample report`: what one's own commands wrote, as one page that needs nothing but a browser.

    sections.py     what the page says of each kind of result
    markup.py       what sections are made of: plots as data, tables, pictures, sources
    page.py         the page around them; page.html, page.css, page.js: plots are drawn in the browser

Everything is inside the file: no script, font, style or picture is fetched.
"""

from __future__ import annotations

from html import escape
from pathlib import Path

from foresample.provenance import __version__
from foresample.results import ResultError, read_results
from foresample.webpage.markup import paragraph
from foresample.webpage.page import assemble, write_page
from foresample.webpage.sections import show

__all__ = ["ResultError", "build", "write"]


def write(out: Path, folder: Path) -> None:
    """Build the page of a folder and write it."""
    write_page(out, build(folder))


def build(folder: Path) -> str:
    """The page: what sample, bench, tune, check and generate wrote into the folder and those below it."""
    results = read_results(folder)
    shown = show(results)
    first = next((one for one in shown if one.alarm), shown[0])
    colophon = f"<p>Made by <code>foresample report</code>, version {escape(__version__)}, from saved result files.</p>"
    if results.foreign:
        left = ", ".join(results.foreign)
        colophon = paragraph(f"JSON files here that are no results of foresample: {left}.") + colophon
    return assemble(
        title=f"foresample: {folder.resolve().name}",
        head=f"<h1>{escape(first.headline)}</h1>",
        cards=[card for one in shown for card in one.cards],
        sections=[one.section for one in shown],
        colophon=colophon,
    )
