"""Figures about time: one sample, many samples, rounds, the first sample, datasets, packages, Markov chains."""

from __future__ import annotations

from typing import TypeVar

from benchmarks.kinds.clock import (
    CpuClock,
    CpuClockRow,
    CpuRounds,
    Latency,
    Mcmc,
    Memory,
    Start,
    Throughput,
)
from benchmarks.kinds.datasets import (
    GenerateLaw,
    GenerateMemory,
    GenerateOverhead,
)
from benchmarks.kinds.packages import PackageCounts, Packages
from benchmarks.names import MODELS
from benchmarks.result_files import DatasetResult, FrontierResult
from benchmarks.results import load, read
from benchmarks.tables.markdown import only, table, table_of
from foresample.engine.tuning import Frontier

Row = TypeVar("Row")


def generate_gpu() -> str:
    """A dataset drawn on a GPU, then the same command again, then without one of its shards."""
    saved = load(DatasetResult, "generate-gpu")
    settings, law = saved.settings, saved.law
    assert law is not None
    shown = ", ".join(f"found {run.found} and drew {run.drawn} in {run.seconds:.1f} s" for run in saved.runs)
    return (
        f"{saved.runs[0].machine.gpu}, {settings.model}, bfloat16, {settings.steps} steps, window {settings.window}, "
        "rounds captured. The command, the command again, and once more with a shard taken away (seconds with the "
        f"distribution check): {shown}. {law.tests} tests against {law.sequential} sequential samples at joint "
        f"level {law.level:g}: smallest p-value {law.smallest_p:.3f}."
    )


def package_counts() -> str:
    """Packages' own loops and the accelerated ones, for few samples and for many."""
    return table_of(
        {
            "sampler": saved.package if row is saved.rows[0] else "",
            "samples at a time": f"{row.count}",
            "window": f"{row.window}",
            "calls a sample": f"{row.calls:.1f} of {saved.steps}",
            "states evaluated a sample": f"{row.evaluations:.0f}",
            "faster than its own loop": f"{row.faster.ratio:.2f}× ± {row.faster.error:.2f}",
        }
        for saved in read().of(PackageCounts)
        for row in saved.rows
    )


def other_packages() -> str:
    """Samplers of other packages at a thousand steps, on a GPU."""
    rows = load(Packages, "packages").rows
    return table_of(
        {
            "sampler": row.name,
            "samples at a time": f"{row.count}",
            "both sides": "CUDA graphs" if row.captured else "eager",
            "window": f"{row.window}",
            "calls a sample": f"{row.calls:.1f} of {row.steps}",
            "states evaluated a sample": f"{row.evaluations:.0f}",
            "seconds: sequential, ours": f"{row.own_seconds:.2f}, {row.seconds:.2f}",
            "faster": f"{row.faster.ratio:.2f}× ± {row.faster.error:.2f}",
            "distribution": (
                f"{row.law.samples} samples against {row.law.sequential}, {row.law.tests} tests, "
                f"smallest p {row.law.smallest_p:.3f}"
            ),
        }
        for row in sorted(rows, key=lambda row: (row.name, row.captured, row.count))
    )


def latency() -> str:
    """One sample at a time on a GPU, and how unusual the smallest p-value is."""
    rows, cells, least = load(Latency, "cifar10-latency-graph").rows, [], 1.0
    for steps in sorted({row.steps for row in rows}):
        base = only(rows, steps=steps, window=0).ms
        ours = [row for row in rows if row.steps == steps and row.window]
        for row in ours:
            assert row.faster is not None
            assert row.law is not None
            gain, ms = f"{row.gain:.2f} ± {row.faster.error:.2f}×", f"{row.ms:.1f} ± {row.ms_error:.1f}"
            faster, p = f"**{gain}**" if row.chosen else gain, f"{row.law.smallest_p:.3f}"
            least = min(least, row.law.smallest_p)
            cells.append([f"{steps}", f"{base:.0f} ms", f"{row.window}", f"{row.calls:.1f}", ms, faster, p])
    heads = ["steps", "sequential", "window", "calls", "ms a sample", "faster"]
    tests = 9 * len(cells)
    chance = f"{100 * (1 - (1 - least) ** tests):.0f} %"
    unusual = (
        f"Among {tests} independent p-values the smallest is {least:.3f} or less in {chance} of all cases."
    )
    return f"{table([*heads, 'smallest of 9 p-values'], cells)}\n\n{unusual}"


def ways() -> str:
    """Ways to run the network, tried on pilot samples."""
    return table_of(
        {
            "sampler": f"window {row.window}" if row.window else "sequential",
            "steps": f"{row.steps}",
            "the network, captured": row.way,
            "ms a sample": f"**{row.ms:.1f}**" if row.chosen else f"{row.ms:.1f}",
        }
        for row in load(Latency, "cifar10-latency-graph").ways
    )


def rounds() -> str:
    """The time of a round by its parts."""
    return table_of(
        {
            "drafts": f"{row.window}" if row.window else "none: the sequential sampler",
            "a round": f"{row.round_us:.0f} µs",
            "the network alone": f"{row.network_us:.0f} µs",
            "all else": f"{100 * row.share:.1f} %",
        }
        for row in load(Latency, "cifar10-latency-graph").rounds
    )


def cpu() -> str:
    """Both samplers on one core."""
    return table_of(
        {
            "what is drawn": f"{row.target}, {row.steps} steps{_together(row)}",
            "window": f"{row.window}",
            "calls": f"{row.calls:.1f}",
            "ms a sample, sequential": f"{row.sequential_ms:.3g}",
            "ms a sample": f"{row.ms:.3g}",
            "gain": f"{row.ratio.ratio:.2f} ± {row.ratio.error:.2f}×",
            "turns": f"{row.ratio.turns}",
        }
        for row in load(CpuClock, "cpu").rows
    )


def _together(row: CpuClockRow) -> str:
    return f", {row.together} together" if row.together > 1 else ""


def cpu_rounds() -> str:
    """The time of a round by its parts, on a CPU."""
    return table_of(
        {
            "target": f"{row.target}, {row.steps} steps",
            "window": f"{row.window}",
            "samples at once": f"{row.slots}",
            "the network, a round": f"{row.network_ms:.2f}",
            "all else": f"**{row.own_ms:.2f}** ({100 * row.share:.0f} %)",
            "all else, plain": f"{row.plain_own_ms:.2f}",
            "a sample, sequential": f"{row.sequential_ms:.1f}",
            "a sample": f"{row.sample_ms:.1f}",
        }
        for row in load(CpuRounds, "cpu-rounds").rows
    )


def start() -> str:
    """Seconds from the start of a process to its first sample, on a CPU; processor seconds of help and errors."""
    saved = load(Start, "start-cpu")
    rows = table_of(
        {
            "network": row.way,
            "installation": "used before" if row.cached else "new",
            "seconds to the first sample": f"{row.seconds:.1f}",
            "of these, preparation": f"{row.preparation_seconds:.1f}",
            "the second sample": f"{row.next_seconds:.1f}",
        }
        for row in saved.rows
    )
    seconds = [command.processor_seconds for command in saved.commands]
    return f"{rows}\n\nHelp and usage errors take {min(seconds):.2f} to {max(seconds):.2f} seconds of processor time."


def throughput() -> str:
    """Many samples through few slots."""
    saved = load(Throughput, "cifar10-throughput")
    settings = saved.settings
    cells = [
        [
            f"{row.steps}",
            f"{100 * row.occupancy:.1f} %",
            f"{100 * row.fixed_occupancy:.1f} %",
            f"{row.samples_per_second:.0f} ({row.gain_over_fixed:.2f}× fixed)",
            f"{row.fixed_samples_per_second:.0f}",
            f"**{row.sequential_samples_per_second:.0f}**",
        ]
        for row in saved.rows
    ]
    heads = ["steps", "slots occupied", f"in fixed batches of {settings.slots}", "samples a second, slots"]
    advice = "; ".join(f"“{tuning.advice}”" for tuning in saved.tunings)
    shown = f"{settings.samples} samples, window {settings.window}. The advice of `tune` is: {advice}."
    return f"{table([*heads, 'fixed batches', 'sequential'], cells)}\n\n{shown}"


def memory() -> str:
    """Peak device memory of a stream."""
    saved = load(Memory, "cifar10-memory")
    shown = ", ".join(f"{r.peak_mib:.0f} MiB ({r.steps} steps, {r.samples} samples)" for r in saved.rows)
    settings = saved.settings
    return f"{settings.slots} slots, window {settings.window}, three engines one after the other: {shown}."


def frontier() -> str:
    """Both samplers, for several numbers of samples at a time."""
    saved, cells = load(FrontierResult, "cifar10-frontier"), []
    for tuning in saved.tunings:
        plain, *ours = Frontier([tuning]).points
        best = max(ours, key=lambda point: point.samples_per_second)
        rates = [f"{p.samples_per_second:.3g}" for p in (plain, best)]
        better = best.samples_per_second > plain.samples_per_second
        rates[better] = f"**{rates[better]}**"
        waits = [f"{1e3 * p.p95_seconds:.0f}" for p in (plain, best)]
        cells.append([f"{tuning.slots}", rates[0], waits[0], f"{best.window}", rates[1], waits[1]])
    heads = ["at a time", "sequential, samples a second", "ms a sample", "window", "ours, samples a second"]
    shown = f"{MODELS['cifar10']}, {saved.tunings[0].steps} steps, H200, captured, not compiled"
    return f"{shown}:\n\n{table([*heads, 'ms, 95 in 100'], cells)}"


def overhead() -> str:
    """The cost of drawing a dataset beyond the engine's own work."""
    return table_of(
        {
            "target": row.target,
            "samples, slots": f"{row.count}, {row.slots}",
            "time outside the engine": f"{100 * row.inside:.2f} %",
            "processor time outside it": f"{100 * row.inside_cpu:.2f} %",
            "dataset against engine alone": f"{100 * row.beside:+.1f} ± {100 * (row.beside_error or 0):.1f} %",
        }
        for row in load(GenerateOverhead, "generate-overhead").rows
    )


def dataset() -> str:
    """A large dataset: the test of its distribution, and the memory it took."""
    saved, rows = load(GenerateLaw, "generate-law"), load(GenerateMemory, "generate-memory").rows
    law, settings = saved.law, saved.settings
    verdict = "passes" if law.passed else "FAILS"
    shown = (
        f"{law.samples} samples of the mixture, d = {settings.dim}, {settings.steps} steps, at once: "
        f"{saved.seconds:.0f} s, {saved.peak_mib:.0f} MiB at most. The distribution check {verdict}: "
        f"{law.tests} tests against {law.sequential} sequential samples at joint level {law.level:g}, "
        f"smallest p-value {law.smallest_p:.2g}."
    )
    cells = [[f"{r.dim}", f"{r.count}", f"{r.samples_mib:.1f}", f"{r.peak_mib:.0f}"] for r in rows]
    return f"{shown}\n\n{table(['dimension', 'samples', 'their size, MiB', 'peak memory, MiB'], cells)}"


def mcmc() -> str:
    """Effective samples a second of Langevin chains, one and several at a time."""
    saved, rows = load(Mcmc, "mcmc"), []
    for name, chains in dict.fromkeys((row.chain, row.chains) for row in saved.rows):
        plain, *ours = (row for row in saved.rows if (row.chain, row.chains) == (name, chains))
        for row in ours:
            assert row.gain is not None
            rates = f"{plain.effective_a_second:.0f}, {row.effective_a_second:.0f}"
            rows.append(
                {
                    "chain": f"{name}, {saved.settings.steps} steps",
                    "chains at a time": f"{chains}",
                    "window": f"{row.window}",
                    "calls a chain": f"{row.calls:.0f}",
                    "effective samples a second: sequential, ours": rates,
                    "gain": f"{row.gain.ratio:.2f} ± {row.gain.error:.2f}×",
                }
            )
    return table_of(rows)
