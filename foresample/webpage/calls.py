"""Speed-up in calls, and how calls grow with the chain."""

from __future__ import annotations

import math
from collections.abc import Sequence

from foresample.webpage.common import SPEEDUP, bench_rows, by_method, counts, machine_of, model_title
from foresample.webpage.markup import Axis, Plot, Point, Section, Series, grid, paragraph, plus_minus
from foresample.webpage.results import Result, Results, is_number


def calls(results: Results) -> Section | None:
    """Speed-up in calls: trained models, mixtures, and curves over the verification batch."""
    models, mixtures = results.matching("*-calls-*"), results.matching("mixture-*")
    curves = results.matching("curves-*")
    plots = [_model_plot(result) for result in models] + [_curve_plot(result) for result in curves]
    several = [r for r in mixtures if len({row["window"] for row in bench_rows(r, "window")}) > 1]
    single = [r for r in mixtures if r not in several]
    plots += [_mixture_plot(result) for result in several]
    if single:
        plots.append(_mixtures_at_one_window(single))
    if not plots:
        return None
    text = paragraph(
        "Speed-up in calls: transitions of the chain over the network calls made one after another for a "
        "sample,",
        "everything counted. Every method here is exact unless its marks are open. Hover, or use the arrow "
        "keys, for",
        "values with standard errors; the legend switches methods off.",
    )
    return Section(
        "calls", "Fewer calls", [text, grid(*(p.html() for p in plots))], plots, models + curves + mixtures
    )


def _model_plot(result: Result) -> Plot:
    settings = result.settings
    told = [f"{settings[key]} samples" for key in ("count",) if key in settings]
    told += [f"window {settings['window']}"] if "window" in settings else []
    return Plot(
        f"plot-{result.name}",
        f"{model_title(result)}: speed-up against chain length",
        Axis("steps of the chain", log=True),
        Axis(SPEEDUP, log=True),
        by_method(bench_rows(result, "steps"), "steps", "speedup", "speedup_error", counts),
        f"A trained model; {', '.join(told)}." if told else "A trained model.",
    )


def _mixture_title(result: Result) -> str:
    s = result.settings
    parts = [f"d = {s['dim']}"] if "dim" in s else [result.name]
    parts += [f"ε = {s['churn']:g}"] if is_number(s.get("churn")) else []
    parts += [f"{s['steps']} steps"] if "steps" in s else []
    return ", ".join([*parts, f"{s['reuse']} reused"] if "reuse" in s else parts)


def _mixture_plot(result: Result) -> Plot:
    return Plot(
        f"plot-{result.name}",
        f"Mixture: {_mixture_title(result)}",
        Axis("window: transitions drafted in a round"),
        Axis(SPEEDUP, zero=True),
        by_method(bench_rows(result, "window"), "window", "speedup", "speedup_error", counts),
        "The closed-form Gaussian mixture of the draft-tree papers.",
    )


def _mixtures_at_one_window(found: Sequence[Result]) -> Plot:
    rows = {result.name: bench_rows(result, "window") for result in found}
    windows = sorted({row["window"] for some in rows.values() for row in some})
    return Plot(
        "plot-mixtures-one-window",
        f"Mixtures at window {', '.join(str(w) for w in windows)}",
        Axis("method"),
        Axis(SPEEDUP, zero=True),
        [
            Series(
                _mixture_title(result),
                [Point(r["method"], r["speedup"], r["speedup_error"], counts(r)) for r in rows[result.name]],
                line=False,
            )
            for result in found
        ],
        "Long chains, one window each: where blocks, recycling and replay add up.",
        kind="dots",
        categories=list(dict.fromkeys(row["method"] for some in rows.values() for row in some)),
    )


def _curve_plot(result: Result) -> Plot:
    rows = result.rows(text=("method",), positive=("states", "speedup"))
    rows = [row for row in rows if row["method"] != "sequential"]  # 1, by definition
    settings = result.settings
    drawn = f"; {settings['samples']} samples{machine_of(result)}" if "samples" in settings else ""
    return Plot(
        f"plot-{result.name}",
        f"{settings.get('target', result.name)}, {settings.get('steps', '?')} steps: speed-up against batch",
        Axis("states evaluated in a call", log=True),
        Axis(SPEEDUP, zero=True),
        by_method(rows, "states", "speedup", "speedup_error", counts),
        f"Every method at several verification batches{drawn}."
        + (
            "" if all(row.get("exact", True) for row in rows) else " Open marks are methods that are not exact."
        ),
    )


RATE = 2 / 3
"""Exponent of the calls that autospeculation is proved to need."""


def growth(results: Results) -> Section | None:
    """Calls against chain length."""
    found = results.matching("*-growth")
    if not found:
        return None
    plots, texts = [], []
    for result in found:
        rows = result.rows(numbers=("calls_error",), positive=("steps", "calls"))
        exponent = float(result.field("exponent", (int, float)))
        steps = [row["steps"] for row in rows]
        centre = [math.fsum(math.log(row[k]) for row in rows) / len(rows) for k in ("steps", "calls")]
        measured = [Point(row["steps"], row["calls"], row["calls_error"]) for row in rows]
        first, last = rows[0], rows[-1]

        def power(p: float, at: tuple[float, float], steps: list[int] = steps) -> list[Point]:
            return [Point(n, math.exp(at[1] + p * (math.log(n) - at[0]))) for n in steps]

        start = (math.log(first["steps"]), math.log(first["calls"]))
        plots.append(
            Plot(
                f"plot-{result.name}",
                f"{model_title(result)}: calls against chain length",
                Axis("steps of the chain, N", log=True),
                Axis("network calls a sample", log=True),
                [
                    Series("measured", measured, "ours"),
                    Series(f"fit, N^{exponent:.2f}", power(exponent, (centre[0], centre[1])), "reference"),
                    Series("N^⅔ from the first point", power(RATE, start), "reference"),
                    Series("sequential, N", [Point(n, float(n)) for n in steps], "reference"),
                ],
            )
        )
        texts.append(
            paragraph(
                f"Going from {first['steps']} to {last['steps']} steps ({last['steps'] / first['steps']:.3g} "
                f"times as many) takes {plus_minus(first['calls'], first['calls_error'])} to "
                f"{plus_minus(last['calls'], last['calls_error'])} calls, "
                f"{last['calls'] / first['calls']:.1f} times as many. The fitted exponent is {exponent:.2f}; "
                "autospeculation (Hu et al. 2025) proves a speed-up of order N^⅓, that is N^⅔ calls, drawn "
                "from the first point. A power law is a summary here, not a theorem: the window is fixed, "
                "so in the end calls must grow like N.",
            )
        )
    return Section("growth", "Finer chains cost little more", texts + [p.html() for p in plots], plots, found)
