"""`foresample report`: saved results as one page that needs nothing but a browser.

    results.py      reads a folder of result files
    sections.py     what the page says of them; a section without its file is left out
    markup.py       what sections are made of: plots as data, tables, pictures, sources
    recording.py    the real run that the animation plays, and storyboard.py, its still picture
    evidence.py     what the law suite tests
    page.html, page.css, page.js    the page around them; plots and animation are drawn in the browser

Everything is inside the file: no script, font, style or picture is fetched.
"""

from __future__ import annotations

import json
from html import escape
from importlib.resources import files
from pathlib import Path
from string import Template

from foresample import __version__
from foresample.webpage import recording, storyboard
from foresample.webpage.markup import Section
from foresample.webpage.results import ResultError, Results, read_results
from foresample.webpage.sections import headlines, sections

__all__ = ["PICTURES", "RESULTS", "ResultError", "build", "write"]

CHECKOUT = Path(__file__).parent.parent.parent
RESULTS, PICTURES = CHECKOUT / "benchmarks" / "results", CHECKOUT / "docs" / "pictures"


def write(out: Path, results: Path = RESULTS, pictures: Path | None = PICTURES) -> None:
    """Build the page and write it."""
    page = build(results, pictures)
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(page, encoding="utf-8")


def build(results: Path = RESULTS, pictures: Path | None = PICTURES) -> str:
    """The page, from a folder of result files and one of pictures."""
    found = read_results(results)
    chapters = sections(found, pictures)
    if not any(section.results for section in chapters):
        raise ResultError(
            f"none of the {len(found.found)} JSON files in {results} is a result this page shows; name a "
            "folder such as benchmarks/results with --results"
        )
    run = recording.record()
    data = {"plots": [plot.to_json() for s in chapters for plot in s.plots], "recording": run.to_json()}
    return Template(_part("page.html")).substitute(
        style=_part("page.css"),
        script=_part("page.js"),
        # A closing tag inside a string must not close the element.
        data=json.dumps(data, ensure_ascii=False).replace("<", "\\u003c"),
        cards=_cards(found),
        contents=_contents(chapters),
        still=storyboard.still(run),
        run=escape(storyboard.summary(run) + "."),
        sections="".join(section.html() for section in chapters),
        unused=_unused(found, chapters),
        version=escape(__version__),
    )


def _part(name: str) -> str:
    return files(__name__).joinpath(name).read_text(encoding="utf-8")


def _cards(found: Results) -> str:
    return "".join(
        f'<li><a href="#{escape(where)}"><b>{escape(figure)}</b> <span>{escape(what)}</span></a></li>'
        for figure, what, where in headlines(found)
    )


def _contents(chapters: list[Section]) -> str:
    return "".join(f'<li><a href="#{escape(s.id)}">{escape(s.title)}</a></li>' for s in chapters)


def _unused(found: Results, chapters: list[Section]) -> str:
    """Say which files the page does not show."""
    used = {result.name for section in chapters for result in section.results}
    left = [f"{name}.json" for name in found.found if name not in used]
    return f"<p>Result files that this page does not show: {escape(', '.join(left))}.</p>" if left else ""
