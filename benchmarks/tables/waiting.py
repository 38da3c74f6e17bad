"""Figures about waiting: plans by what their first window is drafted from, and where slow plans spend calls."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.kinds.robots import LearnedPlans
from benchmarks.results import load
from benchmarks.tables.markdown import table_of


def policy_learned() -> str:
    """Calls of plans by what their first window is drafted from, and what the learned prior saves."""
    saved = load(LearnedPlans, "policy-learned").rows
    shown = table_of(
        {
            "window": f"{row.window}",
            "drafted from": row.drafted_from + (f" ({row.learned_from} plans)" if row.learned_from else ""),
            "calls a plan": f"{row.calls.mean:.2f} ± {row.calls.error:.2f}",
            "median / p90 / p99 / most": (
                f"{row.calls.median:.0f} / {row.calls.p90:.0f} / {row.calls.p99:.0f} / {row.calls.most:.0f}"
            ),
            "states evaluated": f"{row.evaluations:.0f}",
            "ms on one core, median / p99": f"{row.processor_ms.median:.0f} / {row.processor_ms.p99:.0f}",
        }
        for row in saved
    )
    by_data = sorted(saved, key=lambda row: row.learned_from)  # so the prior of the most plans counts
    calls = {(row.window, row.drafted_from): row.calls.mean for row in by_data}
    windows = sorted({row.window for row in saved})

    def fewer(than: str) -> str:
        return _listed([f"{100 * (1 - calls[w, 'learned'] / calls[w, than]):.0f}" for w in windows])

    return (
        f"{shown}\n\nAt windows {_listed(windows)} the learned prior saves {fewer('nothing')} % of the calls of a plan "
        f"that starts from nothing, and {fewer('last plan')} % of those of a plan drafted from the last one."
    )


def policy_tail() -> str:
    """The parts of the chain in which slow plans spend their calls."""
    saved = load(LearnedPlans, "policy-learned")
    window = max(row.window for row in saved.rows)
    rows = [row for row in saved.rows if row.window == window]
    pooled = next(row for row in rows if row.drafted_from == "pooled")
    learned = max((row for row in rows if row.drafted_from == "learned"), key=lambda row: row.learned_from)
    parts = saved.settings.parts
    steps = saved.settings.steps // parts
    calls, slow = learned.calls_by_part, learned.slow_calls_by_part
    return (
        f"At window {window} one window covers the whole chain. With the learned prior, the average over all "
        f"{learned.plans} plans is {sum(calls):.1f} calls, and over the {learned.slow_plans} slowest {sum(slow):.1f}. "
        f"In the last {steps} steps a slow plan begins {slow[-1]:.1f} calls, an average plan {calls[-1]:.1f}; in the "
        f"first {2 * steps} steps they begin {sum(slow[:2]):.1f} and {sum(calls[:2]):.1f}. The slowest plan makes "
        f"{pooled.calls.most:.0f} calls with the pooled prior and {learned.calls.most:.0f} with the learned one."
    )


def _listed(values: Sequence[object]) -> str:
    """The values as a list in a sentence: a, b and c."""
    *most, last = map(str, values)
    return f"{', '.join(most)} and {last}" if most else last
