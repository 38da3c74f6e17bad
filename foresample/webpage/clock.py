"""On the clock: where fewer calls are less time, and where they are not."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from foresample.webpage.common import Row, by_method, counts, machine_of, model_title
from foresample.webpage.markup import (
    Axis,
    Plot,
    Point,
    Role,
    Section,
    Series,
    grid,
    number,
    paragraph,
    plus_minus,
    table,
)
from foresample.webpage.results import Result, Results, is_number


def clock(results: Results) -> Section | None:
    """Milliseconds a sample, where a round's time goes, memory."""
    used, plots, texts = [], [], []
    latency = results.get("cifar10-latency-graph")
    if latency is not None:
        used.append(latency)
        plots.append(_latency_plot(latency))
        if latency.data.get("rounds"):
            plots.append(_rounds_plot(latency))
    eager = results.get("cifar10-latency-eager")
    if eager is not None:
        used.append(eager)
        rows = eager.rows(numbers=("steps", "window", "ms", "ms_error"))
        told = "; ".join(
            f"{'sequential' if not row['window'] else 'window ' + str(row['window'])}: "
            f"{plus_minus(row['ms'], row['ms_error'])} ms"
            for row in rows
        )
        texts.append(
            paragraph(
                f"Without a CUDA graph, launched call by call, {rows[0]['steps']} steps take {told}. The "
                "baseline of the plot is the strict one: the sequential sampler, too, replays a captured "
                "graph.",
            )
        )
    memory = results.get("cifar10-memory")
    if memory is not None:
        used.append(memory)
        texts.append(
            table(
                ["steps of the chain", "samples asked for", "peak memory, MiB"],
                (
                    (row["steps"], row["samples"], row["peak_mib"])
                    for row in memory.rows(numbers=("steps", "samples", "peak_mib"))
                ),
                "Memory hardly grows with the chain or with the number of samples",
            )
        )
    if not plots and not texts:
        return None
    device = machine_of(used[0])
    intro = paragraph(
        f"One sample at a time{device}: calls follow one another, and a call on a few more states costs "
        "little more.",
        "This is where fewer calls become less time.",
    )
    return Section("clock", "On the clock", [intro, grid(*(p.html() for p in plots)), *texts], plots, used)


def _latency_plot(result: Result) -> Plot:
    rows = result.rows(numbers=("window", "ms_error"), positive=("steps", "calls", "ms"))
    chains = list(dict.fromkeys(row["steps"] for row in rows))
    plain = {row["steps"]: row["ms"] for row in rows if row["window"] == 0}

    def note(row: Row) -> str:
        gain = (
            f", {plain[row['steps']] / row['ms']:.2f}× faster"
            if row["window"] and row["steps"] in plain
            else ""
        )
        return f"{number(row['calls'])} calls{gain}"

    return Plot(
        f"plot-{result.name}",
        f"{model_title(result)}: milliseconds a sample against window",
        Axis("window; 0 is the sequential sampler"),
        Axis("ms a sample", log=True),
        [
            Series(
                f"{steps} steps",
                [Point(r["window"], r["ms"], r["ms_error"], note(r)) for r in rows if r["steps"] == steps],
            )
            for steps in chains
        ],
        "Batch 1, the whole round in a CUDA graph, the baseline too.",
    )


def _rounds_plot(result: Result) -> Plot:
    rows = result.rows(numbers=("window", "round_us", "network_us", "network_us_error", "share"), key="rounds")
    names = [f"window {row['window']}" if row["window"] else "sequential" for row in rows]
    shares = [row["share"] for row in rows if row["window"]]
    network = [Point(n, r["network_us"], r["network_us_error"]) for n, r in zip(names, rows, strict=True)]
    own = [
        Point(n, r["round_us"] - r["network_us"], None, f"{100 * r['share']:.1f} % of the round")
        for n, r in zip(names, rows, strict=True)
    ]
    return Plot(
        "plot-rounds",
        "Where a round's time goes",
        Axis("window"),
        Axis("µs a round", zero=True),
        [Series("network call", network), Series("drafting, verifying, committing", own, "ours")],
        f"{100 * min(shares):.1f} to {100 * max(shares):.1f} % of a round is the sampler's own work; the "
        "rest is the network.",
        kind="bars",
        categories=names,
    )


def losses(results: Results) -> Section | None:
    """Where the sequential sampler is the better choice."""
    used, plots, body = [], [], []
    full = results.get("cifar10-throughput")
    if full is not None:
        used.append(full)
        plots.append(_throughput_plot(full))
    policy = results.get("policy-lasa")
    if policy is not None:
        used.append(policy)
        plots.append(_policy_plot(policy))
    for result in results.matching("*-calls-*"):
        used.append(result)
        plots.append(_evaluations_plot(result))
    if not plots:
        return None
    body.append(
        paragraph(
            "Fewer calls is not fewer evaluations: a call checks a whole window, and what is rejected has "
            "been computed all the same. Where every state costs its full price, on a CPU or a GPU that is "
            "full, the sequential sampler is faster, and foresample says so: its tuner advises against "
            "itself.",
        )
    )
    body.append(grid(*(p.html() for p in plots)))
    tunings = full.data.get("tunings") if full is not None else None
    for tuning in tunings if isinstance(tunings, list) else []:
        if isinstance(tuning, dict) and isinstance(tuning.get("advice"), str):
            body.append(f'<blockquote class="note">{escape(tuning["advice"])}.</blockquote>')
    return Section("losses", "Where it loses", body, plots, used)


def _throughput_plot(result: Result) -> Plot:
    kinds: dict[str, tuple[str, Role]] = {
        "sequential": ("sequential_samples_per_second", "exact"),
        "speculative, slots refilled": ("samples_per_second", "ours"),
        "speculative, fixed batches": ("fixed_samples_per_second", "exact"),
    }
    rows = throughput_rows(result)
    settings = result.settings
    names = [f"{row['steps']} steps" for row in rows]
    return Plot(
        f"plot-{result.name}",
        "A GPU that is full: samples a second",
        Axis("chain"),
        Axis("samples a second", zero=True),
        [
            Series(name, [Point(n, row[key]) for n, row in zip(names, rows, strict=True)], role, line=False)
            for name, (key, role) in kinds.items()
        ],
        f"{model_title(result)}, {settings.get('slots', '?')} samples at a time, window "
        f"{settings.get('window', '?')}{machine_of(result)}. Further right is better.",
        kind="dots",
        categories=names,
    )


def _policy_plot(result: Result) -> Plot:
    network, own, whole = [], [], []
    names = []
    for i, row in enumerate(result.rows(text=("policy",), numbers=("calls",))):
        batch = row.get("batch_1")
        if not isinstance(batch, dict) or not is_number(batch.get("ms")) or batch["ms"] <= 0:
            result.fail(f"'batch_1' in rows[{i}] has no milliseconds")
        names.append(row["policy"])
        note = f"{number(row['calls'])} calls a plan"
        if is_number(batch.get("network_ms")):
            network.append(Point(row["policy"], batch["network_ms"], None, note))
            own.append(Point(row["policy"], batch["ms"] - batch["network_ms"], None, note))
        else:
            whole.append(Point(row["policy"], batch["ms"], None, note))
    parts: list[tuple[str, list[Point], Role]] = [
        ("whole plan, not split", whole, "exact"),
        ("network", network, "exact"),
        ("sampler", own, "ours"),
    ]
    return Plot(
        f"plot-{result.name}",
        "A tiny robot policy on a CPU: milliseconds a plan",
        Axis("policy"),
        Axis("ms a plan, batch 1", zero=True),
        [Series(name, points, role) for name, points, role in parts if points],
        _own_share(network, own),
        kind="bars",
        categories=names,
    )


def _own_share(network: Sequence[Point], own: Sequence[Point]) -> str:
    """How much of an accelerated plan is not the network."""
    shares = [100 * o.y / (o.y + n.y) for n, o in zip(network, own, strict=True)]
    if not shares:
        return "Shorter is better."
    return (
        f"{min(shares):.0f} to {max(shares):.0f} % of an accelerated plan is the sampler's own arithmetic: a "
        "network this small leaves little to save."
    )


def _evaluations_plot(result: Result) -> Plot:
    rows = result.rows(text=("method",), positive=("steps", "evaluations"))
    share = [{**row, "share": row["evaluations"] / row["steps"]} for row in rows]
    one = Series("sequential", [Point(n, 1.0) for n in sorted({row["steps"] for row in rows})], "reference")
    return Plot(
        f"plot-evaluations-{result.name}",
        f"{model_title(result)}: states evaluated for each step",
        Axis("steps of the chain", log=True),
        Axis("evaluations over steps", zero=True),
        [*by_method(share, "steps", "share", None, counts), one],
        "What compute pays for: the same runs as above.",
    )


def throughput_rows(result: Result) -> list[Row]:
    """Samples a second: sequential, ours, and ours in fixed batches."""
    return result.rows(
        positive=("steps", "samples_per_second", "fixed_samples_per_second", "sequential_samples_per_second")
    )
