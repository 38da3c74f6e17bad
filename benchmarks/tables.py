"""The figures in README and docs, made from the result files: `python -m benchmarks.tables` writes them.

A page holds `<!-- figures: NAME -->` … `<!-- end -->`; what stands between is replaced. A test fails where a
page says anything else than the results do.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
RESULTS = Path(__file__).parent / "results"


def result(name: str) -> dict[str, Any]:
    """One saved result."""
    return json.loads((RESULTS / f"{name}.json").read_text())


def _row(rows: list[dict[str, Any]], **wanted: Any) -> dict[str, Any]:
    (found,) = [row for row in rows if all(row[k] == v for k, v in wanted.items())]
    return found


def _speedup(row: dict[str, Any]) -> str:
    return f"{row['speedup']:.2f} ± {row['speedup_error']:.2f}"


def models() -> str:
    """Trained models: the default against the chains before it."""
    lines = [
        "| model | steps | default | nearest, per step | blocks, fresh noise | against the better of these |",
        "|---|---|---|---|---|---|",
    ]
    for name, title in (("cifar10", "CIFAR-10"), ("fashion_mnist", "Fashion-MNIST")):
        rows = result(f"{name}-calls-w50")["rows"]
        for steps in (100, 250, 1000):
            ours, nearest, blocks = (
                _row(rows, steps=steps, method=method)
                for method in (
                    "default, x0 reused",
                    "reflection, nearest, x0 reused",
                    "block, parent, fresh noise, x0 reused",
                )
            )
            ratio = ours["speedup"] / max(nearest["speedup"], blocks["speedup"])
            cells = (
                title,
                f"{steps}",
                f"**{_speedup(ours)}**",
                _speedup(nearest),
                _speedup(blocks),
                f"{ratio:.2f}×",
            )
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def mixture() -> str:
    """The closed-form benchmark."""
    lines = [
        "| chain | reused | window | default | nearest, per step | blocks, fresh noise |",
        "|---|---|---|---|---|---|",
    ]
    cases = [("d500-T30", w, r) for r in ("v", "x0") for w in (5, 14)]
    cases += [("d500-T300", 50, "v"), ("d500-T300", 50, "x0"), ("d64-T300", 50, "v")]
    for chain, window, reuse in cases:
        saved = result(f"mixture-{chain}-{reuse}")
        settings = saved["settings"]
        title = f"d = {settings['dim']}, ε = {settings['churn']:g}, {settings['steps']} steps"
        ours, nearest, blocks = (
            _row(saved["rows"], window=window, method=method)
            for method in ("replay, block, secant", "reflection, nearest", "block, parent, fresh noise")
        )
        cells = (title, reuse, f"{window}", f"**{_speedup(ours)}**", _speedup(nearest), _speedup(blocks))
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def quality() -> str:
    """Are the pictures the same?"""
    saved = result("fashion_mnist-quality")
    groups: dict[str, list[float]] = {}
    for row in saved["distances"]:
        pair = " and ".join(sorted(name.split()[0] for name in (row["a"], row["b"])))
        groups.setdefault(pair, []).append(row["distance"])
    lines = ["| Fréchet distance between | values |", "|---|---|"]
    for pair, values in groups.items():
        lines.append(f"| {pair} | {', '.join(f'{v:.4f}' for v in values)} |")
    agreement = saved["agreement"]
    calls = [v for k, v in saved["calls"].items() if k.startswith("speculative")]
    told = ", ".join(f"{name} {100 * value:.1f} %" for name, value in agreement.items())
    settings = saved["settings"]
    lines += [
        "",
        f"{settings['count']} samples a run, {settings['steps']} steps, window {settings['window']}: "
        f"{settings['steps']} calls a sample sequentially, {sum(calls) / len(calls):.1f} speculatively. "
        f"Pictures in which the classifier sees the label asked for: {told}.",
    ]
    return "\n".join(lines)


def policy() -> str:
    """Closed-loop behaviour and latency of the robot policy."""
    lines = [
        "| policy | network calls a plan | distance to the nearest demonstration "
        "| distance to the goal at the end | ms a plan, batch 1 (in the network) |",
        "|---|---|---|---|---|",
    ]
    for row in result("policy-lasa")["rows"]:
        behaviour = (f"{row[k]['mean']:.4f} ± {row[k]['error']:.4f}" for k in ("distance", "to_goal"))
        clock = row["batch_1"]
        inside = "" if clock["network_ms"] is None else f" ({clock['network_ms']:.0f})"
        cells = (row["policy"], f"{row['calls']:.1f}", *behaviour, f"{clock['ms']:.0f}{inside}")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def latency() -> str:
    """One sample at a time on a GPU."""
    lines = ["| steps | sequential | window | calls | ms a sample | faster |", "|---|---|---|---|---|---|"]
    eager = result("cifar10-latency-eager")
    for saved, mode in ((result("cifar10-latency-graph"), ""), (eager, ", eager")):
        rows = saved["rows"]
        for steps in sorted({row["steps"] for row in rows}):
            base = _row(rows, steps=steps, window=0)["ms"]
            ours = [row for row in rows if row["steps"] == steps and row["window"]]
            best = max(row["gain"] for row in ours)
            for row in ours:
                gain = f"{row['gain']:.2f}×"
                cells = (
                    f"{steps}{mode}",
                    f"{base:.0f} ms",
                    f"{row['window']}",
                    f"{row['calls']:.1f}",
                    f"{row['ms']:.1f} ± {row['ms_error']:.1f}",
                    f"**{gain}**" if row["gain"] == best else gain,
                )
                lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def clock() -> str:
    """The best window at each chain length."""
    lines = ["| steps | sequential | foresample | faster |", "|---|---|---|---|"]
    for name, mode in (("cifar10-latency-graph", ""), ("cifar10-latency-eager", ", both eager")):
        rows = result(name)["rows"]
        for steps in sorted({row["steps"] for row in rows}):
            base = _row(rows, steps=steps, window=0)
            best = max((row for row in rows if row["steps"] == steps), key=lambda row: row["gain"])
            ours = f"{best['ms']:.0f} ms (window {best['window']})"
            lines.append(f"| {steps}{mode} | {base['ms']:.0f} ms | {ours} | **{best['gain']:.1f}×** |")
    return "\n".join(lines)


def rounds() -> str:
    """Where the time of a round goes."""
    lines = ["| window | a round | the network alone | all else |", "|---|---|---|---|"]
    for row in result("earlier/cifar10-latency-graph")["rounds"]:
        cells = (
            f"{row['window']}",
            f"{row['round_us']:.0f} µs",
            f"{row['network_us']:.0f} µs",
            f"{100 * row['share']:.1f} %",
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def throughput() -> str:
    """Many samples through few slots."""
    saved = result("cifar10-throughput")
    settings = saved["settings"]
    lines = [
        f"| steps | slots occupied | in fixed batches of {settings['slots']} | samples a second, slots "
        "| fixed batches | sequential |",
        "|---|---|---|---|---|---|",
    ]
    for row in saved["rows"]:
        cells = (
            f"{row['steps']}",
            f"{100 * row['occupancy']:.1f} %",
            f"{100 * row['fixed_occupancy']:.1f} %",
            f"{row['samples_per_second']:.0f} ({row['gain_over_fixed']:.2f}× fixed)",
            f"{row['fixed_samples_per_second']:.0f}",
            f"**{row['sequential_samples_per_second']:.0f}**",
        )
        lines.append(f"| {' | '.join(cells)} |")
    advice = "; ".join(f"“{tuning['advice']}”" for tuning in saved["tunings"])
    lines += [
        "",
        f"{settings['samples']} samples, window {settings['window']}. What `tune` says of it: {advice}.",
    ]
    return "\n".join(lines)


def growth() -> str:
    """Calls against the length of the chain."""
    saved = result("cifar10-growth")
    rows, settings = saved["rows"], saved["settings"]
    calls = " | ".join(f"{row['calls']:.1f} ± {row['calls_error']:.1f}" for row in rows)
    return "\n".join(
        [
            f"| steps | {' | '.join(str(row['steps']) for row in rows)} |",
            f"|---|{'---|' * len(rows)}",
            f"| calls | {calls} |",
            "",
            f"The fit over all of them: calls ∝ N^{saved['exponent']:.3f} (window {settings['window']}, "
            f"{settings['samples']} samples each, bfloat16).",
        ]
    )


def memory() -> str:
    """Peak device memory of a stream."""
    saved = result("cifar10-memory")
    told = ", ".join(
        f"{row['peak_mib']:.0f} MiB ({row['steps']} steps, {row['samples']} samples)" for row in saved["rows"]
    )
    settings = saved["settings"]
    return f"{settings['slots']} slots, window {settings['window']}, three engines one after the other: {told}."


def overhead() -> str:
    """What drawing a dataset costs beyond the engine's own work."""
    lines = [
        "| target | samples, slots | beyond the engine, on the clock | of processor time | beside the engine |",
        "|---|---|---|---|---|",
    ]
    for row in result("generate-overhead")["rows"]:
        shares = (f"{100 * row[k]:.2f} %" for k in ("inside", "inside_cpu"))
        beside = f"{100 * row['beside']:+.1f} %"
        cells = (row["target"], f"{row['count']}, {row['slots']}", *shares, beside)
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def dataset() -> str:
    """A large dataset: its law, and the memory it took."""
    saved, rows = result("generate-law"), result("generate-memory")["rows"]
    law, settings = saved["law"], saved["settings"]
    verdict = "passes" if law["passed"] else "FAILS"
    lines = [
        f"{law['samples']} samples of the mixture, d = {settings['dim']}, {settings['steps']} steps, at once: "
        f"{saved['seconds']:.0f} s, {saved['peak_mib']:.0f} MiB at most. The law check {verdict}: "
        f"{law['tests']} tests against {law['sequential']} sequential samples at joint level {law['level']:g}, "
        f"smallest p-value {law['smallest_p']:.2g}.",
        "",
        "| dimension | samples | their size, MiB | peak memory, MiB |",
        "|---|---|---|---|",
    ]
    lines += [f"| {r['dim']} | {r['count']} | {r['samples_mib']:.1f} | {r['peak_mib']:.0f} |" for r in rows]
    return "\n".join(lines)


def devices() -> str:
    """One sample on k devices, predicted from the latency measured on one."""
    path = RESULTS / "earlier" / "cifar10-latency-graph.json"
    if not path.exists():
        return "(No latency curve is saved yet.)"
    saved = json.loads(path.read_text())
    curve = sorted((row["window"] + 1, row["network_us"]) for row in saved["rounds"])

    def network(states: int) -> float:
        """Microseconds of a call, linear between the measured points."""
        (low, slow), (high, fast) = next(pair for pair in pairwise(curve) if states <= pair[1][0])
        return slow + (fast - slow) * max(0, states - low) / (high - low)

    shares = (1, 2, 4, 8)
    lines = [
        f"| steps | window | {' | '.join(f'{k} device' + 's' * (k > 1) for k in shares)} |",
        "|---|---|" + "---|" * len(shares),
    ]
    for row in saved["rows"]:
        window = row["window"]
        if not window:
            continue
        base = _row(saved["rows"], steps=row["steps"], window=0)
        other = _row(saved["rounds"], window=window)
        saving = [row["calls"] * (other["network_us"] - network(-(-(window + 1) // k))) / 1e3 for k in shares]
        gains = (f"{base['ms'] / (row['ms'] - saved_ms):.2f}×" for saved_ms in saving)
        lines.append(f"| {row['steps']} | {window} | {' | '.join(gains)} |")
    return "\n".join(lines)


FIGURES: dict[str, Callable[[], str]] = {
    "clock": clock,
    "latency": latency,
    "rounds": rounds,
    "throughput": throughput,
    "growth": growth,
    "memory": memory,
    "models": models,
    "mixture": mixture,
    "quality": quality,
    "policy": policy,
    "devices": devices,
    "dataset": dataset,
    "overhead": overhead,
}


def filled(text: str) -> str:
    """A page with its figures as the results have them."""

    def replace(match: re.Match[str]) -> str:
        return f"<!-- figures: {match[1]} -->\n{FIGURES[match[1]]()}\n<!-- end -->"

    return re.sub(r"<!-- figures: (\w+) -->\n.*?<!-- end -->", replace, text, flags=re.DOTALL)


def pages() -> list[Path]:
    """README and docs."""
    return sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md")])


if __name__ == "__main__":
    for page in pages():
        page.write_text(filled(page.read_text()))
