"""Times the two pens of `foresample demo` over many plans, and makes the moving picture of the README.

python -m benchmarks.pens
"""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch
import typer

import foresample as fs
from benchmarks.kinds.robots import PenRow, Pens, PenSettings
from benchmarks.results import RESULTS, load, save
from benchmarks.timing import Ratio, take_turns
from foresample.cli.demo import drawing
from foresample.engine.clock import Times, ratio_interval
from foresample.pretrained import policy as handwriting

PICTURE = Path(__file__).parent.parent / "docs" / "pictures" / "pens.svg"
SLOWER = 10
"""The picture moves this many times slower than the pens did."""
PAUSE = 1500.0
"""Milliseconds that the finished picture is shown before the animation starts again."""


def measure(drawings: int) -> tuple[list[Times], list[list[list[list[float]]]]]:
    """Times of all drawings with each pen, and each pen's paths in the first drawing."""
    both = [Times(), Times()]
    paths: list[list[list[list[float]]]] = []
    for seed in range(drawings):
        pens = drawing.draw_with_pens(seed)
        paths = paths or [pen.paths for pen in pens]
        for times, pen in zip(both, pens, strict=True):
            for turn in zip(pen.times.seconds, pen.times.network, pen.times.calls, strict=True):
                times.add(*turn)
    return both, paths


def compiling(turns: int = 60) -> tuple[Ratio, Ratio]:
    """The gain of compiling the network with torch.compile: for the sequential policy, and for the accelerated one."""
    position, shape = torch.tensor([handwriting.STARTS[drawing.SHAPE]]), torch.tensor([drawing.SHAPE])

    def plan(policy: handwriting.LasaPolicy, turn: int) -> None:
        generator = torch.Generator().manual_seed(turn + 1000)
        policy.predict_action_chunk(position, torch.zeros(1, 2), shape, generator)

    found = []
    with drawing.threads(1):
        for window in (None, drawing.PLAN_WINDOW):
            pens = {"as it is": handwriting.load(), "compiled": handwriting.load()}
            diffusion: Any = pens["compiled"].diffusion
            diffusion.unet = torch.compile(diffusion.unet)
            for policy in pens.values():
                if window is not None:
                    fs.accelerate(policy, window=window)
            sides = {name: partial(plan, policy) for name, policy in pens.items()}
            found.append(take_turns(sides, warm=5, least=turns, most=turns).ratio("compiled"))
    return found[0], found[1]


def row(sampler: str, times: Times, paths: list[list[list[float]]]) -> PenRow:
    ms = [1000 * seconds for seconds in times.seconds]
    return PenRow(
        sampler=sampler,
        ms=median(ms),
        network_ms=1000 * median(times.network),
        calls=fmean(times.calls),
        plan_ms=ms[: len(paths)],
        paths=paths,
    )


def svg(saved: Pens) -> str:
    """Two pens that draw the same shape at their measured pace, as an animated SVG that fetches nothing."""
    plain, ours = saved.rows
    total = max(sum(row.plan_ms) for row in saved.rows) * SLOWER + PAUSE
    titles = (
        ("Sequential sampler", f"{plain.ms:.0f} ms a plan, {plain.calls:.0f} network calls"),
        (f"foresample, {saved.ratio:.1f}× faster", f"{ours.ms:.0f} ms a plan, {ours.calls:.1f} network calls"),
    )
    sides = [_side(k, *titles[k], row, saved.settings.start, total) for k, row in enumerate(saved.rows)]
    label = (
        f"Two pens draw one shape. The sequential policy takes {plain.ms:.0f} ms a plan, "
        f"the accelerated one {ours.ms:.0f} ms."
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 760 360" role="img" aria-label="{label}">\n'
        "<style>text{font-family:system-ui,sans-serif;fill:#1c2430}.s{font-size:14px;fill:#55606e}"
        ".t{font-size:18px;font-weight:600}path{fill:none;stroke-width:8;stroke-linecap:round;"
        "stroke-linejoin:round;stroke-dasharray:1}"
        f".a{{animation-duration:{total:.0f}ms;animation-timing-function:linear;"
        "animation-iteration-count:infinite}@media (prefers-reduced-motion:reduce){.a{animation:none}}</style>\n"
        '<rect width="760" height="360" fill="#fff"/>\n'
        + "\n".join(sides)
        + f'\n<text class="s" x="380" y="350" text-anchor="middle">One CPU core. Shown {SLOWER} times slower '
        "than measured.</text>\n</svg>\n"
    )


def _side(k: int, title: str, note: str, row: PenRow, start: list[float], total: float) -> str:
    """One pen: a path that is uncovered plan by plan, and the pen at its end."""
    left, colour = 380 * k, ("#55606e", "#b3122f")[k]
    points = [start, *(point for path in row.paths for point in path)]
    places = [(left + 190 + 118 * x, 200 - 118 * y) for x, y in points]
    pairs = pairwise(places)
    lengths = [((x - u) ** 2 + (y - v) ** 2) ** 0.5 for (x, y), (u, v) in pairs]
    whole, clock, drawn, frames = sum(lengths), 0.0, 0.0, [(0.0, 0.0)]
    for i, ms in enumerate(row.plan_ms):
        each = len(row.paths[i])
        clock, drawn = clock + ms * SLOWER / total, drawn + sum(lengths[i * each : (i + 1) * each]) / whole
        frames.append((clock, min(drawn, 1.0)))
    frames.append((1.0, 1.0))
    line = "".join(f"{100 * t:.2f}%{{stroke-dashoffset:{1 - d:.4f}}}" for t, d in frames)
    pen = "".join(f"{100 * t:.2f}%{{offset-distance:{100 * d:.2f}%}}" for t, d in frames)
    path = "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in places)
    return (
        f"<style>@keyframes l{k}{{{line}}}@keyframes p{k}{{{pen}}}</style>\n"
        f'<text class="t" x="{left + 190}" y="28" text-anchor="middle">{title}</text>\n'
        f'<text class="s" x="{left + 190}" y="50" text-anchor="middle">{note}</text>\n'
        f'<path class="a" pathLength="1" stroke="{colour}" d="{path}" style="animation-name:l{k}"/>\n'
        f'<circle class="a" r="11" fill="{colour}" '
        f"style=\"offset-path:path('{path}');offset-distance:100%;animation-name:p{k}\"/>"
    )


def main(drawings: int = 8) -> None:
    (plain, ours), paths = measure(drawings)
    compiled, ours_compiled = compiling()
    ratios = [p / o for p, o in zip(plain.seconds, ours.seconds, strict=True)]
    settings = PenSettings(
        shape=handwriting.SHAPES[drawing.SHAPE],
        start=list(handwriting.STARTS[drawing.SHAPE]),
        steps=100,
        window=drawing.PLAN_WINDOW,
        plans=len(ratios),
        threads=1,
    )
    save(
        RESULTS / "pens.json",
        "pens",
        settings,
        rows=[row("sequential", plain, paths[0]), row("accelerated", ours, paths[1])],
        ratio=median(plain.seconds) / median(ours.seconds),
        ratio_interval=list(ratio_interval(ratios)),
        compiled=compiled,
        ours_compiled=ours_compiled,
    )
    PICTURE.write_text(svg(load(Pens, "pens")), encoding="utf-8")


if __name__ == "__main__":
    typer.run(main)
