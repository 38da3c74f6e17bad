"""The samplers: what a sample depends on, what is counted, and what a perfect draft gives."""

from __future__ import annotations

import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import foresample as fs
from benchmarks.curves import wells
from foresample.core.noise import seeds_of
from foresample.core.report import Tally
from foresample.core.round import Settings, begin, last_draftable, one_round
from foresample.targets import ChainTarget
from tests.chains import CHAINS, Zero, constant_drift, flow, interrupted, mixture, strays, worse


class Counting:
    """A target that counts its calls and the states in them."""

    def __init__(self, target: fs.Target) -> None:
        self.shape, self.std, self.start, self.mean = target.shape, target.std, target.start, target.mean
        self.target, self.batches, self.steps = target, [], []

    def predict(self, x: Tensor, step: Tensor, row: Tensor) -> Tensor:
        self.batches.append(len(x))
        self.steps.append(step.tolist())
        return self.target.predict(x, step, row)


SETTINGS = [
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
def test_same_bits_whatever_the_batch(chain: str, arguments: dict, chosen: list[int]) -> None:
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
    run = fs.sample(target, 3, window=20, drafter=fs.DraftModel(interrupted()))
    assert run.calls.tolist() == [5, 5, 5]  # up to and over 0, 5, 9, 10, 14
    assert run.evaluations.tolist() == [15, 15, 15]  # no state twice
    assert sorted(s for steps in target.steps for s in steps) == sorted(3 * list(range(15)))


def test_a_chain_without_noise_is_sampled_sequentially() -> None:
    base = interrupted()
    target = ChainTarget(
        base.shape, torch.zeros_like(base.std), base.state_weight, base.prediction_weight, base.network
    )
    run = fs.sample(target, 4, window=5)
    assert torch.equal(run.samples, fs.sequential(target, 4).samples)
    assert (run.calls == 15).all()


@pytest.mark.parametrize("arguments", SETTINGS, ids=str)
def test_calls_and_evaluations_are_what_the_target_saw(arguments: dict) -> None:
    target = Counting(flow())
    run = fs.sample(target, 1, window=5, **arguments)
    assert int(run.calls) == len(target.batches)
    assert int(run.evaluations) == sum(target.batches)
    assert max(target.batches) <= 6
    many = Counting(flow())
    run = fs.sample(many, 9, window=5, **arguments)
    assert len(many.batches) == int(run.calls.max())
    assert sum(many.batches) == int(run.evaluations.sum()) == run.report.evaluations


def test_a_round_commits_what_it_kept_and_one_more() -> None:
    committed = []
    run = fs.sample(flow(), 5, window=5, observe=lambda c: committed.append(c.committed.sum()))
    assert sum(int(c) for c in committed) == 5 * 16
    assert run.report.accepted + run.report.rounds == 5 * 16
    assert sum(run.report.accepted_lengths) == run.report.rounds


@pytest.mark.parametrize("sampler", [lambda t, **k: fs.sample(t, window=6, **k), fs.sequential])
def test_observers_see_every_committed_state_once(sampler) -> None:  # type: ignore[no-untyped-def]
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


def test_memory_is_bounded_by_the_window() -> None:
    """Nothing carried from round to round has a dimension that grows with the chain."""
    target = fs.GaussianMixture.of_draft_trees(2).langevin(300, 0.01)
    drafter = fs.Replay()
    rows = begin(target, drafter, 4, seeds_of(0, 3))
    for _ in range(3):
        settings = Settings(drafter, 4, None, True, last_draftable(target.std))
        one = one_round(target, rows, settings, Tally(4, 300, target.std.device))
        call = next(one)
        assert len(call.x) <= 3 * 5
        with pytest.raises(StopIteration) as end:
            one.send(target.predict(call.x, call.step, call.row))
        rows = end.value.value[0]
    for value in (rows.noise, rows.previous, *rows.memory.values()):
        assert value.shape[0] == 3
        assert value.numel() <= 3 * 5 * 2


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


def test_secant_gains_ignore_paths_that_agree_to_rounding() -> None:
    """Else g is rounding over rounding, and a draft can run away."""
    drafter, generator = fs.Replay(), torch.Generator().manual_seed(0)
    states = torch.randn(1, 5, 2, generator=generator, dtype=torch.float64)
    predictions = torch.randn(1, 5, 2, generator=generator, dtype=torch.float64)
    memory = drafter.begin(1, 4, states[0, 0])
    length, one = torch.tensor([4]), torch.tensor([1])
    memory = drafter.learn(memory, fs.DraftPath(states, predictions, states[:, 1:], length), one)
    nudged = memory["states"] * (1 + 1e-15)
    memory = drafter.learn(memory, fs.DraftPath(nudged, memory["predictions"] + 1e-3, states[:, 1:], length), one)
    assert memory["gain"].abs().max() == 0


def test_replay_forgets_where_sweeps_diverge() -> None:
    """Rows: none diverges; one does at position 4; one at what is committed and what comes next, which stay."""
    drafter, ones = fs.Replay(), torch.ones(3, dtype=torch.int64)
    line = torch.arange(6.0, dtype=torch.float64).expand(3, 6).unsqueeze(2)
    memory = drafter.begin(3, 5, line[0, 0])
    memory = drafter.learn(memory, fs.DraftPath(line, line + 100, line[:, 1:], 5 * ones), ones)
    assert memory["visited"].tolist() == [5, 5, 5]  # seen once only

    again = line + 101  # at the same steps, the same predictions
    memory["predictions"][1, 4] += 6.1 * 4  # the sweep moves it so far, and it is 4 away from the first
    memory["predictions"][1, 3] += 5.9 * 3
    memory["predictions"][2, :3] += 1000
    memory = drafter.learn(memory, fs.DraftPath(line, again, line[:, 1:], 5 * ones), 2 * ones)
    assert memory["visited"].tolist() == [4, 2, 4]
    assert memory["predictions"][1].flatten().tolist() == [103, 104, 104, 104, 104, 104]


def test_a_wider_window_does_not_mislead_replay() -> None:
    """Where the force is steep, far drafts run away; what they met must not come back in the next window."""
    target = wells(100, "cpu", half=False).targets["force"]
    narrow, wide = (fs.sample(target, 24, window=window, seed=0).speedup for window in (15, 63))
    assert wide > narrow > 6


def test_report_prints_and_serialises() -> None:
    run = fs.sample(flow(), 6, window=5)
    assert f"{run.speedup:.2f}" in str(run.report)
    data = json.loads(run.report.to_json())
    assert data["steps"] == 16
    assert data["count"] == 6
    assert data["speedup"] == pytest.approx(16 / run.calls.double().mean().item())
    assert data["mismatch"][0] is None  # the first step is deterministic: never drafted
    one = json.loads(fs.sequential(flow(), 1).report.to_json())
    assert one["calls_mean"] == 16
    assert one["calls_error"] is None


@pytest.mark.parametrize("churn", [1e-4, 1e-6])
def test_little_noise_is_no_reason_to_give_up(churn: float) -> None:
    """Means may be thousands of std apart in the first rounds, and replay still converges."""
    run = fs.sample(mixture().flow(60, churn, reuse="x0"), 8, window=40, seed=0)
    assert max(m for m in run.report.mismatch if m == m) > 1e2
    assert run.speedup > 5


class Careful(fs.Replay):
    """Looks at what it is given to learn from."""

    def learn(self, memory: fs.DrafterMemory, path: fs.DraftPath, committed: torch.Tensor) -> fs.DrafterMemory:
        inside = torch.arange(path.states.shape[1]) <= path.length.unsqueeze(1)
        assert path.predictions[inside].isfinite().all()
        assert path.states[inside].isfinite().all()
        return super().learn(memory, path, committed)


def test_nothing_is_learned_from_a_draft_that_broke_the_network() -> None:
    fs.sample(strays(), 500, window=10, drafter=Careful())
