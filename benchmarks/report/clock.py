"""Sampling on the clock: where fewer calls take less time, and where they do not."""

from __future__ import annotations

from collections.abc import Callable
from html import escape

from benchmarks.kinds.calls import Calls
from benchmarks.kinds.clock import Latency, LatencyRow, Memory, Throughput, ThroughputRow
from benchmarks.kinds.robots import Policy
from benchmarks.names import MODELS
from benchmarks.report.calls import cost, machine_of
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
    table,
)
from benchmarks.result_files import FrontierResult, Result, Results
from foresample.engine.tuning import Frontier


def clock(results: Results) -> Section | None:
    """Milliseconds a sample, where a round's time goes, memory."""
    latencies, memories = results.of(Latency), results.of(Memory)
    used: list[Result] = [*latencies, *memories]
    if not used:
        return None
    captured = [result for result in latencies if result.settings.mode == "graph"]
    plots = [_latency_plot(result) for result in captured]
    plots += [_rounds_plot(result) for result in captured if result.rounds]
    intro = paragraph(
        f"One sample at a time{machine_of(used[0])}: calls follow one another, and a call on a few more states "
        "costs little more. This is where fewer calls become less time."
    )
    texts = [
        table(
            ["steps of the chain", "samples asked for", "peak memory, MiB"],
            ((row.steps, row.samples, row.peak_mib) for row in result.rows),
            "Memory hardly grows with the chain or with the number of samples",
        )
        for result in memories
    ]
    body = [intro, grid(*(plot.html() for plot in plots)), *texts]
    return Section("clock", "On the clock", body, plots, used)


def _model(name: str) -> str:
    return MODELS.get(name, name)


def _latency_plot(result: Latency) -> Plot:
    plain = {row.steps: row.ms for row in result.rows if row.window == 0}

    def point(row: LatencyRow) -> Point:
        faster = row.window and row.steps in plain
        gain = f", {plain[row.steps] / row.ms:.2f}× faster" if faster else ""
        return Point(row.window, row.ms, row.ms_error, f"{number(row.calls)} calls{gain}")

    return Plot(
        f"plot-{result.name}",
        f"{_model(result.settings.model)}: milliseconds a sample against window",
        Axis("window; 0 is the sequential sampler"),
        Axis("ms a sample", log=True),
        by_name(result.rows, lambda row: f"{row.steps} steps", point, lambda row: "exact"),
        "Batch 1, the whole round in a CUDA graph, the baseline too.",
    )


def _rounds_plot(result: Latency) -> Plot:
    names = {row.window: f"window {row.window}" if row.window else "sequential" for row in result.rounds}
    network, own = [], []
    for row in result.rounds:
        name, shown = names[row.window], f"{100 * row.share:.1f} % of the round"
        network.append(Point(name, row.network_us, row.network_us_error))
        own.append(Point(name, row.round_us - row.network_us, None, shown))
    shares = [100 * row.share for row in result.rounds if row.window] or [0.0]
    return Plot(
        f"plot-rounds-{result.name}",
        "Where a round's time goes",
        Axis("window"),
        Axis("µs a round", zero=True),
        [Series("network call", network), Series("drafting, verifying, committing", own, "ours")],
        f"{min(shares):.1f} to {max(shares):.1f} % of a round is the sampler's own work; the rest is the "
        "network.",
        kind="bars",
        categories=list(names.values()),
    )


def losses(results: Results) -> Section | None:
    """Cases in which the sequential sampler is the better choice."""
    full, policies, models = results.of(Throughput), results.of(Policy), results.of(Calls)
    frontiers = results.of(FrontierResult)
    plots = [_frontier_plot(result) for result in frontiers]
    plots += [_throughput_plot(result) for result in full]
    plots += [_policy_plot(result) for result in policies]
    plots += [_evaluations_plot(result) for result in models]
    if not plots:
        return None
    text = paragraph(
        "Fewer calls is not fewer evaluations: a call checks a whole window, and what is rejected has been "
        "computed all the same. Where every state costs its full price, on a CPU or a GPU that is full, the "
        "sequential sampler is faster, and foresample says so: its tuner advises against itself."
    )
    advice = [
        f'<blockquote class="note">{escape(tuning.advice)}.</blockquote>'
        for result in full
        for tuning in result.tunings
    ]
    body = [text, grid(*(plot.html() for plot in plots)), *advice]
    return Section("losses", "Where it loses", body, plots, [*frontiers, *full, *policies, *models])


def _frontier_plot(result: FrontierResult) -> Plot:
    """Throughput against latency, for both samplers."""
    settings = result.settings
    how = "".join(
        f", {word}" for word, key in (("compiled", "compiled"), ("captured", "graph")) if settings.get(key)
    )
    where = f"{_model(str(settings.get('model')))}, {result.tunings[0].steps} steps{machine_of(result)}{how}"
    sequential: list[Point] = []
    ours: list[Point] = []
    for p in Frontier(result.tunings).points:
        label = f"{p.slots} at a time" + ("" if p.window is None else f", window {p.window}")
        point = Point(1e3 * p.p95_seconds, p.samples_per_second, None, label)
        (sequential if p.window is None else ours).append(point)
    return Plot(
        f"plot-{result.name}-frontier",
        "Throughput against latency",
        Axis("ms a sample, 95 in 100 of them", log=True),
        Axis("samples a second", log=True),
        [Series("sequential", sequential), Series("speculative", _outermost(ours), "ours")],
        f"{where}. Further up and to the left is better; of the windows, those that no other beats in both.",
    )


def _outermost(found: list[Point]) -> list[Point]:
    """The Pareto front of throughput and latency."""
    kept: list[Point] = []
    for point in sorted(found, key=lambda point: (float(point.x), -point.y)):
        if not kept or point.y > kept[-1].y:
            kept.append(point)
    return kept


def _throughput_plot(result: Throughput) -> Plot:
    settings = result.settings

    def series(name: str, rate: Callable[[ThroughputRow], float], role: Role = "exact") -> Series:
        return Series(name, [Point(f"{row.steps} steps", rate(row)) for row in result.rows], role, line=False)

    return Plot(
        f"plot-{result.name}",
        "A GPU that is full: samples a second",
        Axis("chain"),
        Axis("samples a second", zero=True),
        [
            series("sequential", lambda row: row.sequential_samples_per_second),
            series("speculative, slots refilled", lambda row: row.samples_per_second, "ours"),
            series("speculative, fixed batches", lambda row: row.fixed_samples_per_second),
        ],
        f"{_model(settings.model)}, {settings.slots} samples at a time, window "
        f"{settings.window}{machine_of(result)}. Further right is better.",
        kind="dots",
        categories=[f"{row.steps} steps" for row in result.rows],
    )


def _policy_plot(result: Policy) -> Plot:
    whole, network, own = (
        Series("whole plan, not split", []),
        Series("network", []),
        Series("sampler", [], "ours"),
    )
    shares, text = [], "Shorter is better."
    for row in result.rows:
        ms, inside, shown = row.batch_1.ms, row.batch_1.network_ms, f"{number(row.calls)} calls a plan"
        if inside is None:
            whole.points.append(Point(row.label, ms, None, shown))
        else:
            network.points.append(Point(row.label, inside, None, shown))
            own.points.append(Point(row.label, ms - inside, None, shown))
            shares.append(100 * (ms - inside) / ms)
    if shares:
        text = (
            f"{min(shares):.0f} to {max(shares):.0f} % of an accelerated plan is the sampler's own arithmetic."
        )
    return Plot(
        f"plot-{result.name}",
        "A tiny robot policy on a CPU: milliseconds a plan",
        Axis("policy"),
        Axis("ms a plan, batch 1", zero=True),
        [series for series in (whole, network, own) if series.points],
        text,
        kind="bars",
        categories=[row.label for row in result.rows],
    )


def _evaluations_plot(result: Calls) -> Plot:
    one = [Point(steps, 1.0) for steps in sorted({row.steps for row in result.rows})]
    series = by_name(
        result.rows,
        lambda row: row.label,
        lambda row: Point(row.steps, row.evaluations / row.steps, None, cost(row.calls, row.evaluations)),
        lambda row: "ours" if (row.method, row.reuse) == ("default", "x0") else "exact",
    )
    return Plot(
        f"plot-evaluations-{result.name}",
        f"{_model(result.settings.model)}: states evaluated for each step",
        Axis("steps of the chain", log=True),
        Axis("evaluations over steps", zero=True),
        [*series, Series("sequential", one, "reference")],
        "What compute pays for: the same runs as above.",
    )
