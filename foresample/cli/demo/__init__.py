"""`foresample demo`: draws a plan and a picture both ways, and writes one page that shows them.

drawing    the robot, the picture and the check: what is drawn, and how long it took
clock      times taken in turns, and what they say
page.html  the page; everything it needs is put inside, so it opens from disk and fetches nothing
"""

from __future__ import annotations

import json
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Annotated

import typer

from foresample.cli import options
from foresample.cli.console import echo, require_file, require_modules, wait_line
from foresample.cli.demo.clock import Times, duration, verdict
from foresample.provenance import __version__

OUT = Path("out/demo.html")


def demo_command(
    out: Annotated[Path, typer.Option(help="The page to write.")] = OUT, seed: options.Seed = 0
) -> None:
    """Draw with a robot's pen and draw a picture, sequentially and speculatively, and write one page that shows both.

    Needs no GPU and takes less than a minute. Exit status 1 if the exactness check fails.
    """
    require_file(out)
    require_modules("diffusers", "safetensors", "PIL")
    from foresample.cli.demo.drawing import check_plans, draw_picture, draw_with_pens

    with wait_line(quiet=False) as say:
        say("two pens draw a shape")
        pens = draw_with_pens(seed)
        say("one picture, drawn both ways in turns")
        picture = draw_picture(seed)
        say("many plans both ways, to compare their distributions")
        law = check_plans(pens, seed)
    counted = f"{law.sequential} sequential and {law.samples} speculative plans"
    limit = f"smallest p {law.smallest_p:.2g}, the limit is {law.level / law.tests:.2g}"
    found = "passed, no difference" if law.passed else "FAILED, there is a difference"
    lines = {
        "robot": compared(pens.plain, pens.ours, " a plan"),
        "picture": compared(picture.plain, picture.ours, ""),
        "check": f"{found} between {counted} ({law.tests} tests, {limit})",
    }
    fields = {
        **{name: escape(line) for name, line in lines.items()},
        "pen-sequential": facts(pens.plain),
        "pen-speculative": facts(pens.ours),
        "picture-sequential": facts(picture.plain),
        "picture-speculative": facts(picture.ours),
        "version": escape(__version__),
        "data": json.dumps({"pens": pens.shown(), "picture": picture.shown()}).replace("<", "\\u003c"),
    }
    page = (files(__name__) / "page.html").read_text("utf-8")
    for name, text in fields.items():
        page = page.replace("{{" + name + "}}", text)
    out.write_text(page, encoding="utf-8")
    for name, line in lines.items():
        echo(f"{name + ':':<9}{line}")
    echo(f"{'page:':<9}{out}")
    if not law.passed:
        raise typer.Exit(1)


def compared(plain: Times, ours: Times, each: str) -> str:
    """The line about two samplers: times, verdict, calls."""
    times = f"{duration(ours.median)}{each} instead of {duration(plain.median)}"
    return f"{times}, {verdict(plain, ours)} ({ours.calls_mean:.3g} network calls instead of {plain.calls_mean:.3g})"


def facts(times: Times) -> str:
    """What one sampler took, as entries of a list."""
    told = {
        "time": duration(times.median),
        "in the network": duration(times.network_median),
        "network calls": f"{times.calls_mean:.3g}",
    }
    return "".join(f"<div><dt>{name}</dt><dd>{value}</dd></div>" for name, value in told.items())
