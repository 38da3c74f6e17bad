"""Calls of pipelines that once failed inside torch, or with a sentence about something else: served or refused."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import foresample as fs
from foresample.chains import scheduler_chain
from foresample.core.report import Evidence
from foresample.integrations.refusal import Refused

diffusers = pytest.importorskip("diffusers")
pytest.importorskip("transformers")
from diffusers.callbacks import (  # noqa: E402
    MultiPipelineCallbacks,
    PipelineCallback,
    SDCFGCutoffCallback,
    SDXLCFGCutoffCallback,
)

from tests.integrations.forced import walk  # noqa: E402
from tests.support.pipelines import (  # noqa: E402
    EXACT,
    INPAINT_4,
    PROMPTS,
    REFUSED,
    SIZE,
    Case,
    dit,
    generators,
    prompts,
    sd,
    stable_diffusion,
    stable_diffusion_xl,
)

pytestmark = pytest.mark.filterwarnings("ignore")
ONE = SIZE | {"prompt": "a cat"}


@pytest.fixture
def pipe(tmp_path: Path) -> Any:
    return stable_diffusion(tmp_path)


def draw(pipe: Any, **more: Any) -> Tensor:
    return pipe(**PROMPTS | more, generator=generators(4)).images


# ------------------------------------------------------------------ callbacks and their tensors


@pytest.mark.parametrize(
    "wanted", [["prompt_embeds"], ["latents", "prompt_embeds", "negative_prompt_embeds"], []]
)
def test_a_callback_gets_the_tensors_it_names(wanted: list[str], pipe: Any) -> None:
    """The same as from the untouched loop, once for each step; the latents are the drawn ones."""
    seen: list[tuple[int, dict[str, Any]]] = []

    def callback(pipe: Any, step: int, timestep: Tensor, kwargs: dict[str, Any]) -> dict[str, Any]:
        seen.append((step, dict(kwargs)))
        return kwargs

    told = {"callback_on_step_end": callback, "callback_on_step_end_tensor_inputs": wanted}
    draw(pipe, **told)
    theirs, plain = list(seen), draw(pipe)
    seen.clear()
    with fs.accelerate(pipe, window=5):
        ours = draw(pipe)
        assert torch.equal(draw(pipe, **told), ours)
    assert [step for step, _ in seen] == [step for step, _ in theirs] == list(range(12))
    for (_, one), (_, two) in zip(seen, theirs, strict=True):
        assert list(one) == list(two) == wanted
        for name in set(wanted) - {"latents"}:
            assert torch.equal(one[name], two[name])
    if "latents" in wanted:
        torch.testing.assert_close(seen[-1][1]["latents"], ours)
    assert torch.equal(draw(pipe), plain)


@pytest.mark.parametrize(
    ("build", "callback"),
    [(stable_diffusion, SDCFGCutoffCallback), (stable_diffusion_xl, SDXLCFGCutoffCallback)],
)
def test_a_cutoff_of_guidance_is_refused_by_its_name(build: Any, callback: Any, tmp_path: Path) -> None:
    pipe = build(tmp_path)
    told = ONE | {"callback_on_step_end": callback(cutoff_step_ratio=0.4)}
    pipe(**told, generator=generators(1))
    sentence = (
        rf"callback_on_step_end \({callback.__name__}\) changed the prompt_embeds after step 4.*leave the"
    )
    with fs.accelerate(pipe, window=4):
        with pytest.raises(Refused, match=sentence):
            pipe(**told, generator=generators(1))
        assert pipe(**ONE, generator=generators(1)).images.isfinite().all()


def test_a_cutoff_that_never_comes_is_served(pipe: Any) -> None:
    several = MultiPipelineCallbacks([SDCFGCutoffCallback(cutoff_step_ratio=1.0)] * 2)
    with fs.accelerate(pipe, window=4):
        ours = draw(pipe)
        for callback in (several.callbacks[0], several):
            assert torch.equal(draw(pipe, callback_on_step_end=callback), ours)


def test_a_callback_that_writes_into_a_tensor_is_refused(pipe: Any) -> None:
    class Fading(PipelineCallback):
        tensor_inputs = ("prompt_embeds",)

        def callback_fn(self, pipe: Any, step: int, timestep: Tensor, kwargs: dict[str, Any]) -> dict[str, Any]:
            kwargs["prompt_embeds"] *= 0.9
            return {}

    with fs.accelerate(pipe, window=4), pytest.raises(Refused, match=r"\(Fading\) changed the prompt_embeds"):
        draw(pipe, callback_on_step_end=Fading())


@pytest.mark.parametrize(
    ("wanted", "returned"), [(["prompt_embeds"], "latents"), (["latents"], "prompt_embeds")]
)
def test_a_callback_that_returns_what_it_was_not_given_is_refused(
    wanted: Any, returned: str, pipe: Any
) -> None:
    """The pipeline's loop would take it."""
    told = {"callback_on_step_end": lambda *a: {returned: torch.zeros(4, 4, 4, 4)}}
    told["callback_on_step_end_tensor_inputs"] = wanted
    with fs.accelerate(pipe, window=4), pytest.raises(Refused, match=rf"\(<lambda>\) changed the {returned}"):
        draw(pipe, **told)


def test_tensors_that_no_callback_can_have_are_refused_as_without(pipe: Any) -> None:
    told = {"callback_on_step_end": lambda *a: {}, "callback_on_step_end_tensor_inputs": ["noise_pred"]}
    with fs.accelerate(pipe), pytest.raises(ValueError, match="has to be in"):
        draw(pipe, **told)


def test_a_tensor_that_the_scheduler_makes_is_refused(tmp_path: Path) -> None:
    """There are no denoised estimates of drafted states."""
    case = next(case for case in EXACT if case.pipeline == "LatentConsistencyModelPipeline")
    pipe = case.build(tmp_path)
    told = {"callback_on_step_end": lambda *told: {}, "callback_on_step_end_tensor_inputs": ["denoised"]}
    with fs.accelerate(pipe), pytest.raises(Refused, match="leave denoised out of callback_on_step_end_tensor"):
        pipe(**case.arguments(2), **told)


@pytest.mark.parametrize(
    ("kind", "sentence"),
    [("StableDiffusionPipeline", "use callback_on_step_end"), ("IFPipeline", "leave it out")],
)
def test_another_callback_is_refused_with_what_the_pipeline_has(
    kind: str, sentence: str, tmp_path: Path
) -> None:
    case = next(case for case in EXACT if case.pipeline == kind)
    pipe = case.build(tmp_path)
    with fs.accelerate(pipe), pytest.raises(ValueError, match=f"`callback` is not supported .*: {sentence}"):
        pipe(**case.arguments(2), callback=print)


# ------------------------------------------------------------------ a subclass that does not name its arguments


class Wrapped(diffusers.StableDiffusionPipeline):  # type: ignore[name-defined]
    """A user's own pipeline, which hands on its arguments."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return super().__call__(*args, **kwargs)


@pytest.mark.parametrize("scheduler", ["DDPMScheduler", "DDIMScheduler"])
def test_a_subclass_that_hands_on_its_arguments_draws_the_same(scheduler: str, tmp_path: Path) -> None:
    made = getattr(diffusers, scheduler)(clip_sample=False, steps_offset=1)
    eta = {"eta": 1.0} if scheduler == "DDIMScheduler" else {}
    results = []
    for kind in (diffusers.StableDiffusionPipeline, Wrapped):
        pipe, steps = stable_diffusion(tmp_path, made, kind), list[int]()

        class Noting(PipelineCallback):
            tensor_inputs = ("latents", "prompt_embeds")

            def callback_fn(self, pipe: Any, step: int, timestep: Any, kwargs: Any, steps: Any = steps) -> Any:
                assert type(kwargs["latents"]) is Tensor
                steps.append(step)
                return {}

        with fs.accelerate(pipe, window=5):
            results += [
                draw(pipe, **eta),
                pipe(**PROMPTS | eta, generator=[0, 1, 2, 3]).images,
                draw(pipe, **eta, callback_on_step_end=Noting()),
            ]
        assert steps == list(range(12))
    assert all(torch.equal(one, results[0]) for one in results)


def test_arguments_that_have_no_name_are_refused(tmp_path: Path) -> None:
    pipe = stable_diffusion(tmp_path, kind=Wrapped)
    with fs.accelerate(pipe, window=5):
        assert pipe(["a cat"], **SIZE).images.isfinite().all()
        embeds = {"prompt_embeds": torch.zeros(1, 5, 16), "negative_prompt_embeds": torch.zeros(1, 5, 16)}
        assert pipe(None, **SIZE, **embeds).images.isfinite().all()
        with pytest.raises(TypeError, match=r"Wrapped takes \*args, .* pass all but the prompt by name"):
            pipe("a cat", 8, 8, num_inference_steps=4, output_type="latent")


# ------------------------------------------------------------------ window="auto"


@pytest.mark.slow
def test_where_no_window_gains_the_callback_is_called_by_the_pipeline(
    pipe: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As it was passed: it may change the latents then. The report is that of the call."""
    monkeypatch.setattr(
        "foresample.integrations.diffusers.watch.Watch._tick", lambda self: self.clock.append(0.0)
    )

    def callback(pipe: Any, step: int, timestep: Tensor, kwargs: dict[str, Any]) -> dict[str, Any]:
        return {"latents": 0.5 * kwargs["latents"]}

    theirs = draw(pipe, callback_on_step_end=callback)
    with fs.accelerate(pipe, window="auto"):
        for _ in range(2):
            assert torch.equal(draw(pipe, callback_on_step_end=callback), theirs)
            report = pipe.foresample_report
            assert (report.window, report.count, report.steps) == (0, 4, 12)
            assert (report.calls_mean, report.speedup) == (12.0, 1.0)
            assert "sequential, because no window was faster" in str(report)
        pipe(**ONE, num_images_per_prompt=1, generator=generators(1))
        assert pipe.foresample_report.count == 1


@pytest.mark.slow
@pytest.mark.parametrize("case", [case for case in EXACT if case.draws == 400], ids=str)
def test_every_pipeline_has_a_sequential_report(
    case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Schedulers take the latents in other places. The pipeline's own loop needs no evidence, and claims none."""
    monkeypatch.setattr(
        "foresample.integrations.diffusers.watch.Watch._tick", lambda self: self.clock.append(0.0)
    )
    monkeypatch.setattr("foresample.integrations.diffusers.pipelines.WINDOWS", (2,))
    pipe = case.build(tmp_path)
    with fs.accelerate(pipe, window="auto"):
        pipe(**case.arguments(2), generator=generators(2))
        report = pipe.foresample_report
    assert (report.window, report.count) == (0, 2)
    assert report.evidence == Evidence()


@pytest.mark.parametrize("works", [True, False])
def test_a_failed_call_leaves_no_report_of_a_trial(
    works: bool, pipe: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "foresample.integrations.diffusers.watch.Watch._tick", lambda self: self.clock.append(0.0)
    )

    def callback(*told: Any) -> dict[str, Any]:
        if not works:
            raise ZeroDivisionError
        return {}

    with fs.accelerate(pipe, window="auto"):
        with nullcontext() if works else pytest.raises(ZeroDivisionError):
            draw(pipe, callback_on_step_end=callback)
        assert hasattr(pipe, "foresample_report") == works


def test_the_sequential_report_counts_images_that_are_kept_twice_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "foresample.integrations.diffusers.watch.Watch._tick", lambda self: self.clock.append(0.0)
    )
    pipe = dit()
    with fs.accelerate(pipe, window="auto"):
        pipe(class_labels=[1, 2], num_inference_steps=4, output_type="pt", generator=generators(2))
        assert (pipe.foresample_report.count, pipe.foresample_report.steps) == (2, 4)


# ------------------------------------------------------------------ arguments and schedulers by their names


@pytest.mark.parametrize(
    ("name", "argument"),
    [
        ("StableDiffusionSAGPipeline", "sag_scale=0.0"),
        ("StableDiffusionPAGPipeline", "pag_adaptive_scale=0.0"),
    ],
)
def test_a_refusal_names_the_argument_to_drop(name: str, argument: str, tmp_path: Path) -> None:
    """And without it the pipeline draws."""
    case = next(case for case in REFUSED if case.pipeline == name)
    pipe, told = case.build(tmp_path), case.arguments(2)
    key, value = argument.split("=")
    with fs.accelerate(pipe, window=4):
        with pytest.raises(Refused, match=rf"perhaps because of {key}: {argument} turns it off"):
            pipe(**told, generator=generators(2))
        off = None if value == "None" else float(value)
        pipe(**told | {key: off}, generator=generators(2))
        assert pipe.foresample_report.calls_mean < 12


def test_an_empty_mask_is_refused_as_such(tmp_path: Path) -> None:
    case = next(case for case in EXACT if case.pipeline == INPAINT_4)
    pipe, told = case.build(tmp_path), case.arguments(2)
    with fs.accelerate(pipe), pytest.raises(Refused, match="leaves nothing to be painted; pass a mask_image"):
        pipe(**told | {"mask_image": torch.zeros_like(told["mask_image"])}, generator=generators(2))


def test_several_views_are_refused_as_such(tmp_path: Path) -> None:
    pipe = sd("StableDiffusionPanoramaPipeline")(tmp_path)
    told = prompts(1, height=512, width=576) | {"num_inference_steps": 2}
    with (
        fs.accelerate(pipe),
        pytest.raises(Refused, match="stepped its scheduler 2 times at step 0, of several views"),
    ):
        pipe(**told, generator=generators(1))


def test_a_skipped_step_is_named(pipe: Any) -> None:
    class Impatient(type(pipe)):  # type: ignore[misc]
        @property
        def interrupt(self) -> bool:
            return self.scheduler.step is not None and getattr(self, "_late", False)

    def late(module: Any, args: Any) -> None:
        calls.append(1)
        pipe._late = len(calls) > 5

    calls: list[int] = []
    pipe.__class__ = Impatient
    pipe.unet.register_forward_pre_hook(late)
    with (
        fs.accelerate(pipe, window=2, trace=False),
        pytest.raises(Refused, match=r"skipped step 6 of its loop \(pipe\.interrupt was set\?\)"),
    ):
        draw(pipe)


@pytest.mark.parametrize(
    ("scheduler", "sentence"),
    [
        (
            lambda: diffusers.DPMSolverSinglestepScheduler(),
            r"DPMSolverSinglestepScheduler\(algorithm_type='dpmsolver\+\+'\) is not supported; use "
            r"algorithm_type='sde-dpmsolver\+\+' and solver_order=1",
        ),
        (
            lambda: diffusers.EDMDPMSolverMultistepScheduler(),
            r"^EDMDPMSolverMultistepScheduler\(algorithm_type=",
        ),
        (lambda: diffusers.DPMSolverMultistepScheduler(), r"^DPMSolverMultistepScheduler\(algorithm_type="),
        (lambda: diffusers.DDIMParallelScheduler(), "^DDIMParallelScheduler with eta=0"),
        (
            lambda: diffusers.DDPMParallelScheduler(variance_type="learned"),
            r"^DDPMParallelScheduler\(variance_type='learned'\)",
        ),
    ],
)
def test_a_scheduler_is_refused_under_its_own_name(scheduler: Any, sentence: str) -> None:
    made = scheduler()
    made.set_timesteps(4)
    with pytest.raises(ValueError, match=sentence):
        scheduler_chain(made)


def test_the_remedy_for_a_singlestep_solver_is_served(tmp_path: Path) -> None:
    made = diffusers.DPMSolverSinglestepScheduler(algorithm_type="sde-dpmsolver++", solver_order=1)
    pipe = stable_diffusion(tmp_path, made)
    with fs.accelerate(pipe, window=4):
        assert draw(pipe).isfinite().all()


# ------------------------------------------------------------------ generators of one seed

ALIKE = (
    "DDPMPipeline",
    "StableDiffusionPipeline",
    "StableDiffusion3Pipeline",
    "WanPipeline",
    "DiTPipeline",
    "IFPipeline",
)


@pytest.mark.parametrize(
    "case", {case.pipeline: case for case in EXACT if case.pipeline in ALIKE}.values(), ids=str
)
def test_generators_of_one_seed_are_served(case: Case, tmp_path: Path) -> None:
    """Images that begin alike are no sign of a pipeline that keeps each image twice."""
    pipe = case.build(tmp_path)
    with fs.accelerate(pipe, window=4):
        for seeds in ([3, 3], [3, 4, 3, 4]):
            told = case.arguments(len(seeds))
            images = pipe(**told, generator=[torch.Generator().manual_seed(seed) for seed in seeds])[0]
            assert len(images) == len(seeds)
            assert pipe.foresample_report.count == len(seeds)


# ------------------------------------------------------------------ an ensemble of two networks


def test_a_base_and_its_refiner_share_the_steps(tmp_path: Path) -> None:
    """SDXL's ensemble: `denoising_end` of the base is `denoising_start` of the refiner, which `from_pipe` makes."""
    base = stable_diffusion_xl(tmp_path)
    refiner = diffusers.StableDiffusionXLImg2ImgPipeline.from_pipe(base, unet=copy.deepcopy(base.unet))
    with torch.no_grad():
        refiner.unet.conv_in.weight.mul_(1.1)
    told = SIZE | {"prompt": ["a cat"] * 4, "num_inference_steps": 18}
    drawn = prompts(4) | {"prompt": ["a cat"] * 4, "num_images_per_prompt": 1, "num_inference_steps": 18}
    with fs.accelerate(base, window=5), fs.accelerate(refiner, window=5):
        latents = base(**told, denoising_end=0.6, generator=generators(4)).images
        first = base.foresample_report
        again = drawn | {"image": latents, "denoising_start": 0.6, "generator": generators(4)}
        images = refiner(**again).images
        second = refiner.foresample_report
    assert first.steps + second.steps == 18
    assert first.calls_mean + second.calls_mean < 15
    assert images.shape == latents.shape
    run = walk(refiner, drawn | {"image": latents, "denoising_start": 0.6})
    run.require_exact()
