"""LeRobot's real `DiffusionPolicy` (0.4.4): its distribution, its own methods, and refusals."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch

import foresample as fs

diffusers = pytest.importorskip("diffusers")

from foresample.integrations.policies.plans import KEPT  # noqa: E402
from tests.support import lerobots  # noqa: E402
from tests.support.policies import law_tests, seeded  # noqa: E402

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
def test_plans_have_lerobot_s_distribution_with_fewer_calls(policy: Any) -> None:
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
def test_these_distribution_tests_can_fail(policy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The scheduler's larger variance gives another distribution."""
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
    assert planner.options.executed == policy.config.n_action_steps == 8
    fs.restore(policy)
    assert torch.equal(actions(9), before)


def test_planners_of_few_kinds_are_kept(policy: Any) -> None:
    accelerated: Any = fs.accelerate(policy, window=4)
    for count in (1, 2, 3, 4, 5, 1):
        policy.diffusion.generate_actions(lerobots.observation(policy, count))
    kept = list(accelerated.plans.planners.values())
    assert len(kept) == KEPT
    assert [len(planner.data) for planner in kept] == [3, 4, 5, 1]


@pytest.mark.slow
def test_lerobot_s_own_loop_is_watched_once_and_then_trusted(policy: Any) -> None:
    """A subclass that overrides something else has LeRobot's own loop as well."""
    fs.accelerate(policy, window=4)
    own = type(policy.diffusion)
    for kind in (own, type("Mine", (own,), {"compute_loss": lambda self, batch: 0})):
        policy.diffusion.__class__ = kind
        plan = policy.diffusion.generate_actions
        for _ in range(2):
            plan(lerobots.observation(policy))
        evidence = policy.foresample_report.evidence
        assert evidence.trusted == ["LeRobot's own conditional_sample", "diffusers' own DDPMScheduler"]
        assert evidence.steps_replayed == 0
    policy.diffusion.__class__ = own


def test_a_subclass_that_guides_at_some_observations_is_refused_at_those(policy: Any) -> None:
    """It was once accelerated silently, because only the loop of its first plan was watched."""
    own = type(policy.diffusion)

    class Guided(own):  # type: ignore[misc, valid-type]
        strength = 0.0

        def conditional_sample(
            self, batch_size: int, global_cond: Any = None, generator: Any = None, noise: Any = None
        ) -> torch.Tensor:
            sample = torch.randn(batch_size, self.config.horizon, 4, generator=generator)
            self.noise_scheduler.set_timesteps(self.num_inference_steps)
            for t in self.noise_scheduler.timesteps:
                time = torch.full(sample.shape[:1], t, dtype=torch.long)
                output = self.unet(sample, time, global_cond=global_cond)
                if global_cond.max() > 2 or self.strength:
                    output = output - 0.5
                sample = self.noise_scheduler.step(output, t, sample, generator=generator).prev_sample
            return sample

    policy.diffusion.__class__ = Guided
    try:
        fs.accelerate(policy, window=4)
        plan, usual = policy.diffusion.generate_actions, lerobots.observation(policy)
        far = {name: 3 * value for name, value in usual.items()}
        assert plan(usual).shape == plan(usual).shape == (1, 8, 4)
        evidence = policy.foresample_report.evidence
        assert (evidence.steps_replayed, evidence.trusted) == (20, ["diffusers' own DDPMScheduler"])
        sentence = r"Guided\.conditional_sample is not the loop it looks like: .* it changes what its network answers; "
        with pytest.raises(ValueError, match=sentence):
            plan(far)
        policy.diffusion.strength = 1.0
        with pytest.raises(ValueError, match=sentence):
            plan(usual)
        policy.diffusion.strength = 0.0
        assert plan(usual).shape == (1, 8, 4)
    finally:
        fs.restore(policy)
        policy.diffusion.__class__ = own


@pytest.mark.parametrize("way", ["deepcopy", "pickle", "torch.save"])
def test_a_copied_or_saved_policy_is_plain(policy: Any, way: str) -> None:
    names = [set(vars(policy)), set(vars(policy.diffusion))]
    seen = lerobots.observation(policy)
    torch.manual_seed(1)
    before = policy.diffusion.generate_actions(seen)
    fs.accelerate(policy, window=4, warm=True)
    policy.diffusion.generate_actions(seen)
    if way == "deepcopy":
        twin = copy.deepcopy(policy)
    elif way == "pickle":
        twin = pickle.loads(pickle.dumps(policy))
    else:
        file = io.BytesIO()
        torch.save(policy, file)
        file.seek(0)
        twin = torch.load(file, weights_only=False)
    assert [set(vars(twin)), set(vars(twin.diffusion))] == names
    torch.manual_seed(1)
    assert torch.equal(twin.diffusion.generate_actions(seen), before)
    assert isinstance(policy.foresample_report, fs.Report)


@pytest.mark.slow
def test_an_accelerated_policy_can_be_moved_and_loaded(policy: Any) -> None:
    """The next plan is drawn with the weights that are there then."""
    weights, seen = copy.deepcopy(policy.state_dict()), lerobots.observation(policy)

    def plan() -> torch.Tensor:
        torch.manual_seed(1)
        return policy.diffusion.generate_actions(seen)

    fs.accelerate(policy, window=4)
    before = plan()
    assert policy.to("cpu").float().state_dict().keys() == weights.keys()
    policy.load_state_dict({name: 0.9 * value for name, value in weights.items()})
    other = plan()
    fs.accelerate(policy, window=4)
    assert torch.equal(plan(), other)
    policy.load_state_dict(weights)
    assert torch.equal(plan(), before)
    assert not torch.equal(other, before)


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
        ValueError, match=r"has \(1, 104\) numbers, but the policy takes \(1, 52\): give the feat"
    ):
        plan(wide)
    policy.train()
    with pytest.raises(ValueError, match=r"the policy is in training mode; call policy\.eval\(\)"):
        plan(good)
    policy.eval()
    assert plan(good).shape == (1, 8, 4)
