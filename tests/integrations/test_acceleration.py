"""One `accelerate` and one `restore` for all kinds of objects, and their refusals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import foresample as fs
from foresample.integrations.acceleration import AccelerateKeywords
from foresample.integrations.diffusers.pipelines import AcceleratedPipeline
from foresample.integrations.policies.acceleration import AcceleratedPolicy, restore_policy

pytest.importorskip("diffusers")
pytest.importorskip("transformers")
from recipes import lasa
from tests.integrations.test_packages import gaussian
from tests.support.pipelines import stable_diffusion
from tests.support.policies import lerobot, lowdim

KNOWN = "pass a diffusers pipeline .* LeRobot's DiffusionPolicy or a policy of the diffusion_policy family"


def test_each_kind_is_known(tmp_path: Path) -> None:
    for policy in (lerobot(), lowdim()):
        assert isinstance(fs.accelerate(policy), AcceleratedPolicy)
        fs.restore(policy)
    pipe = stable_diffusion(tmp_path)
    assert isinstance(fs.accelerate(pipe), AcceleratedPipeline)
    fs.restore(pipe)


@pytest.mark.parametrize("thing", [None, object(), torch.nn.Linear(1, 1)], ids=["None", "object", "module"])
def test_the_refusal_of_an_unknown_object_names_the_known_kinds(thing: Any) -> None:
    for act in (fs.accelerate, fs.restore):
        with pytest.raises(TypeError, match=f"cannot be accelerated: {KNOWN}"):
            act(thing)


def test_a_class_or_a_target_is_refused_with_what_to_do_instead() -> None:
    target = fs.GaussianMixture.of_draft_trees(2).flow(4, 0.1)
    for thing, sentence in ((torch.nn.Linear, "is a class: pass the object"), (target, "draw from it with")):
        with pytest.raises(TypeError, match=sentence):
            fs.accelerate(thing)


def test_settings_are_refused_before_anything_is_replaced(tmp_path: Path) -> None:
    pipe = stable_diffusion(tmp_path)
    before = set(vars(pipe))
    for options, sentence in (
        ({"window": 0}, "window must be a whole number of at least 1"),
        ({"block": 0}, "block must be a whole number of at least 1"),
        ({"batch_pad": True}, "batch_pad is an option of a policy, not of a pipeline: leave batch_pad out"),
    ):
        with pytest.raises(ValueError, match=sentence):
            fs.accelerate(pipe, **options)
    assert set(vars(pipe)) == before


def test_restoring_what_was_not_accelerated_does_nothing(tmp_path: Path) -> None:
    for served in (lerobot(), lowdim(), stable_diffusion(tmp_path)):
        before = dict(vars(served))
        fs.restore(served)
        assert vars(served) == before


OTHERS: dict[str, Any] = {
    "window": 4,
    "drafter": fs.Replay(),
    "block": 2,
    "recycle": False,
    "batch_pad": True,
    "graph": True,
    "prior": "prior.safetensors",
    "warm": True,
    "executed": 3,
    "pilots": 8,
    "learn": True,
    "trace": False,
    "look": False,
}
"""A value for each option that is not its default."""
DEFAULTS: dict[str, Any] = dict.fromkeys(OTHERS) | {"window": 16, "recycle": True, "trace": True, "look": True}
DEFAULTS |= dict.fromkeys(("batch_pad", "graph", "warm", "learn"), False)
ALL = {"window", "drafter", "block", "recycle", "look"}
TAKEN = {
    "policy": set(OTHERS),
    "pipeline": ALL | {"trace"},
    "package's sampler": ALL,
}


def test_these_are_all_options() -> None:
    assert set(OTHERS) == set(AccelerateKeywords.__annotations__)


@pytest.mark.parametrize(("name", "instead"), [("warn", "warm"), ("pilot", "pilots"), ("blocks", "block")])
def test_a_misspelt_option_is_refused_by_its_name(name: str, instead: str) -> None:
    policy = lowdim()
    with pytest.raises(TypeError, match=f"^{name} is not an option of accelerate: did you mean {instead}"):
        fs.accelerate(policy, **{name: 3})  # type: ignore[arg-type]
    with pytest.raises(
        TypeError, match="slots is not an option of accelerate: the settings are window, drafter"
    ):
        fs.accelerate(policy, slots=3)  # type: ignore[call-arg]


def test_no_action_executed_is_refused() -> None:
    with pytest.raises(ValueError, match="executed must be a whole number of at least 1, not 0"):
        fs.accelerate(lowdim(), executed=0)


def test_restoring_something_that_is_no_policy_is_refused() -> None:
    with pytest.raises(TypeError, match="object is not a diffusion policy that foresample knows"):
        restore_policy(object())


@pytest.mark.slow
@pytest.mark.parametrize("window", ["auto", "tuning"])
def test_every_kind_chooses_its_window(window: Any, tmp_path: Path) -> None:
    if window == "tuning":
        window = fs.tune(fs.pretrained.load().target(steps=4), windows=[2], samples=1, slots=1)
    for served in (stable_diffusion(tmp_path), gaussian(), lowdim()):
        fs.accelerate(served, window=window)
        fs.restore(served)
        with pytest.raises(ValueError, match="whole number of at least 1, 'auto' or a Tuning, not 'quick'"):
            fs.accelerate(served, window="quick")  # type: ignore[arg-type]


@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.parametrize("kind", TAKEN)
def test_an_option_of_another_kind_is_refused_by_its_name(kind: str, name: str, tmp_path: Path) -> None:
    makes = {"policy": lowdim, "pipeline": lambda: stable_diffusion(tmp_path), "package's sampler": gaussian}
    served = makes[kind]()
    before = set(vars(served))
    if name in TAKEN[kind]:
        if name in ("graph", "prior"):  # no GPU, no such file
            with pytest.raises((ValueError, OSError), match=r"graph=True needs a policy on a CUDA|prior"):
                fs.accelerate(served, **{name: OTHERS[name]})
        else:
            fs.accelerate(served, **{name: OTHERS[name]})
            fs.restore(served)
    else:
        with pytest.raises(
            ValueError, match=rf"^{name} is an option of a .*policy.*, not of a {kind}: leave {name} out"
        ):
            fs.accelerate(served, **{name: OTHERS[name]})
    assert set(vars(served)) == before
    default = DEFAULTS[name]
    fs.accelerate(served, **{name: default})  # which says nothing
    fs.restore(served)


class Vague(lasa.DiffusionModel):
    """Passes all arguments on."""

    def conditional_sample(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        return super().conditional_sample(*args, **kwargs)


def test_a_policy_with_unknown_arguments_is_refused_with_the_known_ones() -> None:
    policy = lerobot()
    policy.diffusion.__class__ = Vague
    for act in (fs.accelerate, fs.restore):
        for served in (policy, policy.diffusion):
            with pytest.raises(
                TypeError,
                match=r"Vague\.conditional_sample\(\*args.*does not have the arguments .* \(batch_size, global_cond, "
                r"generator, noise\).* or make a target with foresample\.targets",
            ):
                act(served)
