"""Figures about other methods: curves on equal terms, quality against cost, ranked trees, which method when."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TypeVar

from benchmarks.curves import BATCHES, OURS, PROBLEMS, TREES
from benchmarks.kinds.clock import (
    Latency,
    Throughput,
)
from benchmarks.kinds.quality import QualityCost, QualityCostPoint
from benchmarks.kinds.rivals import CurvePoint, Curves, Ranked
from benchmarks.names import MODELS, label
from benchmarks.results import RESULTS, load, read
from benchmarks.tables import front
from benchmarks.tables.headlines import package_rows
from benchmarks.tables.markdown import only, speedup, table, table_of

Row = TypeVar("Row")

LEAD = (5, 64)
"""The verification batches at which the default must be ahead of every exact peer."""


def curve_files() -> list[Curves]:
    """Results at equal states a call, in the order of the problems."""
    order = list(PROBLEMS)
    return sorted(read(RESULTS).of(Curves), key=lambda saved: order.index(saved.settings.problem))


def peers(rows: Iterable[CurvePoint]) -> list[CurvePoint]:
    """Rows of the exact methods that are not ours."""
    return [row for row in rows if row.method not in (*OURS, "sequential")]


def batches(rows: Sequence[CurvePoint]) -> list[int]:
    """States a call at which the default and every peer of the file were measured."""
    others = {row.method for row in peers(rows)}
    measured = {(row.method, row.states) for row in rows}
    sizes = {row.states for row in rows if row.method == "default"}
    return sorted(n for n in sizes if all((peer, n) in measured for peer in others))


def best_peer(rows: Sequence[CurvePoint], states: int) -> CurvePoint:
    """The exact peer with the fewest calls at this many states a call or fewer: it may leave some unused."""
    return min((row for row in peers(rows) if row.states <= states), key=lambda row: row.calls)


def lead(rows: Sequence[CurvePoint], states: int) -> tuple[float, float]:
    """Calls of the best peer over the default's, and the standard error."""
    ours, peer = only(rows, method="default", states=states), best_peer(rows, states)
    ratio = peer.calls / ours.calls
    return ratio, ratio * math.hypot(*(row.calls_error / row.calls for row in (ours, peer)))


def _lead(rows: Sequence[CurvePoint], states: int) -> str:
    return "{:.3f} ± {:.3f}×".format(*lead(rows, states))


def _title(saved: Curves) -> str:
    where = " (GPU)" if saved.settings.device == "cuda" else ""
    return f"{saved.settings.target}, {saved.settings.steps} steps{where}"


def curves_lead() -> str:
    """The cases in which the default needs fewer calls, and how many fewer."""
    (low, high), cells = LEAD, []
    for saved in curve_files():
        rows = saved.rows
        sizes = [n for n in batches(rows) if low <= n <= high]
        line = [_title(saved)]
        for pick in (min, max):
            n = pick(sizes, key=lambda states: lead(rows, states)[0])
            line += [f"{_lead(rows, n)} at {n}", label(best_peer(rows, n).method)]
        cells.append(line)
    heads = ["chain", f"smallest lead from {low} to {high} states a call", "over", "largest lead", "over"]
    return table(heads, cells)


def curves() -> str:
    """Speed-ups of all methods over the verification batch, one table a chain."""
    return "\n\n".join(_curves(saved) for saved in curve_files())


def _curves(saved: Curves) -> str:
    rows, settings = [row for row in saved.rows if row.method != "sequential"], saved.settings
    sizes = sorted({row.states for row in rows})
    drawn = sorted({row.samples for row in rows if row.shape})
    cells = []
    for method in dict.fromkeys(row.method for row in rows):
        mine = {row.states: speedup(row) for row in rows if row.method == method}
        bold = "**" if method == "default" else ""
        shown = [f"{bold}{mine[n]}{bold}" if n in mine else "" for n in sizes]
        cells.append([f"{bold}{label(method)}{bold}", *shown])
    whole = batches(rows)
    cells.append(["lead over the best rival", *(_lead(rows, n) if n in whole else "" for n in sizes)])
    for method in TREES:
        chosen = {row.states: _tree(row.shape) for row in rows if row.method == method and row.shape}
        if chosen:
            cells.append([f"tree of {label(method)}", *(chosen.get(n, "") for n in sizes)])
    where = f"../benchmarks/results/{saved.name}"
    return (
        f"**{_title(saved)}** ({settings.samples} samples, trees {', '.join(map(str, drawn)) or 'none'}, "
        f"pilots {settings.pilots}; [file]({where}.json), [picture]({where}.png))\n\n"
    ) + table(["states a call", *map(str, sizes)], cells)


def _tree(shape: str) -> str:
    """5-3-1-1-1-1 as 5-3-1…, with its depth."""
    children = shape.split("-")
    wide = [child for child in children if child != "1"]
    return f"{'-'.join([*wide, '1…'] if len(wide) < len(children) else wide)} ({len(children)} deep)"


def curves_behind() -> str:
    """The cases in which a peer needs fewer calls than the default."""
    lines = []
    for saved in curve_files():
        rows = saved.rows
        behind = [n for n in batches(rows) if lead(rows, n)[0] <= 1]
        shown = [f"{label(best_peer(rows, n).method)} at {n} states a call ({_lead(rows, n)})" for n in behind]
        ours = min((row for row in rows if row.method == "default"), key=lambda row: row.calls)
        peer = min(peers(rows), key=lambda row: row.calls)
        if shown:
            lines.append(
                f"* {_title(saved)}: {'; '.join(shown)}. At any number of states, the fewest calls are "
                f"{ours.calls:.2f} of the default at {ours.states}, and {peer.calls:.2f} of "
                f"{label(peer.method)} at {peer.states}."
            )
    return "\n".join(lines) or "Nowhere, at the numbers of states measured."


def curves_cost() -> str:
    """Evaluations of a sample at three verification batches."""
    lines = []
    for saved in curve_files():
        rows = saved.rows
        for n in sorted({5, 16, 64}.intersection(batches(rows))):
            peer = best_peer(rows, n)
            both = only(rows, method="default", states=n), peer
            calls = (f"{row.calls:.2f} ± {row.calls_error:.2f}" for row in both)
            evaluations = (f"{row.evaluations:.1f} ± {row.evaluations_error:.1f}" for row in both)
            lines.append(
                {
                    "chain": _title(saved),
                    "states a call": f"{n}",
                    "calls: default, best rival": ", ".join(calls),
                    "evaluations: default, best rival": ", ".join(evaluations),
                    "best rival": label(peer.method),
                }
            )
    return table_of(lines)


def curves_missing() -> str:
    """Batches that have not been measured with every peer."""
    lines = []
    for saved in curve_files():
        there = batches(saved.rows)
        if missing := [str(n) for n in BATCHES if n not in there]:
            lines.append(
                f"* {_title(saved)}: not measured with every rival at {' and '.join(missing)} states a call."
            )
    return "\n".join(lines) or "Everything above was run at every number of states a call."


FASHION_COST = ("quality-cost-fashion",)


CIFAR10_COST = ("quality-cost-cifar10", "quality-cost-cifar10-tight")


POLICY_COST = ("quality-cost-policy",)


MIXTURE_COST = ("quality-cost-mixture",)


def _costs(names: Sequence[str]) -> QualityCost:
    (saved,) = QualityCost.joined([load(QualityCost, name) for name in names])
    return saved


def quality_cost(names: Sequence[str]) -> str:
    """The distance to the sequential distribution against the calls, for exact and lossy methods."""
    saved = _costs(names)
    rows, floor = saved.rows, saved.floor
    alone, data = (any(getattr(row, name) is not None for row in rows) for name in ("alone_ms", "to_data"))
    cells = [
        [
            f"{label(row.method)}, {'other seeds: the floor' if row is floor else row.detail}",
            "yes" if row.exact else "no",
            f"{row.calls:.1f}",
            f"{row.evaluations:.0f}",
            *([_alone(row)] if alone else []),
            _with_error(row.distance, row.distance_error),
            f"{row.distance / floor.distance:.2f}×",
            *([_with_error(row.to_data, row.to_data_error)] if data else []),
        ]
        for row in rows
    ]
    heads = ["method", "exact", "calls", "evaluations", *(["ms, drawn alone"] if alone else [])]
    heads += [
        "distance to the sequential sampler",
        "over the floor",
        *(["distance to the data"] if data else []),
    ]
    return f"{_title_of(saved)}:\n\n{table(heads, cells)}"


def _title_of(saved: QualityCost) -> str:
    settings = saved.settings
    many = f"{settings.sets} sets of " if settings.sets > 1 else ""
    return f"{_chain(saved)}, {many}{settings.count} samples of each method"


def _alone(row: QualityCostPoint) -> str:
    if row.alone_ms is None:
        return ""
    gain = "" if row.faster is None else f" ({row.faster.ratio:.2f} ± {row.faster.error:.2f}×)"
    return f"{row.alone_ms:.3g}{gain}"


def _with_error(value: float | None, error: float | None) -> str:
    if value is None:
        return ""
    return f"{value:.4f}" if error is None else f"{value:.4f} ± {error:.4f}"


def quality_cost_summary() -> str:
    """The fewest calls at which each method cannot be told from the sequential sampler, or its closest."""
    saved, cells = _costs(MIXTURE_COST), []
    floor = saved.floor
    for method in dict.fromkeys(row.method for row in saved.rows):
        rows = [row for row in saved.rows if row.method == method]
        near = [row for row in rows if _as_near(row, floor)]
        row = min(near, key=lambda row: row.calls) if near else min(rows, key=lambda row: row.distance)
        cells.append(
            [
                f"{label(method)}, {'other seeds' if row is floor else row.detail}",
                f"{row.calls:.1f}",
                _with_error(row.distance, row.distance_error),
                "the floor" if row is floor else "yes" if near else "no",
                _with_error(row.to_data, row.to_data_error),
            ]
        )
    heads = ["method", "calls", "distance to the sequential sampler", "at the floor", "distance to the data"]
    return f"{_title_of(saved)}:\n\n{table(heads, cells)}"


def _as_near(row: QualityCostPoint, floor: QualityCostPoint) -> bool:
    """Whether a distance is no more than two standard errors above the floor."""
    error = math.hypot(row.distance_error or 0.0, floor.distance_error or 0.0)
    return row.distance - floor.distance <= 2 * error


def ranked() -> str:
    """Calls saved by ranking the children, on several chains."""
    return table_of(
        {
            "chain": row.chain,
            "median mismatch": f"{row.mismatch:.2f}",
            "D-GRS rejects": f"{100 * row.rejected_in_turn:.1f} %",
            "RASS rejects": f"{100 * row.rejected_by_rank:.1f} %",
            "RASS saves in calls": f"{row.fewer_calls:.1f} ± {row.error:.1f} %",
        }
        for row in load(Ranked, "ranked").rows
    )


def when() -> str:
    """Both samplers on the clock of a GPU."""
    pictures = load(Latency, "cifar10-latency-graph")
    cells = []
    for steps in sorted({row.steps for row in pictures.rows}):
        base = only(pictures.rows, steps=steps, window=0)
        best = only(pictures.rows, steps=steps, chosen=True)
        where = f"one picture: {MODELS[pictures.settings.model]}, {steps} steps"
        cells.append(_pair(where, base.calls, base.ms, best.calls, best.ms))
    robot, strict, quickest = front.quickest("robot-clock")
    where = f"a robot's plan: LeRobot's policy, {robot.settings.steps} steps"
    cells.append(_pair(where, strict.calls.mean, strict.ms.median, quickest.calls.mean, quickest.ms.median))
    for each in package_rows():
        what = "pictures" if "DDPM" in each.name else "a spectrum of cosmology"
        where = f"{what}: {each.name}, {each.steps} steps, {each.count} at a time"
        ms = 1e3 / each.count
        cells.append(_pair(where, each.steps, ms * each.own_seconds, each.calls, ms * each.seconds))
    full = load(Throughput, "cifar10-throughput")
    for row in full.rows:
        where = f"a dataset: {MODELS[full.settings.model]}, {row.steps} steps, {full.settings.slots} at a time"
        rates = row.sequential_samples_per_second, row.samples_per_second
        cells.append(_pair(where, row.steps, 1e3 / rates[0], row.calls, 1e3 / rates[1]))
    return table(["what is drawn", "calls: sequential, ours", "ms a sample: sequential, ours", "result"], cells)


def _pair(where: str, base_calls: float, base_ms: float, calls: float, ms: float) -> list[str]:
    times = f"{base_ms:.1f}, {ms:.1f}"
    return [where, f"{base_calls:.0f}, {calls:.1f}", times, front.verdict(base_ms / ms)]


def when_lossy() -> str:
    """Few-step solvers and iterations to a tolerance beside ours: cost, and distance to the distribution."""
    cells = []
    for names in (FASHION_COST, CIFAR10_COST, POLICY_COST):
        saved = _costs(names)
        floor = saved.floor
        for method in dict.fromkeys(row.method for row in saved.rows):
            rows = [row for row in saved.rows if row.method == method]
            if method.startswith(("default", "ddim", "dpmpp", "para", "sequential")):
                row = min(rows, key=lambda row: row.distance)
                shown = "the floor" if row is floor else f"{row.distance / floor.distance:.2f}× the floor"
                what = "other seeds" if row is floor else row.detail
                cells.append([_chain(saved), f"{label(method)}, {what}", f"{row.calls:.1f}", shown])
    return table(
        ["chain", "method, at its most faithful", "calls", "distance to the sequential distribution"], cells
    )


def _chain(saved: QualityCost) -> str:
    return f"{saved.settings.target}, {saved.settings.steps} steps"
