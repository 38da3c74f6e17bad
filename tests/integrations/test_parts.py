"""A pipeline's parts around accelerated calls: copied, pickled, saved, shared, in threads, and after failures."""

from __future__ import annotations

import copy
import io
import pickle
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import foresample as fs
from foresample.integrations.diffusers.again import Reevaluation
from foresample.integrations.diffusers.arguments import Recorded
from foresample.integrations.diffusers.clock import Clock
from foresample.integrations.diffusers.rounds import Rounds
from foresample.integrations.diffusers.session import Session
from foresample.integrations.diffusers.witnesses import Witnesses
from foresample.integrations.refusal import Refused

diffusers = pytest.importorskip("diffusers")
pytest.importorskip("transformers")
from tests.support.pipelines import (  # noqa: E402
    EULER,
    MULTISTEP,
    PROMPTS,
    REFUSED,
    Case,
    generators,
    pictured,
    stable_diffusion,
)

pytestmark = pytest.mark.filterwarnings("ignore")
IMG2IMG = diffusers.StableDiffusionImg2ImgPipeline


@pytest.fixture
def pipe(tmp_path: Path) -> Any:
    return stable_diffusion(tmp_path)


def draw(pipe: Any, **more: Any) -> Tensor:
    return pipe(**PROMPTS | more, generator=generators(4)).images


def picture(pipe: Any) -> Tensor:
    pipe.set_progress_bar_config(disable=True)
    return pipe(**pictured(2, strength=0.6), generator=generators(2)).images


def require_untouched(pipe: Any) -> None:
    """Nothing of ours is on the parts."""
    for name, part in pipe.components.items():
        assert not hasattr(type(part), "_foresample_plain"), name
    assert not {"step", "set_timesteps", "scale_model_input", "add_noise"} & set(vars(pipe.scheduler))
    assert type(pipe.scheduler.timesteps) is Tensor


# ------------------------------------------------------------------ copies


def saved(thing: Any) -> Any:
    file = io.BytesIO()
    torch.save(thing, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES: dict[str, Callable[[Any], Any]] = {
    "deepcopy": copy.deepcopy,
    "copy": copy.copy,
    "pickle": lambda thing: pickle.loads(pickle.dumps(thing)),
    "torch.save": saved,
}


@pytest.mark.slow
@pytest.mark.parametrize("how", COPIES)
def test_a_copy_of_an_accelerated_pipeline_is_a_plain_pipeline(how: str, pipe: Any) -> None:
    before = draw(pipe)
    with fs.accelerate(pipe, window=5):
        ours = draw(pipe)
        twin = COPIES[how](pipe)
        assert type(twin) is diffusers.StableDiffusionPipeline
        assert not {"_foresample", "foresample_report", "foresample_trace"} & set(vars(twin))
        require_untouched(twin)
        assert torch.equal(draw(twin), before)
        assert torch.equal(draw(pipe), ours)
        with fs.accelerate(twin, window=5):
            assert torch.equal(draw(twin), ours)


@pytest.mark.slow
@pytest.mark.parametrize("part", ["unet", "scheduler", "vae"])
@pytest.mark.parametrize("how", COPIES)
def test_a_part_of_an_accelerated_pipeline_is_copied_as_a_plain_part(how: str, part: str, pipe: Any) -> None:
    kind = type(getattr(pipe, part))
    with fs.accelerate(pipe, window=5):
        draw(pipe)
        twin = COPIES[how](getattr(pipe, part))
        assert type(twin) is kind
        require_untouched(pipe)
        setattr(pipe, part, twin)
    assert draw(pipe).isfinite().all()


def test_parts_copied_in_a_callback_are_plain(pipe: Any) -> None:
    """The parts have stand-ins while the pipeline draws; copies do not get them."""
    copies = []

    def callback(pipe: Any, step: int, timestep: Tensor, kwargs: dict[str, Any]) -> dict[str, Any]:
        if step == 3:
            copies.extend(
                [copy.deepcopy(pipe), pickle.loads(pickle.dumps(pipe.unet)), copy.deepcopy(pipe.unet)]
            )
        return kwargs

    with fs.accelerate(pipe, window=5):
        draw(pipe, callback_on_step_end=callback)
    assert [type(twin) for twin in copies] == [type(pipe), type(pipe.unet), type(pipe.unet)]
    assert not hasattr(type(copies[0].unet), "_foresample_plain")


@pytest.mark.parametrize("how", COPIES)
def test_a_scheduler_copied_in_a_callback_is_plain_and_works(how: str, pipe: Any) -> None:
    seen: list[Tensor] = []

    def preview(pipe: Any, step: int, timestep: Tensor, kwargs: dict[str, Any]) -> dict[str, Any]:
        twin, latents = COPIES[how](pipe.scheduler), torch.ones(1, 4, 4, 4)
        assert type(twin) is diffusers.DDPMScheduler
        assert not {"step", "set_timesteps", "scale_model_input", "add_noise"} & set(vars(twin))
        twin.set_timesteps(5)
        seen.append(twin.step(latents, twin.timesteps[2], latents, generator=generators(1)[0]).prev_sample)
        return kwargs

    draw(pipe, callback_on_step_end=preview)
    theirs = list(seen)
    seen.clear()
    with fs.accelerate(pipe, window=5):
        draw(pipe, callback_on_step_end=preview)
    torch.testing.assert_close(seen, theirs)


@pytest.mark.parametrize("scheduler", [EULER, MULTISTEP], ids=["Euler", "DPM-Solver"])
def test_a_callback_may_use_the_scheduler(scheduler: Any, tmp_path: Path) -> None:
    """It is at the callback's step, as in the untouched loop; what would change it is refused."""
    pipe = stable_diffusion(tmp_path, scheduler())
    seen: list[Any] = []

    def look(pipe: Any, step: int, timestep: Tensor, kwargs: dict[str, Any]) -> dict[str, Any]:
        scheduler, ones = pipe.scheduler, torch.ones(3, 4)
        times = [float(time) for time in scheduler.timesteps]
        twin = copy.deepcopy(scheduler)
        seen.append((step, times.index(float(timestep)), scheduler.step_index))
        if step < 11:
            seen.append(float(scheduler.scale_model_input(ones, timestep).sum()))
            seen.append(float(twin.scale_model_input(ones, timestep).sum()))
        return kwargs

    draw(pipe, callback_on_step_end=look)
    theirs = list(seen)
    seen.clear()
    with fs.accelerate(pipe, window=5):
        draw(pipe, callback_on_step_end=look)
        assert seen == theirs

        def moving(pipe: Any, step: int, timestep: Tensor, kwargs: dict[str, Any]) -> dict[str, Any]:
            pipe.scheduler.step(kwargs["latents"], timestep, kwargs["latents"])
            return kwargs

        with pytest.raises(Refused, match=r"\(moving\) changes the pipeline: its scheduler \("):
            draw(pipe, callback_on_step_end=moving)
    require_untouched(pipe)


def test_a_saved_pipeline_can_be_loaded(pipe: Any, tmp_path: Path) -> None:
    before = draw(pipe)
    with fs.accelerate(pipe, window=5):
        draw(pipe)
        pipe.save_pretrained(tmp_path / "saved")
    loaded = diffusers.DiffusionPipeline.from_pretrained(tmp_path / "saved", safety_checker=None)
    assert type(loaded) is diffusers.StableDiffusionPipeline
    loaded.set_progress_bar_config(disable=True)
    torch.testing.assert_close(draw(loaded), before, rtol=1e-4, atol=1e-4)


# ------------------------------------------------------------------ shared parts


@pytest.mark.slow
@pytest.mark.parametrize("maker", ["StableDiffusionImg2ImgPipeline", "AutoPipelineForImage2Image"])
def test_a_pipeline_made_from_an_accelerated_one(maker: str, pipe: Any) -> None:
    """The copy is plain and can be accelerated too; neither affects the other."""
    make = getattr(diffusers, maker).from_pipe
    theirs, plain = draw(pipe), picture(make(pipe))
    with fs.accelerate(pipe, window=5):
        ours, other = draw(pipe), make(pipe)
        assert type(other) is IMG2IMG
        assert type(picture(other)) is Tensor
        assert torch.equal(picture(other), plain)
        with fs.accelerate(other, window=5):
            painted = picture(other)
            assert other.foresample_report.steps == 7
            assert torch.equal(draw(pipe), ours)
            assert torch.equal(picture(other), painted)
        assert torch.equal(picture(other), plain)
    assert torch.equal(draw(pipe), theirs)
    require_untouched(other)


@pytest.mark.slow
@pytest.mark.parametrize("shared", [["scheduler"], ["unet"], ["scheduler", "unet", "text_encoder"]], ids=str)
def test_pipelines_that_share_parts(shared: list[str], pipe: Any, tmp_path: Path) -> None:
    other = stable_diffusion(tmp_path)
    for name in shared:
        setattr(other, name, getattr(pipe, name))
    theirs = draw(other)
    fs.accelerate(pipe, window=5)
    ours = draw(pipe)
    assert torch.equal(draw(other), theirs)
    fs.accelerate(other, window=5)
    for one in (pipe, other, pipe):
        assert torch.equal(draw(one), ours)
    fs.restore(pipe)  # the first to come is the first to go
    assert torch.equal(draw(pipe), theirs)
    assert torch.equal(draw(other), ours)
    fs.restore(other)
    assert torch.equal(draw(other), theirs)
    require_untouched(pipe)


# ------------------------------------------------------------------ threads


def in_a_thread(act: Callable[[], Any]) -> Any:
    """The result of a call in another thread, or its exception."""
    found: list[Any] = []

    def run() -> None:
        try:
            found.append(act())
        except Exception as error:
            found.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return found[0]


class Meanwhile:
    """A progress bar that acts once, in the middle of the loop."""

    def __init__(self, act: Callable[[], Any]) -> None:
        self.act, self.found = act, list[Any]()

    def __enter__(self) -> Meanwhile:
        return self

    def __exit__(self, *error: object) -> None:
        return None

    def update(self) -> None:
        if not self.found:
            self.found.append(in_a_thread(self.act))


def between_turns(pipe: Any, act: Callable[[], Any]) -> tuple[Tensor, Any]:
    """The images of the pipeline, and the result of an act in another thread meanwhile."""
    bar = Meanwhile(act)
    pipe.progress_bar = lambda *args, **kwargs: bar
    try:
        return draw(pipe), bar.found[0]
    finally:
        del pipe.progress_bar


def test_a_second_thread_is_refused_at_once_and_the_first_goes_on(pipe: Any) -> None:
    with fs.accelerate(pipe, window=5):
        ours = draw(pipe)
        images, error = between_turns(pipe, lambda: draw(pipe))
        assert torch.equal(images, ours)
        assert isinstance(error, Refused)
        assert "is still drawing, in another thread" in str(error)
        assert "copy.deepcopy(pipe)" in str(error)
        assert torch.equal(draw(pipe), ours)


def test_a_plain_pipeline_of_another_thread_may_share_networks(pipe: Any, tmp_path: Path) -> None:
    other = stable_diffusion(tmp_path)
    other.unet, other.text_encoder = pipe.unet, pipe.text_encoder
    theirs = draw(other)
    with fs.accelerate(pipe, window=5):
        ours = draw(pipe)
        images, found = between_turns(pipe, lambda: draw(other))
    assert torch.equal(images, ours)
    assert torch.equal(found, theirs)


@pytest.mark.parametrize("part", ["unet", "scheduler"])
def test_an_accelerated_pipeline_of_another_thread_may_not_share_parts(
    part: str, pipe: Any, tmp_path: Path
) -> None:
    other = stable_diffusion(tmp_path)
    setattr(other, part, getattr(pipe, part))
    with fs.accelerate(pipe, window=5), fs.accelerate(other, window=5):
        ours = draw(pipe)
        images, error = between_turns(pipe, lambda: draw(other))
        assert torch.equal(images, ours)
        assert isinstance(error, Refused)
        assert f"drawing with this pipeline's {part} in another thread" in str(error)
        assert torch.equal(draw(other), ours)


# ------------------------------------------------------------------ whatever ends a run


class Stop(BaseException):
    """Not an `Exception`, like KeyboardInterrupt."""


def broken_callback(error: BaseException) -> Callable[..., Any]:
    def callback(pipe: Any, step: int, timestep: Tensor, kwargs: dict[str, Any]) -> dict[str, Any]:
        if step == 4:
            raise error
        return kwargs

    return callback


@pytest.mark.parametrize("error", [KeyboardInterrupt(), Stop(), ZeroDivisionError("theirs")], ids=repr)
def test_a_callback_s_exception_comes_out_and_leaves_the_pipeline_whole(error: Any, pipe: Any) -> None:
    before = draw(pipe)
    with fs.accelerate(pipe, window=5):
        ours = draw(pipe)
        with pytest.raises(type(error)) as found:
            draw(pipe, callback_on_step_end=broken_callback(error))
        assert found.value is error
        assert not hasattr(pipe, "foresample_report")  # the last call has none
        require_untouched(pipe)
        assert torch.equal(draw(pipe), ours)
    assert torch.equal(draw(pipe), before)


@pytest.mark.slow
@pytest.mark.parametrize("error", [KeyboardInterrupt, torch.OutOfMemoryError, RuntimeError])
@pytest.mark.parametrize("calls", [1, 4, 6], ids=["watched", "first", "drafted"])
def test_a_network_s_exception_leaves_the_pipeline_whole(error: Any, calls: int, pipe: Any) -> None:
    """It is raised as it is where the untouched call would have raised it too, and as a refusal after that."""
    before, left = draw(pipe), [calls]

    def fail(module: Any, args: Any) -> None:
        left[0] -= 1
        if left[0] == 0:
            raise error("theirs")

    with fs.accelerate(pipe, window=5):
        hook = pipe.unet.register_forward_pre_hook(fail)
        with pytest.raises(error) as found:
            draw(pipe)
        hook.remove()
        refused = error is RuntimeError and calls == 6
        assert isinstance(found.value, Refused) == refused
        if refused:
            assert "the pipeline's unet cannot take a batch of drafted states (RuntimeError: theirs)" in str(
                found.value
            )
        require_untouched(pipe)
        assert draw(pipe).isfinite().all()
    assert torch.equal(draw(pipe), before)


OWN = [
    *[
        (Session, n)
        for n in ("step", "evaluate", "scale", "aligned", "_hand_out", "_settle", "_first", "close")
    ],
    (Recorded, "_argument"),
    (Reevaluation, "evaluate"),
    (Clock, "require_known_time"),
    (Rounds, "settle"),
    (Witnesses, "beside"),
]


@pytest.mark.slow
@pytest.mark.parametrize("trace", [True, False])
@pytest.mark.parametrize(("kind", "name"), OWN)
def test_an_exception_of_our_own_is_a_refusal(
    kind: type, name: str, trace: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If one of our functions fails on an unforeseen loop, one message says so, and the pipeline is intact."""
    pipe = stable_diffusion(tmp_path, diffusers.EulerAncestralDiscreteScheduler())
    before, error = draw(pipe), IndexError("list index\nout of range")

    def fail(self: Any, *args: Any, **kwargs: Any) -> Any:
        raise error

    with fs.accelerate(pipe, window=5, trace=trace):
        with monkeypatch.context() as broken:
            broken.setattr(kind, name, fail)
            with pytest.raises(Refused, match=r"at step \d+ .*foresample\.restore\(pipe\) first") as found:
                draw(pipe)
        assert found.value.__cause__ is error
        assert "\n" not in str(found.value)
        require_untouched(pipe)
        assert draw(pipe).isfinite().all()
    assert torch.equal(draw(pipe), before)


def test_an_exception_while_watching_is_a_refusal(pipe: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any) -> Any:
        raise IndexError("ours")

    monkeypatch.setattr("foresample.integrations.explain.ChainBeside.after", fail)
    with fs.accelerate(pipe, window=5), pytest.raises(Refused, match="cannot follow this pipeline's loop"):
        draw(pipe)
    require_untouched(pipe)


@pytest.mark.slow
@pytest.mark.parametrize("case", REFUSED, ids=str)
def test_a_refused_pipeline_is_left_whole(case: Case, tmp_path: Path) -> None:
    """Its own calls give the same images as before, also where it sets its networks up for its loop."""
    pipe = case.build(tmp_path)

    def theirs() -> Tensor:
        torch.manual_seed(7)
        return torch.as_tensor(pipe(**case.arguments(2), generator=generators(2))[0])

    def processors() -> list[Any]:
        return [
            getattr(m, "processor", None)
            for n in ("unet", "transformer")
            if hasattr(pipe, n)
            for m in getattr(pipe, n).modules()
        ]

    try:
        before = theirs()
    except Exception:
        pytest.skip("the untouched pipeline cannot draw either")
    known = processors()
    with pytest.raises((ValueError, Refused)), fs.accelerate(pipe, window=5):
        pipe(**case.arguments(2), generator=generators(2))
    assert all(now is then for now, then in zip(processors(), known, strict=True))
    assert torch.equal(theirs(), before)
    require_untouched(pipe)
