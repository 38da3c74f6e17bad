"""Quality against cost, and the pictures themselves."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from benchmarks.kinds.quality import Quality, QualityCost
from benchmarks.kinds.robots import Policy
from benchmarks.names import label
from benchmarks.report.markup import (
    Axis,
    Plot,
    Point,
    Section,
    Series,
    by_name,
    grid,
    paragraph,
    picture,
    table,
)
from benchmarks.result_files import Result, Results


def quality(results: Results) -> Section | None:
    """Quality against cost."""
    saved, costs = results.of(Quality), results.of(QualityCost)
    plots = [_quality_plot(result) for result in saved]
    plots += [plot for cost in QualityCost.joined(costs) for plot in _cost_plots(cost)]
    if not plots:
        return None
    shown = [f"<div>{_distances(result)}</div>" for result in saved]
    body = [grid(*(plot.html() for plot in plots), *shown)]
    return Section("quality", "Quality against cost", body, plots, [*saved, *costs])


def _quality_plot(result: Quality) -> Plot:
    points: dict[str, list[Point]] = {}
    for row in result.distances:
        for one, other in ((row.a, row.b), (row.b, row.a)):
            run = result.runs.get(other)
            if one == "real" and run is not None:
                points.setdefault(run.sampler, []).append(Point(run.calls, row.distance, None, _words(other)))
    return Plot(
        f"plot-{result.name}",
        "Fashion-MNIST: distance to real pictures against calls",
        Axis("network calls a sample", log=True),
        Axis("Fréchet distance to real pictures", zero=True),
        [
            Series(sampler, own, "ours" if sampler == "speculative" else "exact", line=False)
            for sampler, own in points.items()
        ],
        "Features of our own classifier, so not comparable with FIDs elsewhere. Two runs of each sampler: the "
        "difference between runs is the scale to judge by.",
    )


def _distances(result: Quality) -> str:
    shares = ", ".join(f"{_words(key)} {100 * run.agreement:.1f} %" for key, run in result.runs.items())
    return table(
        ["Fréchet distance between", "values"],
        [(" and ".join(pair), ", ".join(f"{v:.4f}" for v in values)) for pair, values in result.pairs.items()],
        "If the distributions are the same, two samplers are no further apart than two runs of either",
    ) + paragraph(f"Pictures in which the classifier sees the label asked for: {shares}.")


def _words(key: str) -> str:
    return key.replace("-", " ")


def _cost_plots(result: QualityCost) -> list[Plot]:
    """Distance against calls, and against milliseconds where samples were drawn alone."""
    where = "a GPU" if result.settings.device == "cuda" else "a CPU"
    calls = _cost_plot(
        result,
        f"plot-{result.name}",
        "calls",
        "calls",
        "network calls a sample",
        "Open marks are methods that are not exact; along their lines the tolerance or the number of steps varies. The "
        "sequential mark, of other seeds, is the floor: exact methods differ from it by chance alone.",
    )
    clocked = [row for row in result.rows if row.alone_ms is not None]
    if not clocked:
        return [calls]
    clock = _cost_plot(
        replace(result, rows=clocked),
        f"plot-{result.name}-ms",
        "alone_ms",
        "milliseconds",
        "ms of a sample drawn alone",
        f"On {where}, networks eager, peers in plain PyTorch: medians of a few samples, orders of magnitude.",
    )
    return [calls, clock]


def _cost_plot(result: QualityCost, id: str, quantity: str, against: str, axis: str, text: str) -> Plot:
    """Distance against this quantity of a row."""
    return Plot(
        id,
        f"{result.settings.target}: distance against {against}",
        Axis(axis, log=True),
        Axis("distance to the sequential distribution", log=True),
        by_name(
            result.rows,
            lambda row: label(row.method),
            lambda row: Point(getattr(row, quantity), row.distance, row.distance_error, row.detail),
            lambda row: "inexact" if not row.exact else "ours" if row.method == "default" else "exact",
        ),
        text,
    )


SHEETS = (
    (
        "compare.png",
        "Two grids of twenty garments; most places show nearly the same garment left and right",
        "Fashion-MNIST, the embedded model, drawn by foresample sample: sequential left, speculative right, 100 "
        "steps, window 8. The seeds are the same on both sides, and accepted noise is shared, so many "
        "pictures are alike; the distribution is the same by proof.",
        True,
    ),
    (
        "fashion-mnist-samples.png",
        "Ten rows of ten garments, one class a row, all recognisable",
        "Fashion-MNIST, sequential, 100 steps, one class a row: what the embedded model can do.",
        False,
    ),
    (
        "cifar10-samples.png",
        "Ten rows of ten small photographs, one class a row; vehicles and horses are clear, animals often not",
        "CIFAR-10, sequential, 100 steps, one class a row. Eight minutes of training: a benchmark for "
        "samplers, not for pictures.",
        False,
    ),
    (
        "run.png",
        "Bars along the chain, one a round, most of them several steps long, some ending in a red corrected "
        "step",
        "One run of foresample sample: each bar is a round, that is one call, and the steps it committed.",
        False,
    ),
)


def sheets(results: Results, pictures: Path) -> Section | None:
    """Sample sheets, as far as the pictures are there."""
    body = [
        picture(pictures / name, alt, caption, wide=wide)
        for name, alt, caption, wide in SHEETS
        if (pictures / name).is_file()
    ]
    used: list[Result] = []
    for policy in results.of(Policy):
        if (drawn := policy.path.with_suffix(".png")).is_file():
            used.append(policy)
            body.append(
                picture(
                    drawn,
                    "Four handwritten shapes: demonstrations, and roll-outs of the sequential and the "
                    "accelerated policy, which look alike",
                    "A robot policy draws handwriting in closed loop: demonstrations, the sequential policy, "
                    "the accelerated one.",
                )
            )
    if not body:
        return None
    return Section("pictures", "Pictures", [f'<div class="sheets">{"".join(body)}</div>'], [], used)
