"""Policies that only look like a known loop: each is refused, with the step and by how much.

The loops are the real methods' sources with a line put in.
"""

from __future__ import annotations

import inspect
import random
import textwrap
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import foresample as fs

pytest.importorskip("diffusers")
from tests.policies import FAMILIES, seeded

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
    r"differs by \d\S* from the scheduler's chain; plan with the policy as it is \(foresample\.restore\), make a target "
    r"with foresample\.targets, or give trace=False"
)
DEVIATING: dict[str, tuple[tuple[str, ...], str]] = {
    "guidance": ((STEP, "output = 1.5 * output"), rf"at step 1 its state {DIFFERS}"),
    "guidance by a second call": (
        (STEP, "output = 1.5 * output - 0.5 * UNCONDITIONAL"),
        "at step 1 it shows its network other conditions than it was given",
    ),
    "inpainting": ((CALL, "@[:, 0] = 0.3"), rf"at step 0 its state {DIFFERS}"),
    "another normalisation": ((CALL, "@ = 1.02 * @"), rf"at step 0 its state {DIFFERS}"),
    "guidance at late steps": ((STEP, "output = output + 0.1", "i >= 15"), rf"at step 16 its state {DIFFERS}"),
    "a blend at one late step": ((CALL, "@ = 0.9 * @ + 0.1", "i == 17"), rf"at step 17 its state {DIFFERS}"),
    "actions clipped at the end": ((END, "@ = @.clamp(-0.3, 0.3)"), rf"what it returns {DIFFERS}"),
    "another scale at the end": ((END, "@ = 2 * @"), rf"what it returns {DIFFERS}"),
    "other conditions": ((CALL, "global_cond = global_cond + 0.01"), "at step 0 it shows its network other"),
    "other conditions later": ((CALL, "global_cond = 0 * global_cond", "i == 9"), "at step 9 it shows"),
    "an early end": ((CALL, "break", "i == 12"), "it calls its network 12 times instead of 20"),
    "a skipped step": ((CALL, "continue", "i == 12"), "at step 12 it is at another timestep"),
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
def test_it_takes_four_network_calls_and_the_look_two_small_ones_once_for_each_kind(family: str) -> None:
    """Two, because these chains clip: at the first step their predictions are ±1 (`core.look`)."""
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
    looked, traced, both = rows(trace=False), rows(look=False), rows()
    for which, count in enumerate((2, 2, 3, 2)):
        first = which in (0, 2)
        watched = ([count] * 3 + [3]) * first  # then one state of each, in one call
        assert looked[which] == bare[which][:1] + [4] * 2 * first + bare[which][1:]
        assert traced[which][: len(watched)] == watched
        drawn = traced[which][len(watched) :]
        assert both[which] == watched + drawn[:1] + [4] * 2 * first + drawn[1:]
        if family == "lerobot":  # the other draws from the start that its own loop drew
            assert drawn == bare[which]


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
def test_a_network_that_mixes_rows_is_refused_unless_nobody_looks(family: str, window: Any) -> None:
    make, plan = FAMILIES[family]
    policy = make()
    network = network_of(policy)
    forward = network.forward
    network.forward = lambda sample, *args, **kwargs: forward(sample, *args, **kwargs) + 0.1 * sample.mean(0)
    with fs.accelerate(policy, window=window, trace=False):
        for _ in range(2):  # what was refused is not known
            with pytest.raises(ValueError, match="the target mixes rows: with other batch-mates"):
                plan(policy, 3, seeded(0))
    with fs.accelerate(policy, window=window, trace=False, look=False):
        assert plan(policy, 3, seeded(0)).isfinite().all()


@families
def test_a_look_leaves_no_mark_on_what_pilots_and_warm_starts_remember(family: str) -> None:
    """The same plans, priors and calls with a look and without; a planner made anew does not look again."""
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
    assert looks == [2, 0, 0, 0] + [0] * 4
    assert calls[:4] == calls[4:]
    assert all(torch.equal(a, b) for a, b in zip(drawn[:4], drawn[4:], strict=True))


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

    def tune(target: fs.Target, **how: Any) -> Any:
        measured.append(how["slots"])
        fs.tune(target, windows=[2], samples=2, **how)  # the real one, but for what its clock says
        return SimpleNamespace(window=found)

    monkeypatch.setattr("foresample.integrations.plans.tune", tune)
    with fs.accelerate(policy, window="auto"):
        for _ in range(2):
            assert torch.equal(plan(policy, 3, seeded(0)), sequential if found is None else given)
        assert measured == [3]
        plan(policy, 2, seeded(0))
        assert measured == [3, 2]
        if found is not None:
            assert policy.foresample_report.look_calls == 0  # tuning has looked
