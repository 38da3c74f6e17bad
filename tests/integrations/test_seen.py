"""Cases that `accelerate` once got wrong, or failed at inside torch: each is right or refused in one sentence.

Inpainting, ControlNet, Wan and all others that are a pipeline and a scheduler are in `test_exact`.
"""

from __future__ import annotations

import functools
import io
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import foresample as fs
from foresample.engine.tuning import Trial, Tuning
from foresample.integrations.diffusers.pipelines import AcceleratedPipeline, accelerate_pipeline
from foresample.integrations.refusal import Refused
from foresample.settings import Settings

diffusers = pytest.importorskip("diffusers")
pytest.importorskip("transformers")
from tests.integrations.forced import walk  # noqa: E402
from tests.support.pipelines import EXACT, PROMPTS, Case, generators, stable_diffusion, unconditional, unet  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")
TRIALS = [Trial(5, 24, 1.0, 1.0, 6.0, 2.0)]


@pytest.fixture
def pipe(tmp_path: Path) -> Any:
    return stable_diffusion(tmp_path)


def draw(pipe: Any, **more: Any) -> Tensor:
    told: dict[str, Any] = PROMPTS | more
    prompts = 1 if isinstance(told["prompt"], str) else len(told["prompt"])
    return pipe(**told, generator=generators(prompts * told["num_images_per_prompt"])).images


# ------------------------------------------------------------------ networks: compiled, replaced, hooked


@pytest.mark.parametrize("when", ["before", "after", "in place before", "in place after"])
def test_a_compiled_network_draws_the_same(when: str, pipe: Any) -> None:
    """torch.compile's own modules, but for the compilation; that of one is below."""
    with fs.accelerate(pipe, window=5):
        plain = draw(pipe)
    kind = type(pipe.unet)

    def compiled() -> None:
        if when.startswith("in place"):
            pipe.unet.compile(backend="eager")
        else:
            pipe.unet = torch.compile(pipe.unet, backend="eager")

    if when.endswith("before"):
        compiled()
    with torch.compiler.set_stance("force_eager"), fs.accelerate(pipe, window=5):
        if when.endswith("after"):
            draw(pipe)
            compiled()
        ours = draw(pipe)
        assert pipe.foresample_report.calls_mean < 12
    torch.testing.assert_close(ours, plain, rtol=1e-4, atol=1e-4 * float(plain.abs().max()))
    assert type(getattr(pipe.unet, "_orig_mod", pipe.unet)) is kind
    assert not hasattr(type(pipe.unet), "_foresample_handle")


@pytest.mark.slow
def test_a_network_that_is_really_compiled() -> None:
    """Compiled after: our watch must not be traced."""
    pipe = unconditional("DDPMPipeline", diffusers.DDPMScheduler(), blocks=1)

    def images() -> Any:
        return pipe(batch_size=2, num_inference_steps=4, output_type="np", generator=generators(2)).images

    with fs.accelerate(pipe, window=2):
        plain = images()
        pipe.unet = torch.compile(pipe.unet, backend="eager", dynamic=True)
        assert images() == pytest.approx(plain, abs=1e-4)


def test_a_replaced_network_is_noticed(pipe: Any) -> None:
    with fs.accelerate(pipe):
        pipe.unet = unet(cross_attention_dim=16).eval()
        with pytest.raises(RuntimeError, match=r"unet was replaced: call foresample\.accelerate\(pipe\) again"):
            draw(pipe)
        fs.accelerate(pipe)
        assert draw(pipe).isfinite().all()


def test_what_others_put_over_ours_stays_and_works(pipe: Any) -> None:
    """Hooks that come after `accelerate`, on the network and on the scheduler, are there after `restore`."""
    before, seen = draw(pipe), list[str]()
    fs.accelerate(pipe, window=5)

    def hooked(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def hook(*args: Any, **kwargs: Any) -> Any:
            seen.append(name)
            return function(*args, **kwargs)

        return hook

    pipe.unet.forward = hooked("forward", pipe.unet.forward)
    pipe.scheduler.step = hooked("step", pipe.scheduler.step)
    handle = pipe.unet.register_forward_pre_hook(lambda module, args: seen.append("pre"))
    hooks = pipe.unet.forward, pipe.scheduler.step
    draw(pipe)
    assert set(seen) == {"forward", "step", "pre"}
    fs.restore(pipe)
    assert (vars(pipe.unet)["forward"], vars(pipe.scheduler)["step"]) == hooks
    seen.clear()
    assert torch.equal(draw(pipe), before)  # through the hooks, and through ours below them
    assert [seen.count(name) for name in ("forward", "step", "pre")] == [12, 12, 12]
    handle.remove()


# ------------------------------------------------------------------ callbacks


@pytest.mark.parametrize("name", ["_guidance_scale", "_guidance_rescale"])
def test_a_callback_that_changes_guidance_is_refused(name: str, pipe: Any) -> None:
    def callback(pipe: Any, step: int, timestep: Tensor, kwargs: dict[str, Tensor]) -> dict[str, Tensor]:
        if step == 6:
            setattr(pipe, name, 1.5)
        return kwargs

    with (
        fs.accelerate(pipe, window=4),
        pytest.raises(Refused, match=rf"changed pipe\.{name}.*beyond step 6; call foresample\.restore"),
    ):
        draw(pipe, callback_on_step_end=callback)


# ------------------------------------------------------------------ what is told of a run


def test_the_bar_ends_at_its_end(pipe: Any) -> None:
    shown = io.StringIO()
    pipe.set_progress_bar_config(disable=False, file=shown)
    with fs.accelerate(pipe, window=5):
        draw(pipe)
    *_, last = shown.getvalue().replace("\n", "").split("\r")
    assert "12/12" in last
    assert shown.getvalue().count(" 0/12") == 1  # what is watched first shows no bar


def test_a_report_counts_over_images_and_prints_for_one(pipe: Any) -> None:
    with fs.accelerate(pipe, window=5):
        draw(pipe)
        report = pipe.foresample_report
        assert report.rounds == round(4 * report.calls_mean)  # a sum over images, as documented
        assert report.accepted + report.rounds == 4 * 12
        draw(pipe, prompt="a cat", negative_prompt="x", num_images_per_prompt=1)
        alone = pipe.foresample_report
    assert alone.count == 1
    assert "calls a sample" in str(alone)
    assert "nan" not in str(alone)


# ------------------------------------------------------------------ the free look


def spoiled(pipe: Any, change: Callable[..., Any]) -> None:
    """The pipeline's network with another forward: change(forward, sample, timestep, **arguments)."""
    forward = pipe.unet.forward

    @functools.wraps(forward)
    def other(sample: Tensor, timestep: Tensor, **arguments: Any) -> Any:
        return change(forward, sample, timestep, **arguments)

    pipe.unet.forward = other


def mixing(forward: Any, sample: Tensor, timestep: Tensor, **arguments: Any) -> Any:
    return forward(sample + 0.01 * sample.mean(0, keepdim=True), timestep, **arguments)


def one_timestep(forward: Any, sample: Tensor, timestep: Tensor, **arguments: Any) -> Any:
    return forward(sample, timestep.flatten()[0], **arguments)


def random(forward: Any, sample: Tensor, timestep: Tensor, **arguments: Any) -> Any:
    return forward(nn.functional.dropout(sample, 0.2), timestep, **arguments)


class Remembering:
    last = 0.0

    def __call__(self, forward: Any, sample: Tensor, timestep: Tensor, **arguments: Any) -> Any:
        shifted, self.last = sample + 0.01 * self.last, float(sample.mean()) + 1
        return forward(shifted, timestep, **arguments)


WITHOUT_LAW: dict[str, tuple[Callable[[], Any], str]] = {
    "mixes rows": (lambda: mixing, "mixes rows: evaluated with other batch-mates"),
    "one timestep for all": (lambda: one_timestep, "mixes rows: evaluated with other batch-mates"),
    "dropout": (lambda: random, "draws random numbers: evaluated twice at one state"),
    "memory": (Remembering, "keeps state between calls: evaluated twice at one state"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", WITHOUT_LAW)
def test_a_network_without_a_distribution_is_refused_unless_look_is_false(name: str, pipe: Any) -> None:
    make, said = WITHOUT_LAW[name]
    spoiled(pipe, make())
    sentence = rf"the pipeline's unet {said}, .* of its size, the mean of step 0 by .* std; .*look=False"
    with fs.accelerate(pipe, window=5):
        for _ in range(2):  # a refused configuration is not a known one
            with pytest.raises(Refused, match=sentence):
                draw(pipe)
    with fs.accelerate(pipe, window=5, look=False):
        assert draw(pipe).isfinite().all()


def test_a_side_network_is_checked_too(tmp_path: Path) -> None:
    case = next(case for case in EXACT if case.pipeline == "StableDiffusionControlNetPipeline")
    pipe = case.build(tmp_path)
    forward = pipe.controlnet.forward

    @functools.wraps(forward)
    def other(sample: Tensor, *args: Any, **kwargs: Any) -> Any:
        return forward(sample - 0.01 * sample.mean(0, keepdim=True), *args, **kwargs)

    pipe.controlnet.forward = other
    with fs.accelerate(pipe, window=5), pytest.raises(Refused, match="the pipeline's controlnet mixes rows"):
        pipe(**case.arguments(4), generator=generators(4))


KINDS = ("StableDiffusion", "StableDiffusionControlNet", "AnimateDiff", "Flux", "Wan", "CogVideoX")
WHOLE = [case for case in EXACT if case.parts == 1]  # a rehearsal would add calls
LOOKED = {case.pipeline: case for case in WHOLE if case.pipeline in [f"{kind}Pipeline" for kind in KINDS]}


@pytest.mark.slow
@pytest.mark.parametrize("case", LOOKED.values(), ids=str)
def test_the_look_costs_one_state_and_no_call(case: Case, tmp_path: Path) -> None:
    """The same calls, images and report, one state more in each; once for a configuration, one state at the end."""
    pipe, rows = case.build(tmp_path), list[int]()
    for name in ("unet", "transformer", "transformer_2", "controlnet"):
        if getattr(pipe, name, None) is not None:
            getattr(pipe, name).register_forward_pre_hook(
                lambda module, args, kwargs: rows.append(len([*args, *kwargs.values()][0])), with_kwargs=True
            )
    runs, calls = [], []
    for look in (True, False):
        with fs.accelerate(pipe, window=4, trace=False, look=look):
            for _ in range(2):
                rows.clear()
                torch.manual_seed(0)
                runs.append(pipe(**case.arguments(2), generator=generators(2))[0])
                calls.append((list(rows), pipe.foresample_report))
    first, second, *without = [rows for rows, _ in calls]
    assert without[0] == without[1]
    assert first[: len(second)] == second
    assert len(second) == len(without[0])
    assert len({report.calls_mean for _, report in calls}) == 1
    networks = len(first) - len(second)  # or one that is called twice a step
    assert [report.look_calls for _, report in calls] == [networks, 0, 0, 0]
    if getattr(pipe, "transformer_2", None) is not None:  # the two share the steps
        networks //= 2
    assert 0 < networks <= 2
    assert all(0 < states <= 2 for states in first[len(second) :])
    more = [a - b for a, b in zip(second, without[0], strict=True)]
    assert set(more[:networks]) == {0}
    assert all(0 <= states <= 2 for states in more[networks:])
    assert sum(more) > networks
    assert [report.evidence.asked_again > networks for _, report in calls] == [True, True, False, False]
    for run in runs[1:]:
        torch.testing.assert_close(run, runs[0], rtol=1e-3, atol=1e-3 * float(runs[0].abs().max()))


def test_rounding_is_no_dependence(pipe: Any) -> None:
    """A network whose answers depend on the size of its call, as libraries' do: three calls more, once.

    One is as large as the call that first answered the state (four images with guidance), two have four states.
    """

    def rounding(forward: Any, sample: Tensor, timestep: Tensor, **arguments: Any) -> Any:
        return forward(sample * (1 + 1e-3 * (len(sample) > 8)), timestep, **arguments)

    spoiled(pipe, rounding)
    rows: list[int] = []
    pipe.unet.register_forward_pre_hook(lambda module, args: rows.append(len(args[0])))
    with fs.accelerate(pipe, window=5, trace=False):
        draw(pipe)
        assert rows[2:5] == [8, 8, 8]
        first = pipe.foresample_report
        draw(pipe)
        second = pipe.foresample_report
    assert (first.look_calls, second.look_calls) == (3 + (first.calls_mean < 12), 0)
    assert "differences of the network's rounding" in first.evidence.trusted
    assert first.evidence.largest_change > 1e-4


# ------------------------------------------------------------------ window="auto"


@pytest.mark.slow
def test_a_window_is_chosen_once_for_each_configuration(pipe: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The fastest of those tried; the clock is ours here."""
    seconds = {2: 3.0, 4: 2.0, 8: 1.0, 16: 1.2, 32: 9.0}
    drawn: list[int] = []
    original = AcceleratedPipeline._draw

    def clocked(self: Any, bound: Any, window: int, callback: Any, known: Any) -> Any:
        drawn.append(window)
        result = original(self, bound, window, callback, known)
        self.pipe.foresample_report.seconds = seconds[window]
        return result

    monkeypatch.setattr(AcceleratedPipeline, "_draw", clocked)
    monkeypatch.setattr(
        "foresample.integrations.diffusers.watch.Watch._tick",
        lambda self: self.clock.append(9.0 * len(self.clock)),
    )
    with fs.accelerate(pipe, window=8):
        fixed = draw(pipe)
    drawn.clear()
    with fs.accelerate(pipe, window="auto"):
        one = draw(pipe)
        assert drawn == [2, 4, 8, 16, 32, 8]
        assert torch.equal(draw(pipe), one)
        assert drawn == [2, 4, 8, 16, 32, 8, 8]
        assert pipe.foresample_report.window == 8
        drawn.clear()
        draw(pipe, num_inference_steps=6)  # another configuration
        assert len(drawn) > 1
    assert torch.equal(one, fixed)  # trying used none of the generators' numbers


def test_where_no_window_gains_the_pipeline_draws_by_itself(pipe: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    before = draw(pipe)
    monkeypatch.setattr(
        "foresample.integrations.diffusers.watch.Watch._tick", lambda self: self.clock.append(0.0)
    )
    with fs.accelerate(pipe, window="auto"):
        assert torch.equal(draw(pipe), before)


def test_a_tuning_is_a_window(pipe: Any) -> None:
    """A tuning serves as many steps and images as it was measured with, and is refused for others."""
    tuning = Tuning(steps=12, slots=4, step_seconds=1.0, trials=TRIALS, window=5, achieved=2.0)
    alone = replace(tuning, window=None, achieved=None)
    before = draw(pipe)
    with accelerate_pipeline(pipe, Settings(window=5), trace=True) as _:
        ours = draw(pipe)
    with accelerate_pipeline(pipe, Settings(window=tuning), trace=False) as _:
        assert torch.equal(draw(pipe), ours)
        assert pipe.foresample_report.window == 5
        with pytest.raises(
            ValueError, match="12 steps with 4 samples at a time, not of 12 steps with 2: draw 4 at a time"
        ):
            draw(pipe, prompt=["a cat"], negative_prompt=["x"])
        with pytest.raises(ValueError, match="not of 6 steps with 4"):
            draw(pipe, num_inference_steps=6)
    with accelerate_pipeline(pipe, Settings(window=alone), trace=True) as _:
        assert torch.equal(draw(pipe), before)
        assert pipe.foresample_report.window == 0


@pytest.mark.law
def test_a_chosen_window_is_exact(pipe: Any) -> None:
    """False alarm 1e-4. Choosing looks at the clock and at other noise than the images'."""
    with fs.accelerate(pipe, window="auto"):
        draw(pipe)
        (known,) = pipe._foresample.known.values()
    walk(pipe, PROMPTS, window=known.windows[0] or 4).require_exact()
