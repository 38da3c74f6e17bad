"""Plots and tables that several sections show."""

from __future__ import annotations

from html import escape

from benchmarks.report.markup import Axis, Plot, Point, Series, by_name, number, table
from benchmarks.result_files import BenchRow, CheckResult, FrontierResult
from benchmarks.results import label
from foresample.engine.tuning import Frontier

SPEEDUP = "transitions per network call"


def bench_plot(id: str, title: str, rows: list[BenchRow], text: str) -> Plot:
    """Speed-up of the methods against the window, or side by side if there is only one."""
    if len(windows := {row.window for row in rows}) > 1:
        return Plot(
            id,
            title,
            Axis("window: transitions drafted in a round"),
            Axis(SPEEDUP, zero=True),
            by_name(
                rows,
                lambda row: label(row.method),
                lambda row: bench_point(row, row.window),
                lambda row: "ours" if row.method == "default" else "exact",
            ),
            text,
        )
    return Plot(
        id,
        title,
        Axis("method"),
        Axis(SPEEDUP, zero=True),
        [Series(f"window {windows.pop()}", [bench_point(row, label(row.method)) for row in rows], line=False)],
        text,
        kind="dots",
        categories=list(dict.fromkeys(label(row.method) for row in rows)),
    )


def bench_point(row: BenchRow, x: float | str) -> Point:
    """A row's speed-up over x."""
    return Point(x, row.speedup, row.speedup_error, cost(row.calls, row.evaluations))


def cost(calls: float, evaluations: float) -> str:
    """The cost of a sample in words."""
    return f"{number(calls)} calls, {number(evaluations)} evaluations a sample"


def frontier_plot(result: FrontierResult, id: str) -> Plot:
    """Throughput against latency, for both samplers."""
    sequential: list[Point] = []
    ours: list[Point] = []
    for p in Frontier(result.tunings).points:
        label = f"{p.slots} at a time" + ("" if p.window is None else f", window {p.window}")
        point = Point(1e3 * p.p95_seconds, p.samples_per_second, None, label)
        (sequential if p.window is None else ours).append(point)
    return Plot(
        f"{id}-frontier",
        "Throughput against latency",
        Axis("ms a sample, 95 in 100 of them", log=True),
        Axis("samples a second", log=True),
        [
            Series("sequential", sequential),
            Series("speculative", _outermost(ours), "ours"),
        ],
        "Further up and to the left is better; of the windows, those that no other beats in both.",
    )


def _outermost(found: list[Point]) -> list[Point]:
    """The Pareto front of throughput and latency."""
    kept: list[Point] = []
    for point in sorted(found, key=lambda point: (float(point.x), -point.y)):
        if not kept or point.y > kept[-1].y:
            kept.append(point)
    return kept


def note(advice: str) -> str:
    """The tuner's advice as a block."""
    return f'<blockquote class="note">{escape(advice)}.</blockquote>'


def findings_table(result: CheckResult, caption: str = "") -> str:
    """Each question and its answer."""
    rows = [(f.question, "yes" if f.passed else "NO", f.detail) for f in result.findings]
    return table(["question", "passed", "numbers"], rows, caption)
