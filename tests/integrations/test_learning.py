"""Priors learned from a policy's own plans, and the noise of plans whose drafts know earlier ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import foresample as fs

pytest.importorskip("diffusers")

from foresample.drafters import LearnedPrior
from foresample.drafters.learned import load_prior
from foresample.engine import Engine
from foresample.integrations.policies import learning
from tests.support.policies import FAMILIES, LowdimPolicy, law_tests, lerobot, lowdim, plan_lowdim, seeded

families = pytest.mark.parametrize("family", FAMILIES)


@pytest.fixture(autouse=True)
def _short_training(monkeypatch: pytest.MonkeyPatch) -> None:
    defaults = LearnedPrior.fit.__kwdefaults__
    assert defaults is not None
    monkeypatch.setitem(defaults, "steps", 200)


def plan(policy: Any, seen: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """Plans for these observations, [R, 3]."""
    if isinstance(policy, LowdimPolicy):
        return policy.predict_action(seen[:, :2], generator)
    with torch.no_grad():
        return policy.diffusion.conditional_sample(len(seen), global_cond=seen, generator=generator)


def report(policy: Any) -> fs.Report:
    return getattr(policy, "diffusion", policy).foresample_report


def observations(count: int, seed: int = 0) -> Tensor:
    return 2 * torch.randn(count, 3, generator=seeded(seed))


def learned(policy: Any, plans: int = 200) -> Any:
    accelerated: Any = fs.accelerate(policy, window=19, learn=True, trace=False)
    for turn in range(4):
        plan(policy, observations(plans // 4, turn), seeded(turn))
    accelerated.learn()
    return accelerated


@families
def test_learned_plans_take_fewer_calls_and_keep_their_distribution(family: str) -> None:
    policy, seen = FAMILIES[family][0](), observations(300, 9)
    untouched = plan(policy, seen, seeded(7))
    with fs.accelerate(policy, window=19, pilots=200, trace=False):
        for turn in range(4):
            plan(policy, observations(50, turn), seeded(turn))
        plan(policy, seen, seeded(8))
        pooled = report(policy).calls_mean
    learned(policy)
    drawn = plan(policy, seen, seeded(8))
    assert report(policy).calls_mean < pooled
    found = law_tests(drawn, untouched)
    assert min(found) * len(found) > 1e-4
    fs.restore(policy)


@families
def test_a_learned_prior_is_saved_and_loaded_and_learns_again(family: str, tmp_path: Path) -> None:
    policy, seen = FAMILIES[family][0](), observations(3, 9)
    accelerated = learned(policy)
    drawn = plan(policy, seen, seeded(8))
    first = accelerated.prior
    first.save(tmp_path / "prior.safetensors")
    planner = next(iter(accelerated.plans.planners.values()))
    again = accelerated.learn()  # from three plans more, in the place of the old one
    assert repr(again) != repr(first)
    assert next(iter(accelerated.plans.planners.values())) is planner
    assert planner.past == repr(again)
    assert repr(load_prior(tmp_path / "prior.safetensors")) == repr(first)
    with fs.accelerate(policy, window=19, prior=tmp_path / "prior.safetensors", trace=False):
        assert torch.equal(plan(policy, seen, seeded(8)), drawn)


def test_a_prior_of_another_policy_is_refused(tmp_path: Path) -> None:
    prior = learned(lowdim()).prior
    other = lowdim()
    with torch.no_grad():
        other.model.outer.mul_(1.1)
    with pytest.raises(ValueError, match="learned from the plans of another policy: learn one for this policy"):
        fs.accelerate(other, prior=prior)
    same = lowdim()
    same.model.to(torch.bfloat16).to(torch.float32)  # the same weights, rounded
    with fs.accelerate(same, prior=prior, trace=False):
        assert plan(same, observations(2)).isfinite().all()
    wide = LowdimPolicy(same.noise_scheduler, condition=2)
    with torch.no_grad():
        wide.model.load_state_dict(same.model.state_dict())
    with (
        fs.accelerate(wide.eval(), prior=prior, trace=False),
        pytest.raises(
            ValueError, match="learned from plans of 10 numbers in 20 steps with 4 numbers observed; here"
        ),
    ):
        wide.conditional_sample(
            torch.zeros(1, 4, 3), torch.zeros(1, 4, 3, dtype=torch.bool), global_cond=torch.zeros(1, 2)
        )


def test_what_cannot_be_learned_from_is_refused(tmp_path: Path) -> None:
    policy = lowdim()
    accelerated: Any = fs.accelerate(policy, trace=False)
    plan(policy, observations(2))
    with pytest.raises(ValueError, match="no plan to learn from: give learn=True to accelerate"):
        accelerated.learn()
    accelerated = fs.accelerate(policy, learn=True, trace=False)
    plan(policy, observations(2))
    with pytest.raises(ValueError, match="2 plans are too few to learn from: draw at least 32 first"):
        accelerated.learn()
    with pytest.raises(ValueError, match="learn=True and pilots both make a prior"):
        fs.accelerate(policy, learn=True, pilots=8)
    with pytest.raises(ValueError, match="leave drafter out"):
        fs.accelerate(policy, learn=True, drafter=fs.Frozen("parent"))
    blind = lerobot()
    accelerated = fs.accelerate(blind, learn=True, trace=False)
    with pytest.raises(ValueError, match=r"depend on no observation.*use pilots=64"):
        plan(blind, torch.zeros(2, 0))
    learned(policy).prior.save(tmp_path / "prior.safetensors")
    with pytest.raises(ValueError, match="holds no prior, but components"):
        fs.Prior.load(tmp_path / "prior.safetensors")
    fs.Prior(torch.zeros(1, 2, 3), torch.zeros(1, 2, 3)).save(tmp_path / "other.safetensors")
    with pytest.raises(ValueError, match="holds no learned prior"):
        LearnedPrior.load(tmp_path / "other.safetensors")


def test_only_the_latest_plans_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("foresample.integrations.policies.plans.MOST", 60)
    accelerated = learned(lowdim())
    kept = [len(condition) for condition, _, _ in accelerated.plans.seen]
    assert kept == [50]
    assert learning.FEWEST <= 50


@families
@pytest.mark.parametrize("options", [{"warm": True, "executed": 1}, {"pilots": 8}, {"learn": True}], ids=str)
def test_no_plan_is_drafted_from_what_its_own_noise_led_to(
    family: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever seeds the caller repeats: drafting from a path that one's own noise led to changes the distribution
    (`tests/law/test_warm_starts.py`)."""
    make, draw = FAMILIES[family]
    policy, used = make(), list[tuple[int, ...]]()
    own = Engine.sample

    def sample(engine: Engine, seeds: Any, *args: Any, **kwargs: Any) -> fs.Run:
        used.append(tuple(torch.as_tensor(seeds).tolist()))
        return own(engine, seeds, *args, **kwargs)

    monkeypatch.setattr(Engine, "sample", sample)
    monkeypatch.setattr(learning, "FEWEST", 4)
    accelerated: Any = fs.accelerate(policy, window=5, trace=False, **options)
    for turn in range(4):
        draw(policy, 4, seeded(1))
        if turn % 2 and "learn" in options:
            accelerated.learn()
    drafted = used if "warm" in options else used[::2]  # the first two plans know of no other
    assert len(set(drafted)) == len(drafted) > 1
    if "warm" in options:  # a plan that starts anew may be the first one again
        accelerated.forget()
        draw(policy, 4, seeded(1))
        assert used[-1] == used[0]
    fs.restore(policy)


def steps_of(policy: Any, steps: int) -> None:
    getattr(policy, "diffusion", policy).num_inference_steps = steps


@families
def test_a_prior_is_fitted_on_pilots_of_one_size(family: str) -> None:
    """It drafts plans of that size only: the others are drafted without it, as if there were none."""
    make, draw = FAMILIES[family]
    policy = make()
    with fs.accelerate(policy, window=5, trace=False):
        steps_of(policy, 10)
        without = draw(policy, 2, seeded(9))
    steps_of(policy, 20)
    accelerated: Any = fs.accelerate(policy, window=5, pilots=4, trace=False)
    draw(policy, 2, seeded(1))
    steps_of(policy, 10)
    draw(policy, 2, seeded(2))
    assert accelerated.plans.prior is None  # there are four pilots, two of each size
    steps_of(policy, 20)
    draw(policy, 2, seeded(3))
    assert len(accelerated.prior.jacobian) == 20
    steps_of(policy, 10)
    assert torch.equal(draw(policy, 2, seeded(9)), without)
    steps_of(policy, 20)
    draw(policy, 2, seeded(4))
    assert accelerated.plans.planners.popitem()[1].table is not None
    fs.restore(policy)


def test_pilots_with_other_conditioned_coordinates_are_not_mixed() -> None:
    policy, data = lowdim(), torch.zeros(2, 4, 3)
    mask = data.bool()
    mask[:, 0] = True
    accelerated: Any = fs.accelerate(policy, window=5, pilots=4, trace=False)
    for given in (data.bool(), mask, mask):
        policy.conditional_sample(data, given, global_cond=torch.zeros(2, 2))
    assert accelerated.prior.states.shape[2:] == (9,)


@families
def test_a_learned_prior_waits_while_plans_of_another_size_are_drawn(family: str) -> None:
    make, draw = FAMILIES[family]
    policy = make()
    with fs.accelerate(policy, window=19, trace=False):
        steps_of(policy, 10)
        without = draw(policy, 2, seeded(9))
    steps_of(policy, 20)
    accelerated = learned(policy)
    with_prior = draw(policy, 2, seeded(8))
    steps_of(policy, 10)
    assert torch.equal(draw(policy, 2, seeded(9)), without)
    with pytest.raises(ValueError, match="2 plans are too few to learn from"):
        accelerated.learn()  # from the latest plans, which have 10 steps
    steps_of(policy, 20)
    assert torch.equal(draw(policy, 2, seeded(8)), with_prior)
    fs.restore(policy)


def test_a_prior_that_was_given_is_refused_for_plans_of_another_size() -> None:
    policy = lerobot()
    prior = learned(policy).prior
    with fs.accelerate(policy, window=19, prior=prior, trace=False):
        steps_of(policy, 10)
        with pytest.raises(ValueError, match="learned from plans of 8 numbers in 20 steps with 3"):
            plan(policy, observations(2))
    steps_of(policy, 20)
    accelerated: Any = fs.accelerate(policy, window=19, pilots=4, trace=False)
    plan(policy, observations(4))
    with fs.accelerate(policy, window=19, prior=accelerated.prior, trace=False):
        steps_of(policy, 10)
        with pytest.raises(ValueError, match="fitted on plans of 8 numbers in 20 steps, this policy's have 8"):
            plan(policy, observations(2))


def test_learning_again_and_after_the_end_needs_no_new_plan() -> None:
    policy = lerobot()
    accelerated = learned(policy)
    first = repr(accelerated.prior)
    assert repr(accelerated.learn()) == first
    fs.restore(policy)
    assert repr(accelerated.learn()) == first


def test_what_is_learned_drafts_batches_of_every_size() -> None:
    policy = lerobot()
    accelerated = learned(policy)
    for count in (1, 2):
        plan(policy, observations(count))
    again = accelerated.learn()
    assert {planner.past for planner in accelerated.plans.planners.values()} == {repr(again)}
    fs.restore(policy)


def test_a_cold_policy_draws_with_the_seeds_it_is_given() -> None:
    policy = lowdim()
    with fs.accelerate(policy, window=5, trace=False):
        assert torch.equal(plan_lowdim(policy, 2, seeded(1)), plan_lowdim(policy, 2, seeded(1)))
