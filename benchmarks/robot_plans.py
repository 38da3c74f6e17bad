"""Plans of LeRobot's policy on recorded observations, and priors made from plans: what the robot benchmarks share."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any

import torch
import typer
from torch import Tensor

import foresample as fs
from benchmarks.kinds.robots import Spread
from foresample.drafters import LearnedPrior
from foresample.integrations.policies.learning import learn_prior
from foresample.integrations.policies.planner import Planner
from foresample.targets import ChainTarget
from recipes import metaworld

Observation = dict[str, Tensor]
WARM_UP = 5
EPISODES = 40  # timed
BATCH = 256  # plans drawn at a time to learn from
PILOT_WINDOW = 2  # nearly as few evaluations as the sequential sampler, which is what many plans at a time cost


def episodes(
    loaded: metaworld.LoadedPolicy, data: metaworld.Demonstrations, chosen: Iterable[int]
) -> list[list[Observation]]:
    """Observations of these episodes, normalised, each [1, n_obs_steps, …], every n_action_steps."""
    if data.tasks != loaded.tasks:
        raise typer.BadParameter(
            f"the demonstrations are of {', '.join(data.tasks)}, but the policy was trained on "
            f"{', '.join(loaded.tasks)}: give --data with the demonstrations of its tasks"
        )
    config = loaded.policy.config
    features = {name: value for name, value in data.features().items() if name != "action"}
    normal = loaded.before(features)
    found = []
    for number in chosen:
        place = (data.episode == number).nonzero().squeeze(1)
        first = int(place[0])
        moments = range(first, int(place[-1]) + 1, config.n_action_steps)
        back = range(1 - config.n_obs_steps, 1)
        found.append(
            [
                {n: torch.stack([normal[n][max(first, i + j)] for j in back]).unsqueeze(0) for n in features}
                for i in moments
            ]
        )
    return found


def timed_episodes(data: metaworld.Demonstrations) -> list[int]:
    """Numbers of the episodes whose plans are timed, in an order in which the first few are of several tasks."""
    count = int(data.episode[-1]) + 1
    return _mixed(list(range(0, count, max(1, count // EPISODES))))


def other_episodes(data: metaworld.Demonstrations, most: int | None = None) -> list[int]:
    """Numbers of episodes without a timed plan, for choices and priors; about `most` of them, in such an order."""
    timed = set(timed_episodes(data))
    rest = [number for number in range(int(data.episode[-1]) + 1) if number not in timed]
    return _mixed(rest if most is None else rest[:: max(1, len(rest) // most)])


def _mixed(numbers: list[int]) -> list[int]:
    """The same numbers in a random order: files have one task after the other."""
    return random.Random(0).sample(numbers, len(numbers))


def spread(values: list[float]) -> Spread:
    ordered = sorted(values)
    p99 = ordered[math.ceil(0.99 * len(ordered)) - 1]
    return Spread(mean=fmean(ordered), median=median(ordered), p99=p99, most=ordered[-1])


def planner_of(policy: Any) -> Planner:
    """The planner of an accelerated policy that has planned."""
    return next(iter(policy.diffusion.conditional_sample.plans.planners.values()))


def along(
    policy: Any, courses: list[list[Observation]], plan: Callable[[Observation], object] | None = None
) -> Callable[[int], None]:
    """One plan a turn along these episodes; the policy is reset where one begins."""
    moments = [(seen, i == 0) for course in courses for i, seen in enumerate(course)]
    plan = plan or policy.diffusion.generate_actions

    def turn(number: int) -> None:
        seen, begins = moments[number % len(moments)]
        if begins:
            policy.reset()
        plan(seen)

    return turn


# ---------------------------------------------------------------- priors


def fit(policy: Any, courses: list[list[Observation]], pilots: int) -> fs.Prior:
    """A prior from plans of these episodes, all of an episode at once."""
    accelerated: Any = fs.accelerate(policy, window=99, pilots=pilots, trace=False)
    for course in courses:
        together = {name: torch.cat([one[name] for one in course]) for name in course[0]}
        policy.diffusion.generate_actions(together)
        if accelerated.prior is not None:
            break
    prior = accelerated.prior
    fs.restore(policy)
    if prior is None:
        raise typer.BadParameter("these episodes have too few observations for so many pilots")
    return prior


@dataclass(frozen=True)
class Pilots:
    """Plans to make priors from: what each was conditioned on, [P, C], and its path, [P, N, F] both."""

    target: ChainTarget
    condition: Tensor
    states: Tensor
    predictions: Tensor


def draw_pilots(policy: Any, observations: list[Observation]) -> Pilots:
    """One plan for each of these observations, as far as they fill batches."""
    accelerated: Any = fs.accelerate(policy, window=PILOT_WINDOW, learn=True, trace=False)
    together = {name: torch.cat([one[name] for one in observations]) for name in observations[0]}
    batch = min(BATCH, len(observations))
    for part in range(len(observations) // batch):
        rows = slice(part * batch, (part + 1) * batch)
        policy.diffusion.generate_actions({name: value[rows] for name, value in together.items()})
        print(f"{(part + 1) * batch} plans to learn from", flush=True)
    paths = (torch.cat(values) for values in zip(*accelerated.plans.seen, strict=True))
    pilots = Pilots(planner_of(policy).target, *paths)
    fs.restore(policy)
    return pilots


def learn(policy: Any, courses: list[list[Observation]], plans: int) -> tuple[LearnedPrior, int]:
    """A prior learned from at most `plans` plans of these episodes, evenly spread; and how many plans it had."""
    seen = [one for course in courses for one in course]
    count = min(plans, len(seen))
    pilots = draw_pilots(policy, [seen[i * len(seen) // count] for i in range(count)])
    network = policy.diffusion.unet
    prior = learn_prior(pilots.target, network, pilots.condition, pilots.states, pilots.predictions)
    return prior, len(pilots.condition)
