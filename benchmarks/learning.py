"""Network calls of a robot's plans, by the path their first window is drafted from; and where slow plans spend theirs.

    python -m benchmarks.learning --data DEMONSTRATIONS      # what `python -m recipes.metaworld record` wrote

LeRobot's small Meta-World policy plans at batch 1 on recorded episodes, a new plan every 8 actions. Priors are made
from plans on nine of ten episodes, and measured on the others. What is compared at each window:

    nothing     the first call of a plan evaluates one state
    last plan   the last plan's path, moved on by the actions executed since
    pooled      the mean path of all plans
    learned     a small network's estimate of the mean path, given the observation

The kept prior (`--keep`) is for `python -m benchmarks.robots success --prior`, the closed loop.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from time import process_time
from typing import Annotated, Any, cast

import torch
import typer
from torch import Tensor

import foresample as fs
from benchmarks.kinds.robots import LearnedPlansRow, PlanTail
from benchmarks.results import RESULTS, save
from benchmarks.robot_plans import BATCH, Observation, draw_pilots, episodes, planner_of, spread
from foresample.drafters import LearnedPrior
from foresample.engine.priors import prior_of_paths
from foresample.integrations.policies.learning import MOST, learn_prior
from recipes import metaworld

PARTS = 10
"""Equal parts of the chain in which calls are counted."""


@dataclass
class Plans:
    """Costs of the plans of one way of drafting."""

    calls: list[float] = field(default_factory=list)
    evaluations: list[float] = field(default_factory=list)
    ms: list[float] = field(default_factory=list)
    begun: list[Tensor] = field(default_factory=list)
    """[PARTS] each: calls that began in each part of the chain."""

    def row(self, window: int, drafted_from: str, learned_from: int) -> LearnedPlansRow:
        calls, begun = torch.tensor(self.calls, dtype=torch.float64), torch.stack(self.begun)
        p90 = sorted(self.calls)[math.ceil(0.9 * len(calls)) - 1]
        slow = calls >= max(p90, float(calls.mean()))
        whole = spread(self.calls)
        return LearnedPlansRow(
            window=window,
            drafted_from=drafted_from,
            learned_from=learned_from,
            plans=len(calls),
            calls=PlanTail(
                mean=whole.mean,
                error=float(calls.std() / math.sqrt(len(calls))),
                median=whole.median,
                p90=p90,
                p99=whole.p99,
                most=whole.most,
            ),
            evaluations=sum(self.evaluations) / len(calls),
            processor_ms=spread(self.ms),
            calls_by_part=begun.mean(0).tolist(),
            slow_plans=int(slow.sum()),
            slow_calls_by_part=begun[slow].mean(0).tolist(),
        )


def plan_all(policy: Any, courses: list[list[Observation]], window: int, most: int, **options: Any) -> Plans:
    """Plans at batch 1 along these episodes, after five that are not counted."""
    plans, warm_up, begun = Plans(), 5, torch.zeros(PARTS)

    def observe(commit: fs.Commit) -> None:
        begun[int(commit.step[0]) * PARTS // steps] += 1

    with fs.accelerate(policy, window=window, trace=False, **options):
        policy.diffusion.generate_actions(courses[0][0])
        steps, engine = policy.foresample_report.steps, cast(Any, planner_of(policy).engine)
        own = engine.sample
        engine.sample = lambda seeds: own(seeds, observe)
        for course in courses:
            policy.reset()
            for observation in course:
                begun.zero_()
                began = process_time()
                policy.diffusion.generate_actions(observation)
                took, report = 1000 * (process_time() - began), policy.foresample_report
                warm_up -= 1
                if warm_up >= 0:
                    continue
                plans.ms.append(took)
                plans.calls.append(report.calls_mean)
                plans.evaluations.append(report.evaluations_mean)
                plans.begun.append(begun.clone())
                if len(plans.calls) == most:
                    return plans
    return plans


def main(
    policy: Annotated[Path, typer.Option(help="a folder of `recipes.metaworld train`")] = metaworld.ASSET,
    data: Annotated[Path, typer.Option(help="what `recipes.metaworld record` wrote")] = metaworld.DATA,
    windows: Annotated[list[int] | None, typer.Option("--window", help="windows to try")] = None,
    fewer: Annotated[
        list[int] | None, typer.Option("--fewer", help="numbers of plans to learn from, beside all")
    ] = None,
    plans: Annotated[int, typer.Option(help="plans of each row, at most")] = 500,
    most: Annotated[int, typer.Option(help="plans to learn from")] = MOST,
    keep: Annotated[Path | None, typer.Option(help="where the prior learned from all plans goes")] = None,
    seed: int = 0,
    out: Annotated[Path, typer.Option(help="folder for the result file")] = RESULTS,
) -> None:
    """Calls of plans drafted from nothing, the last plan, a pooled prior and a learned one."""
    torch.manual_seed(seed)
    torch.set_num_threads(1)
    loaded, recorded = metaworld.load(policy), metaworld.Demonstrations.load(data)
    served, count = loaded.policy, int(recorded.episode[-1]) + 1
    measured = episodes(loaded, recorded, range(0, count, 10))
    others = [
        one
        for rest in range(1, 10)
        for course in episodes(loaded, recorded, range(rest, count, 10))
        for one in course
    ]
    pilots = draw_pilots(served, others[: most // BATCH * BATCH])
    paths, found = (pilots.states, pilots.predictions), list[LearnedPlansRow]()
    learned: dict[int, LearnedPrior] = {}
    for number in (*(fewer or []), len(pilots.condition)):
        some = (value[:number] for value in (pilots.condition, *paths))
        learned[number] = learn_prior(pilots.target, served.diffusion.unet, *some)
    if keep is not None:
        learned[len(pilots.condition)].save(keep)
    settings = {
        "policy": policy.name,
        "parameters": sum(p.numel() for p in served.parameters()),
        "steps": len(pilots.target.std),
        "episodes": len(measured),
        "parts": PARTS,
        "seed": seed,
    }
    for window in windows or [32, 64, 99]:
        pooled = prior_of_paths(pilots.target, *paths, window=window)
        ways: list[tuple[str, int, dict[str, Any]]] = [
            ("nothing", 0, {}),
            ("last plan", 0, {"warm": True}),
            ("pooled", len(pilots.condition), {"prior": pooled}),
            *(("learned", number, {"prior": prior}) for number, prior in learned.items()),
        ]
        for drafted_from, number, options in ways:
            row = plan_all(served, measured, window, plans, **options).row(window, drafted_from, number)
            found.append(row)
            tail = row.calls
            print(
                f"window {window:2d}, {drafted_from:9s} {number:5d}: {tail.mean:.2f} ± {tail.error:.2f} calls, "
                f"median {tail.median:.0f}, p90 {tail.p90:.0f}, p99 {tail.p99:.0f}, most {tail.most:.0f}; "
                f"{row.processor_ms.median:.0f} ms",
                flush=True,
            )
            save(out / "policy-learned.json", "policy-learned", settings, rows=found)


if __name__ == "__main__":
    typer.run(main)
