"""The page about this repository's evidence: `make report`, or `python -m benchmarks.report`.

calls, clock, robots, quality, published, exactness     what it says; a section without its results is left out
headlines       the figures at its head
evidence        the numbers of the distribution tests
recording       the real run that the animation plays (run.js, run.css), and storyboard, its still picture
markup          the pieces of a section; the page around them is page.html, page.css and page.js
"""

from __future__ import annotations

import json
from dataclasses import replace
from html import escape
from pathlib import Path
from string import Template

from benchmarks.report import recording, storyboard
from benchmarks.report.calls import calls, growth
from benchmarks.report.clock import clock, losses
from benchmarks.report.exactness import exactness
from benchmarks.report.headlines import headlines
from benchmarks.report.markup import Section
from benchmarks.report.published import published
from benchmarks.report.quality import quality, sheets
from benchmarks.report.robots import robots
from benchmarks.result_files import Results
from benchmarks.results import RESULTS, read
from foresample.provenance import __version__

HERE = Path(__file__).parent
PICTURES = HERE.parent.parent / "docs" / "pictures"
HEAD = """<h1>Several times fewer network calls, <em>exactly</em> the same distribution</h1>
<p class="lead">A stochastic diffusion sampler walks a chain of Gaussian steps, one network call each. foresample
drafts a window of future steps for free, checks the whole window with <strong>one</strong> batched call, keeps the
longest part an exact test allows, corrects the next state, and goes on. No training, any model, and no approximation:
whatever the draft, samples have exactly the distribution of the sequential sampler. A bad draft costs time, never
correctness.</p>"""


def write(out: Path, results: Path = RESULTS, pictures: Path = PICTURES) -> None:
    """Build the page and write it; what cannot be written as text, as names of files sometimes cannot, is replaced."""
    page = build(results, pictures)
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(page, encoding="utf-8", errors="replace")


def build(results: Path = RESULTS, pictures: Path = PICTURES) -> str:
    """The page, from a folder of result files and one of pictures."""
    everything = read(results)
    # Results of earlier versions lie in folders below.
    found = replace(everything, found=[result for result in everything.found if "/" not in result.name])
    chapters = sections(found, pictures)
    used = {result.name for section in chapters for result in section.results}
    left = [f"{result.name}.json" for result in everything.found if result.name not in used] + found.foreign
    unused = f"<p>Result files that this page does not show: {escape(', '.join(left))}.</p>" if left else ""
    run = recording.record()
    shown = [_how(run), *chapters]
    data = {"plots": [plot.to_json() for s in shown for plot in s.plots], "recording": run.to_json()}
    return Template(_part("page.html")).substitute(
        title="foresample: exact speculative sampling of diffusion models, measured",
        style=_part("page.css") + _part("run.css"),
        head=HEAD,
        cards="".join(card.html() for card in headlines(found)),
        contents="".join(f'<li><a href="#{escape(s.id)}">{escape(s.short or s.title)}</a></li>' for s in shown),
        sections="".join(section.html() for section in shown),
        colophon=f"{unused}<p>Made by <code>make report</code>, version {escape(__version__)}, from saved result "
        "files.</p>",
        # A closing tag inside a string must not close the element.
        data=json.dumps(data, ensure_ascii=False, allow_nan=False).replace("<", "\\u003c"),
        script=_part("page.js") + _part("run.js"),
    )


def sections(results: Results, pictures: Path) -> list[Section]:
    """All sections for which there is something to show, in the order of the page."""
    made = [
        calls(results),
        growth(results),
        clock(results),
        robots(results, pictures),
        quality(results),
        sheets(results, pictures),
        published(results),
        exactness(results),
        losses(results),
    ]
    return [section for section in made if section is not None]


def _how(run: recording.Recording) -> Section:
    """The recorded run: an animation, and without scripts or on paper a picture."""
    body = Template(_part("how.html")).substitute(
        still=storyboard.still(run), run=escape(storyboard.summary(run) + ".")
    )
    return Section("how", "How it works: a real run, round by round", [body], short="How it works")


def _part(name: str) -> str:
    return (HERE / name).read_text(encoding="utf-8")
