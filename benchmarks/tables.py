"""The figures in README and docs, made from the result files: `python -m benchmarks.tables` writes them.

A page holds `<!-- figures: NAME -->` … `<!-- end -->`; what stands between is replaced. A test fails where a
page says anything else than the results do.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.curves import BATCHES

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
    for row in result("cifar10-latency-graph")["rounds"]:
        cells = (
            f"{row['window']}" if row["window"] else "none: the sequential sampler",
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
    saved = result("cifar10-latency-graph")
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


def policy_quality() -> str:
    """Did they arrive, and do the tests see a difference?"""
    rows = result("policy-lasa")["rows"]
    arrived = min(row["arrived"]["mean"] for row in rows)
    smallest = min(p for row in rows for p in row["p_values"].values())
    return (
        f"{'All' if arrived == 1 else f'At least {100 * arrived:.1f} % of the'} roll-outs of the {len(rows)} "
        "policies come to rest within 0.1 of the goal. Two-sample Kolmogorov–Smirnov tests of both distances "
        f"against the sequential policy's give p-values from {smallest:.2f} up."
    )


def policy_steps() -> str:
    """Calls of a plan where the scheduler takes fewer steps."""
    calls = result("policy-lasa")["calls_by_steps"]
    lines = [" | ".join(["| steps", *calls]), "|---" * (len(calls) + 1)]
    lines.append(" | ".join(["| calls", *(f"{value:.1f}" for value in calls.values())]))
    return "\n".join(f"{line} |" for line in lines).replace("--- |", "---|")


def policy_costs() -> str:
    """Where a plan's time goes on one core."""
    saved = result("policy-lasa")
    call = saved["network_call_ms"]
    own = [
        (row["batch_1"]["ms"] - row["batch_1"]["network_ms"]) / row["batch_1"]["calls"]
        for row in saved["rows"]
        if row["batch_1"]["network_ms"] is not None
    ]
    return (
        f"On this CPU a round costs {min(own):.1f} to {max(own):.1f} ms of the sampler's own arithmetic, a "
        f"network call {call['1']:.1f} ms with one state and {call['17']:.1f} ms, "
        f"{call['17'] / call['1']:.1f} times as long, with 17."
    )


def training() -> str:
    """How the two models were trained."""
    saved = [result(f"training-{name}") for name in ("fashion-mnist", "cifar10")]
    folders = (
        "`foresample/pretrained/fashion_mnist`, inside the package",
        "`assets/cifar10`, in the repository only",
    )
    data = "60 000 pictures 28×28, not mirrored", "50 000 pictures 32×32, mirrored at random"
    table = {
        "folder": folders,
        "parameters, size": [f"{_spaced(r['parameters'])}, {r['bytes'] / 1e6:.1f} MB" for r in saved],
        "data": data,
        "training": [f"{r['steps']} steps of {r['batch']}, {r['seconds']:.0f} s" for r in saved],
        "loss (MSE of v), training": [f"{r['loss']:.3f}" for r in saved],
        "loss, 2000 held-out pictures": [f"{r['test_loss']:.3f}" for r in saved],
        "quality": ("below", "by eye: see the sheet"),
    }
    lines = ["| | Fashion-MNIST | CIFAR-10 |", "|---|---|---|"]
    return "\n".join([*lines, *(f"| {name} | {' | '.join(cells)} |" for name, cells in table.items())])


def classifier() -> str:
    """How good the judge is."""
    saved = result("training-classifier")
    return (
        f"A six-layer convolutional network ({saved['parameters'] / 1e6:.2f} M parameters, "
        f"{saved['bytes'] / 1e6:.1f} MB, `foresample/pretrained/classifier.safetensors`), "
        f"{100 * saved['test_accuracy']:.1f} % correct on the test pictures of Fashion-MNIST."
    )


def response() -> str:
    """What following the noise beyond the horizon gave, on a model not used to choose it."""
    before, after = (
        result(name)["rows"] for name in ("earlier/cifar10-calls-w50-gain-only", "cifar10-calls-w50")
    )
    moves = []
    for steps in (1000, 250, 100):
        old, new = (_row(rows, steps=steps, method="default, x0 reused") for rows in (before, after))
        moves.append(f"from {_speedup(old)} to {_speedup(new)} at {steps}")
    return (
        f"On the CIFAR-10 model, which was not used for the choice, it moved the speed-up {moves[0]} steps, "
        f"{moves[1]} and {moves[2]} (same seed, 64 samples): a small gain, of the order of two standard errors "
        "at best."
    )


def _spaced(number: int) -> str:
    return f"{number:,}".replace(",", " ")


# ------------------------------------------------------------------ side by side with everybody else

OURS = ("default", "replay without secant", "sequential")
CHAINS = (
    *("mixture-T30", "mixture-T300", "langevin-T200", "wells-T100", "policy-T100"),
    *("fashion-T100-cuda", "cifar10-T100-cuda"),
)
"""Chains that are compared at equal states a call, in the order of the page."""
LEAD = (5, 64)
"""The verification batches at which the default must be ahead of every exact peer."""


def curve_files() -> dict[str, dict[str, Any]]:
    """Results at equal states a call, by the name of their file."""
    return {name: result(name) for name in (f"curves-{chain}" for chain in CHAINS)}


def batches(rows: list[dict[str, Any]]) -> list[int]:
    """States a call at which the default and every peer of the file were measured."""
    peers = {row["method"] for row in rows} - set(OURS)
    measured = {(row["method"], row["states"]) for row in rows}
    sizes = {row["states"] for row in rows if row["method"] == "default"}
    return sorted(n for n in sizes if all((peer, n) in measured for peer in peers))


def best_peer(rows: list[dict[str, Any]], states: int) -> dict[str, Any]:
    """The exact peer with the fewest calls."""
    peers = [row for row in rows if row["states"] == states and row["method"] not in OURS]
    return min(peers, key=lambda row: row["calls"])


def lead(rows: list[dict[str, Any]], states: int) -> tuple[float, float]:
    """Calls of the best peer over the default's, and the standard error."""
    ours, peer = _row(rows, method="default", states=states), best_peer(rows, states)
    ratio = peer["calls"] / ours["calls"]
    return ratio, ratio * math.hypot(*(row["calls_error"] / row["calls"] for row in (ours, peer)))


def _lead(rows: list[dict[str, Any]], states: int) -> str:
    return "{:.3f} ± {:.3f}×".format(*lead(rows, states))


def _title(saved: dict[str, Any]) -> str:
    where = " (GPU)" if saved["settings"]["device"] == "cuda" else ""
    return f"{saved['settings']['target']}, {saved['settings']['steps']} steps{where}"


def curves_lead() -> str:
    """Where the default is ahead, and by how much."""
    low, high = LEAD
    lines = [
        f"| chain | smallest lead from {low} to {high} states a call | over | largest lead | over |",
        "|---|---|---|---|---|",
    ]
    for saved in curve_files().values():
        rows = saved["rows"]
        sizes = [n for n in batches(rows) if low <= n <= high]
        cells = [_title(saved)]
        for pick in (min, max):
            n = pick(sizes, key=lambda states: lead(rows, states)[0])
            cells += [f"{_lead(rows, n)} at {n}", best_peer(rows, n)["method"]]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def curves() -> str:
    """Speed-ups of all methods over the verification batch, one table a chain."""
    return "\n\n".join(_curves(name, saved) for name, saved in curve_files().items())


def _curves(name: str, saved: dict[str, Any]) -> str:
    rows, settings = saved["rows"], saved["settings"]
    sizes = sorted({row["states"] for row in rows if row["method"] != "sequential"})
    lines = [
        f"**{_title(saved)}** ({settings['samples']} samples, trees {_drawn(rows)}, "
        f"pilots {settings['pilots']}; [file](../benchmarks/results/{name}.json), "
        f"[picture](../benchmarks/results/{name}.png))",
        "",
        f"| states a call | {' | '.join(map(str, sizes))} |",
        "|---" * (len(sizes) + 1) + "|",
    ]
    for method in dict.fromkeys(row["method"] for row in rows if row["method"] != "sequential"):
        mine = {row["states"]: row for row in rows if row["method"] == method}
        bold = "**" if method == "default" else ""
        cells = [f"{bold}{_speedup(mine[n])}{bold}" if n in mine else "" for n in sizes]
        lines.append(f"| {bold}{method}{bold} | {' | '.join(cells)} |")
    whole = batches(rows)
    leads = (_lead(rows, n) if n in whole else "" for n in sizes)
    lines.append(f"| default over the best peer | {' | '.join(leads)} |")
    for method in ("D-GRS", "RASS"):
        chosen = {row["states"]: row["shape"] for row in rows if row["method"] == method}
        if chosen:
            cells = [_tree(chosen[n]) if n in chosen else "" for n in sizes]
            lines.append(f"| tree of {method} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _drawn(rows: list[dict[str, Any]]) -> str:
    drawn = {row["samples"] for row in rows if row["shape"]}
    return ", ".join(map(str, sorted(drawn))) if drawn else "none"


def _tree(shape: str) -> str:
    """5-3-1-1-1-1 as 5-3-1…, with its depth."""
    children = shape.split("-")
    wide = [child for child in children if child != "1"]
    return f"{'-'.join([*wide, '1…'] if len(wide) < len(children) else wide)} ({len(children)} deep)"


def curves_behind() -> str:
    """Where some peer needs fewer calls than the default."""
    lines = []
    for saved in curve_files().values():
        rows = saved["rows"]
        behind = [n for n in batches(rows) if lead(rows, n)[0] <= 1]
        told = [f"{best_peer(rows, n)['method']} at {n} states a call ({_lead(rows, n)})" for n in behind]
        ours = min((row for row in rows if row["method"] == "default"), key=_calls)
        peer = min((row for row in rows if row["method"] not in OURS), key=_calls)
        if told:
            lines.append(
                f"* {_title(saved)}: {'; '.join(told)}. At any number of states, the fewest calls are "
                f"{ours['calls']:.2f} of the default at {ours['states']}, and {peer['calls']:.2f} of "
                f"{peer['method']} at {peer['states']}."
            )
    return "\n".join(lines) or "Nowhere, at the numbers of states measured."


def _calls(row: dict[str, Any]) -> float:
    return row["calls"]


def curves_cost() -> str:
    """What the calls cost: evaluations and seconds of a sample at three verification batches."""
    lines = [
        "| chain | states a call | calls: default, best peer | evaluations: default, best peer "
        "| ms: sequential, default, best peer | best peer |",
        "|---|---|---|---|---|---|",
    ]
    for saved in curve_files().values():
        rows = saved["rows"]
        plain = _row(rows, method="sequential")
        for n in sorted({5, 16, 64}.intersection(batches(rows))):
            ours, peer = _row(rows, method="default", states=n), best_peer(rows, n)
            cells = [_title(saved), f"{n}"]
            for key, digits in (("calls", 2), ("evaluations", 1)):
                pair = ((row[key], row[f"{key}_error"]) for row in (ours, peer))
                cells.append(", ".join(f"{mean:.{digits}f} ± {error:.{digits}f}" for mean, error in pair))
            seconds = (row["seconds"] for row in (plain, ours, peer))
            cells.append(", ".join(f"{1e3 * s:.1f}" for s in seconds))
            lines.append(f"| {' | '.join(cells)} | {peer['method']} |")
    return "\n".join(lines)


def curves_missing() -> str:
    """What has not been measured."""
    lines = []
    for saved in curve_files().values():
        there = batches(saved["rows"])
        if missing := [str(n) for n in BATCHES if n not in there]:
            lines.append(f"* {_title(saved)}: not with every peer at {' and '.join(missing)} states a call.")
    return "\n".join(lines) or "Everything above was run at every number of states a call."


def quality_cost() -> str:
    """The lossy methods' distance to the sequential law against their calls."""
    if not (RESULTS / "quality-cost-fashion.json").exists():
        return "(Not measured yet: `python -m benchmarks.quality_cost --device cuda`.)"
    saved = result("quality-cost-fashion")
    settings, rows = saved["settings"], saved["rows"]
    floor = _row(rows, method="sequential")
    lines = [
        f"{settings['target']}, {settings['steps']} steps, {settings['count']} pictures of each method:",
        "",
        "| method | exact | calls | evaluations | distance to the sequential law | over the floor |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        name = f"{row['method']}, other seeds: the floor" if row is floor else row["method"]
        cells = [name, "yes" if row["exact"] else "no", f"{row['calls']:.1f}", f"{row['evaluations']:.0f}"]
        cells += [f"{row['distance']:.4f}", f"{row['distance'] / floor['distance']:.2f}×"]
        lines.append(f"| {' | '.join(cells)} |")
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
    "quality_cost": quality_cost,
    "curves_missing": curves_missing,
    "curves_cost": curves_cost,
    "curves_behind": curves_behind,
    "curves": curves,
    "curves_lead": curves_lead,
    "response": response,
    "classifier": classifier,
    "training": training,
    "policy_costs": policy_costs,
    "policy_steps": policy_steps,
    "policy_quality": policy_quality,
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
