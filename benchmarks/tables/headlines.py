"""The table of headline figures: what each rests on, and what was tried to make its baseline faster."""

from __future__ import annotations

from benchmarks.kinds.clock import CpuClock, Latency
from benchmarks.kinds.packages import PackageRow, Packages
from benchmarks.kinds.robots import Pens
from benchmarks.results import load
from benchmarks.tables.front import quickest
from benchmarks.tables.markdown import table

HEADS = [
    "what is drawn",
    "faster",
    "baseline",
    "timed: baseline, ours",
    "what was tried to make the baseline faster",
]


def headlines() -> str:
    """Evidence for each headline figure."""
    robots = [
        _robot("robot-clock", "H200", "TF32 and cuDNN search were on; bfloat16 was not tried"),
        _robot("robot-clock-cpu", "one CPU core", "more threads were not tried"),
    ]
    return table(HEADS, [_pens(), *_pictures(), *robots, *_packages(), *_cpu()])


def _pictures() -> list[list[str]]:
    saved, lines = load(Latency, "cifar10-latency-graph"), []
    for steps in sorted({row.steps for row in saved.rows}):
        mine = [row for row in saved.rows if row.steps == steps]
        (base,), (best,) = ([row for row in mine if not row.window], [row for row in mine if row.chosen])
        assert best.faster is not None
        lines.append(
            [
                f"one CIFAR-10 picture, {steps} steps, H200",
                f"{best.faster.ratio:.2f} ± {best.faster.error:.2f}×",
                f"{base.way}, CUDA graph, {saved.settings.network}",
                f"{best.faster.turns} pictures each, in turns",
                f"{_ways(saved)}; max-autotune was not tried",
            ]
        )
    return lines


def _ways(saved: Latency) -> str:
    """Milliseconds of the sequential sampler in each way, all with a CUDA graph."""
    tried = sorted((row for row in saved.ways if not row.window), key=lambda row: row.ms)
    return f"at {tried[0].steps} steps: " + "; ".join(f"{row.way}, {row.ms:.0f} ms" for row in tried)


def _robot(name: str, machine: str, untried: str) -> list[str]:
    saved, base, ours = quickest(name)
    assert ours.faster is not None
    tried = [f"{row.run} ({row.ms.median:.0f} ms)" for row in saved.rows if row.method == "sequential"]
    return [
        f"a plan of LeRobot's policy, {saved.settings.parameters / 1e6:.3g} M parameters, {machine}",
        f"{ours.faster.ratio:.1f} ± {ours.faster.error:.2f}×",
        base.run,
        f"{base.plans}, {ours.plans} plans, in turns",
        f"{', '.join(tried)}; {untried}",
    ]


def _pens() -> list[str]:
    saved = load(Pens, "pens")
    low, high = saved.ratio_interval
    return [
        f"the pen of the README: Robot policy (handwriting), window {saved.settings.window}, one CPU core",
        f"{saved.ratio:.2f}× ({low:.2f} to {high:.2f}, at 95 %)",
        "the policy's own loop, one thread",
        f"{saved.settings.plans} plans each, in turns",
        f"compiled, its loop is {saved.compiled.ratio:.2f} ± {saved.compiled.error:.2f}× as fast as before, and ours "
        f"{saved.ours_compiled.ratio:.2f} ± {saved.ours_compiled.error:.2f}×",
    ]


def package_rows() -> list[PackageRow]:
    """Packages' captured samplers, with the fewest samples at a time and with the most."""
    rows = [row for row in load(Packages, "packages").rows if row.captured]
    counts = [row.count for row in rows]
    return [row for row in rows if row.count in (min(counts), max(counts))]


def _packages() -> list[list[str]]:
    eager = {(row.name, row.count): row for row in load(Packages, "packages").rows if not row.captured}
    lines = []
    for row in package_rows():
        own = eager.get((row.name, row.count))
        took = (
            ""
            if own is None
            else f"; its own loop, eager, takes {own.own_seconds / row.own_seconds:.1f}× as long"
        )
        lines.append(
            [
                f"{row.name}, {row.steps} steps, {row.count} at a time, H200",
                f"{row.faster.ratio:.2f} ± {row.faster.error:.2f}×",
                "`fs.sequential`, CUDA graph",
                f"{row.faster.turns} turns of {row.count} for each side, or more",
                f"captured as ours is{took}; compiling was not tried",
            ]
        )
    return lines


def _cpu() -> list[list[str]]:
    return [
        [
            f"{row.target}, {row.steps} steps, one CPU core",
            f"{row.ratio.ratio:.2f} ± {row.ratio.error:.2f}×",
            "PyTorch and compiled transitions, one thread",
            f"{row.ratio.turns} samples each, in turns",
            "its transitions are compiled by Numba, as ours are",
        ]
        for row in load(CpuClock, "cpu").rows
        if row.together == 1
    ]
