"""The figures in README and docs, made from the result files: `python -m benchmarks.tables` writes them.

A page holds `<!-- figures: NAME -->` … `<!-- end -->`; the text between them is replaced. A test fails where a
page says anything else than the results do.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

from benchmarks import front, waiting
from benchmarks import headlines as headline
from benchmarks.curves import BATCHES, OURS, PROBLEMS, TREES
from benchmarks.markdown import table, table_of
from benchmarks.result_files import BenchResult, BenchRow, DatasetResult, FrontierResult
from benchmarks.results import (
    MODELS,
    RESULTS,
    Agreement,
    Calls,
    ClassifierTraining,
    CpuClock,
    CpuClockRow,
    CpuRounds,
    CurvePoint,
    Curves,
    Deadlines,
    GenerateLaw,
    GenerateMemory,
    GenerateOverhead,
    Growth,
    Latency,
    Mcmc,
    Memory,
    Order,
    PackageCounts,
    Packages,
    Policy,
    PolicyWarm,
    Quality,
    QualityCost,
    QualityCostPoint,
    Ranked,
    RobotClock,
    RobotClockRow,
    RobotSuccess,
    Start,
    SuccessRow,
    Throughput,
    Training,
    Warm,
    label,
    load,
    read,
    wilson,
)
from foresample.engine.tuning import Frontier

ROOT = Path(__file__).parent.parent
Row = TypeVar("Row")


def _row(rows: Iterable[Row], **wanted: Any) -> Row:
    (found,) = [row for row in rows if all(getattr(row, k) == v for k, v in wanted.items())]
    return found


def _speedup(row: BenchRow | CurvePoint) -> str:
    return f"{row.speedup:.2f} ± {row.speedup_error:.2f}"


def models() -> str:
    """Trained models: the default against the chains before it."""
    cells = []
    for name, title in MODELS.items():
        saved = load(Calls, f"{name}-calls-w50")
        for steps in (100, 250, 1000):
            ours, nearest, blocks = (
                _row(saved.rows, steps=steps, method=method, reuse="x0")
                for method in ("default", "reflection-nearest", "block-parent-fresh")
            )
            ratio = ours.speedup / max(nearest.speedup, blocks.speedup)
            shown = [_speedup(row) for row in (ours, nearest, blocks)]
            cells.append([title, f"{steps}", f"**{shown[0]}**", *shown[1:], f"{ratio:.2f}×"])
    heads = [
        "model",
        "steps",
        "default",
        "nearest, per step",
        "blocks, fresh noise",
        "against the better of these",
    ]
    return table(heads, cells)


def mixture() -> str:
    """The closed-form benchmark."""
    cells = []
    cases = [("d500-T30", w, r) for r in ("v", "x0") for w in (5, 14)]
    cases += [("d500-T300", 50, "v"), ("d500-T300", 50, "x0"), ("d64-T300", 50, "v")]
    for chain, window, reuse in cases:
        saved = load(BenchResult, f"mixture-{chain}-{reuse}")
        settings = saved.settings
        title = f"d = {settings.dim}, ε = {settings.churn:g}, {settings.steps} steps"
        ours, nearest, blocks = (
            _speedup(_row(saved.rows, window=window, method=method))
            for method in ("default", "reflection-nearest", "block-parent-fresh")
        )
        cells.append([title, reuse, f"{window}", f"**{ours}**", nearest, blocks])
    return table(["chain", "reused", "window", "default", "nearest, per step", "blocks, fresh noise"], cells)


def quality() -> str:
    """Are the pictures the same?"""
    saved = load(Quality, "fashion_mnist-quality")
    shown = ", ".join(f"{run.replace('-', ' ')} {100 * r.agreement:.1f} %" for run, r in saved.runs.items())
    calls = [run.calls for run in saved.runs.values() if run.sampler == "speculative"]
    settings = saved.settings
    distances = [
        (" and ".join(pair), ", ".join(f"{v:.4f}" for v in values)) for pair, values in saved.pairs.items()
    ]
    return (
        table(["Fréchet distance between", "values"], distances)
        + f"\n\n{settings.count} samples a run, {settings.steps} steps, window {settings.window}: "
        f"{settings.steps} calls a sample sequentially, {sum(calls) / len(calls):.1f} speculatively. "
        f"Pictures in which the classifier sees the requested label: {shown}."
    )


def agreement() -> str:
    """Labels that the classifier sees, and what the size of a call does to the network's answers."""
    saved = load(Agreement, "fashion_mnist-agreement")
    settings, rows = saved.settings, []
    for row in saved.rows:
        low, high = row.interval
        rows.append(
            {
                "network": row.network,
                "sampler": row.sampler,
                "seed": f"{row.seed}",
                "pictures": f"{row.pictures}",
                "label seen (Wilson, 95 %)": f"{100 * row.share:.2f} % ({100 * low:.2f} … {100 * high:.2f})",
                "calls a picture": f"{row.calls:.1f}",
            }
        )
    apart = ", ".join(
        f"{100 * d:+.2f} ± {100 * e:.2f} % in {network}" for network, (d, e) in saved.differences().items()
    )
    sizes = table_of(
        {
            "network": row.network,
            "states a call": f"{row.states}",
            "largest difference": f"{row.most:.1e}",
            "root mean square": f"{row.rms:.1e}",
            "mean": f"{row.mean:+.1e} ± {row.mean_error:.0e}",
        }
        for row in saved.calls
    )
    return (
        f"{settings.steps} steps, window {settings.window}, {settings.slots} slots:\n\n{table_of(rows)}\n\n"
        f"Speculative minus sequential, with its standard error: {apart}. The p-value of no difference is "
        f"{saved.p_value:.2f}.\n\nThe network's outputs, of root mean square {saved.calls[0].answer:.2f}, for the "
        f"same {max(row.states for row in saved.calls)} states, compared with those of calls with one state:\n\n"
        f"{sizes}"
    )


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


def _robot_clock(name: str) -> str:
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
    lines = [[task, *(cell([_row(saved.rows, task=task, method=m)]) for m in saved.methods)] for task in tasks]
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
        found = [_row(saved.rows, window=window, warm=w, prior=p) for w, p in _STARTS]
        cells.append([f"{window}", *(f"{row.calls:.2f} ± {row.error:.2f}" for row in found)])
    return table(["window", "cold", "warm", "prior", "warm and prior"], cells)


_STARTS = ((False, False), (True, False), (False, True), (True, True))


def latency() -> str:
    """One sample at a time on a GPU, and how unusual the smallest p-value is."""
    rows, cells, least = load(Latency, "cifar10-latency-graph").rows, [], 1.0
    for steps in sorted({row.steps for row in rows}):
        base = _row(rows, steps=steps, window=0).ms
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


def warm() -> str:
    """Calls started cold and from a prior."""
    return table_of(
        {
            "model": MODELS.get(row.model, row.model),
            "steps": f"{row.steps}",
            "window": f"{row.window}",
            "prior": "table and bands" if row.bands else "table",
            "calls, cold": f"{row.cold:.2f} ± {row.cold_error:.2f}",
            "calls, warm": f"{row.warm:.2f} ± {row.warm_error:.2f}",
            "fewer": f"{100 * row.fewer:.1f} ± {100 * row.fewer_error:.1f} %",
        }
        for model in ("cifar10", "fashion_mnist")
        for row in load(Warm, f"warm-{model}").rows
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


def headlines() -> str:
    """Evidence for each headline figure."""
    return table(headline.HEADS, headline.rows())


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


def growth() -> str:
    """Calls against the length of the chain."""
    saved = load(Growth, "cifar10-growth")
    calls = ["calls", *(f"{row.calls:.1f} ± {row.calls_error:.1f}" for row in saved.rows)]
    return (
        table(["steps", *(f"{row.steps}" for row in saved.rows)], [calls])
        + f"\n\nThe fit over all of them: calls ∝ N^{saved.exponent:.3f} (window {saved.settings.window}, "
        f"{saved.settings.samples} samples each, bfloat16)."
    )


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


def devices() -> str:
    """One sample on k devices, predicted from the latency measured on one, where every call had the whole window."""
    saved = load(Latency, "earlier/cifar10-latency-whole")
    curve = sorted((row.window + 1, row.network_us) for row in saved.rounds)

    def network(states: int) -> float:
        """Microseconds of a call, linear between the measured points."""
        (low, slow), (high, fast) = next(pair for pair in pairwise(curve) if states <= pair[1][0])
        return slow + (fast - slow) * max(0, states - low) / (high - low)

    shares, cells = (1, 2, 4, 8), []
    for row in saved.rows:
        window = row.window
        if not window:
            continue
        base = _row(saved.rows, steps=row.steps, window=0)
        other = _row(saved.rounds, window=window)
        saving = [row.calls * (other.network_us - network(-(-(window + 1) // k))) / 1e3 for k in shares]
        gains = (f"{base.ms / (row.ms - saved_ms):.2f}×" for saved_ms in saving)
        cells.append([f"{row.steps}", f"{window}", *gains])
    return table(["steps", "window", *(f"{k} device" + "s" * (k > 1) for k in shares)], cells)


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


def training() -> str:
    """Training of the two models."""
    saved = [load(Training, f"training-{name}") for name in ("fashion-mnist", "cifar10")]
    folders = (
        "`foresample/pretrained/fashion_mnist`, inside the package",
        "`assets/cifar10`, in the repository only",
    )
    data = "60 000 pictures 28×28, not mirrored", "50 000 pictures 32×32, mirrored at random"
    found = {
        "folder": folders,
        "parameters, size": [f"{_spaced(r.parameters)}, {r.bytes / 1e6:.1f} MB" for r in saved],
        "data": data,
        "training": [f"{r.steps} steps of {r.batch}, {r.seconds:.0f} s" for r in saved],
        "loss (MSE of v), training": [f"{r.loss:.3f}" for r in saved],
        "loss, 2000 held-out pictures": [f"{r.test_loss:.3f}" for r in saved],
        "quality": ("below", "by eye: see the sheet"),
    }
    lines = ["| | Fashion-MNIST | CIFAR-10 |", "|---|---|---|"]
    return "\n".join([*lines, *(f"| {name} | {' | '.join(cells)} |" for name, cells in found.items())])


def classifier() -> str:
    """Accuracy of the classifier."""
    saved = load(ClassifierTraining, "training-classifier")
    return (
        f"A six-layer convolutional network ({saved.parameters / 1e6:.2f} M parameters, "
        f"{saved.bytes / 1e6:.1f} MB, `foresample/pretrained/classifier.safetensors`), "
        f"{100 * saved.test_accuracy:.1f} % correct on the test pictures of Fashion-MNIST."
    )


def response() -> str:
    """The gain from following the noise beyond the horizon, on a model that was not used to choose it."""
    names = ("earlier/cifar10-calls-w50-gain-only", "cifar10-calls-w50")
    files = [load(Calls, name) for name in names]
    moves = []
    for steps in (1000, 250, 100):
        old, new = (_row(saved.rows, steps=steps, method="default", reuse="x0") for saved in files)
        moves.append(f"from {_speedup(old)} to {_speedup(new)} at {steps}")
    return (
        "On the CIFAR-10 model, which was not used for these choices, the slope κ beyond the horizon changed the "
        f"speed-up {moves[0]} steps, {moves[1]} and {moves[2]} (same seed, 64 samples): a small gain, about two "
        "standard errors at best."
    )


def _spaced(number: int) -> str:
    return f"{number:,}".replace(",", " ")


# ------------------------------------------------------------------ side by side with everybody else

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
    ours, peer = _row(rows, method="default", states=states), best_peer(rows, states)
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
        mine = {row.states: _speedup(row) for row in rows if row.method == method}
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
            both = _row(rows, method="default", states=n), peer
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


def _quality_cost(names: Sequence[str]) -> str:
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


def order() -> str:
    """Samples chosen by when they were done, and by their index."""
    saved = load(Order, "order")
    settings = saved.settings
    cells = [["all of them (sequential)", f"{settings.sequential}", f"{saved.right:.3f} ± {saved.error:.3f}"]]
    for row in saved.rows:
        rule = row.rule if row.rounds is None else f"stopped after {row.rounds} rounds: {row.rule}"
        cells.append([rule, f"{row.kept:.1f}", f"{row.right:.3f} ± {row.error:.3f}"])
    where = f"{settings.steps} steps, window {settings.window}, {settings.slots} slots"
    return (
        f"{where}, {settings.runs} runs of each rule:\n\n{table(['taken', 'samples a run', 'P(x > 0)'], cells)}"
    )


# ------------------------------------------------------------------ which method when


def when() -> str:
    """Both samplers on the clock of a GPU."""
    pictures = load(Latency, "cifar10-latency-graph")
    cells = []
    for steps in sorted({row.steps for row in pictures.rows}):
        base = _row(pictures.rows, steps=steps, window=0)
        best = _row(pictures.rows, steps=steps, chosen=True)
        where = f"one picture: {MODELS[pictures.settings.model]}, {steps} steps"
        cells.append(_pair(where, base.calls, base.ms, best.calls, best.ms))
    robot, strict, quickest = front.quickest("robot-clock")
    where = f"a robot's plan: LeRobot's policy, {robot.settings.steps} steps"
    cells.append(_pair(where, strict.calls.mean, strict.ms.median, quickest.calls.mean, quickest.ms.median))
    for each in headline.package_rows():
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


FIGURES: dict[str, Callable[[], str]] = {
    made.__name__: made
    for made in (
        *(front.headline, front.pays, front.when_cpu, front.robot_short, front.robot_call),
        *(
            headlines,
            when,
            when_lossy,
            latency,
            ways,
            rounds,
            warm,
            cpu,
            cpu_rounds,
            start,
            throughput,
            frontier,
        ),
        *(growth, memory, devices, models, mixture, response, quality, agreement, training, classifier),
        *(policy, policy_steps, policy_quality, policy_costs, policy_warm, robot_clock_cpu),
        *(robot_success, robot_success_hard, robot_success_learned),
        *(waiting.policy_learned, waiting.policy_tail, other_packages, package_counts, ranked, mcmc, order),
        *(curves, curves_lead, curves_behind, curves_cost, curves_missing, quality_cost_summary),
        *(dataset, overhead, generate_gpu),
    )
} | {
    "robot_clock": partial(_robot_clock, "robot-clock"),
    "quality_cost": partial(_quality_cost, FASHION_COST),
    "quality_cost_cifar10": partial(_quality_cost, CIFAR10_COST),
    "quality_cost_policy": partial(_quality_cost, POLICY_COST),
    "quality_cost_mixture": partial(_quality_cost, MIXTURE_COST),
}
"""The figures by their names in the pages."""


def filled(text: str, kind: str = "figures", made: Mapping[str, Callable[[], str]] = FIGURES) -> str:
    """A page with its figures as the results have them, or with what else is made between such marks."""

    def replace(match: re.Match[str]) -> str:
        return f"<!-- {kind}: {match[1]} -->\n{made[match[1]]()}\n<!-- end -->"

    return re.sub(rf"<!-- {kind}: (\w+) -->\n.*?<!-- end -->", replace, text, flags=re.DOTALL)


def pages() -> list[Path]:
    """README and docs."""
    return sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md")])


if __name__ == "__main__":
    for page in pages():
        page.write_text(filled(page.read_text()))
