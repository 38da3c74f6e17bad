"""The samplers: what a sample depends on, what is counted, and what a perfect draft gives."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import foresample as fs
from foresample.core.noise import seeds_of
from tests.support.small_chains import CHAINS, Zero, constant_drift, flow, interrupted, worse


class Counting:
    """A target that counts its calls and the states in them."""

    def __init__(self, target: fs.Target) -> None:
        self.shape, self.std, self.start, self.mean = target.shape, target.std, target.start, target.mean
        self.target = target
        self.batches: list[int] = []
        self.steps: list[list[int]] = []

    def predict(self, x: Tensor, step: Tensor, row: Tensor) -> Tensor:
        self.batches.append(len(x))
        self.steps.append(step.tolist())
        return self.target.predict(x, step, row)


SETTINGS: list[dict[str, Any]] = [
    {},
    {"block": 1, "drafter": fs.Frozen("nearest")},
    {"block": 3, "drafter": fs.Frozen("parent"), "recycle": False},
    {"drafter": fs.Frozen("head"), "recycle": False, "block": 1},
]


@settings(max_examples=25, deadline=None)
@given(
    chain=st.sampled_from([name for name in CHAINS if name != "single precision"]),
    arguments=st.sampled_from(SETTINGS),
    chosen=st.lists(st.integers(0, 30), min_size=1, max_size=9, unique=True),
)
def test_same_bits_whatever_the_batch(chain: str, arguments: dict[str, Any], chosen: list[int]) -> None:
    target, seeds = CHAINS[chain](), seeds_of(7, 31)
    everyone = fs.sample(target, seeds=seeds, window=5, **arguments)
    some = fs.sample(target, seeds=seeds[chosen], window=5, **arguments)
    assert torch.equal(some.samples, everyone.samples[chosen])
    assert torch.equal(some.calls, everyone.calls[chosen])
    assert torch.equal(some.evaluations, everyone.evaluations[chosen])


def test_same_bits_in_high_dimension_too() -> None:
    target = fs.GaussianMixture.of_draft_trees(500).flow(30, 0.1)
    everyone = fs.sample(target, 7, window=14, seed=3)
    for i in range(7):
        alone = fs.sample(target, seeds=seeds_of(3, 7)[i : i + 1], window=14)
        assert torch.equal(alone.samples[0], everyone.samples[i])


@pytest.mark.parametrize("chain", CHAINS)
def test_sequential_has_the_same_bits_whatever_the_batch(chain: str) -> None:
    target, seeds = CHAINS[chain](), seeds_of(7, 31)
    everyone = fs.sequential(target, seeds=seeds)
    assert torch.equal(fs.sequential(target, seeds=seeds[[3, 17]]).samples, everyone.samples[[3, 17]])


def test_seeds_derive_from_the_run_seed() -> None:
    target = flow()
    assert torch.equal(
        fs.sample(target, 5, window=4, seed=9).samples,
        fs.sample(target, seeds=seeds_of(9, 5), window=4).samples,
    )
    assert not torch.equal(
        fs.sample(target, 5, window=4, seed=9).samples, fs.sample(target, 5, window=4, seed=10).samples
    )


@pytest.mark.parametrize("chain", CHAINS)
@pytest.mark.parametrize("window", [1, 4, 20])
def test_a_perfect_draft_gives_the_sequential_sample(chain: str, window: int) -> None:
    """Every draft is kept, so the same noise gives the same states, bit for bit."""
    target = CHAINS[chain]()
    run = fs.sample(target, 20, window=window, seed=2, drafter=fs.DraftModel(target))
    assert torch.equal(run.samples, fs.sequential(target, 20, seed=2).samples)
    assert run.report.accepted == run.report.drafted


def test_deterministic_steps_cost_no_call_of_their_own() -> None:
    """With perfect drafts a call reaches past the next deterministic step: one call for each stretch."""
    target = Counting(interrupted())  # deterministic: 0, 5, 9, 10, 14 of 15
    run = fs.sample(target, 3, window=20, drafter=fs.DraftModel(interrupted()), look=False)
    assert run.calls.tolist() == [5, 5, 5]  # up to and over 0, 5, 9, 10, 14
    assert run.evaluations.tolist() == [15, 15, 15]  # no state twice
    assert sorted(s for steps in target.steps for s in steps) == sorted(3 * list(range(15)))


def test_a_chain_without_noise_is_sampled_sequentially() -> None:
    base = interrupted()
    target = replace(base, chain=replace(base.chain, std=torch.zeros_like(base.std)))
    run = fs.sample(target, 4, window=5)
    assert torch.equal(run.samples, fs.sequential(target, 4).samples)
    assert (run.calls == 15).all()


@pytest.mark.parametrize("arguments", SETTINGS, ids=str)
def test_calls_and_evaluations_are_those_the_target_counted(arguments: dict[str, Any]) -> None:
    target = Counting(flow())
    run = fs.sample(target, 1, window=5, look=False, **arguments)
    assert int(run.calls) == len(target.batches)
    assert int(run.evaluations) == sum(target.batches)
    assert max(target.batches) <= 6
    many = Counting(flow())
    run = fs.sample(many, 9, window=5, look=False, **arguments)
    assert len(many.batches) == int(run.calls.max())
    assert sum(many.batches) == int(run.evaluations.sum()) == run.report.evaluations


def test_a_round_commits_what_it_kept_and_one_more() -> None:
    committed = []
    run = fs.sample(flow(), 5, window=5, observe=lambda c: committed.append(c.committed.sum()))
    assert sum(int(c) for c in committed) == 5 * 16
    assert run.report.accepted + run.report.rounds == 5 * 16
    assert sum(run.report.accepted_lengths) == run.report.rounds


@pytest.mark.parametrize("sampler", [lambda t, **k: fs.sample(t, window=6, **k), fs.sequential])
def test_observers_see_every_committed_state_once(sampler: Callable[..., fs.Run]) -> None:
    seen = torch.full((4, 17, 2), torch.nan, dtype=torch.float64)

    def observe(commit: fs.Commit) -> None:
        for r, sample in enumerate(commit.sample.tolist()):
            for j in range(int(commit.committed[r])):
                step = int(commit.step[r]) + 1 + j
                assert seen[sample, step].isnan().all()
                seen[sample, step] = commit.states[r, j]

    run = sampler(flow(), count=4, observe=observe)
    assert seen[:, 1:].isfinite().all()
    assert torch.equal(seen[:, -1], run.samples)


def test_a_useless_draft_still_ends_with_one_transition_a_call() -> None:
    run = fs.sample(constant_drift(drift=1e6), 5, window=4, drafter=Zero())
    assert (run.calls == 7).all()


def test_a_better_draft_needs_fewer_calls() -> None:
    target = flow()
    calls = [
        fs.sample(target, 200, window=8, drafter=drafter).report.calls_mean
        for drafter in (fs.DraftModel(target), fs.DraftModel(worse(target)), Zero())
    ]
    assert calls[0] < calls[1] < calls[2] <= 16
