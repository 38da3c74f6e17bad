"""The table of headline figures: what each rests on, and what was tried to make its baseline faster."""

from __future__ import annotations

import math

from benchmarks.front import quickest
from benchmarks.results import CpuClock, Latency, PackageRow, Packages, Pens, load

UNTRIED = "cuDNN search, max-autotune and channels-last were not tried"
HEADS = [
    "what is drawn",
    "faster",
    "baseline",
    "timed: baseline, ours",
    "what was tried to make the baseline faster",
]


def rows() -> list[list[str]]:
    """One line a headline, cells as in `HEADS`."""
    robots = [
        _robot("robot-clock", "H200", "TF32 and cuDNN search were on; bfloat16 and max-autotune"),
        _robot("robot-clock-cpu", "one CPU core", "more threads"),
    ]
    return [_pens(), *_pictures(), *robots, *_packages(), *_cpu()]


def _pictures() -> list[list[str]]:
    saved, lines = load(Latency, "cifar10-latency-graph"), []
    for steps in sorted({row.steps for row in saved.rows}):
        (base,) = (row for row in saved.rows if row.steps == steps and not row.window)
        mine = [row for row in saved.rows if row.steps == steps]
        best = max(mine, key=lambda row: (row.chosen, row.gain))
        error = best.gain * math.hypot(base.ms_error / base.ms, best.ms_error / best.ms)
        timed = f"{max(2, saved.settings.samples // 4)}, {saved.settings.samples} pictures"
        if best.faster:
            error, timed = best.faster.error, f"{best.faster.turns} pictures each, in turns"
        lines.append(
            [
                f"one CIFAR-10 picture, {steps} steps, H200",
                f"{best.gain:.2f} ± {error:.2f}×",
                f"{base.way or 'compiled'}, CUDA graph, {saved.settings.network}",
                timed,
                _ways(saved) or f"compiled and captured as ours is; {UNTRIED}",
            ]
        )
    return lines


def _ways(saved: Latency) -> str:
    """Milliseconds of the sequential sampler in each way, all with a CUDA graph."""
    tried = sorted((row for row in saved.ways if not row.window), key=lambda row: row.ms)
    return ", ".join(f"{row.way} ({row.ms:.0f} ms for {row.steps} steps)" for row in tried)


def _robot(name: str, machine: str, untried: str) -> list[str]:
    saved, base, ours = quickest(name)
    error = f"×; error not recorded, means give {base.ms.mean / ours.ms.mean:.1f}×"
    if ours.faster:
        error = f" ± {ours.faster.error:.2f}×"
    tried = [f"{row.run} ({row.ms.median:.0f} ms)" for row in saved.rows if row.method == "sequential"]
    if not any("compiled" in run for run in tried):
        untried = f"compiling and {untried}"
    return [
        f"a plan of LeRobot's policy, {saved.settings.parameters / 1e6:.3g} M parameters, {machine}",
        f"{base.ms.median / ours.ms.median:.1f}{error}",
        base.run,
        f"{base.plans}, {ours.plans} plans",
        f"{', '.join(tried)}; {untried} were not tried",
    ]


def _pens() -> list[str]:
    saved = load(Pens, "pens")
    low, high = saved.ratio_interval
    return [
        f"the pen of the README: Robot policy (handwriting), window {saved.settings.window}, one CPU core",
        f"{saved.ratio:.2f}× ({low:.2f} to {high:.2f}, at 95 %)",
        "the policy's own loop, one thread",
        f"{saved.settings.plans} plans each, in turns",
        "nothing",
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
