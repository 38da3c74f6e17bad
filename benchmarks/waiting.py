"""Figures about waiting: plans by what their first window is drafted from, and where slow plans spend calls."""

from __future__ import annotations

from benchmarks.results import LearnedPlans, load


def policy_learned() -> str:
    """Calls of plans by what their first window is drafted from."""
    saved = load(LearnedPlans, "policy-learned")
    cells = [
        [
            f"{row.window}",
            row.drafted_from + (f" ({row.learned_from} plans)" if row.learned_from else ""),
            f"{row.calls.mean:.2f} ± {row.calls.error:.2f}",
            f"{row.calls.median:.0f} / {row.calls.p90:.0f} / {row.calls.p99:.0f} / {row.calls.most:.0f}",
            f"{row.evaluations:.0f}",
            f"{row.processor_ms.median:.0f} / {row.processor_ms.p99:.0f}",
        ]
        for row in saved.rows
    ]
    heads = ["window", "drafted from", "calls a plan", "median / p90 / p99 / most"]
    return _table([*heads, "states evaluated", "ms on one core, median / p99"], cells)


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


def _table(heads: list[str], cells: list[list[str]]) -> str:
    head, *lines = [f"| {' | '.join(line)} |" for line in (heads, *cells)]
    return "\n".join([head, "|---" * len(heads) + "|", *lines])
