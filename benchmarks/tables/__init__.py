"""The figures in README and docs, made from the result files: `python -m benchmarks.tables` writes them.

A page holds `<!-- figures: NAME -->` … `<!-- end -->`; the text between them is replaced. A test fails where a page
says anything else than the results do.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from benchmarks.tables import clock, front, headlines, pictures, rivals, robots, waiting

ROOT = Path(__file__).parents[2]

FIGURES: dict[str, Callable[[], str]] = {
    made.__name__: made
    for made in (
        *(front.headline, front.pays, front.when_cpu, front.robot_short, front.robot_call, headlines.headlines),
        *(clock.latency, clock.ways, clock.rounds, clock.cpu, clock.cpu_rounds, clock.start, clock.throughput),
        *(clock.frontier, clock.memory, clock.mcmc, clock.dataset, clock.overhead, clock.generate_gpu),
        *(clock.other_packages, clock.package_counts),
        *(
            pictures.warm,
            pictures.growth,
            pictures.devices,
            pictures.models,
            pictures.mixture,
            pictures.response,
        ),
        *(pictures.quality, pictures.agreement, pictures.training, pictures.classifier, pictures.order),
        *(robots.policy, robots.policy_steps, robots.policy_quality, robots.policy_costs, robots.policy_warm),
        *(
            robots.robot_clock_cpu,
            robots.robot_success,
            robots.robot_success_hard,
            robots.robot_success_learned,
        ),
        *(waiting.policy_learned, waiting.policy_tail),
        *(rivals.when, rivals.when_lossy, rivals.ranked, rivals.quality_cost_summary),
        *(rivals.curves, rivals.curves_lead, rivals.curves_behind, rivals.curves_cost, rivals.curves_missing),
    )
} | {
    "robot_clock": partial(robots.robot_clock, "robot-clock"),
    "quality_cost": partial(rivals.quality_cost, rivals.FASHION_COST),
    "quality_cost_cifar10": partial(rivals.quality_cost, rivals.CIFAR10_COST),
    "quality_cost_policy": partial(rivals.quality_cost, rivals.POLICY_COST),
    "quality_cost_mixture": partial(rivals.quality_cost, rivals.MIXTURE_COST),
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
