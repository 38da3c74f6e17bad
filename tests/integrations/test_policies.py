"""Robot policies of both families, accelerated: the sequential policy's law, fewer calls, no trace left."""

from __future__ import annotations

import copy
import io
import json
import pickle
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Event, current_thread
from time import sleep
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter

import foresample as fs

diffusers = pytest.importorskip("diffusers")

from foresample.integrations.explain import same_noise  # noqa: E402
from foresample.integrations.policies.plans import seeds_from  # noqa: E402
from recipes import lasa  # noqa: E402
from tests.support.policies import (  # noqa: E402
    FAMILIES,
    SCHEDULE,
    LowdimPolicy,
    Small,
    law_tests,
    lerobot,
    lowdim,
    observed,
    plan_lerobot,
    plan_lowdim,
    seeded,
)
from tests.support.waiting import GUARD  # noqa: E402

LEVEL = 1e-3  # probability that a correct sampler fails one of the law tests here
PLANS = 2000


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest) -> tuple[Any, Callable[..., Tensor]]:
    make, plan = FAMILIES[request.param]
    return make(), plan


def network_of(policy: Any) -> Small:
    return policy.diffusion.unet if hasattr(policy, "diffusion") else policy.model


@pytest.mark.law
def test_plans_have_the_sequential_distribution_with_fewer_calls(family: Any) -> None:
    policy, plan = family
    sequential = plan(policy, PLANS, seeded(1))
    with fs.accelerate(policy, window=6):
        speculative = plan(policy, PLANS, seeded(2))
        report = policy.foresample_report
    assert report.calls_mean < 0.7 * 20
    p_values = law_tests(sequential, speculative)
    assert min(p_values) > LEVEL / len(p_values)


@pytest.mark.law
def test_the_distribution_tests_can_fail() -> None:
    """A policy that forgets to overwrite one conditioned coordinate before the network is found out."""
    policy, forgetful = lowdim(), lowdim()
    sequential = plan_lowdim(policy, PLANS, seeded(1))
    inner = forgetful.model.forward

    def forward(sample: Tensor, timestep: Tensor, **conditions: Any) -> Tensor:
        changed = sample.clone()
        changed[:, 1, 2] = 0.0
        return inner(changed, timestep, **conditions)

    forgetful.model.forward = forward  # type: ignore[method-assign, assignment]
    with fs.accelerate(forgetful, window=6):
        p_values = law_tests(sequential, plan_lowdim(forgetful, PLANS, seeded(2)))
    assert min(p_values) < LEVEL / len(p_values)


@pytest.mark.law
def test_the_given_noise_is_where_the_chain_starts() -> None:
    """A schedule that ends far from pure noise: plans remember their start, as the sequential ones do."""
    model = lerobot().diffusion
    model.noise_scheduler = diffusers.DDPMScheduler(num_train_timesteps=20)
    start, condition = torch.randn(1, 4, 2, generator=seeded(3)), torch.zeros(1500, 3)
    start = start.expand(1500, 4, 2).clone()
    sequential = model.conditional_sample(1500, condition, seeded(4), start).detach()
    with fs.accelerate(model, window=6):
        speculative = model.conditional_sample(1500, condition, seeded(5), noise=start)
        fresh = model.conditional_sample(1500, condition, seeded(5))
        with pytest.raises(ValueError, match="give one start"):
            model.conditional_sample(3, condition[:3], noise=start)
    p_values = law_tests(sequential, speculative)
    assert min(p_values) > LEVEL / len(p_values)
    assert min(law_tests(sequential, fresh)) < LEVEL / len(p_values)


def test_conditioned_coordinates_are_kept_exactly_and_conditions_follow_their_rows() -> None:
    policy = lowdim()
    observation = torch.linspace(-1, 1, 12).view(6, 2)
    data, mask = observed(observation)
    with fs.accelerate(policy, window=5, trace=False):
        plans = policy.predict_action(observation, seeded(0))
    assert plans.shape == data.shape
    assert plans.dtype == data.dtype
    assert torch.equal(plans[mask], data[mask])
    # The last plan of a batch is drawn by its own seed and its own conditions: alone it comes out the same.
    seeds = torch.randint(2**63 - 1, (6,), generator=seeded(0))
    with fs.accelerate(policy, window=5, trace=False), pytest.MonkeyPatch.context() as patch:
        patch.setattr("foresample.integrations.policies.plans.seeds_from", lambda generator, count: seeds[5:])
        alone = policy.predict_action(observation[5:], seeded(0))
    torch.testing.assert_close(alone[0], plans[5], rtol=1e-4, atol=1e-5)


def test_the_report_is_empty_before_the_first_plan_and_counts_preparation_once(family: Any) -> None:
    policy, plan = family
    model = getattr(policy, "diffusion", policy)
    with fs.accelerate(policy, window=4):
        assert policy.foresample_report is model.foresample_report
        assert str(policy.foresample_report) == "nothing has been drawn yet"
        assert json.loads(policy.foresample_report.to_json())["calls_mean"] is None
        plan(policy, 1, seeded(0))
        first = policy.foresample_report
        assert (first.count, first.steps) == (1, 20)
        plan(policy, 1, seeded(0))
        assert first.preparation_seconds > policy.foresample_report.preparation_seconds
    assert not hasattr(policy, "foresample_report")
    assert not hasattr(model, "foresample_report")


def test_a_compiled_network_is_compiled_at_most_twice() -> None:
    class Dense(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(12, 8)

        def forward(self, sample: Tensor, timestep: Tensor, global_cond: Tensor) -> Tensor:
            time = timestep.expand(len(sample)).unsqueeze(1)
            return self.layer(torch.cat([sample.flatten(1), time, global_cond], 1)).view_as(sample)

    torch._dynamo.reset()
    policy, counter = lerobot(), CompileCounter()
    policy.diffusion.unet = torch.compile(Dense().eval(), dynamic=True, backend=cast(Any, counter))
    for window in (3, 9):
        with fs.accelerate(policy, window=window, trace=False):
            for count in (1, 4):
                plan_lerobot(policy, count, seeded(0))
    assert counter.frame_count == 2


def test_a_plan_that_is_all_conditions() -> None:
    policy, data = lowdim(), torch.rand(2, 4, 3)
    with fs.accelerate(policy):
        plans = policy.conditional_sample(data, torch.ones_like(data).bool(), global_cond=data[:, 0, :2])
    assert torch.equal(plans, data)


@pytest.mark.parametrize("options", [{}, {"trace": False}, {"window": "auto"}, {"learn": True}], ids=str)
def test_an_empty_batch_is_left_to_the_policy(family: Any, options: dict[str, Any]) -> None:
    policy, plan = family
    expected = plan(policy, 0)
    with fs.accelerate(policy, **options):
        assert plan(policy, 0).shape == expected.shape
        assert str(policy.foresample_report) == "nothing has been drawn yet"
        assert plan(policy, 2).shape == (2, *expected.shape[1:])


def test_restore_leaves_no_trace(family: Any) -> None:
    policy, plan = family
    model = getattr(policy, "diffusion", policy)
    before, names = plan(policy, 3, seeded(0)), [set(vars(policy)), set(vars(model))]
    fs.accelerate(policy, window=4)
    fs.accelerate(policy, window=8)  # again, with other settings
    other = plan(policy, 3, seeded(0))
    assert policy.foresample_report.window == 8
    assert not torch.equal(before, other)
    fs.restore(policy)
    assert torch.equal(plan(policy, 3, seeded(0)), before)
    assert [set(vars(policy)), set(vars(model))] == names
    fs.restore(policy)  # nothing to undo


def test_a_method_rebound_by_someone_else_comes_back() -> None:
    policy = lowdim()
    original = policy.conditional_sample

    def rebound(condition_data: Tensor, condition_mask: Tensor, generator: Any = None, **kwargs: Any) -> Tensor:
        return original(condition_data, condition_mask, generator=generator, **kwargs)

    policy.conditional_sample = rebound  # type: ignore[method-assign, assignment]
    with fs.accelerate(policy):
        pass
    assert policy.conditional_sample is rebound


def test_an_error_inside_the_block_restores_too() -> None:
    policy = lowdim()
    with pytest.raises(RuntimeError, match="stop"), fs.accelerate(policy):
        raise RuntimeError("stop")
    assert "conditional_sample" not in vars(policy)


COPIES: dict[str, Callable[[Any], Any]] = {
    "deepcopy": copy.deepcopy,
    "copy": copy.copy,
    "pickle": lambda one: pickle.loads(pickle.dumps(one)),
    "pickle, first protocol": lambda one: pickle.loads(pickle.dumps(one, protocol=0)),
    "torch.save": lambda one: saved_and_loaded(one),
}


def saved_and_loaded(one: Any) -> Any:
    file = io.BytesIO()
    torch.save(one, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("way", COPIES)
def test_a_copy_of_an_accelerated_policy_is_the_plain_policy(family: Any, way: str) -> None:
    policy, plan = family
    model = getattr(policy, "diffusion", policy)
    before, names = plan(policy, 2, seeded(0)), set(vars(model))
    with fs.accelerate(policy, window=4):
        accelerated = plan(policy, 2, seeded(0))
        twin = COPIES[way](model)
        assert set(vars(twin)) == names
        holder = SimpleNamespace(diffusion=twin) if policy is not model else twin
        assert torch.equal(plan(holder, 2, seeded(0)), before)
        fs.restore(holder)  # nothing to undo, and nothing is undone elsewhere
        assert torch.equal(plan(policy, 2, seeded(0)), accelerated)


def test_a_generator_decides_the_plan_and_only_that(family: Any) -> None:
    policy, plan = family
    with fs.accelerate(policy, window=6):
        one, two = plan(policy, 3, seeded(0)), plan(policy, 3, seeded(0))
        generator = seeded(0)
        first, second = (plan(policy, 3, generator) for _ in range(2))
        torch.manual_seed(5)
        state = torch.get_rng_state()
        plan(policy, 3, seeded(0))
        assert torch.equal(torch.get_rng_state(), state)
        global_one = plan(policy, 3)
        torch.manual_seed(5)
        global_two = plan(policy, 3)
    assert torch.equal(one, two)
    assert torch.equal(one, first)
    assert not torch.equal(first, second)
    assert torch.equal(global_one, global_two)


@pytest.mark.parametrize("pad", [True, 40])
def test_padding_shows_the_network_one_shape_and_changes_nothing(family: Any, pad: bool | int) -> None:
    policy, plan = family
    with fs.accelerate(policy, window=6, trace=False):
        plain = plan(policy, 3, seeded(0))
        network_of(policy).shapes.clear()
    with fs.accelerate(policy, window=6, batch_pad=pad, trace=False):
        padded = plan(policy, 3, seeded(0))
    shapes = network_of(policy).shapes
    assert {shape[0] for shape in shapes} == {3 * 7 if pad is True else 40}
    torch.testing.assert_close(padded, plain, rtol=1e-4, atol=1e-5)


class Slow(Small):
    """Lets other threads come in between."""

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        sleep(1e-3)
        return super().forward(*args, **kwargs)


@pytest.mark.parametrize("family", FAMILIES)
def test_threads_that_plan_with_one_policy_wait_for_one_another(family: str) -> None:
    """Each gets the plans of its own observations; `forget` and reports do not come in between."""
    policy = FAMILIES[family][0]()
    network_of(policy).__class__ = Slow

    def plans(value: float) -> list[Tensor]:
        def plan(seed: int) -> Tensor:
            if family == "diffusion_policy":
                return policy.predict_action(torch.full((1, 2), value), seeded(seed))
            with torch.no_grad():
                given = torch.full((1, 3), value)
                return policy.diffusion.conditional_sample(1, global_cond=given, generator=seeded(seed))

        return [plan(seed) for seed in range(4)]

    values = (-1.0, 0.0, 1.0)
    with fs.accelerate(policy, window=4):
        alone = list(map(plans, values))
        with ThreadPoolExecutor(3) as threads:
            together = list(threads.map(plans, values))
    for one, two in zip(alone, together, strict=True):
        torch.testing.assert_close(one, two)


class Met(Small):
    """The first thread leaves while the second is inside."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.inside, self.left = {"first_0": Event(), "second_0": Event()}, Event()

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        name = current_thread().name
        if name in self.inside and not self.inside[name].is_set():
            self.inside[name].set()
            assert (self.inside["second_0"] if name == "first_0" else self.left).wait(GUARD)
        return super().forward(*args, **kwargs)


@pytest.mark.parametrize("known", [False, True], ids=["first plan", "later plan"])
def test_policies_that_share_a_network_plan_at_the_same_time(known: bool) -> None:
    """Each thread has stand-ins of its own, and nothing of them is left on the network."""
    first, second = lowdim(), lowdim()
    network = first.model = second.model = Met(4, 3, 2)

    def plan(policy: LowdimPolicy) -> Tensor:
        return plan_lowdim(policy, 1, seeded(3))

    with fs.accelerate(first, window=4), fs.accelerate(second, window=4):
        alone = [plan(policy) for policy in (first, second)[not known :]]
        with (
            ThreadPoolExecutor(1, thread_name_prefix="first") as one,
            ThreadPoolExecutor(1, thread_name_prefix="second") as two,
        ):
            drawn = one.submit(plan, first)
            assert network.inside["first_0"].wait(GUARD)
            other = two.submit(plan, second)
            drawn.exception()
            network.left.set()
            together = [drawn.result(), other.result()]
        assert "forward" not in vars(network)
    assert all(torch.equal(drawn, alone[-1]) for drawn in (*alone, *together))


def test_seeds_are_not_drawn_while_a_comparison_has_seeded_torch_s_generator() -> None:
    torch.manual_seed(7)
    expected = seeds_from(None, 2)
    torch.manual_seed(7)
    with ThreadPoolExecutor(1) as threads, same_noise(torch.device("cpu")):
        drawn = threads.submit(seeds_from, None, 2)
        with pytest.raises(TimeoutError):
            drawn.result(timeout=0.2)
        torch.randn(3)
    assert torch.equal(drawn.result(), expected)


def test_padding_that_is_too_small_is_refused() -> None:
    policy = lowdim()
    with (
        fs.accelerate(policy, window=6, batch_pad=8),
        pytest.raises(ValueError, match="at least 7 for each"),
    ):
        plan_lowdim(policy, 4)


def test_half_precision_comes_back_as_half_precision() -> None:
    policy = lerobot()
    policy.diffusion.to(torch.bfloat16)
    condition = torch.zeros(2, 3, dtype=torch.bfloat16)
    with fs.accelerate(policy):
        plans = policy.diffusion.conditional_sample(2, condition)
    assert plans.dtype == torch.bfloat16
    assert plans.shape == (2, 4, 2)


@pytest.mark.law
def test_local_conditions_and_stochastic_ddim() -> None:
    """DDIM has noise when the policy passes eta to scheduler.step."""
    policy = lowdim("DDIMScheduler", eta=1.0)
    policy.num_inference_steps = 10
    policy.model = Small(4, 3, 4)
    data = torch.zeros(300, 4, 3)
    arguments = {"local_cond": torch.full((300, 4, 1), 0.3), **policy.kwargs}
    with torch.no_grad():
        sequential = policy.conditional_sample(data, data.bool(), **arguments, generator=seeded(0))
    with fs.accelerate(policy, window=5):
        speculative = policy.conditional_sample(data, data.bool(), **arguments, generator=seeded(1))
    p_values = law_tests(sequential, speculative)
    assert min(p_values) > LEVEL / len(p_values)
    assert policy.num_inference_steps == 10


class TransformerPolicy(LowdimPolicy):
    """diffusion_policy's transformer: one condition, named cond and passed by position."""

    def conditional_sample(  # type: ignore[override]
        self,
        condition_data: Tensor,
        condition_mask: Tensor,
        cond: Tensor | None = None,
        generator: torch.Generator | None = None,
        **kwargs: Any,
    ) -> Tensor:
        plan = torch.randn(condition_data.shape, dtype=condition_data.dtype, generator=generator)
        self.noise_scheduler.set_timesteps(self.num_inference_steps)
        for t in self.noise_scheduler.timesteps:
            plan[condition_mask] = condition_data[condition_mask]
            output = self.model(plan, t, cond)
            plan = self.noise_scheduler.step(output, t, plan, generator=generator, **kwargs).prev_sample
        plan[condition_mask] = condition_data[condition_mask]
        return plan


def test_the_transformer_s_condition_is_passed_on() -> None:
    policy = TransformerPolicy(diffusers.DDPMScheduler(**SCHEDULE)).eval()
    seen = []

    def model(sample: Tensor, timestep: Tensor, cond: Tensor) -> Tensor:
        seen.append(cond.shape[0] == sample.shape[0])
        return 0.5 * sample + cond.mean((1, 2)).view(-1, 1, 1)

    policy.__dict__["model"] = model
    del policy._modules["model"]
    data = torch.zeros(3, 4, 3)
    with fs.accelerate(policy, window=5):
        policy.conditional_sample(data, data.bool(), cond=torch.rand(3, 2, 2))
    assert seen
    assert all(seen)


@pytest.mark.law
@pytest.mark.slow
def test_the_trained_policy_plans_with_fewer_calls() -> None:
    """The handwriting policy, trained on real demonstrations: same law of plans, a third of the calls."""
    policy = lasa.load()
    position, velocity = torch.tensor([[-0.4, 0.7]]), torch.zeros(1, 2)
    shape = torch.zeros(1, dtype=torch.int64)
    many = [v.expand(300, *v.shape[1:]) for v in (position, velocity, shape)]

    def plans(seed: int) -> Tensor:
        return policy.predict_action_chunk(many[0], many[1], many[2], seeded(seed))

    sequential = plans(0)
    with fs.accelerate(policy, window=16):
        speculative = plans(1)
        report = policy.foresample_report
    assert isinstance(report, fs.Report)
    assert report.speedup > 3
    p_values = law_tests(sequential, speculative)
    assert min(p_values) > LEVEL / len(p_values)


@pytest.mark.law
@pytest.mark.slow
def test_the_trained_policy_reaches_its_goal_either_way() -> None:
    """Closed loop, 8 of 16 velocities at a time: an S of 112 points from where people began it."""

    def ends() -> Tensor:
        position, velocity = torch.tensor([[0.72, 0.66]]).expand(12, 2), torch.zeros(12, 2)
        generator = seeded(0)
        for _ in range(14):
            actions = policy.predict_action_chunk(position, velocity, torch.zeros(12).long(), generator)
            position, velocity = position + actions.sum(1), actions[:, -1]
        return (position - torch.tensor([-0.716, -0.946])).norm(dim=1)

    policy = lasa.load()
    assert ends().max() < 0.15
    with fs.accelerate(policy, window=16):
        assert ends().max() < 0.15


def test_what_is_no_policy_is_refused() -> None:
    for thing in (object(), nn.Linear(1, 1), SimpleNamespace(diffusion=nn.Linear(1, 1))):
        with pytest.raises(TypeError, match=r"cannot be accelerated: pass .* LeRobot's DiffusionPolicy"):
            fs.accelerate(thing)


def test_ddim_without_noise_is_refused_with_what_to_use() -> None:
    policy = lerobot()
    policy.diffusion.noise_scheduler = diffusers.DDIMScheduler(**SCHEDULE)
    with pytest.raises(ValueError, match=r"eta=0.*DDPMScheduler\.from_config"):
        fs.accelerate(policy)
    assert "conditional_sample" not in vars(policy.diffusion)
    with pytest.raises(ValueError, match=r"or give the policy eta=1\.0"):
        fs.accelerate(lowdim("DDIMScheduler"))
    model = policy.diffusion
    model.noise_scheduler = diffusers.DDPMScheduler.from_config(model.noise_scheduler.config)
    with fs.accelerate(policy):
        assert plan_lerobot(policy, 1).shape == (1, 4, 2)


@pytest.mark.parametrize("scheduler", [diffusers.DDIMScheduler, diffusers.DDIMParallelScheduler])
def test_ddim_is_refused_with_the_same_sentence_before_the_first_plan_and_later(
    family: Any, scheduler: Any
) -> None:
    policy, plan = family
    model, ddim = getattr(policy, "diffusion", policy), scheduler(**SCHEDULE)
    ddpm, model.noise_scheduler = model.noise_scheduler, ddim
    with pytest.raises(ValueError, match=f"this policy runs {scheduler.__name__} with eta=0") as early:
        fs.accelerate(policy)
    model.noise_scheduler = ddpm
    with fs.accelerate(policy):
        plan(policy, 1)
        model.noise_scheduler = ddim
        with pytest.raises(ValueError, match="adds no noise") as late:
            plan(policy, 1)
    assert str(late.value) == str(early.value)


def test_settings_and_calls_that_cannot_work_are_refused() -> None:
    policy = lowdim()
    with pytest.raises(ValueError, match="window must be"):
        fs.accelerate(policy, window=0)
    with pytest.raises(ValueError, match="batch_pad must be"):
        fs.accelerate(policy, batch_pad=0)
    with pytest.raises(TypeError, match="not a drafter"):
        fs.accelerate(policy, drafter=3)  # type: ignore[arg-type]
    data, mask = torch.zeros(2, 4, 3), torch.zeros(2, 4, 3, dtype=torch.bool)
    mask[0, 0, 0] = True
    with fs.accelerate(policy):
        with pytest.raises(ValueError, match="once for each mask"):
            policy.conditional_sample(data, mask)
        with pytest.raises(ValueError, match=r"cannot pass return_dict to scheduler\.step"):
            policy.conditional_sample(data, data.bool(), return_dict=False)
    thresholded = diffusers.DDPMScheduler(thresholding=True, clip_sample=False, **SCHEDULE)
    with (
        fs.accelerate(LowdimPolicy(thresholded).eval()) as policy,
        pytest.raises(ValueError, match="clip_sample"),
    ):
        plan_lowdim(policy, 1)


def test_a_network_that_still_drops_out_is_refused() -> None:
    policy = lowdim()
    policy.model.add_module("drop", nn.Dropout(0.1))
    with fs.accelerate(policy):
        with pytest.raises(ValueError, match=r"training mode and has Dropout; call policy\.eval\(\)"):
            plan_lowdim(policy, 1)
        policy.eval()
        plan_lowdim(policy, 1)
