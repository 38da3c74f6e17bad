"""The figures of the front pages: a headline, where speculation pays, and both samplers on a CPU."""

from __future__ import annotations

from benchmarks.kinds.clock import CpuClock, Latency, Throughput
from benchmarks.kinds.robots import Pens, RobotClock, RobotClockRow
from benchmarks.results import load
from benchmarks.tables.markdown import table_of


def headline() -> str:
    """The first sentence of the README."""
    plain, ours, gain = _pens()
    return (
        f"**A robot's plan in {ours:.0f} ms instead of {plain:.0f} on one CPU core, {gain:.1f}× faster, "
        "with exactly the same distribution.**"
    )


def pays() -> str:
    """Three lines: gains on a CPU, gains on a GPU, losses."""
    _, _, handwriting = _pens()
    small, *on_cpu = quickest("robot-clock-cpu")
    large, *on_gpu = quickest("robot-clock")
    best = max(load(Latency, "cifar10-latency-graph").rows, key=lambda row: (row.chosen, row.gain))
    full = load(Throughput, "cifar10-throughput")
    losses = sorted(row.sequential_samples_per_second / row.samples_per_second for row in full.rows)
    lines = [
        f"* **Pays on a CPU core,** one plan at a time: {_gain(*on_cpu)} for LeRobot's policy with "
        f"{_millions(small)} parameters, {handwriting:.1f}× for the pen above.",
        f"* **Pays on a GPU,** one sample at a time on an H200: {best.gain:.1f}× for a CIFAR-10 picture of "
        f"{best.steps} steps, {_gain(*on_gpu)} for LeRobot's policy with {_millions(large)} parameters.",
        f"* **Loses on a full device:** {losses[0]:.1f} to {losses[-1]:.1f}× slower for {full.settings.slots} "
        "CIFAR-10 pictures at a time on an H200.",
    ]
    return "\n".join(lines)


def when_cpu() -> str:
    """Both samplers on one CPU core: rows of a table."""
    small, before, now = quickest("robot-clock-cpu")
    what = f"a robot's plan: LeRobot's policy, {_millions(small)} parameters, {small.settings.steps} steps"
    rows = [(what, (before.calls.mean, now.calls.mean), (before.ms.median, now.ms.median))]
    for row in load(CpuClock, "cpu").rows:
        together = f", {row.together} at a time" if row.together > 1 else ""
        what = f"{row.target}, {row.steps} steps{together}"
        rows.append((what, (row.steps, row.calls), (row.sequential_ms, row.ms)))
    return table_of(
        {
            "what is drawn": what,
            "calls: sequential, ours": f"{calls[0]:.0f}, {calls[1]:.1f}",
            "ms a sample: sequential, ours": f"{ms[0]:.3g}, {ms[1]:.3g}",
            "result": verdict(ms[0] / ms[1]),
        }
        for what, calls, ms in rows
    )


def robot_short() -> str:
    """The rows most readers need: the strictest sequential plan and the fastest of ours, on a GPU and on a CPU."""
    rows = []
    for name, where in (("robot-clock", "H200"), ("robot-clock-cpu", "one CPU core")):
        saved, before, now = quickest(name)
        drafts = f"drafts from {'a learned prior' if now.learned_from else 'the last plan'}"
        for what, row in (("LeRobot's loop", before), (f"foresample, window {now.window}, {drafts}", now)):
            rows.append(
                {
                    "policy, machine": f"{_millions(saved)} parameters, {where}",
                    "plan": f"{what}, {row.run}",
                    "calls": f"{row.calls.mean:.1f}",
                    "median ms": f"{row.ms.median:.0f}",
                    "99th percentile": f"{row.ms.p99:.0f}",
                    "faster": "" if row is before else f"**{_gain(before, now)}**",
                }
            )
    return table_of(rows)


def robot_call() -> str:
    """Time of a network call on a GPU, and what explains it."""
    saved, before, now = quickest("robot-clock")
    assert now.network_ms is not None
    assert now.window is not None
    one, gigabytes = before.ms.median / before.calls.mean, 4 * saved.settings.parameters / 1e9
    return (
        f"On the H200 a call takes {one:.1f} ms with one state and {now.network_ms:.1f} ms with {now.window + 1}, "
        f"which is why few wide calls are faster. The weights ({gigabytes:.1f} GB) do not explain the {one:.1f} ms: "
        f"this GPU reads as much in about {gigabytes / 4.8:.1f} ms. Where the rest goes has not been measured with a "
        "profiler."
    )


def quickest(name: str) -> tuple[RobotClock, RobotClockRow, RobotClockRow]:
    """LeRobot's policy: the fastest sequential plan and the fastest accelerated one, chosen on other episodes if the
    file says so."""
    saved = load(RobotClock, name)
    before, now = (
        min(
            (row for row in saved.rows if row.method == method), key=lambda row: (not row.chosen, row.ms.median)
        )
        for method in ("sequential", "accelerated")
    )
    return saved, before, now


def _pens() -> tuple[float, float, float]:
    saved = load(Pens, "pens")
    plain, ours = saved.rows
    return plain.ms, ours.ms, saved.ratio


def _millions(saved: RobotClock) -> str:
    return f"{saved.settings.parameters / 1e6:.3g} million"


def _gain(before: RobotClockRow, now: RobotClockRow) -> str:
    return f"{before.ms.median / now.ms.median:.1f}×"


def verdict(gain: float) -> str:
    """A speed-up in words, in bold type if it is one."""
    return f"**{gain:.1f}×\u00a0faster**" if gain > 1 else f"{1 / gain:.1f}×\u00a0slower"
