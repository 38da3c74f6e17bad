"""Loops that change at a few of their steps are drawn in parts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import foresample as fs
from foresample.integrations.diffusers.parts import Parts
from foresample.integrations.refusal import Refused

diffusers = pytest.importorskip("diffusers")
pytest.importorskip("transformers")
from tests.integrations.forced import walk  # noqa: E402
from tests.integrations.test_fuzz import AFTER_STEP, BEFORE_STEP, changed  # noqa: E402
from tests.support.pipelines import DPM, EXACT, PROMPTS, a_scheduler, generators, sd  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")
CHANGING = [case for case in EXACT if case.parts > 1]
ENDING = next(case for case in CHANGING if "guidance_end" in case.note)


def draw(pipe: Any, **more: Any) -> Tensor:
    return pipe(**ENDING.arguments(4) | more, generator=generators(4)).images


def test_a_loop_that_changes_is_drawn_alike_the_first_time_and_the_next(tmp_path: Path) -> None:
    """The first attempt, which finds the change, takes nothing from the generators."""
    pipe = ENDING.build(tmp_path)
    with fs.accelerate(pipe, window=4):
        one = draw(pipe)
        first = pipe.foresample_report
        two = draw(pipe)
        second = pipe.foresample_report
    assert torch.equal(one, two)
    assert first.steps == second.steps == len(second.mismatch) == 12
    assert first.calls_mean == second.calls_mean < 10
    assert second.evidence.asked_again > 0


def test_a_callback_is_called_once_for_each_step_of_a_loop_that_changes(tmp_path: Path) -> None:
    pipe, steps = ENDING.build(tmp_path), list[int]()

    def callback(pipe: Any, step: int, timestep: Tensor, kwargs: dict[str, Tensor]) -> dict[str, Tensor]:
        assert timestep == pipe.scheduler.timesteps[step]
        steps.append(step)
        return kwargs

    with fs.accelerate(pipe, window=4):
        draw(pipe, callback_on_step_end=callback)
    assert steps == list(range(12))


@pytest.mark.parametrize(
    "given", [lambda end: [end], np.float32, torch.tensor], ids=["list", "numpy", "tensor"]
)
def test_a_callback_is_called_once_for_each_step_when_a_number_changes(
    given: Callable[[float], Any], tmp_path: Path
) -> None:
    pipe, steps = ENDING.build(tmp_path), list[int]()

    def callback(pipe: Any, step: int, timestep: Tensor, kwargs: dict[str, Tensor]) -> dict[str, Tensor]:
        steps.append(step)
        return kwargs

    with fs.accelerate(pipe, window=4):
        for end in (1.0, 0.5):
            steps.clear()
            draw(pipe, control_guidance_end=given(end), callback_on_step_end=callback)
            assert steps == list(range(12))


@pytest.mark.parametrize("wanted", [["latents"], ["latents", "prompt_embeds"]], ids=str)
def test_a_call_with_the_same_numbers_is_not_rehearsed_again(wanted: list[str], tmp_path: Path) -> None:
    pipe, calls = sd()(tmp_path), list[int]()
    pipe.unet.register_forward_pre_hook(lambda *told: calls.append(1))
    told = {"callback_on_step_end": lambda *told: {}, "callback_on_step_end_tensor_inputs": wanted}
    counts = []
    with fs.accelerate(pipe, window=4, trace=False, look=False):
        for _ in range(3):
            calls.clear()
            pipe(**PROMPTS, **told, generator=generators(4))
            counts.append(len(calls))
    assert counts[0] - 1 == counts[1] == counts[2]


def test_a_multistep_solver_is_refused_where_the_loop_changes(tmp_path: Path) -> None:
    kind = "StableDiffusionControlNetPipeline"
    pipe = ENDING.build(tmp_path)
    assert type(pipe).__name__ == kind
    pipe.scheduler = a_scheduler("DPMSolverMultistepScheduler", **DPM)()
    with fs.accelerate(pipe, window=4), pytest.raises(Refused, match=r"changes at step 6.*use solver_order=1"):
        draw(pipe)


DEPENDENT = (
    "self._means = {{**vars(self).get('_means', {{}}), i: float(noise_pred.mean())}}; "
    "noise_pred = noise_pred * (1.2 + abs(self._means[i - {ago}]) if i > 5 else 1.0)"
)
"""From step 6 on, the output is scaled by what an earlier step saw."""


@pytest.mark.parametrize("ago", [3, "(i - 2)"])
def test_a_change_that_depends_on_the_states_is_refused(ago: Any, tmp_path: Path) -> None:
    """With drafted states the number would differ."""
    pipe = sd()(tmp_path)
    pipe.__class__ = changed(BEFORE_STEP, DEPENDENT.format(ago=ago), "True")
    for _ in range(2):
        with fs.accelerate(pipe, window=4), pytest.raises(Refused, match=r"restore\(pipe\) first"):
            pipe(**PROMPTS, generator=generators(4))


@pytest.mark.parametrize("when", ["i == 3", "i == 0", "i in (2, 6)"])
def test_a_change_to_a_fixed_value_is_served(when: str, tmp_path: Path) -> None:
    pipe = sd()(tmp_path)
    pipe.__class__ = changed(AFTER_STEP, "self._guidance_scale = 1.5 + i", when)
    walk(pipe, PROMPTS | {"guidance_scale": 3.0}).require_exact()


@pytest.mark.law
def test_without_the_rehearsal_another_distribution_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A broken twin: without the check, a change that depends on the states gets through."""
    monkeypatch.setattr(Parts, "require_as_rehearsed", lambda *told: None)
    pipe = sd()(tmp_path)
    pipe.__class__ = changed(BEFORE_STEP, DEPENDENT.format(ago="(i - 2)"), "True")
    with pytest.raises(AssertionError):
        walk(pipe, PROMPTS | {"guidance_scale": 3.0}).require_exact()
