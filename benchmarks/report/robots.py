"""Robots: LeRobot's policy on the clock and in closed loop."""

from __future__ import annotations

from pathlib import Path

from benchmarks.kinds.robots import PolicyWarm, RobotClock, RobotClockRow, RobotSuccess
from benchmarks.report.calls import machine_of
from benchmarks.report.markup import (
    Axis,
    Plot,
    Point,
    Section,
    Series,
    by_name,
    grid,
    number,
    paragraph,
    picture,
    table,
)
from benchmarks.result_files import Result, Results

EPISODE = "robot-episode.gif"
_STARTS = {(False, False): "cold", (True, False): "warm", (False, True): "prior", (True, True): "warm, prior"}


def robots(results: Results, pictures: Path) -> Section | None:
    """Milliseconds and calls of a plan, success rates, an episode."""
    clocks, trials, starts = results.of(RobotClock), results.of(RobotSuccess), results.of(PolicyWarm)
    used: list[Result] = [*clocks, *trials, *starts]
    if not used:
        return None
    plots = [plot for result in clocks for plot in (_clock_plot(result), _tail_plot(result))]
    body = [
        paragraph(
            "LeRobot's own diffusion policy, trained on Meta-World, plans with 100 network calls in a row. "
            "Accelerated, it draws from the same distribution with a few wide ones. Plans differ in calls, so the "
            "slowest of a hundred is shown beside the median: a controller waits for that one."
        ),
        grid(*(plot.html() for plot in plots)),
    ]
    body += [_success_table(result) for result in trials]
    if trials and (pictures / EPISODE).is_file():
        alt = "A robot hand takes a peg to its hole, seen from above and from the side, with each plan in red"
        caption = "An episode of the accelerated policy: hand (blue), peg (yellow), hole (star), plan (red)."
        body.append(picture(pictures / EPISODE, alt, caption, wide=True))
    body += [_starts_table(result) for result in starts]
    return Section("robots", "Robots", body, plots, used)


def _label(row: RobotClockRow) -> str:
    if row.window is None:
        return row.run
    start = "learned prior" if row.learned_from else _STARTS[bool(row.warm), bool(row.prior)]
    return f"{row.run}, {start}"


def _clock_plot(result: RobotClock) -> Plot:
    rows = [row for row in result.rows if not row.auto]
    fastest = min((row.ms.median for row in rows if row.window is None), default=None)

    def point(row: RobotClockRow) -> Point:
        gain = f", {fastest / row.ms.median:.1f}× the fastest sequential" if fastest and row.window else ""
        return Point(row.window or 0, row.ms.median, None, f"{number(row.calls.mean)} calls{gain}")

    return Plot(
        f"plot-{result.name}",
        f"{result.settings.parameters / 1e6:.0f} million parameters: milliseconds a plan against window",
        Axis("window; 0 is LeRobot's loop"),
        Axis("ms a plan, median", log=True),
        by_name(rows, _label, point, lambda row: "exact"),
        f"Batch 1, recorded observations{machine_of(result)}.",
    )


def _tail_plot(result: RobotClock) -> Plot:
    rows = [r for r in result.rows if r.window is not None and r.warm and not r.auto]
    runs = {row.run for row in rows}
    best = next((run for run in ("graph", "compiled + graph", "compiled") if run in runs), "eager")
    rows = sorted((r for r in rows if r.run == best), key=lambda r: r.window or 0)
    kept = {r.window: r for r in rows}.values()

    def points(name: str) -> list[Point]:
        return [
            Point(r.window or 0, getattr(r.ms, name), None, f"{getattr(r.calls, name):.0f} calls") for r in kept
        ]

    return Plot(
        f"plot-tail-{result.name}",
        "The slow plans",
        Axis("window"),
        Axis("ms a plan", zero=True),
        [
            Series("median", points("median"), "ours"),
            Series("99th percentile", points("p99")),
            Series("slowest", points("most")),
        ],
        f"{best}, started warm.",
    )


def _success_table(result: RobotSuccess) -> str:
    methods = result.methods
    tasks = dict.fromkeys(row.task for row in result.rows)
    found = {
        (row.task, row.method): (
            f"{row.successes} of {row.episodes} ({100 * row.low:.0f} to {100 * row.high:.0f} %)"
        )
        for row in result.rows
    }
    rows = [[task, *(found.get((task, method), "") for method in methods)] for task in tasks]
    calls = {row.method: row.calls for row in result.rows}
    rows.append(["calls a plan", *(number(calls.get(method)) for method in methods)])
    still = "; the robot holds still while a plan is computed" if result.settings.waits else ""
    caption = f"Episodes that succeeded, the same situations for every method{still}"
    return table(["task", *methods], rows, caption)


def _starts_table(result: PolicyWarm) -> str:
    windows = dict.fromkeys(row.window for row in result.rows)
    found = {(row.window, row.warm, row.prior): row.calls for row in result.rows}
    rows: list[list[str | float | None]] = [
        [f"{w}", *(found.get((w, *start)) for start in _STARTS)] for w in windows
    ]
    return table(
        ["window", *_STARTS.values()],
        rows,
        "The handwriting policy: calls a plan, by what its plans start from",
    )
