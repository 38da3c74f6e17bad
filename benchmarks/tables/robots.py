"""Figures about robot policies: plans on the clock, closed loops, tasks, warm starts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from benchmarks.kinds.robots import (
    Deadlines,
    Policy,
    PolicyWarm,
    RobotClock,
    RobotClockRow,
    RobotSuccess,
    SuccessRow,
)
from benchmarks.names import wilson
from benchmarks.results import load
from benchmarks.tables.markdown import only, table

Row = TypeVar("Row")


def policy() -> str:
    """Closed-loop behaviour and latency of the robot policy."""
    cells = []
    for row in load(Policy, "policy-lasa").rows:
        behaviour = (f"{value.mean:.4f} ± {value.error:.4f}" for value in (row.distance, row.to_goal))
        inside = "" if row.batch_1.network_ms is None else f" ({row.batch_1.network_ms:.0f})"
        faster = row.batch_1.faster
        gain = "" if faster is None else f": {faster.ratio:.2f} ± {faster.error:.2f}× faster"
        cells.append([row.label, f"{row.calls:.1f}", *behaviour, f"{row.batch_1.ms:.0f}{inside}{gain}"])
    heads = ["policy", "network calls a plan", "distance to the nearest demonstration"]
    heads += ["distance to the goal at the end", "ms a plan, batch 1 (in the network)"]
    return table(heads, cells)


def robot_clock(name: str) -> str:
    """LeRobot's full-size policy on a GPU."""
    saved = load(RobotClock, name)
    settings = saved.settings
    about = (
        f"{settings.parameters / 1e6:.0f} million parameters, {settings.device}, "
        f"{'TF32 and cuDNN benchmarking as in LeRobot’s scripts' if settings.tf32 else settings.precision}, "
        f"{settings.steps} steps, batch 1, up to {max(row.plans for row in saved.rows)} plans of each kind on recorded "
        "observations:"
    )
    return f"{about}\n\n{_plans_table(saved.rows)}"


def robot_clock_cpu() -> str:
    """The shipped policy on one core."""
    saved = load(RobotClock, "robot-clock-cpu")
    about = (
        f"{saved.settings.parameters / 1e6:.1f} million parameters, {saved.settings.threads} core of an x86 CPU, "
        f"{saved.settings.steps} steps, batch 1:"
    )
    return f"{about}\n\n{_plans_table(saved.rows)}"


def _plans_table(rows: Sequence[RobotClockRow]) -> str:
    sequential = {row.run: row for row in rows if row.method == "sequential"}
    strict = min(sequential.values(), key=lambda row: (not row.chosen, row.ms.median)).ms.median
    eager = sequential["eager"].ms.median if "eager" in sequential else None
    order = ("eager", "compiled", "graph", "compiled + graph", "max-autotune", "max-autotune + graph")
    cells = []
    for row in sorted(
        rows,
        key=lambda r: (
            r.method == "accelerated",
            order.index(r.run),
            r.learned_from,
            not r.warm,
            not r.prior,
            r.window or 0,
        ),
    ):
        how = [f"window {row.window}{' (auto)' * row.auto}"] if row.window else ["LeRobot's loop"]
        if row.learned_from:
            how.append(f"learned from {row.learned_from} plans")
        elif row.window:
            how += [name for name, on in (("warm", row.warm), ("prior", row.prior)) if on] or ["cold"]
        share = ""
        if row.round_ms and row.network_ms:
            share = f"{100 * max(0.0, 1 - row.network_ms / row.round_ms):.1f} %"
        cells.append(
            [
                ", ".join(how),
                row.run,
                f"{row.ms.median:.1f} / {row.ms.p99:.1f} / {row.ms.most:.1f}",
                f"{row.calls.mean:.1f} / {row.calls.p99:.0f} / {row.calls.most:.0f}",
                f"{strict / row.ms.median:.1f}{'' if row.faster is None else f' ± {row.faster.error:.2f}'}×",
                "" if eager is None else f"{eager / row.ms.median:.1f}×",
                share,
            ]
        )
    heads = ["plan", "run", "ms: median / 99th percentile / maximum", "calls: mean / 99th percentile / maximum"]
    heads += ["against the fastest sequential", "against eager", "share of a round outside the network"]
    return table(heads, cells)


def robot_success() -> str:
    """Closed loop on Meta-World."""
    saved = load(RobotSuccess, "robot-success")
    share = {method: _share([row for row in saved.rows if row.method == method]) for method in saved.methods}
    apart = ", ".join(f"{m} {100 * (share[m] - share['DDPM']):+.1f}" for m in saved.methods if m != "DDPM")
    together = f"All tasks together: {100 * share['DDPM']:.1f} % with DDPM; against it, in points: {apart}."
    cells = [*_successes(saved), _calls(saved)]
    return f"{table(['task', *saved.methods], cells)}\n\n{together}"


def robot_success_hard() -> str:
    """Closed loop on harder tasks, without and with the time that plans take."""
    saved, waited = load(RobotSuccess, "robot-success-hard"), load(RobotSuccess, "robot-success-hard-timed")
    clock = {row.method: row for row in load(Deadlines, "robot-deadlines-hard").rows}
    timed = [clock[method] for method in saved.methods]
    cells = [
        *_successes(saved, together=True),
        _calls(saved),
        ["ms a plan: median / 99th percentile", *(f"{row.ms.median:.0f} / {row.ms.p99:.0f}" for row in timed)],
        ["plans that miss the deadline", *(f"{row.late} of {row.plans}" for row in timed)],
    ]
    waits = ["steps held still before a plan", *(f"{waited.settings.waits[m]}" for m in waited.methods)]
    return (
        f"{table(['task', *saved.methods], cells)}\n\nIn real time, {waited.settings.longest} steps an episode:\n\n"
        + table(["task", *waited.methods], [*_successes(waited, together=True), waits])
    )


def robot_success_learned() -> str:
    """Closed loop with a learned prior."""
    saved, told = load(RobotSuccess, "robot-success-learned"), []
    for method, name in (("DDPM", "the policy's own loop"), ("learned", "the learned prior")):
        rows = [row for row in saved.rows if row.method == method]
        successes, calls = sum(row.successes for row in rows), rows[0].calls
        told.append(f"{successes} with {name} ({calls:.1f} calls a plan)")
    episodes = sum(row.episodes for row in saved.rows) // len(saved.methods)
    return f"Of {episodes} episodes of the five easier tasks, {' and '.join(told)} succeed."


def _successes(saved: RobotSuccess, together: bool = False) -> list[list[str]]:
    """Rows of a table: successes of each task, and of all tasks together."""

    def cell(rows: list[SuccessRow]) -> str:
        successes, episodes = sum(row.successes for row in rows), sum(row.episodes for row in rows)
        low, high = wilson(successes, episodes)
        return f"{successes} of {episodes} ({100 * low:.0f} to {100 * high:.0f} %)"

    tasks = list(dict.fromkeys(row.task for row in saved.rows))
    lines = [[task, *(cell([only(saved.rows, task=task, method=m)]) for m in saved.methods)] for task in tasks]
    if together:
        lines.append(
            ["all tasks", *(cell([row for row in saved.rows if row.method == m]) for m in saved.methods)]
        )
    return lines


def _calls(saved: RobotSuccess) -> list[str]:
    calls = {row.method: row.calls for row in saved.rows}
    return ["network calls a plan", *(f"{calls[method]:.1f}" for method in saved.methods)]


def _share(rows: list[SuccessRow]) -> float:
    return sum(row.successes for row in rows) / sum(row.episodes for row in rows)


def policy_warm() -> str:
    """The handwriting policy, by what its plans start from."""
    saved = load(PolicyWarm, "policy-warm")
    cells = []
    for window in dict.fromkeys(row.window for row in saved.rows):
        found = [only(saved.rows, window=window, warm=w, prior=p) for w, p in _STARTS]
        cells.append([f"{window}", *(f"{row.calls:.2f} ± {row.error:.2f}" for row in found)])
    return table(["window", "cold", "warm", "prior", "warm and prior"], cells)


_STARTS = ((False, False), (True, False), (False, True), (True, True))


def policy_quality() -> str:
    """Did they arrive, and do the tests see a difference?"""
    rows = load(Policy, "policy-lasa").rows
    arrived = min(row.arrived.mean for row in rows)
    smallest = min(p for row in rows for p in (row.p_values.distance, row.p_values.to_goal))
    return (
        f"{'All' if arrived == 1 else f'At least {100 * arrived:.1f} % of the'} roll-outs of the {len(rows)} "
        "policies come to rest within 0.1 of the goal. Two-sample Kolmogorov–Smirnov tests of both distances "
        f"against the sequential policy's give p-values from {smallest:.2f} up."
    )


def policy_steps() -> str:
    """Calls of a plan where the scheduler takes fewer steps."""
    calls = load(Policy, "policy-lasa").calls_by_steps
    return table(["steps", *calls], [["calls", *(f"{value:.1f}" for value in calls.values())]])


def policy_costs() -> str:
    """The time of a plan by its parts, on one core."""
    saved = load(Policy, "policy-lasa")
    call, clocks = saved.network_call_ms, [row.batch_1 for row in saved.rows]
    own = [(c.ms - c.network_ms) / c.calls for c in clocks if c.network_ms is not None]
    wide = saved.network_call_ratio.get("17")
    error = "" if wide is None else f" ± {wide.error / wide.ratio**2:.2f}"
    return (
        f"On this CPU a round costs {min(own):.1f} to {max(own):.1f} ms of the sampler's own arithmetic, a "
        f"network call {call['1']:.1f} ms with one state and {call['17']:.1f} ms, "
        f"{call['17'] / call['1']:.1f}{error} times as long, with 17."
    )
