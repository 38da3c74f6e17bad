"""What the page says: each maker makes one section from the results it needs, or nothing without them."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from foresample.webpage.calls import calls, growth
from foresample.webpage.clock import clock, losses, throughput_rows
from foresample.webpage.common import DEFAULT, EARLIER, MODELS, Row, bench_rows, machine_of, model_title
from foresample.webpage.exactness import exactness, law_finding
from foresample.webpage.markup import Section
from foresample.webpage.published import published
from foresample.webpage.quality import quality, sheets
from foresample.webpage.results import Result, Results


def sections(results: Results, pictures: Path | None) -> list[Section]:
    """All sections for which there is something to show, in the order of the page."""
    makers: list[Callable[[Results], Section | None]] = [
        calls,
        growth,
        clock,
        quality,
        published,
        exactness,
        losses,
    ]
    made = [make(results) for make in makers]
    made.insert(4, sheets(results, pictures))
    return [section for section in made if section is not None]


def headlines(results: Results) -> list[tuple[str, str, str]]:
    """(figure, what it is, where it stands on the page) for the head of the page."""
    cards = []
    best = _best_calls(results)
    if best is not None:
        model, ours, earlier = best
        cards.append(
            (
                f"{ours['speedup']:.1f}×",
                f"fewer network calls one after another: {model}, {ours['steps']} steps, window "
                f"{ours['window']} ({ours['speedup']:.2f} ± {ours['speedup_error']:.2f})",
                "calls",
            )
        )
        cards.append(
            (
                f"{ours['speedup'] / earlier:.2f}×",
                "as far on each call as the better of the exact chains before it, in the same run",
                "calls",
            )
        )
    fastest = _fastest(results)
    if fastest is not None:
        result, plain, ours = fastest
        cards.append(
            (
                f"{plain['ms'] / ours['ms']:.1f}×",
                f"less time a sample at batch 1: {plain['ms']:.0f} ms → {ours['ms']:.0f} ms for "
                f"{ours['steps']} steps{machine_of(result)}",
                "clock",
            )
        )
    check = results.get("check-embedded")
    if check is not None:
        found = re.search(r"(\d+) tests at joint level (\S+), smallest p-value (\S+)", law_finding(check))
        if found:
            cards.append(
                (
                    f"p = {float(found[3]):.2g}",
                    f"the smallest p-value of {found[1]} tests of the embedded model's law; at joint level "
                    f"{found[2]} one below {found[2]}/{found[1]} would be an alarm",
                    "exactness",
                )
            )
    full = results.get("cifar10-throughput")
    if full is not None:
        (row, *_) = throughput_rows(full)
        loses = ": there it loses" if row["samples_per_second"] < row["sequential_samples_per_second"] else ""
        share = row["samples_per_second"] / row["sequential_samples_per_second"]
        cards.append(
            (
                f"{share:.2f}×",
                f"the sequential sampler's throughput once a GPU is full{loses}",
                "losses",
            )
        )
    return cards


def _best_calls(results: Results) -> tuple[str, Row, float] | None:
    """The default's best row on a trained model, and the better of the earlier chains beside it."""
    found = []
    for result in results.matching("*-calls-*"):
        for row in bench_rows(result, "steps"):
            beside = [r for r in result.data["rows"] if r["steps"] == row["steps"] and r["method"] in EARLIER]
            if row["method"] == DEFAULT and beside:
                found.append((model_title(result), row, max(r["speedup"] for r in beside)))
    # CIFAR-10 is the harder of the two models, and the one the papers before it report.
    found.sort(key=lambda f: (f[0] == MODELS["cifar10"], f[1]["speedup"]))
    return found[-1] if found else None


def _fastest(results: Results) -> tuple[Result, Row, Row] | None:
    """The longest chain of the latency file: its sequential row, and the quickest other."""
    result = results.get("cifar10-latency-graph")
    if result is None:
        return None
    rows = result.rows(numbers=("window", "ms_error"), positive=("steps", "calls", "ms"))
    rows = [row for row in rows if row["steps"] == max(r["steps"] for r in rows)]
    plain, others = [r for r in rows if r["window"] == 0], [r for r in rows if r["window"] > 0]
    return (result, plain[0], min(others, key=lambda r: r["ms"])) if plain and others else None
