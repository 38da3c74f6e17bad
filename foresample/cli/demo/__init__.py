"""`foresample demo`: draws a plan and a picture both ways, and writes one page that shows them.

drawing    the robot, the picture and the check: draws both ways in turns, and times them
page.html  the page, which contains everything it needs: it opens from disk and fetches nothing
"""

from __future__ import annotations

import json
from html import escape
from importlib.resources import files

import typer

from foresample.cli.console import echo, wait_line
from foresample.cli.demo import drawing
from foresample.cli.options import Demo
from foresample.engine.clock import Comparison, Times
from foresample.provenance import __version__


def run(options: Demo) -> None:
    out, seed = options.out, options.seed
    with wait_line(quiet=False) as say:
        say("two pens draw a shape")
        pens = drawing.draw_with_pens(seed)
        say("one picture, drawn both ways in turns")
        picture = drawing.draw_picture(seed)
        say("many plans both ways, to compare their distributions")
        law = drawing.check_plans(pens, seed)
    counted = f"{law.sequential} sequential and {law.samples} speculative plans"
    limit = f"smallest p {law.smallest_p:.2g}, the limit is {law.level / law.tests:.2g}"
    found = "passed, no difference" if law.passed else "FAILED, there is a difference"
    compared = {"pen": Comparison(pens[0].times, pens[1].times), "picture": picture.comparison}
    lines = {
        "robot": sentence(compared["pen"], " a plan"),
        "picture": sentence(compared["picture"], ""),
        "check": f"{found} between {counted} ({law.tests} tests, {limit})",
    }
    fields = {name: escape(line) for name, line in lines.items()}
    for name, both in compared.items():
        fields |= {f"{name}-sequential": facts(both.plain), f"{name}-speculative": facts(both.ours)}
    data = {"pens": drawing.shown(pens), "picture": picture.shown()}
    fields |= {"version": escape(__version__), "data": json.dumps(data).replace("<", "\\u003c")}
    page = (files(__name__) / "page.html").read_text("utf-8")
    for name, text in fields.items():
        page = page.replace("{{" + name + "}}", text)
    out.write_text(page, encoding="utf-8")
    for name, line in lines.items():
        echo(f"{name + ':':<9}{line}{f'; the page is {out}' if name == 'check' else ''}")
    if not law.passed:
        raise typer.Exit(1)


def sentence(compared: Comparison, each: str) -> str:
    """The line about two samplers: verdict, times, calls."""
    (before, _, calls), (now, _, fewer) = compared.plain.medians, compared.ours.medians
    detail = f" ({compared.detail})" if compared.detail else ""
    verdict = f"{compared.verdict} on this machine{detail}, the same distribution"
    return f"{verdict}: {now}{each} instead of {before}, {fewer} network calls instead of {calls}"


def facts(times: Times) -> str:
    """Times and calls of one sampler, as entries of a list."""
    named = zip(("time", "in the network", "network calls"), times.medians, strict=True)
    return "".join(f"<div><dt>{name}</dt><dd>{value}</dd></div>" for name, value in named)
