"""What the page says of each kind of result: a headline, cards, and a section with plots, tables and pictures."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from html import escape
from pathlib import Path
from typing import Any

from foresample.core.report import on_the_clock
from foresample.engine.tuning import Frontier
from foresample.results import (
    BenchResult,
    BenchRow,
    CheckResult,
    DatasetResult,
    FrontierResult,
    Result,
    Results,
    SampleResult,
    TuneResult,
    label,
)
from foresample.webpage.markup import (
    Axis,
    Card,
    Plot,
    Point,
    Section,
    Series,
    by_name,
    grid,
    number,
    paragraph,
    picture,
    plus_minus,
    table,
)

SPEEDUP = "transitions per network call"
FEWER = "fewer network calls one after another"
MOST_FAILURES = 10


@dataclass(frozen=True)
class Shown:
    """One result on the page."""

    headline: str
    cards: list[Card]
    section: Section
    alarm: bool = False
    """Whether a test of the law failed: then the page begins with it."""


def show(results: Results) -> list[Shown]:
    """All results, kind by kind; the first of each kind and those that alarm have cards."""
    shown = []
    for kind, (name, title, make) in MAKERS.items():
        found = results.of(kind)
        for i, result in enumerate(found):
            one = make(result, f"{name}-{i}", f"{title}: {result.name}" if len(found) > 1 else title)
            shown.append(one if i == 0 or one.alarm else replace(one, cards=[]))
    return shown


# ------------------------------------------------------------------ sample


def _sample(result: SampleResult, id: str, title: str) -> Shown:
    run, plain = result.speculative, result.sequential
    told = f"{run.count} samples{_of(result.settings)}, {run.steps} steps"
    if not run.window:  # the tuner found that none pays
        text = paragraph(f"{told}, {run.seconds:.3g} s. No window pays here, so none was drafted.")
        cards = [Card(f"{run.count}", f"samples, drawn sequentially in {run.seconds:.3g} s", id)]
        body = [text, _pictures(result.path.parent, RUN_PICTURES), _settings(result.settings)]
        return Shown(f"{run.count} samples, drawn sequentially", cards, Section(id, title, body, [], [result]))
    fewer = f"{run.calls_mean:.1f} instead of {plain.calls_mean:g} a sample"
    cards = [Card(f"{run.speedup:.2f}×", f"{FEWER}: {fewer}", id)]
    rows = [
        (
            "network calls, a sample",
            f"{plain.calls_mean:g}",
            plus_minus(run.calls_mean, run.calls_error),
            f"{run.speedup:.2f}× fewer",
        ),
        (
            "states evaluated, a sample",
            f"{plain.calls_mean:g}",
            f"{run.evaluations_mean:.1f}",
            f"{run.evaluations_mean / plain.calls_mean:.2f}× as many",
        ),
    ]
    seconds, about = plain.seconds or plain.seconds_estimated, "" if plain.seconds else "≈ "
    if seconds is not None:
        ratio = seconds / run.seconds
        seconds_told = f"{about}{seconds:.3g}", f"{run.seconds:.3g}"
        rows.append((f"seconds, all {run.count}", *seconds_told, on_the_clock(ratio)))
        clock = f"{run.seconds:.3g} s for {run.count} samples, {about}{seconds:.3g} s sequentially"
        cards.append(Card(f"{about}{ratio:.2f}×", f"the sequential sampler's speed on the clock: {clock}", id))
    plots = _run_plots(result, id)
    body = [
        paragraph(f"{told}, window {run.window}."),
        table(["", "sequential", "speculative", ""], rows),
        grid(*(plot.html() for plot in plots)),
        _pictures(result.path.parent, RUN_PICTURES),
        _settings(result.settings),
    ]
    headline = f"{run.calls_mean:.1f} network calls a sample instead of {plain.calls_mean:g}"
    return Shown(headline, cards, Section(id, title, body, plots, [result]))


def _run_plots(result: SampleResult, id: str) -> list[Plot]:
    """What happened round by round."""
    run = result.speculative
    rounds = max(1, sum(run.accepted_lengths))
    kept = [Point(i, n / rounds, None, f"{n} rounds") for i, n in enumerate(run.accepted_lengths)]
    gaps = [Point(k, gap) for k, gap in enumerate(run.mismatch) if gap]  # on a log axis neither None nor 0
    plots = [
        Plot(
            f"{id}-kept",
            "Drafts kept in a round",
            Axis("drafts kept"),
            Axis("share of rounds", zero=True),
            [Series("rounds", kept, "ours")],
            "A round commits the drafts it keeps and one transition more.",
        ),
        Plot(
            f"{id}-mismatch",
            "Mismatch of draft and target along the chain",
            Axis("step"),
            Axis("mean mismatch, in units of std", log=True),
            [Series("mismatch", gaps, "ours")],
            "Where it is small, drafts are kept.",
        ),
    ]
    return [plot for plot in plots if plot.series[0].points]


RUN_PICTURES = {
    "compare.png": (
        "Samples of the sequential sampler and of the speculative one, side by side",
        "Both samplers from the same seeds: many samples are alike; what is the same by proof is the law.",
    ),
    "samples.png": ("The samples in a grid", "The samples."),
    "run.png": (
        "Bars along the chain, one a round, some ending in a corrected step",
        "One sample's run: each bar is a round, that is one call, and the steps it committed.",
    ),
}


# ------------------------------------------------------------------ generate


def _dataset(result: DatasetResult, id: str, title: str) -> Shown:
    costs, settings, law = result.costs, result.settings, result.law
    count = f"{costs.samples}" if costs.samples == settings.count else f"{costs.samples} of {settings.count}"
    fewer = f"{costs.calls_mean:.1f} network calls a sample instead of {settings.steps}"
    cards = [Card(count, f"samples of the dataset, {fewer}", id)]
    if result.failures:
        cards.append(Card(f"{len(result.failures)}", "samples of it broke: NaN or infinite", id))
    rows = [
        ("samples", f"{count}, {'×'.join(map(str, settings.shape))}, {settings.dtype}{_of(vars(settings))}"),
        ("shards", f"{len(result.shards)} of {settings.shard} samples"),
        (
            "chain",
            f"{settings.steps} steps, {f'window {settings.window}, ' if settings.window else ''}seed {settings.seed}",
        ),
        ("method", settings.method),
        ("network calls, a sample", f"{costs.calls_mean:.2f}, {costs.speedup:.2f}× fewer"),
        ("states evaluated, a sample", f"{costs.evaluations_mean:.1f}"),
        ("drafts kept, a round", f"{costs.accepted_mean:.2f}"),
    ]
    if law is not None:
        cards.append(_law_card(law.passed, law.tests, law.smallest_p, law.level, id))
        tests = f"{law.tests} tests against {law.sequential} sequential samples at joint level {law.level:g}"
        verdict = "passed" if law.passed else "FAILED"
        rows.append(("law", f"{verdict}: {tests}, smallest p-value {law.smallest_p:.2g} ({law.worst})"))
    runs = [(run.started, run.found, run.drawn, run.seconds, run.peak_mib) for run in result.runs]
    broken = [(f.index, f.seed, f.step, f.error) for f in result.failures[:MOST_FAILURES]]
    more = len(result.failures) - len(broken)
    body = [
        table(["", ""], rows),
        table(["run of", "found", "drawn", "seconds", "peak memory, MiB"], runs, "Runs"),
        table(["sample", "seed", "step", "error"], broken, "Samples that broke") if broken else "",
        paragraph(f"And {more} more: see {result.name}.json.") if more else "",
        _pictures(
            result.path.parent,
            {"contact.png": ("Samples of the dataset in a grid", "Samples spread over the dataset.")},
        ),
    ]
    alarm = law is not None and not law.passed
    headline = "The law check of the dataset failed" if alarm else f"{count} samples, {fewer}"
    return Shown(headline, cards, Section(id, title, body, [], [result]), alarm)


# ------------------------------------------------------------------ bench


def _bench(result: BenchResult, id: str, title: str) -> Shown:
    rows, settings = result.rows, result.settings
    best = max(rows, key=lambda row: (row.method == "default", row.speedup))
    which = f"{label(best.method)}, window {best.window}"
    cards = [Card(f"{best.speedup:.2f}×", f"{FEWER}: {which}", id)]
    if others := [row for row in rows if row.window == best.window and row is not best]:
        second = max(others, key=lambda row: row.speedup)
        text = f"as far on each call as {label(second.method)}, the best of the others there"
        cards.append(Card(f"{best.speedup / second.speedup:.2f}×", text, id))
    plot = bench_plot(f"{id}-speedup", "Speed-up in calls", rows, f"{settings.samples} samples of each method.")
    details = {"d = ": settings.dim, "ε = ": settings.churn, "reused: ": settings.reuse}
    about = "".join(f", {name}{value}" for name, value in details.items() if value is not None)
    told = [
        (
            label(row.method),
            row.window,
            plus_minus(row.speedup, row.speedup_error),
            row.calls,
            row.evaluations,
            row.accepted,
            row.seconds,
        )
        for row in rows
    ]
    heads = ["method", "window", "speed-up", "calls a sample", "states evaluated", "drafts kept", "seconds"]
    body = [
        paragraph(f"{settings.target}{about}, {settings.steps} steps."),
        plot.html(),
        table(heads, told),
    ]
    return Shown(f"{best.speedup:.2f}× {FEWER}", cards, Section(id, title, body, [plot], [result]))


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
    """What a sample took."""
    return f"{number(calls)} calls, {number(evaluations)} evaluations a sample"


# ------------------------------------------------------------------ tune


def _tune(result: TuneResult, id: str, title: str) -> Shown:
    trials = result.trials
    about = "is the most any window gains on the clock: sample sequentially"
    if result.window is not None:
        about = f"faster on the clock with window {result.window}"
    card = Card(f"{result.gain:.2f}×", about, id)
    plots = [
        Plot(
            f"{id}-gain",
            "Gain on the clock against window",
            Axis("window"),
            Axis("times as fast as the sequential sampler, predicted", zero=True),
            [
                Series(
                    "gain", [Point(t.window, t.gain, None, f"{number(t.calls)} calls") for t in trials], "ours"
                ),
                Series("sequential", [Point(t.window, 1.0) for t in trials], "reference"),
            ],
        ),
        Plot(
            f"{id}-latency",
            "What a call costs",
            Axis("states in a call"),
            Axis("milliseconds", zero=True),
            [
                Series("the network alone", [Point(t.states, 1e3 * t.call_seconds) for t in trials]),
                Series("a whole round", [Point(t.states, 1e3 * t.round_seconds) for t in trials], "ours"),
            ],
            f"A transition of the sequential sampler takes {number(1e3 * result.step_seconds)} ms.",
        ),
    ]
    rows = [
        (t.window, t.states, 1e3 * t.call_seconds, 1e3 * t.round_seconds, t.calls, f"{t.gain:.2f}×")
        for t in trials
    ]
    heads = ["window", "states in a call", "ms a call", "ms a round", "calls a sample", "gain on the clock"]
    body = [
        note(result.advice),
        paragraph(f"{result.steps} steps, {result.slots} at a time{_of(result.settings)}."),
        grid(*(plot.html() for plot in plots)),
        table(heads, rows),
        _settings(result.settings),
    ]
    return Shown(result.advice, [card], Section(id, title, body, plots, [result]))


def _frontier(result: FrontierResult, id: str, title: str) -> Shown:
    plot = frontier_plot(result, id)
    rows = [
        (p.slots, "–" if p.window is None else p.window, p.samples_per_second, 1e3 * p.p95_seconds)
        for p in Frontier(result.tunings).points
    ]
    heads = ["samples at a time", "window", "samples a second", "ms a sample, 95 in 100"]
    best = Frontier(result.tunings).best()
    body = [
        note(f"The most samples a second: {best}"),
        paragraph(f"{result.tunings[0].steps} steps{_of(result.settings)}."),
        grid(plot.html()),
        table(heads, rows),
        _settings(result.settings),
    ]
    return Shown(f"{best}", [], Section(id, title, body, [plot], [result]))


def frontier_plot(result: FrontierResult, id: str) -> Plot:
    """Samples a second against the wait for one, for both samplers."""
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
    """Those with more samples a second than any that is sooner."""
    kept: list[Point] = []
    for point in sorted(found, key=lambda point: (float(point.x), -point.y)):
        if not kept or point.y > kept[-1].y:
            kept.append(point)
    return kept


def note(advice: str) -> str:
    """What the tuner says."""
    return f'<blockquote class="note">{escape(advice)}.</blockquote>'


# ------------------------------------------------------------------ check


def _check(result: CheckResult, id: str, title: str) -> Shown:
    failed = ", ".join(finding.question for finding in result.findings if not finding.passed)
    cards = [Card("not exact" if failed else "exact", failed or "as far as the tests see", id)]
    for finding in result.findings:
        if finding.tests is not None and finding.smallest_p is not None:
            cards.append(_law_card(finding.passed, finding.tests, finding.smallest_p, result.level, id))
    body = [
        paragraph(f"What foresample check found{_of(result.settings)}."),
        findings_table(result),
        _settings(result.settings),
    ]
    headline = "The check of exactness failed" if failed else "Exact, as far as the tests see"
    return Shown(headline, cards, Section(id, title, body, [], [result]), bool(failed))


def findings_table(result: CheckResult, caption: str = "") -> str:
    """Each question and its answer."""
    rows = [(f.question, "yes" if f.passed else "NO", f.detail) for f in result.findings]
    return table(["question", "passed", "numbers"], rows, caption)


def _law_card(passed: bool, tests: int, smallest_p: float, level: float, where: str) -> Card:
    alarm = f"one below {level:g}/{tests} {'would be' if passed else 'is'} an alarm"
    text = f"the smallest p-value of {tests} tests of the law; at joint level {level:g} {alarm}"
    return Card(f"p = {smallest_p:.2g}", text, where)


# ------------------------------------------------------------------ what they share


def _of(settings: Mapping[str, Any]) -> str:
    """The model or target, to stand behind a noun."""
    name = settings.get("model") or settings.get("target")
    return f" of {name}" if isinstance(name, str) else ""


def _settings(settings: Mapping[str, Any]) -> str:
    """All of them, folded."""
    rows = [(name, value if isinstance(value, str) else json.dumps(value)) for name, value in settings.items()]
    return f"<details><summary>Settings</summary>{table(['', ''], rows)}</details>" if rows else ""


def _pictures(folder: Path, known: Mapping[str, tuple[str, str]]) -> str:
    """Those of the pictures that the folder has."""
    found = [
        picture(folder / name, alt, caption, wide=name == "compare.png")
        for name, (alt, caption) in known.items()
        if (folder / name).is_file()
    ]
    return f'<div class="sheets">{"".join(found)}</div>' if found else ""


MAKERS: dict[type[Result], tuple[str, str, Callable[[Any, str, str], Shown]]] = {
    SampleResult: ("sample", "Samples", _sample),
    DatasetResult: ("dataset", "Dataset", _dataset),
    BenchResult: ("bench", "Methods compared", _bench),
    TuneResult: ("tune", "Which window", _tune),
    FrontierResult: ("frontier", "How many at a time", _frontier),
    CheckResult: ("check", "Is it exact?", _check),
}
"""In the order of the page: a name for links, a title, and who makes it."""
