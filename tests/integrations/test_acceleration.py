"""One `accelerate` and one `restore`: each finds the right way, or says what it knows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import foresample as fs
from foresample.integrations.pipelines import AcceleratedPipeline
from foresample.integrations.policies import AcceleratedPolicy

pytest.importorskip("diffusers")
pytest.importorskip("transformers")
from tests.pipelines import stable_diffusion
from tests.policies import lerobot, lowdim

KNOWN = "pass a diffusers pipeline .* LeRobot's DiffusionPolicy or a policy of the diffusion_policy family"


def test_each_kind_is_known(tmp_path: Path) -> None:
    for policy in (lerobot(), lowdim()):
        assert isinstance(fs.accelerate(policy), AcceleratedPolicy)
        fs.restore(policy)
    pipe = stable_diffusion(tmp_path)
    assert isinstance(fs.accelerate(pipe), AcceleratedPipeline)
    fs.restore(pipe)


@pytest.mark.parametrize("thing", [None, object(), torch.nn.Linear(1, 1)], ids=["None", "object", "module"])
def test_what_is_unknown_is_told_what_is_known(thing: Any) -> None:
    for act in (fs.accelerate, fs.restore):
        with pytest.raises(TypeError, match=f"is nothing foresample knows how to accelerate: {KNOWN}"):
            act(thing)


def test_settings_are_refused_before_anything_is_replaced(tmp_path: Path) -> None:
    pipe = stable_diffusion(tmp_path)
    before = set(vars(pipe))
    for options, sentence in (
        ({"window": 0}, "window must be a whole number of at least 1"),
        ({"block": 0}, "block must be a whole number of at least 1"),
        ({"batch_pad": True}, "batch_pad is a matter of policies: leave it out for a pipeline"),
    ):
        with pytest.raises(ValueError, match=sentence):
            fs.accelerate(pipe, **options)
    assert set(vars(pipe)) == before


def test_restoring_what_was_not_accelerated_does_nothing(tmp_path: Path) -> None:
    for served in (lerobot(), lowdim(), stable_diffusion(tmp_path)):
        before = dict(vars(served))
        fs.restore(served)
        assert vars(served) == before
