"""Starting warm: drafts from other samples keep the law; drafts that know a sample's own noise must be caught.

Theory, section 10: a first window may be drafted from anything that is independent of the noise still to be spent.
A robot's last plan is, as long as it is its *predictions* that are drafted from; its noise is not, because what it did
is what the robot sees next. References and tests are those of `attack`, apart from the package's own.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor

import foresample as fs
from foresample.core.noise import seeds_of
from foresample.drafters import LearnedPrior
from foresample.engine.priors import RecordingTarget
from tests.law.attack import Walk, given, pulled, record, same_table, smallest, walk

pytestmark = pytest.mark.law

LEVEL = 1e-3 / 12  # a share for each of this file's tests

# ------------------------------------------------------------------ a closed loop

PLAN = 6  # transitions of a plan's chain
STD = 0.5


def pull(x: np.ndarray, seen: np.ndarray) -> np.ndarray:
    """The output of the policy's network: where to pull a plan, given the observation."""
    return seen + 0.6 * np.tanh(2 * (x - seen))


def plan_mean(x: np.ndarray, seen: np.ndarray) -> np.ndarray:
    return 0.6 * x + 0.4 * pull(x, seen)


def world(seen: np.ndarray, plan: np.ndarray, random: np.random.Generator) -> np.ndarray:
    """The next observation: what the plan did, nearly."""
    return 0.6 * seen + 0.4 * plan + 0.1 * random.standard_normal(seen.shape)


@dataclass(frozen=True)
class Policy:
    """Plans [n, 1] for observations [n, 1], one a row."""

    seen: np.ndarray

    @property
    def shape(self) -> torch.Size:
        return torch.Size([1])

    @property
    def std(self) -> Tensor:
        return torch.full((PLAN,), STD, dtype=torch.float64)

    def start(self, noise: Tensor, row: Tensor) -> Tensor:
        return noise

    def predict(self, x: Tensor, step: Tensor, row: Tensor) -> Tensor:
        return torch.from_numpy(pull(x.numpy(), self.seen[row.numpy()]))

    def mean(self, x: Tensor, prediction: Tensor, step: Tensor) -> Tensor:
        return 0.6 * x + 0.4 * prediction


@dataclass(frozen=True)
class Planned:
    """The last turn of a loop."""

    seen: np.ndarray
    """[n]: the observation."""
    plan: np.ndarray
    """[n]"""
    noise: np.ndarray
    """[n]: the innovation of the plan's last transition but one, standard normal given the observation."""
    calls: float


def reference_loop(robots: int, turns: int, seed: int) -> Planned:
    random = np.random.default_rng(seed)
    seen = random.standard_normal((robots, 1))
    for turn in range(turns):
        x, noise = random.standard_normal((robots, 1)), random.standard_normal((PLAN, robots, 1))
        for z in noise:
            x = plan_mean(x, seen) + STD * z
        if turn + 1 < turns:
            seen = world(seen, x, random)
    return Planned(seen[:, 0], x[:, 0], noise[-2, :, 0], PLAN)


def loop(robots: int, turns: int, seed: int, *, drafts: bool, fresh_noise: bool) -> Planned:
    """The same by the package: drafting from the last plan's predictions, or drawing with the last plan's noise."""
    random = np.random.default_rng(seed)
    seen, last = random.standard_normal((robots, 1)), None
    for turn in range(turns):
        policy = RecordingTarget(Policy(seen), robots, PLAN)
        drafter = fs.Replay(prior=last if drafts else None)
        path = torch.zeros(robots, PLAN, 1, dtype=torch.float64)
        run = fs.sample(
            policy,
            seeds=seeds_of(seed + fresh_noise * turn, robots),
            window=4,
            drafter=drafter,
            observe=record(path),
        )
        last = fs.Prior(policy.states[:, :PLAN], policy.predictions[:, :PLAN])
        x = path[:, :, 0].numpy()
        if turn + 1 < turns:
            seen = world(seen, run.samples.numpy(), random)
    noise = (x[:, -2] - plan_mean(x[:, -3], seen[:, 0])) / STD
    return Planned(seen[:, 0], x[:, -1], noise, float(run.calls.double().mean()))


def smallest_of_loop(ours: Planned, theirs: Planned) -> float:
    """The smallest p-value for the law of (observation, plan), corrected for the number of tests."""
    found = [
        stats.ks_2samp(ours.seen, theirs.seen, method="asymp").pvalue,
        stats.ks_2samp(ours.plan, theirs.plan, method="asymp").pvalue,
        stats.ks_2samp(ours.plan - ours.seen, theirs.plan - theirs.seen, method="asymp").pvalue,
        same_table(ours.seen, ours.plan, theirs.seen, theirs.plan),
        given(stats.rankdata(ours.seen) / (len(ours.seen) + 1), ours.noise),
    ]
    return min(found) * len(found)


def test_drafting_from_the_last_plan_keeps_the_law_of_observation_and_plan() -> None:
    ours = loop(20_000, 3, 1, drafts=True, fresh_noise=True)
    assert smallest_of_loop(ours, reference_loop(20_000, 3, 1)) > LEVEL
    assert (
        ours.calls < 0.98 * loop(2_000, 3, 1, drafts=False, fresh_noise=True).calls
    )  # else nothing was drafted


@pytest.mark.parametrize("drafts", [True, False], ids=["and drafting from it", "alone"])
def test_drawing_with_the_last_plans_noise_is_caught(drafts: bool) -> None:
    ours = loop(5_000, 3, 1, drafts=drafts, fresh_noise=False)
    assert smallest_of_loop(ours, reference_loop(5_000, 3, 1)) < LEVEL


# ------------------------------------------------------------------ priors and the noise they know


def prior_of(chain: Walk, seeds: Tensor, kind: str) -> fs.Prior:
    """A prior with a path for each sample, from samples of these seeds."""
    steps = len(chain.noise_scale)
    recorded = RecordingTarget(chain, len(seeds), steps)
    if kind == "speculative path":
        fs.sample(recorded, seeds=seeds, window=4, slots=4_000)
    else:
        fs.sequential(recorded, seeds=seeds)
    states, predictions = recorded.states[:, :steps], recorded.predictions[:, :steps]
    if kind == "end":
        states, predictions = (v[:, -1:].expand_as(v).contiguous() for v in (states, predictions))
    return fs.Prior(states, predictions)


def smallest_with(kind: str, *, own: bool, samples: int) -> float:
    chain, seeds = pulled(), seeds_of(5, 2 * samples)
    prior = prior_of(chain, seeds[:samples] if own else seeds[samples:], kind)
    path = torch.zeros(samples, len(chain.noise_scale), chain.dim, dtype=torch.float64)
    drafter = fs.Replay(prior=prior)
    fs.sample(chain, seeds=seeds[:samples], window=4, drafter=drafter, slots=4_000, observe=record(path))
    return smallest(chain, path.numpy(), walk(chain, samples, 5))[0]


@pytest.mark.parametrize("kind", ["speculative path", "end"])
def test_a_prior_of_other_samples_keeps_the_law(kind: str) -> None:
    assert smallest_with(kind, own=False, samples=20_000) > LEVEL


def test_a_prior_that_knows_how_its_own_sample_ends_is_caught() -> None:
    assert smallest_with("end", own=True, samples=5_000) < LEVEL


def test_a_prior_fitted_on_its_own_speculative_samples_is_caught() -> None:
    """Step by step, and yet not adapted: which drafts a round kept depends on the noise of later ones."""
    assert smallest_with("speculative path", own=True, samples=60_000) < LEVEL


def test_a_draft_of_the_sample_s_own_sequential_path_does_no_harm() -> None:
    """It is adapted: its prediction for a step depends only on noise before that step. So all of it is accepted."""
    assert smallest_with("sequential path", own=True, samples=20_000) > LEVEL


# ------------------------------------------------------------------ priors that are learned from conditions


def smallest_learned(*, own: bool, samples: int) -> float:
    """A network that learned from pilots how a path depends on where it ends, and is shown where others end, or where
    the very sample drafted would end: that is a condition which knows the noise."""
    chain, seeds = pulled(), seeds_of(5, 2 * samples + 2_000)
    steps = len(chain.noise_scale)

    def paths(of: Tensor) -> tuple[Tensor, Tensor]:
        recorded = RecordingTarget(chain, len(of), steps)
        fs.sequential(recorded, seeds=of)
        return recorded.states[:, :steps], recorded.predictions[:, :steps]

    states, predictions = paths(seeds[-2_000:])
    jacobian = torch.zeros(steps, chain.dim, chain.dim, dtype=states.dtype)
    learned = LearnedPrior.fit(states[:, -1], states, predictions, jacobian, steps=300)
    ends = paths(seeds[:samples] if own else seeds[samples : 2 * samples])[0][:, -1]
    drafter = fs.Replay(prior=fs.Prior(*learned(ends)))
    path = torch.zeros(samples, steps, chain.dim, dtype=torch.float64)
    fs.sample(chain, seeds=seeds[:samples], window=4, drafter=drafter, slots=4_000, observe=record(path))
    return smallest(chain, path.numpy(), walk(chain, samples, 5))[0]


def test_a_prior_learned_from_conditions_keeps_the_law() -> None:
    assert smallest_learned(own=False, samples=20_000) > LEVEL


def test_a_learned_prior_that_is_shown_the_noise_is_caught() -> None:
    assert smallest_learned(own=True, samples=5_000) < LEVEL
