"""Speed-up in calls, and how calls grow with the chain."""

from __future__ import annotations

import math
from collections.abc import Sequence

from benchmarks.kinds.calls import Calls, Growth
from benchmarks.kinds.rivals import CurvePoint, Curves
from benchmarks.names import MODELS, label
from benchmarks.report.markup import (
    Axis,
    Plot,
    Point,
    Role,
    Section,
    Series,
    by_name,
    grid,
    number,
    paragraph,
    plus_minus,
)
from benchmarks.result_files import BenchResult, BenchRow, Result, Results

SPEEDUP = "transitions per network call"


def calls(results: Results) -> Section | None:
    """Speed-up in calls: trained models, mixtures, and curves over the verification batch."""
    models, curves, mixtures = results.of(Calls), results.of(Curves), results.of(BenchResult)
    plots = [_model_plot(result) for result in models] + [_curve_plot(result) for result in curves]
    single = [result for result in mixtures if len({row.window for row in result.rows}) == 1]
    plots += [_mixture_plot(result) for result in mixtures if result not in single]
    if single:
        plots.append(_mixtures_at_one_window(single))
    if not plots:
        return None
    text = paragraph(
        "Speed-up in calls: transitions of the chain over the network calls made one after another for a "
        "sample, everything counted. Every method here is exact unless its marks are open. Hover, or use the "
        "arrow keys, for values with standard errors; the legend switches methods off."
    )
    body = [text, grid(*(plot.html() for plot in plots))]
    return Section("calls", "Fewer calls", body, plots, [*models, *curves, *mixtures])


def _model_plot(result: Calls) -> Plot:
    settings = result.settings
    return Plot(
        f"plot-{result.name}",
        f"{MODELS.get(settings.model, settings.model)}: speed-up against chain length",
        Axis("steps of the chain", log=True),
        Axis(SPEEDUP, log=True),
        by_name(
            result.rows,
            lambda row: row.label,
            lambda row: bench_point(row, row.steps),
            lambda row: "ours" if (row.method, row.reuse) == ("default", "x0") else "exact",
        ),
        f"A trained model; {settings.count} samples, window {settings.window}.",
    )


def _mixture_plot(result: BenchResult) -> Plot:
    return Plot(
        f"plot-{result.name}",
        f"Mixture: {_mixture_title(result)}",
        Axis("window: transitions drafted in a round"),
        Axis(SPEEDUP, zero=True),
        by_name(
            result.rows,
            lambda row: label(row.method),
            lambda row: bench_point(row, row.window),
            lambda row: "ours" if row.method == "default" else "exact",
        ),
        "The closed-form Gaussian mixture of the draft-tree papers.",
    )


def _mixture_title(result: BenchResult) -> str:
    s = result.settings
    shown = {"d = {}": s.dim, "ε = {:g}": s.churn, "{} steps": s.steps, "{} reused": s.reuse}
    return ", ".join(text.format(value) for text, value in shown.items() if value is not None)


def _mixtures_at_one_window(found: Sequence[BenchResult]) -> Plot:
    windows = sorted({row.window for result in found for row in result.rows})
    methods = dict.fromkeys(row.method for result in found for row in result.rows)
    return Plot(
        "plot-mixtures-one-window",
        f"Mixtures at window {', '.join(str(w) for w in windows)}",
        Axis("method"),
        Axis(SPEEDUP, zero=True),
        [
            Series(
                _mixture_title(result),
                [bench_point(row, label(row.method)) for row in result.rows],
                line=False,
            )
            for result in found
        ],
        "Long chains, one window each: where blocks, recycling and replay add up.",
        kind="dots",
        categories=[label(method) for method in methods],
    )


def _curve_plot(result: Curves) -> Plot:
    settings = result.settings

    def role(row: CurvePoint) -> Role:
        return "inexact" if not row.exact else "ours" if row.method == "default" else "exact"

    return Plot(
        f"plot-{result.name}",
        f"{settings.target}, {settings.steps} steps: speed-up against batch",
        Axis("states evaluated in a call", log=True),
        Axis(SPEEDUP, zero=True),
        by_name(
            [row for row in result.rows if row.method != "sequential"],  # 1, by definition
            lambda row: label(row.method),
            lambda row: Point(row.states, row.speedup, row.speedup_error, cost(row.calls, row.evaluations)),
            role,
        ),
        f"Every method at several verification batches; {settings.samples} samples{machine_of(result)}."
        + ("" if all(row.exact for row in result.rows) else " Open marks are methods that are not exact."),
    )


def bench_point(row: BenchRow, x: float | str) -> Point:
    """A row's speed-up over x."""
    return Point(x, row.speedup, row.speedup_error, cost(row.calls, row.evaluations))


def cost(calls: float, evaluations: float) -> str:
    """The cost of a sample in words."""
    return f"{number(calls)} calls, {number(evaluations)} evaluations a sample"


def machine_of(result: Result) -> str:
    """The machine of a result, as the end of a sentence."""
    return f" on one {result.machine.gpu}" if result.machine.gpu else " on a CPU"


RATE = 1 / 2
"""Exponent of the calls that autospeculation is proved to need."""


def growth(results: Results) -> Section | None:
    """Calls against chain length."""
    found = results.of(Growth)
    if not found:
        return None
    plots, texts = [], []
    for result in found:
        rows, exponent = result.rows, result.exponent
        centre_steps, centre_calls = (
            math.fsum(map(math.log, values)) / len(rows)
            for values in ([row.steps for row in rows], [row.calls for row in rows])
        )
        first, last = rows[0], rows[-1]

        def power(p: float, steps: float, calls: float, found: Growth = result) -> list[Point]:
            """calls · (N / steps)^p, both as logarithms."""
            return [Point(row.steps, math.exp(calls + p * (math.log(row.steps) - steps))) for row in found.rows]

        plots.append(
            Plot(
                f"plot-{result.name}",
                f"{MODELS.get(result.settings.model, result.settings.model)}: calls against chain length",
                Axis("steps of the chain, N", log=True),
                Axis("network calls a sample", log=True),
                [
                    Series("measured", [Point(r.steps, r.calls, r.calls_error) for r in rows], "ours"),
                    Series(f"fit, N^{exponent:.2f}", power(exponent, centre_steps, centre_calls), "reference"),
                    Series(
                        "√N from the first point",
                        power(RATE, math.log(first.steps), math.log(first.calls)),
                        "reference",
                    ),
                    Series("sequential, N", [Point(r.steps, float(r.steps)) for r in rows], "reference"),
                ],
            )
        )
        texts.append(
            paragraph(
                f"Going from {first.steps} to {last.steps} steps ({last.steps / first.steps:.3g} "
                f"times as many) takes {plus_minus(first.calls, first.calls_error)} to "
                f"{plus_minus(last.calls, last.calls_error)} calls, "
                f"{last.calls / first.calls:.1f} times as many. The fitted exponent is {exponent:.2f}; "
                "parallel sampling by autospeculation (Anari et al. 2025, arXiv 2511.07869) proves expected rounds of "
                "order √N, up to logarithms, for a scheme of its own where the sequential sampler takes N; √N is drawn "
                "from the first point. Hu et al. (2025) had N^⅔ before. "
                "A power law is a summary here, not a theorem: the window is fixed, "
                "so in the end calls must grow like N.",
            )
        )
    return Section("growth", "Finer chains cost little more", texts + [p.html() for p in plots], plots, found)
