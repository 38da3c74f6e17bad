"""ManiSkill's, robomimic's and LeRobot's multi-task DiT policies: their interfaces and documented loops, around a small
network; none of them can be had from an installed package here.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import foresample as fs

diffusers = pytest.importorskip("diffusers")

from foresample.integrations.policies.families import find_loop  # noqa: E402
from tests.support.policies import SCHEDULE, Small, law_tests  # noqa: E402

LEVEL = 1e-3
PLANS = 1200


def scheduler() -> Any:
    return diffusers.DDPMScheduler(**SCHEDULE)


class Agent(nn.Module):
    """ManiSkill: observations in, the actions to execute out; never sets timesteps; a second name for its method."""

    def __init__(self) -> None:
        super().__init__()
        self.obs_horizon, self.act_horizon = 1, 2
        self.noise_pred_net, self.noise_scheduler = Small(4, 2, 3), scheduler()
        self.get_eval_action = self.get_action

    def get_action(self, obs_seq: Tensor) -> Tensor:
        condition = obs_seq.flatten(1)
        plan = torch.randn(len(obs_seq), 4, 2)
        with torch.no_grad():
            for k in self.noise_scheduler.timesteps:
                output = self.noise_pred_net(sample=plan, timestep=k, global_cond=condition)
                plan = self.noise_scheduler.step(model_output=output, timestep=k, sample=plan).prev_sample
        return plan[:, :2]


class Robomimic:
    """robomimic: no module itself; plans with the average of its networks."""

    def __init__(self) -> None:
        nets = nn.ModuleDict({"policy": nn.ModuleDict({"noise_pred_net": Small(4, 2, 3)})}).eval()
        self.nets, self.noise_scheduler = nets, scheduler()
        self.ema = SimpleNamespace(averaged_model=copy.deepcopy(nets).eval())
        with torch.no_grad():
            self.ema.averaged_model["policy"]["noise_pred_net"].outer.mul_(0.9)
        self.queue: list[Tensor] = []

    def reset(self) -> None:
        self.queue.clear()

    def _get_action_trajectory(self, obs_dict: dict[str, Tensor], goal_dict: None = None) -> Tensor:
        condition = obs_dict["obs"].flatten(1)
        plan = torch.randn(len(condition), 4, 2)
        self.noise_scheduler.set_timesteps(20)
        network = self.ema.averaged_model["policy"]["noise_pred_net"]
        with torch.no_grad():
            for k in self.noise_scheduler.timesteps:
                output = network(sample=plan, timestep=k, global_cond=condition)
                plan = self.noise_scheduler.step(model_output=output, timestep=k, sample=plan).prev_sample
        return plan[:, :2]


class Transformer(Small):
    """The multi-task DiT's network: its own names, and one timestep a row."""

    def forward(self, x: Tensor, timestep: Tensor, conditioning_vec: Tensor) -> Tensor:  # type: ignore[override]
        assert timestep.shape == x.shape[:1]
        self.shapes.append(tuple(x.shape))
        features = torch.cat([x.flatten(1), timestep[:, None] / 20, conditioning_vec], 1)
        hidden = torch.tanh((features.unsqueeze(2) * self.inner).sum(1))
        return 0.6 * x + 0.8 * (hidden.unsqueeze(2) * self.outer).sum(1).view_as(x)


class Objective(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.noise_scheduler = scheduler()

    def conditional_sample(self, model: nn.Module, batch_size: int, conditioning_vec: Tensor) -> Tensor:
        plan = torch.randn(batch_size, 4, 2)
        self.noise_scheduler.set_timesteps(20)
        for t in self.noise_scheduler.timesteps:
            time = torch.full(plan.shape[:1], int(t))
            plan = self.noise_scheduler.step(
                model(plan, time, conditioning_vec=conditioning_vec), t, plan
            ).prev_sample
        return plan


class MultiTask(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.config = SimpleNamespace(n_action_steps=2)
        self.noise_predictor, self.objective = Transformer(4, 2, 3), Objective()

    def reset(self) -> None: ...

    def predict_action_chunk(self, observation: Tensor) -> Tensor:
        with torch.no_grad():
            found = self.objective.conditional_sample(self.noise_predictor, len(observation), observation)
        return found[:, :2]


def observations(count: int) -> Tensor:
    return torch.tensor([[0.3, -0.5, 1.0]]).expand(count, 3)


FAMILIES: dict[str, tuple[Callable[[], Any], Callable[[Any, int], Tensor]]] = {
    "ManiSkill": (lambda: Agent().eval(), lambda p, n: p.get_eval_action(observations(n).unsqueeze(1))),
    "robomimic": (Robomimic, lambda p, n: p._get_action_trajectory({"obs": observations(n)})),
    "multi_task_dit": (lambda: MultiTask().eval(), lambda p, n: p.predict_action_chunk(observations(n))),
}


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest) -> tuple[Any, Callable[[Any, int], Tensor]]:
    make, plan = FAMILIES[request.param]
    torch.manual_seed(11)
    return make(), plan


@pytest.mark.law
def test_plans_have_the_sequential_distribution_with_fewer_calls(family: Any) -> None:
    policy, plan = family
    sequential = plan(policy, PLANS)
    fs.accelerate(policy, window=6, warm=True)
    cold, warm = plan(policy, PLANS), plan(policy, PLANS)
    report = policy.foresample_report
    assert report.calls_mean < 0.7 * 20
    p_values = law_tests(sequential, cold) + law_tests(sequential, warm)
    assert min(p_values) > LEVEL / len(p_values)
    with torch.no_grad():  # the tests would see a network that is a little different
        loop: Any = find_loop(policy)
        loop.network.outer.mul_(0.8)
    other = law_tests(sequential, plan(policy, PLANS))
    assert min(other) < LEVEL / len(other)


def test_restore_leaves_no_trace(family: Any) -> None:
    policy, plan = family
    owner = getattr(policy, "objective", policy)
    torch.manual_seed(1)
    before, names = plan(policy, 2), [set(vars(policy)), set(vars(owner))]
    accelerated: Any = fs.accelerate(policy, window=4)
    torch.manual_seed(1)
    one = plan(policy, 2)
    torch.manual_seed(1)
    assert torch.equal(plan(policy, 2), one)  # the global generator decides
    assert len(accelerated.plans.planners) == 1
    assert accelerated.plans.options.executed == (None if isinstance(policy, Robomimic) else 2)
    fs.restore(policy)
    torch.manual_seed(1)
    assert torch.equal(plan(policy, 2), before)
    assert [set(vars(policy)), set(vars(owner))] == names
    assert "step" not in vars(owner.noise_scheduler)


def test_another_thread_calls_the_network_and_the_scheduler_as_they_are() -> None:
    agent = Agent().eval()
    network, step, answers = agent.noise_pred_net, agent.noise_scheduler.step, list[tuple[Tensor, Tensor]]()
    given = torch.ones(1, 4, 2), torch.tensor([3])
    condition = observations(1)
    agent.noise_scheduler.set_timesteps(20)
    with torch.no_grad():
        expected = network.forward(*given, condition)
    last = step(expected, 0, given[0]).prev_sample

    def elsewhere() -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            return network.forward(*given, condition), agent.noise_scheduler.step(
                expected, 0, given[0]
            ).prev_sample

    def meanwhile(*_: Any) -> None:
        with ThreadPoolExecutor(1) as thread:
            answers.append(thread.submit(elsewhere).result())

    network.register_forward_hook(meanwhile)
    with fs.accelerate(agent, window=4):
        agent.get_eval_action(observations(1).unsqueeze(1))
    assert len(answers) >= 20
    for answer, stepped in answers:
        assert torch.equal(answer, expected)
        assert torch.equal(stepped, last)


@pytest.mark.parametrize("options", [{}, {"trace": False}, {"window": "auto"}], ids=str)
def test_an_empty_batch_is_left_to_the_policy(family: Any, options: dict[str, Any]) -> None:
    policy, plan = family
    with fs.accelerate(policy, **options):
        assert plan(policy, 0).shape == (0, 2, 2)
        assert str(policy.foresample_report) == "nothing has been drawn yet"
        assert plan(policy, 2).shape == (2, 2, 2)


def test_the_policy_inside_a_robomimic_roll_out_policy_is_found() -> None:
    inner = Robomimic()
    wrapped = SimpleNamespace(policy=inner)
    with fs.accelerate(wrapped, window=4):
        inner._get_action_trajectory({"obs": observations(1)})
        assert wrapped.foresample_report.count == 1
    assert "_get_action_trajectory" not in vars(inner)


class Guided(Agent):
    """Two calls a step, mixed."""

    def get_action(self, obs_seq: Tensor) -> Tensor:
        condition, plan = obs_seq.flatten(1), torch.randn(len(obs_seq), 4, 2)
        with torch.no_grad():
            for k in self.noise_scheduler.timesteps:
                output = self.noise_pred_net(plan, k, global_cond=condition) * 1.5
                plan = self.noise_scheduler.step(output, k, plan).prev_sample
        return plan


class Inpainting(Agent):
    def get_action(self, obs_seq: Tensor) -> Tensor:
        condition, plan = obs_seq.flatten(1), torch.randn(len(obs_seq), 4, 2)
        with torch.no_grad():
            for i, k in enumerate(self.noise_scheduler.timesteps):
                if i > 10:
                    plan[:, 0] = 0.0
                output = self.noise_pred_net(plan, k, global_cond=condition)
                plan = self.noise_scheduler.step(output, k, plan).prev_sample
        return plan


class Forgetful(Agent):
    """Other conditions in the second half."""

    def get_action(self, obs_seq: Tensor) -> Tensor:
        condition, plan = obs_seq.flatten(1), torch.randn(len(obs_seq), 4, 2)
        with torch.no_grad():
            for i, k in enumerate(self.noise_scheduler.timesteps):
                output = self.noise_pred_net(plan, k, global_cond=condition if i < 10 else 0 * condition)
                plan = self.noise_scheduler.step(output, k, plan).prev_sample
        return plan


class Unconditional(Small):
    """Also answers without a condition."""

    def forward(
        self,
        sample: Tensor,
        timestep: Tensor,
        local_cond: Tensor | None = None,
        global_cond: Tensor | None = None,
    ) -> Tensor:
        condition = sample.new_zeros(len(sample), 3) if global_cond is None else global_cond
        return super().forward(sample, timestep, local_cond, condition)


class Dropping(Agent):
    """No conditions in the second half."""

    def __init__(self) -> None:
        super().__init__()
        self.noise_pred_net = Unconditional(4, 2, 3)

    def get_action(self, obs_seq: Tensor) -> Tensor:
        condition, plan = obs_seq.flatten(1), torch.randn(len(obs_seq), 4, 2)
        with torch.no_grad():
            for i, k in enumerate(self.noise_scheduler.timesteps):
                given = {"global_cond": condition} if i < 10 else {}
                output = self.noise_pred_net(plan, k, **given)
                plan = self.noise_scheduler.step(output, k, plan).prev_sample
        return plan


class Impatient(Agent):
    """Stops halfway."""

    def get_action(self, obs_seq: Tensor) -> Tensor:
        condition, plan = obs_seq.flatten(1), torch.randn(len(obs_seq), 4, 2)
        with torch.no_grad():
            for k in self.noise_scheduler.timesteps[:10]:
                output = self.noise_pred_net(plan, k, global_cond=condition)
                plan = self.noise_scheduler.step(output, k, plan).prev_sample
        return plan


class Restless(Agent):
    """Draws noise of its own, which only the trace notices."""

    def get_action(self, obs_seq: Tensor) -> Tensor:
        condition, plan = obs_seq.flatten(1), torch.randn(len(obs_seq), 4, 2)
        with torch.no_grad():
            for k in self.noise_scheduler.timesteps:
                output = self.noise_pred_net(plan, k, global_cond=condition)
                plan = self.noise_scheduler.step(output, k, plan).prev_sample
                torch.randn(1)
        return plan


@pytest.mark.parametrize(
    ("kind", "trace", "said"),
    [
        (Guided, True, "at step 1 its state differs"),
        (Guided, False, "it changes what its network answers"),
        (Inpainting, True, "at step 11 its state differs"),
        (Inpainting, False, "it changes the plan between its scheduler and its network"),
        (Forgetful, True, "at step 10 it passes its network other conditions"),
        (Forgetful, False, "at step 10 it passes its network other conditions"),
        (Dropping, False, "at step 10 it passes its network other conditions"),
        (Impatient, True, "its network 10 times instead of 20"),
        (Impatient, False, "its network 10 times and its scheduler 10 times instead of 20"),
        (Restless, True, "at step 2 its state differs"),
    ],
)
def test_a_loop_that_does_more_is_refused(kind: type[Agent], trace: bool, said: str) -> None:
    policy = kind().eval()
    with fs.accelerate(policy, window=4, trace=trace), pytest.raises(ValueError, match=said):
        policy.get_action(observations(2).unsqueeze(1))
    assert "forward" not in vars(policy.noise_pred_net)
    assert "step" not in vars(policy.noise_scheduler)
    assert policy.get_action(observations(2).unsqueeze(1)).shape == (2, 4, 2)


class Moody(Agent):
    """Changes its loop at step 7 of some plans."""

    mood = ""

    def get_action(self, obs_seq: Tensor) -> Tensor:
        condition, plan = obs_seq.flatten(1), torch.randn(len(obs_seq), 4, 2)
        with torch.no_grad():
            for i, k in enumerate(self.noise_scheduler.timesteps):
                mood = self.mood if i == 7 else ""
                time = k - 1 if mood == "network's time" else k
                output = self.noise_pred_net(sample=plan, timestep=time, global_cond=condition)
                if mood == "an answer" and output.max() > -torch.inf:
                    output = output.clamp(-0.5, 0.5)
                time = k - 1 if mood == "scheduler's time" else k
                sample = 0.9 * plan if mood == "scheduler's plan" else plan
                stepped = self.noise_scheduler.step(model_output=output, timestep=time, sample=sample)
                plan = stepped.pred_original_sample if mood == "an estimate" else stepped.prev_sample
                if mood == "a state" and plan.abs().max() < torch.inf:
                    plan = plan.clamp(-0.5, 0.5)
        return plan[:, :2]


@pytest.mark.parametrize(
    ("mood", "said"),
    [
        ("network's time", "at step 7 its timestep is not the scheduler's"),
        ("scheduler's time", "at step 7 its timestep is not the scheduler's"),
        ("scheduler's plan", "at step 7 it gives its scheduler another plan than its network"),
        ("an answer", "at step 7 it changes what its network answers"),
        ("an estimate", "it makes use of its scheduler's pred_original_sample"),
        ("a state", "at step 8 it changes the plan between its scheduler and its network"),
    ],
)
def test_every_plan_is_checked_against_the_loop(mood: str, said: str) -> None:
    policy = Moody().eval()
    with fs.accelerate(policy, window=4):
        for _ in range(2):
            policy.get_action(observations(2).unsqueeze(1))
        report: Any = policy.foresample_report
        evidence = report.evidence
        assert (evidence.steps_replayed, evidence.trusted) == (20, ["diffusers' own DDPMScheduler"])
        policy.mood = mood
        with pytest.raises(ValueError, match=said):
            policy.get_action(observations(2).unsqueeze(1))


def test_the_method_is_handed_the_states_and_answers_of_its_own_plan() -> None:
    """Between two steps the loop has the states and outputs that the sequential loop would have."""
    policy, seen = Agent().eval(), []
    network = policy.noise_pred_net
    own = network.forward
    step = policy.noise_scheduler.step
    with fs.accelerate(policy, window=4, trace=False):
        network.register_forward_hook(
            lambda module, args, kwargs, out: seen.append((kwargs, out)), with_kwargs=True
        )
        policy.get_action(observations(2).unsqueeze(1))
    assert len(seen) == 20
    assert policy.noise_scheduler.step == step
    for given, answer in seen:
        torch.testing.assert_close(own(**given), answer, rtol=1e-4, atol=1e-5)
    assert len({float(given["sample"].sum()) for given, _ in seen}) == 20


def test_a_network_patched_between_plans_is_in_the_next_plan() -> None:
    drawn = []
    for before in (True, False):
        torch.manual_seed(5)
        policy = Agent().eval()
        own = policy.noise_pred_net.forward
        if before:
            fs.accelerate(policy, window=4)
            policy.get_action(observations(2).unsqueeze(1))
        network: Any = policy.noise_pred_net
        network.forward = lambda own=own, **given: 0.5 * own(**given)
        if not before:
            fs.accelerate(policy, window=4)
        torch.manual_seed(6)
        drawn.append(policy.get_action(observations(2).unsqueeze(1)))
    assert torch.equal(*drawn)


class Listed(Small):
    """Takes its condition in a dictionary."""

    def forward(self, sample: Tensor, timestep: Tensor, given: dict[str, Tensor]) -> Tensor:  # type: ignore[override]
        return super().forward(sample, timestep, None, given["condition"])


class Packing(Agent):
    def __init__(self) -> None:
        super().__init__()
        self.noise_pred_net = Listed(4, 2, 3)

    def get_action(self, obs_seq: Tensor) -> Tensor:
        given, plan = {"condition": obs_seq.flatten(1)}, torch.randn(len(obs_seq), 4, 2)
        for k in self.noise_scheduler.timesteps:
            output = self.noise_pred_net(plan, k, given)
            plan = self.noise_scheduler.step(output, k, plan)[0]
        return plan


def test_conditions_in_a_dictionary_are_refused() -> None:
    """A planner would keep the conditions of the first plan."""
    policy = Packing().eval()
    with fs.accelerate(policy, window=4), pytest.raises(ValueError, match="its network takes 2, a dict"):
        policy.get_action(observations(2).unsqueeze(1))


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))])
def test_a_copy_is_the_plain_policy(family: Any, copied: Callable[[Any], Any]) -> None:
    policy, plan = family
    torch.manual_seed(1)
    before = plan(policy, 2)
    with fs.accelerate(policy, window=4):
        plan(policy, 2)
        twin = copied(policy)
    assert vars(twin).keys() == vars(policy).keys()
    torch.manual_seed(1)
    assert torch.equal(plan(twin, 2), before)


def test_what_adds_no_noise_or_trains_is_refused() -> None:
    flow = MultiTask().eval()
    del flow.objective.noise_scheduler
    with pytest.raises(ValueError, match="Objective adds no noise"):
        fs.accelerate(flow)
    agent = Agent().eval()
    agent.noise_scheduler = diffusers.DDIMScheduler(**SCHEDULE)
    with pytest.raises(ValueError, match=r"eta=0, which adds no noise.*use DDPMScheduler"):
        fs.accelerate(agent)
    with pytest.raises(ValueError, match="training mode"):
        fs.accelerate(Agent())
