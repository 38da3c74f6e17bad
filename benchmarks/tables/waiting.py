"""Figures about waiting: plans by what their first window is drafted from, and where slow plans spend calls."""

from __future__ import annotations

from benchmarks.kinds.robots import LearnedPlans
from benchmarks.results import load
from benchmarks.tables.markdown import table_of


def policy_learned() -> str:
    """Calls of plans by what their first window is drafted from."""
    return table_of(
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
        for row in load(LearnedPlans, "policy-learned").rows
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
        f"At window {window} one window covers the whole chain. Of {learned.plans} plans with the learned prior the "
        f"{learned.slow_plans} slowest make {sum(slow):.1f} calls on average, all of them {sum(calls):.1f}. "
        f"{slow[-1]:.1f} of the slow plans' calls begin in the last {steps} steps, against {calls[-1]:.1f} of all "
        f"plans'; {sum(slow[:2]):.1f} begin in the first {2 * steps}, against {sum(calls[:2]):.1f}. The slowest plan "
        f"makes {pooled.calls.most:.0f} calls with the pooled prior and {learned.calls.most:.0f} with the learned one."
    )
