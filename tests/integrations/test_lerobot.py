"""LeRobot's real `DiffusionPolicy` (0.4.4): its law, its own methods, and what is refused with the policy untouched."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import foresample as fs

diffusers = pytest.importorskip("diffusers")

from foresample.integrations.plans import KEPT  # noqa: E402
from tests import lerobots  # noqa: E402
from tests.policies import law_tests, seeded  # noqa: E402

LEVEL = 1e-3  # probability that a correct sampler fails one of the law tests here
PLANS = 300


@pytest.fixture(scope="module")
def made() -> Any:
    return lerobots.policy()


@pytest.fixture
def policy(made: Any) -> Any:
    yield made
    fs.restore(made)
    made.reset()


def plans(policy: Any, seed: int) -> torch.Tensor:
    model = policy.diffusion
    condition = model._prepare_global_conditioning(lerobots.observation(policy, PLANS))
    with torch.no_grad():
        return model.conditional_sample(PLANS, global_cond=condition, generator=seeded(seed))


@pytest.mark.law
def test_the_law_is_lerobot_s_with_fewer_calls(policy: Any) -> None:
    """Cold, then warm with a prior fitted on the plans before; every plan after the first depends on the last."""
    sequential = plans(policy, 1)
    fs.accelerate(policy, window=8, warm=True, pilots=PLANS)
    cold = plans(policy, 2)
    calls = policy.foresample_report.calls_mean
    plans(policy, 3)  # the first with the prior
    warm = plans(policy, 4)
    assert max(policy.foresample_report.calls_mean, calls) < 0.5 * 20
    p_values = law_tests(sequential, cold) + law_tests(sequential, warm)
    assert min(p_values) > LEVEL / len(p_values)


@pytest.mark.law
def test_these_law_tests_can_fail(policy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The scheduler's larger variance is another law."""
    sequential, model = plans(policy, 1), policy.diffusion
    other = diffusers.DDPMScheduler.from_config(model.noise_scheduler.config, variance_type="fixed_large")
    monkeypatch.setattr(model, "noise_scheduler", other)
    with fs.accelerate(policy, window=8):
        p_values = law_tests(sequential, plans(policy, 2))
    assert min(p_values) < LEVEL / len(p_values)


def test_actions_come_as_they_did(policy: Any) -> None:
    """`select_action` fills its queues and plans every eight steps; `reset` forgets the last plan; `restore` all."""
    seen = {name: value[:, 0] for name, value in lerobots.observation(policy).items()}

    def actions(count: int) -> torch.Tensor:
        policy.reset()
        torch.manual_seed(3)
        return torch.cat([policy.select_action(dict(seen)) for _ in range(count)])

    before = actions(9)
    accelerated = fs.accelerate(policy, window=8, warm=True)
    first, second = actions(17), actions(17)
    assert first.shape == (17, 4)
    assert torch.equal(first, second)  # nothing of the plan before `reset` is left
    (planner,) = accelerated.plans.planners.values()  # type: ignore[union-attr]
    assert planner.how.executed == policy.config.n_action_steps == 8
    fs.restore(policy)
    assert torch.equal(actions(9), before)


def test_planners_of_few_kinds_are_kept(policy: Any) -> None:
    accelerated: Any = fs.accelerate(policy, window=4)
    for count in (1, 2, 3, 4, 5, 1):
        policy.diffusion.generate_actions(lerobots.observation(policy, count))
    kept = list(accelerated.plans.planners.values())
    assert len(kept) == KEPT
    assert [len(planner.data) for planner in kept] == [3, 4, 5, 1]


def untouched(policy: Any) -> bool:
    return "conditional_sample" not in vars(policy.diffusion) and "reset" not in vars(policy)


def test_what_cannot_work_is_refused_before_anything_changes(
    policy: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(
        ValueError, match=r"graph=True needs a policy on a CUDA device: move it there first, or"
    ):
        fs.accelerate(policy, graph=True)
    assert untouched(policy)
    policy.train()
    with pytest.raises(ValueError, match=r"the policy is in training mode; call policy\.eval\(\)"):
        fs.accelerate(policy)
    policy.eval()
    assert untouched(policy)
    ddim = diffusers.DDIMScheduler.from_config(policy.diffusion.noise_scheduler.config)
    monkeypatch.setattr(policy.diffusion, "noise_scheduler", ddim)
    with pytest.raises(ValueError, match=r"DDIMScheduler with eta=0, which adds no noise.*DDPMScheduler\.from"):
        fs.accelerate(policy)
    assert untouched(policy)


def test_what_cannot_work_later_is_refused_and_the_next_plan_is_fine(policy: Any) -> None:
    fs.accelerate(policy, window=4)
    plan, good = policy.diffusion.generate_actions, lerobots.observation(policy)
    wide = {name: torch.cat([value, value], -1) for name, value in good.items()}
    with pytest.raises(
        ValueError, match=r"comes to \(1, 104\) numbers, the policy takes \(1, 52\): give the feat"
    ):
        plan(wide)
    policy.train()
    with pytest.raises(ValueError, match=r"the policy is in training mode; call policy\.eval\(\)"):
        plan(good)
    policy.eval()
    assert plan(good).shape == (1, 8, 4)
