"""The figures at the head of the page: the best ones, and the worst."""

from __future__ import annotations

from benchmarks.kinds.calls import Calls, CallsRow
from benchmarks.kinds.clock import Latency, Throughput
from benchmarks.names import MODELS
from benchmarks.report.calls import machine_of
from benchmarks.report.markup import Card
from benchmarks.result_files import CheckResult, Results

EARLIER = ("reflection-nearest", "block-parent-fresh")
"""The exact chains before ours."""


def headlines(results: Results) -> list[Card]:
    """The headlines for which there are results."""
    return [*_calls(results), *_clock(results), *_law(results), *_full(results)]


def _calls(results: Results) -> list[Card]:
    """The default's best row on a trained model, and the better of the earlier chains beside it."""
    found: list[tuple[str, CallsRow, float]] = []
    for result in results.of(Calls):
        for row in result.rows:
            beside = [r.speedup for r in result.rows if r.steps == row.steps and r.method in EARLIER]
            if (row.method, row.reuse) == ("default", "x0") and beside:
                found.append((result.settings.model, row, max(beside)))
    if not found:
        return []
    # CIFAR-10 is the harder of the two models, and the one the papers before it report.
    model, ours, earlier = max(found, key=lambda one: (one[0] == "cifar10", one[1].speedup))
    text = (
        f"fewer network calls one after another: {MODELS.get(model, model)}, {ours.steps} steps, window "
        f"{ours.window} ({ours.speedup:.2f} ± {ours.speedup_error:.2f})"
    )
    before = "as far on each call as the better of the exact chains before it, in the same run"
    return [
        Card(f"{ours.speedup:.1f}×", text, "calls"),
        Card(f"{ours.speedup / earlier:.2f}×", before, "calls"),
    ]


def _clock(results: Results) -> list[Card]:
    """The longest chain on the clock: its sequential row, and the quickest other."""
    for result in results.of(Latency):
        longest = max(row.steps for row in result.rows)
        plain = [row for row in result.rows if row.steps == longest and not row.window]
        others = [row for row in result.rows if row.steps == longest and row.window]
        if result.settings.mode == "graph" and plain and others:
            ours = min(others, key=lambda row: row.ms)
            text = (
                f"less time a sample at batch 1: {plain[0].ms:.0f} ms → {ours.ms:.0f} ms for {longest} "
                f"steps{machine_of(result)}"
            )
            return [Card(f"{plain[0].ms / ours.ms:.1f}×", text, "clock")]
    return []


def _law(results: Results) -> list[Card]:
    for check in results.of(CheckResult):
        for finding in check.findings:
            if finding.tests is not None and finding.smallest_p is not None:
                text = (
                    f"the smallest p-value of {finding.tests} tests of the embedded model's distribution; at joint "
                    f"level {check.level:g} one below {check.level:g}/{finding.tests} would be an alarm"
                )
                return [Card(f"p = {finding.smallest_p:.2g}", text, "exactness")]
    return []


def _full(results: Results) -> list[Card]:
    for result in results.of(Throughput):
        row = result.rows[0]
        share = row.samples_per_second / row.sequential_samples_per_second
        text = (
            f"the sequential sampler's throughput once a GPU is full{': there it loses' if share < 1 else ''}"
        )
        return [Card(f"{share:.2f}×", text, "losses")]
    return []
