"""Policies that only look like a known loop: each is refused, with the step and by how much.

The loops are the real methods' sources with a line put in.
"""

from __future__ import annotations

import copy
import functools
import inspect
import random
import textwrap
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import foresample as fs

diffusers = pytest.importorskip("diffusers")

from foresample.engine import tuning  # noqa: E402
from foresample.integrations.networks import held_by  # noqa: E402
from foresample.integrations.policies.acceleration import AcceleratedPolicy  # noqa: E402
from foresample.settings import Settings  # noqa: E402
from tests.support.policies import FAMILIES, LowdimPolicy, observed, seeded  # noqa: E402

STEPS = 20
CALL, STEP, END = "output = self.", "= self.noise_scheduler.step(", "return "
"""Lines of both families' methods: the change comes before one of them. @ is the state, i the step."""
STATE = {"lerobot": "sample", "diffusion_policy": "plan"}
NETWORK = {
    "lerobot": "self.unet(@, timestep, global_cond=0 * global_cond)",
    "diffusion_policy": "self.model(@, t, local_cond=local_cond, global_cond=0 * global_cond)",
}
families = pytest.mark.parametrize("family", FAMILIES)


def changed(family: str, where: str, what: str, when: str = "True") -> Any:
    """A policy whose class has another conditional_sample."""
    policy = FAMILIES[family][0]()
    model = getattr(policy, "diffusion", policy)
    source = textwrap.dedent(inspect.getsource(type(model).conditional_sample))
    start = source.rindex("\n", 0, source.rindex(where)) + 1
    line = source[start:]
    indent = line[: len(line) - len(line.lstrip())]
    put = f"if {when}:\n    {what}\n".replace("UNCONDITIONAL", NETWORK[family]).replace("@", STATE[family])
    source = source[:start] + textwrap.indent(put, indent) + line
    source = source.replace(
        "for t in self.noise_scheduler.timesteps", "for i, t in enumerate(self.noise_scheduler.timesteps)"
    )
    names: dict[str, Any] = {}
    exec("from __future__ import annotations\n" + source, vars(inspect.getmodule(type(model))), names)
    model.__class__ = type(f"My{type(model).__name__}", (type(model),), names)
    return policy


DIFFERS = (
    r"differs by \d\S* from the scheduler's chain; plan with the policy as it is \(foresample\.restore\), make a "
    r"target with foresample\.targets, or give trace=False"
)
DEVIATING: dict[str, tuple[tuple[str, ...], str]] = {
    "guidance": ((STEP, "output = 1.5 * output"), rf"at step 1 its state {DIFFERS}"),
    "guidance by a second call": (
        (STEP, "output = 1.5 * output - 0.5 * UNCONDITIONAL"),
        "at step 1 it passes its network other conditions than it was given",
    ),
    "inpainting": ((CALL, "@[:, 0] = 0.3"), rf"at step 0 its state {DIFFERS}"),
    "another normalisation": ((CALL, "@ = 1.02 * @"), rf"at step 0 its state {DIFFERS}"),
    "guidance at late steps": ((STEP, "output = output + 0.1", "i >= 15"), rf"at step 16 its state {DIFFERS}"),
    "a blend at one late step": ((CALL, "@ = 0.9 * @ + 0.1", "i == 17"), rf"at step 17 its state {DIFFERS}"),
    "actions clipped at the end": ((END, "@ = @.clamp(-0.3, 0.3)"), rf"what it returns {DIFFERS}"),
    "another scale at the end": ((END, "@ = 2 * @"), rf"what it returns {DIFFERS}"),
    "other conditions": ((CALL, "global_cond = global_cond + 0.01"), "at step 0 it passes its network other"),
    "other conditions later": ((CALL, "global_cond = 0 * global_cond", "i == 9"), "at step 9 it passes"),
    "an early end": ((CALL, "break", "i == 12"), "it calls its network 12 times instead of 20"),
    "a skipped step": ((CALL, "continue", "i == 12"), "at step 12 its timestep is not the scheduler's"),
}


@families
@pytest.mark.parametrize("name", DEVIATING)
def test_what_the_chain_does_not_contain_is_refused(family: str, name: str) -> None:
    change, sentence = DEVIATING[name]
    policy, plan = changed(family, *change), FAMILIES[family][1]
    with (
        fs.accelerate(policy, window=5),
        pytest.raises(ValueError, match=rf"is not the loop it looks like: {sentence}"),
    ):
        plan(policy, 2, seeded(0))
    with fs.accelerate(policy, window=5, trace=False):
        assert plan(policy, 2, seeded(0)).isfinite().all()  # whoever knows better


@families
def test_it_takes_four_network_calls_once_for_each_kind_and_looks_take_small_ones(family: str) -> None:
    make, plan = FAMILIES[family]

    def rows(**how: Any) -> list[list[int]]:
        """States of each network call, of four plans: two of a kind, another kind, and the first again."""
        policy, made = make(), []
        model = getattr(policy, "diffusion", policy)
        shapes = (model.unet if hasattr(model, "unet") else model.model).shapes
        with fs.accelerate(policy, window=5, **how):
            for count in (2, 2, 3, 2):
                shapes.clear()
                plan(policy, count, seeded(0))
                made.append([shape[0] for shape in shapes])
        return made

    bare = rows(trace=False, look=False)
    looked, traced = rows(trace=False), rows(look=False)
    for which, count in enumerate((2, 2, 3, 2)):
        first = which in (0, 2)
        watched = ([count] * 3 + [3]) * first  # then one state of each, in one call
        assert traced[which][: len(watched)] == watched
        drawn = traced[which][len(watched) :]
        if family == "lerobot":  # the other draws from the start that its own loop drew
            assert drawn == bare[which]
        assert (
            sum(size == count for size in drawn) <= 1
        )  # nothing is evaluated once more for the loop to run along
        extra = Counter(looked[which])
        extra.subtract(bare[which])
        assert {size for size, calls in extra.items() if calls} <= {2, 4}
        assert extra.total() >= 2 * first


# ------------------------------------------------------------------ every plan, not only the first of its kind

AT_SOME_PLANS = {
    "guidance": (STEP, "output = output + 0.5", "it changes what its network answers"),
    "guidance that is there already": (STEP, "output.add_(0.5)", "it changes what its network answers"),
    "a blend": (CALL, "@ = 0.9 * @ + 0.1", "it changes the plan between"),
    "a blend that is there already": (CALL, "@.mul_(0.9)", "it changes the plan between"),
    "other conditions": (CALL, "global_cond = 0 * global_cond", "it passes its network other conditions"),
    "written conditions": (CALL, "global_cond.mul_(0.5)", "it passes its network other conditions"),
    "another plan for the scheduler": (STEP, "@ = 0.9 * @", "it gives its scheduler another plan"),
    "a second call": (STEP, "UNCONDITIONAL", "it calls its network"),
    "noise of one seed": (STEP, "generator = torch.Generator().manual_seed(0)", "it gives its scheduler more"),
    "an early end": (CALL, "break", "it calls its network"),
    "an early end with a result": (STEP, "break", "it calls its network"),
}
"""Changes that a subclass makes at some plans and at some steps, and what is said of them."""


def condition_of(model: Any, value: float) -> dict[str, Any]:
    """The arguments of one call of either family's method, the observation being this value."""
    if hasattr(model, "unet"):
        return {"batch_size": 2, "global_cond": torch.full((2, 3), value)}
    data, mask = observed(torch.full((2, 2), value))
    return {"condition_data": data, "condition_mask": mask, "global_cond": torch.full((2, 2), value)}


WHICH = {
    "at an observation": "bool(global_cond.max() > 1)",
    "by an attribute": "getattr(self, 'guided', False)",
    "at a state": "(@[..., 0] > self.bound).all()",
    "at an answer": "(output[..., 0] > self.bound).all()",
}
SOME_PLANS = [
    (n, w) for n in AT_SOME_PLANS for w in WHICH if w != "at an answer" or AT_SOME_PLANS[n][0] == STEP
]


@families
@pytest.mark.parametrize(("name", "which"), SOME_PLANS)
def test_what_a_later_plan_does_is_refused(family: str, name: str, which: str) -> None:
    """A kind of plan that was watched before is held to the chain at each plan, on the states of that plan."""
    where, what, sentence = AT_SOME_PLANS[name]
    condition = f"i == 7 and {WHICH[which]}"
    policy = changed(family, where, what, condition)
    model = getattr(policy, "diffusion", policy)
    model.bound = torch.inf
    with fs.accelerate(policy, window=5):
        for seed in range(2):
            assert model.conditional_sample(**condition_of(model, 0.3), generator=seeded(seed)).isfinite().all()
        model.guided, model.bound = True, -torch.inf
        with pytest.raises(ValueError, match=rf"is not the loop it looks like: .*{sentence}"):
            model.conditional_sample(**condition_of(model, 1.5), generator=seeded(3))
        model.guided, model.bound = False, torch.inf
        assert model.conditional_sample(**condition_of(model, 0.3), generator=seeded(4)).isfinite().all()


def test_coordinates_that_a_later_plan_does_not_overwrite_are_refused() -> None:
    for place, sentence in ((CALL, "it changes the plan between"), (END, "it returns other values")):
        policy = changed("diffusion_policy", place, "plan = plan.clone()")
        source = textwrap.dedent(inspect.getsource(LowdimPolicy.conditional_sample))
        line = "plan[condition_mask] = condition_data[condition_mask]"
        at = source.index(line) if place == CALL else source.rindex(line)
        forgets = "plan[condition_mask] += 0 if not getattr(self, 'forgets', False) else 0.1\n"
        indent = " " * (at - source.rindex("\n", 0, at) - 1)
        source = source[: at + len(line)] + "\n" + indent + forgets + source[at + len(line) :]
        names: dict[str, Any] = {}
        exec("from __future__ import annotations\n" + source, vars(inspect.getmodule(LowdimPolicy)), names)
        policy.__class__ = type("Forgetful", (LowdimPolicy,), names)
        with fs.accelerate(policy, window=5):
            policy.conditional_sample(**condition_of(policy, 0.3))
            policy.forgets = True
            with pytest.raises(ValueError, match=sentence):
                policy.conditional_sample(**condition_of(policy, 0.3))


@families
def test_a_subclass_that_changes_nothing_plans_as_well_and_its_evidence_says_so(family: str) -> None:
    """Its loop runs along with every plan; the library's own function is watched at the first plan only."""
    policy, plan = changed(family, CALL, "pass"), FAMILIES[family][1]
    with fs.accelerate(policy, window=5):
        for replayed in (2 * STEPS, STEPS, STEPS):
            plan(policy, 2, seeded(0))
            evidence = policy.foresample_report.evidence
            assert evidence.steps_replayed == replayed
            assert evidence.trusted == ["diffusers' own DDPMScheduler"]
    with fs.accelerate(policy, window=5, trace=False):
        plan(policy, 2, seeded(0))
        evidence = policy.foresample_report.evidence
        assert evidence.steps_replayed == 0
        assert evidence.trusted == ["its loop and its scheduler (trace=False)"]
    own = FAMILIES["lerobot"][0]()
    with fs.accelerate(own, window=5):
        for replayed in (STEPS, 0):
            FAMILIES["lerobot"][1](own, 2, seeded(0))
            evidence = own.foresample_report.evidence
            assert evidence.steps_replayed == replayed
            assert evidence.trusted == ["foresample's own conditional_sample", "diffusers' own DDPMScheduler"]


def other_clipping(model: Any) -> None:
    model.noise_scheduler.register_to_config(clip_sample_range=0.2)


def other_levels(model: Any) -> None:
    model.noise_scheduler.alphas_cumprod.mul_(0.9)


def other_steps(model: Any) -> None:
    model.num_inference_steps = 10


def other_prediction(model: Any) -> None:
    model.noise_scheduler.register_to_config(prediction_type="sample")


def other_scheduler(model: Any) -> None:
    config = model.noise_scheduler.config
    model.noise_scheduler = diffusers.DDPMScheduler.from_config(config, variance_type="fixed_large")


def other_network(model: Any) -> None:
    name = "unet" if hasattr(model, "unet") else "model"
    twin = copy.deepcopy(getattr(model, name))
    with torch.no_grad():
        twin.outer.mul_(0.5)
    setattr(model, name, twin)


def other_forward(model: Any) -> None:
    network = network_of(model)
    own = network.forward
    network.forward = lambda *args, **kwargs: 0.5 * own(*args, **kwargs)


def other_weights(model: Any) -> None:
    with torch.no_grad():
        network_of(model).outer.mul_(0.5)


def other_precision(model: Any) -> None:
    model.to(torch.float64)


@families
@pytest.mark.parametrize("subclass", [False, True], ids=["as it is", "subclass"])
@pytest.mark.parametrize(
    "change",
    [
        other_clipping,
        other_levels,
        other_steps,
        other_prediction,
        other_scheduler,
        other_network,
        other_forward,
        other_weights,
        other_precision,
    ],
)
def test_what_changes_between_plans_is_in_the_next_plan(family: str, subclass: bool, change: Any) -> None:
    """As if the policy had been accelerated after the change."""

    def plan(model: Any) -> torch.Tensor:
        dtype = next(model.parameters()).dtype
        given = condition_of(model, 0.4)
        given = {
            n: v.to(dtype) if torch.is_tensor(v) and v.is_floating_point() else v for n, v in given.items()
        }
        return model.conditional_sample(**given, generator=seeded(1))

    drawn = []
    for before in (True, False):
        policy = changed(family, CALL, "pass") if subclass else FAMILIES[family][0]()
        model = getattr(policy, "diffusion", policy)
        if before:
            fs.accelerate(policy, window=5)
            unchanged = plan(model)
        change(model)
        if not before:
            fs.accelerate(policy, window=5)
        drawn.append(plan(model))
    assert torch.equal(*drawn)
    assert not torch.equal(unchanged.double(), drawn[0].double())


@families
def test_a_scheduler_with_code_of_someone_else_is_refused(family: str) -> None:
    make, plan = FAMILIES[family]
    policy = make()
    model = getattr(policy, "diffusion", policy)
    scheduler = model.noise_scheduler
    own = scheduler.step
    with fs.accelerate(policy, window=5):
        plan(policy, 2, seeded(0))
        scheduler.step = lambda output, t, sample, **more: own(output + 0.5, t, sample, **more)
        with pytest.raises(
            ValueError, match=r"not diffusers' own \(DDPMScheduler\.step\).*or give trace=False"
        ):
            plan(policy, 2, seeded(0))
        del scheduler.step
        plan(policy, 2, seeded(0))
    kind = type("DDPMScheduler", (type(scheduler),), {"step": lambda self, *args, **more: own(*args, **more)})
    scheduler.__class__ = kind
    with fs.accelerate(policy, window=5), pytest.raises(ValueError, match="not diffusers' own"):
        plan(policy, 2, seeded(0))
    with fs.accelerate(policy, window=5, trace=False):
        assert plan(policy, 2, seeded(0)).isfinite().all()


@families
def test_a_method_or_a_scheduler_patched_on_its_class_is_noticed(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, plan = FAMILIES[family]
    policy = make()
    model = getattr(policy, "diffusion", policy)
    own, step = type(model).conditional_sample, diffusers.DDPMScheduler.step
    with fs.accelerate(policy, window=5):
        plan(policy, 2, seeded(0))
        with monkeypatch.context() as patch:
            patch.setattr(diffusers.DDPMScheduler, "step", functools.wraps(step)(lambda *a, **k: step(*a, **k)))
            with pytest.raises(ValueError, match="not diffusers' own"):
                plan(policy, 2, seeded(0))
        wrapped = functools.wraps(own)(lambda *args, **kwargs: 2 * own(*args, **kwargs))
        with monkeypatch.context() as patch:
            patch.setattr(type(model), "conditional_sample", wrapped)
            with pytest.raises(ValueError, match="was replaced since it was accelerated"):
                plan(policy, 2, seeded(0))
        plan(policy, 2, seeded(0))
    monkeypatch.setattr(type(model), "conditional_sample", wrapped)
    with fs.accelerate(policy, window=5), pytest.raises(ValueError, match="what it returns differs"):
        plan(policy, 2, seeded(0))


@families
def test_a_scheduler_that_scales_its_states_is_refused(family: str) -> None:
    """The loop does not scale them, nor its start, so its distribution is another than the scheduler's."""
    policy = FAMILIES[family][0]()
    model = getattr(policy, "diffusion", policy)
    model.noise_scheduler = diffusers.EulerAncestralDiscreteScheduler(num_train_timesteps=20)
    with pytest.raises(
        ValueError, match="EulerAncestralDiscreteScheduler needs both scaled: use DDPMScheduler"
    ):
        fs.accelerate(policy, window=5, trace=False)


def test_a_captured_network_is_captured_again_when_its_modules_hold_other_values() -> None:
    """A graph has values and addresses in it: they are part of the kind of a plan."""
    network = FAMILIES["lerobot"][0]().diffusion.unet
    network.register_buffer("table", torch.zeros(3))
    network.scale = 1.0
    seen = [held_by(network)]
    network.scale = 2.0
    seen.append(held_by(network))
    network.table = torch.ones(3)
    seen.append(held_by(network))
    network.outer = torch.nn.Parameter(network.outer.detach().clone())
    seen.append(held_by(network))
    assert len(set(seen)) == 4
    assert held_by(network) == seen[-1]


# ------------------------------------------------------------------ many small changes

CHANGES = [
    (CALL, "@ = @ * {a}"),
    (CALL, "@ = @ + 0.0"),
    (CALL, "@ = @.clamp(-{c}, {c})"),
    (CALL, "@ = @.flip(0)"),
    (CALL, "@ = @ + {b} * torch.randn(@.shape, generator=generator)"),
    (CALL, "continue"),
    (CALL, "break"),
    (CALL, "global_cond = global_cond * {a}"),
    (CALL, "t = self.noise_scheduler.timesteps[min(i + 1, 19)]"),
    (STEP, "output = output * {a}"),
    (STEP, "output = output.clamp(-{c}, {c})"),
    (STEP, "output = output - {b} * output.mean(0, keepdim=True)"),
    (STEP, "output = {b} * output + (1 - {b}) * UNCONDITIONAL"),
    (STEP, "UNCONDITIONAL"),
    (STEP, "@ = {a} * @"),
    (STEP, "@ = self.noise_scheduler.step(output, t, @, generator=generator).prev_sample"),
    (END, "@ = @ * {a}"),
    (END, "@ = @.clamp(-{c}, {c})"),
    (END, "@ = @ + {b}"),
    (END, "pass"),
]
WHEN = ["True", "True", "i == {k}", "i >= {k}", "i < {k}", "i % 2 == 0", "@.abs().max() > {c}"]


@pytest.mark.slow
@families
def test_every_change_ends_exact_or_refused(family: str) -> None:
    """Exact is what leaves the untouched loop's plans as they are, generator by generator."""
    rng, (make, plan) = random.Random(0), FAMILIES[family]
    base, ends = plan(make(), 3, seeded(1)), {"same": 0, "refused": 0}
    for _ in range(100):
        (where, what), when = rng.choice(CHANGES), rng.choice(WHEN)
        numbers = {
            "a": rng.choice([0.5, 0.99, 1.01, 1.5]),
            "b": round(rng.uniform(0.05, 0.95), 2),
            "c": rng.choice([0.5, 2.0, 30.0]),
            "k": rng.randrange(STEPS),
        }
        change = where, what.format(**numbers), when.format(**numbers) if where != END else "True"
        policy = changed(family, *change)
        same = torch.equal(plan(policy, 3, seeded(1)), base)
        with fs.accelerate(policy, window=5):
            try:
                plan(policy, 3, seeded(1))
            except ValueError as error:
                if "is not the loop it looks like" not in str(error):
                    raise
                ends["refused"] += 1
            else:
                assert same, change
                ends["same"] += 1
    assert ends["same"] >= 5
    assert ends["refused"] >= 50


# ------------------------------------------------------------------ the free look, and windows that are chosen


def network_of(policy: Any) -> Any:
    model = getattr(policy, "diffusion", policy)
    return model.unet if hasattr(model, "unet") else model.model


@families
@pytest.mark.parametrize("window", [5, "auto"])
def test_a_network_that_mixes_rows_is_refused_unless_look_is_false(family: str, window: Any) -> None:
    make, plan = FAMILIES[family]
    policy = make()
    network = network_of(policy)
    forward = network.forward
    network.forward = lambda sample, *args, **kwargs: forward(sample, *args, **kwargs) + 0.1 * sample.mean(0)
    with fs.accelerate(policy, window=window, trace=False):
        for _ in range(2):  # what was refused is not known
            with pytest.raises(ValueError, match="the target mixes rows: evaluated with other batch-mates"):
                plan(policy, 3, seeded(0))
    with fs.accelerate(policy, window=window, trace=False, look=False):
        assert plan(policy, 3, seeded(0)).isfinite().all()


@families
def test_a_look_leaves_no_mark_on_what_pilots_and_warm_starts_remember(family: str) -> None:
    """The same plans, priors and calls with a look and without."""
    make, plan = FAMILIES[family]
    drawn, calls, looks = [], [], []
    for look in (True, False):
        policy = make()
        with fs.accelerate(policy, window=5, look=look, warm=True, pilots=4, executed=1):
            for seed in range(4):  # the prior is there from the third on
                drawn.append(plan(policy, 2, seeded(seed)))
                report = policy.foresample_report
                calls.append(report.calls_mean)
                looks.append(report.look_calls)
    assert looks[0] >= 2
    assert looks[4:] == [0] * 4
    assert calls[:4] == calls[4:]
    assert all(torch.equal(a, b) for a, b in zip(drawn[:4], drawn[4:], strict=True))


@families
def test_a_warm_policy_takes_a_prior_longer_than_its_window(family: str) -> None:
    """With a slope for every step of its paths, of which a plan's window uses the first."""
    make, plan = FAMILIES[family]
    policy = make()
    fitting = fs.accelerate(policy, window=5, pilots=2)
    for seed in range(3):
        plan(policy, 2, seeded(seed))
    assert isinstance(fitting, AcceleratedPolicy)
    found = fitting.prior
    fs.restore(policy)
    assert isinstance(found, fs.Prior)
    states, steps = found.states, found.steps
    assert steps >= 6
    longer = fs.Prior(states, found.predictions, torch.linspace(0.1, 0.2, steps).to(states), found.jacobian)
    with fs.accelerate(policy, window=2, prior=longer, warm=True, executed=1):
        assert all(plan(policy, 2, seeded(seed)).isfinite().all() for seed in range(3))


@families
@pytest.mark.parametrize("found", [6, None])
def test_a_window_is_chosen_once_for_each_kind_of_plan(
    family: str, found: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Plans as with that window given, whose law is tested; choosing uses none of the generator's numbers."""
    make, plan = FAMILIES[family]
    policy, measured = make(), []
    sequential = plan(policy, 3, seeded(0))
    with fs.accelerate(policy, window=6):
        given = plan(policy, 3, seeded(0))

    def measured_window(target: fs.Target, settings: Settings) -> Any:
        measured.append(settings.slots)
        real(target, settings, windows=[2], samples=2)  # the real one, but for what its clock says
        return SimpleNamespace(window_for=lambda steps, slots: found)

    real = tuning.measure
    monkeypatch.setattr(tuning, "measure", measured_window)
    with fs.accelerate(policy, window="auto"):
        for _ in range(2):
            assert torch.equal(plan(policy, 3, seeded(0)), sequential if found is None else given)
        assert measured == [3]
        plan(policy, 2, seeded(0))
        assert measured == [3, 2]
        report = policy.foresample_report
        if found is not None:
            assert report.look_calls > 0  # engines ask again, whoever chose their window
        else:
            assert report.method == "sequential, because no window was faster"
            assert (report.count, report.calls_mean) == (2, report.steps)
