"""The page about this repository's evidence: `make report`, or `python -m benchmarks.report`.

calls, clock, robots, quality, published, exactness     what it says; a section without its results is left out
headlines       the figures at its head
evidence        the numbers of the distribution tests
recording       the real run that the animation plays (run.js, run.css), and storyboard, its still picture
plots           plots and tables that several sections show
markup, page    the pieces of a section and the page around them (page.html, page.css, page.js)
"""

from __future__ import annotations

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
from benchmarks.report.page import assemble, write_page
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
    """Build the page and write it."""
    write_page(out, build(results, pictures))


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
    return assemble(
        title="foresample: exact speculative sampling of diffusion models, measured",
        head=HEAD,
        cards=headlines(found),
        sections=[_how(run), *chapters],
        colophon=f"{unused}<p>Made by <code>make report</code>, version {escape(__version__)}, from saved result "
        "files.</p>",
        style=(HERE / "run.css").read_text(encoding="utf-8"),
        script=(HERE / "run.js").read_text(encoding="utf-8"),
        data={"recording": run.to_json()},
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
    text = Template((HERE / "how.html").read_text(encoding="utf-8"))
    body = text.substitute(still=storyboard.still(run), run=escape(storyboard.summary(run) + "."))
    return Section("how", "How it works: a real run, round by round", [body], short="How it works")
