"""`foresample.accelerate` on real pipelines with random weights."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import foresample as fs
from foresample import pretrained
from foresample.integrations.diffusers.calls import stream_seeds
from foresample.targets import from_scheduler

diffusers = pytest.importorskip("diffusers")
pytest.importorskip("transformers")
from tests.support import pipelines  # noqa: E402
from tests.support.pipelines import DDIM, PIPELINES, PROMPTS, SIZE, embeddings, generators  # noqa: E402

pytestmark = pytest.mark.filterwarnings(
    "ignore::FutureWarning", "ignore::DeprecationWarning", "ignore::UserWarning"
)


@pytest.mark.parametrize("name", PIPELINES)
def test_same_type_fewer_calls_and_no_trace(name: str, tmp_path: Path) -> None:
    build, arguments = PIPELINES[name]
    pipe = build(tmp_path)

    def draw() -> Any:
        torch.manual_seed(7)  # some pipelines do not pass their generator on to the scheduler
        return pipe(**arguments, generator=generators(4))

    before = draw()
    kind, attributes = type(pipe), set(vars(pipe))
    with fs.accelerate(pipe, window=5):
        ours, again = draw(), draw()
        report = pipe.foresample_report
    assert type(ours) is type(before)
    assert ours.images.shape == before.images.shape
    assert ours.images.dtype == before.images.dtype
    assert torch.equal(ours.images, again.images)
    assert report.calls_mean < 0.85 * 12
    assert report.steps == 12
    assert type(pipe) is kind
    assert set(vars(pipe)) == attributes
    assert "forward" not in vars(pipe.unet if hasattr(pipe, "unet") else pipe.transformer)
    assert not {"step", "set_timesteps", "scale_model_input"} & set(vars(pipe.scheduler))
    assert torch.equal(draw().images, before.images)


@pytest.mark.slow
@pytest.mark.parametrize("name", PIPELINES)
def test_each_image_has_its_own_stream_and_conditioning(name: str, tmp_path: Path) -> None:
    """Dropping images from the batch leaves the others as they were, up to the network's rounding."""
    build, arguments = PIPELINES[name]
    pipe = build(tmp_path)
    single = {k: v[:1] if isinstance(v, list) else v for k, v in arguments.items()} | {
        "num_images_per_prompt": 1
    }
    single = {k: v[:1] if isinstance(v, Tensor) else v for k, v in single.items()}
    with fs.accelerate(pipe, window=5):
        everyone = pipe(**arguments, generator=generators(4)).images
        alone = pipe(**single, generator=generators(1)).images
    torch.testing.assert_close(alone[0], everyone[0], rtol=1e-3, atol=1e-3 * float(everyone[0].abs().max()))


def test_guided_states_get_their_own_prompt_and_timestep(tmp_path: Path) -> None:
    """The pipeline's samples are those of the same chain around guidance written out by hand."""
    pipe = pipelines.stable_diffusion(tmp_path)
    with fs.accelerate(pipe, window=5):
        theirs = pipe(**PROMPTS, guidance_scale=4.0, generator=generators(4)).images
        report = pipe.foresample_report

    positive, unconditional = pipe.encode_prompt(["a cat", "dog"], "cpu", 2, True, negative_prompt=["x", "y z"])
    scheduler = copy.deepcopy(pipe.scheduler)
    scheduler.set_timesteps(12)
    own = generators(4)
    start = torch.cat([torch.randn(1, 4, 4, 4, generator=g) for g in own])

    def guided(x: Tensor, time: Tensor, row: Tensor) -> Tensor:
        text = pipe.unet(x, time, encoder_hidden_states=positive[row]).sample
        free = pipe.unet(x, time, encoder_hidden_states=unconditional[row]).sample
        return free + 4.0 * (text - free)

    target = replace(from_scheduler(scheduler, guided, (4, 4, 4)), start_states=start)
    run = fs.sample(target, seeds=stream_seeds(own)(4), window=5)
    assert run.report.calls_mean == report.calls_mean
    torch.testing.assert_close(theirs, run.samples, rtol=1e-3, atol=1e-3 * float(theirs.abs().max()))


def test_a_learned_variance_without_its_channels_is_refused(tmp_path: Path) -> None:
    pipe = pipelines.stable_diffusion(tmp_path, diffusers.DDPMScheduler(variance_type="learned_range"))
    fs.accelerate(pipe, trace=False)  # diffusers itself fails there
    with pytest.raises(RuntimeError, match="use a scheduler with fixed variance"):
        pipe(**PROMPTS, generator=generators(4))


@pytest.mark.parametrize("drafter", [fs.Frozen("head"), fs.Frozen("nearest")], ids=str)
def test_other_drafters_and_blocks(drafter: fs.Drafter, tmp_path: Path) -> None:
    pipe = pipelines.stable_diffusion(tmp_path)
    with fs.accelerate(pipe, window=5, drafter=drafter, block=1, recycle=False):
        assert pipe(**PROMPTS, generator=generators(4)).images.isfinite().all()


def test_seeds_may_be_given_instead_of_generators(tmp_path: Path) -> None:
    pipe = pipelines.stable_diffusion(tmp_path)
    with fs.accelerate(pipe, window=5):
        one = pipe(**PROMPTS, generator=[0, 1, 2, 3]).images
        two = pipe(**PROMPTS, generator=generators(4)).images
        three = pipe(**PROMPTS, generator=3).images
        four = pipe(**PROMPTS, generator=seeded(3)[0]).images
        five = pipe(**PROMPTS, generator=torch.arange(4)).images
    assert torch.equal(one, two)
    assert torch.equal(one, five)
    assert torch.equal(three, four)


@pytest.mark.parametrize("wrong", [None, "3", 1.5], ids=repr)
def test_a_list_of_generators_must_be_whole(wrong: Any, tmp_path: Path) -> None:
    pipe = pipelines.stable_diffusion(tmp_path)
    with (
        fs.accelerate(pipe),
        pytest.raises(TypeError, match=f"generator contains {wrong!r}: give each image a"),
    ):
        pipe(**PROMPTS, generator=[wrong] * 4)


def seeded(*seeds: int) -> list[torch.Generator]:
    return [torch.Generator().manual_seed(seed) for seed in seeds]


def both(pipe: Any, draw: Callable[[], Tensor]) -> list[Tensor]:
    """The images of the untouched pipeline and those of the accelerated one."""
    theirs = draw()
    with fs.accelerate(pipe, window=5):
        return [theirs, draw()]


@pytest.mark.parametrize("guidance", [1.0, 4.0])
def test_generators_of_one_seed_draw_one_image(guidance: float, tmp_path: Path) -> None:
    """Equal images are not taken for one image that is kept twice for guidance."""
    pipe = pipelines.stable_diffusion(tmp_path)
    told = SIZE | {"prompt": "a cat", "num_images_per_prompt": 4, "guidance_scale": guidance}
    for images in both(pipe, lambda: pipe(**told, generator=seeded(3, 4, 3, 4)).images):
        assert torch.equal(images[:2], images[2:])
        assert not torch.equal(images[0], images[1])


def test_generators_of_one_seed_draw_two_where_the_noise_is_not_theirs() -> None:
    """Flux does not pass them on to its scheduler: only the first latents are alike."""
    pipe = pipelines.flux()
    words = {name: value.repeat(2, *[1] * (value.ndim - 1)) for name, value in embeddings(1).items()}
    for images in both(pipe, lambda: pipe(**SIZE, **words, generator=seeded(3, 3)).images):
        assert not torch.equal(images[0], images[1])


@pytest.mark.parametrize("listed", [False, True])
def test_one_generator_draws_other_noise_each_time(listed: bool, tmp_path: Path) -> None:
    """For the next image, and in the next call, also where the first latents are given."""
    pipe, generator = pipelines.stable_diffusion(tmp_path), torch.Generator().manual_seed(3)
    told = SIZE | {"prompt": "a cat", "num_images_per_prompt": 2, "latents": torch.zeros(2, 4, 4, 4)}
    given = [generator, generator] if listed else generator
    for images in both(pipe, lambda: torch.cat([pipe(**told, generator=given).images for _ in range(2)])):
        assert len(images.unique(dim=0)) == 4


def test_callbacks_come_in_step_order_with_all_images(tmp_path: Path) -> None:
    pipe, seen = pipelines.stable_diffusion(tmp_path), []

    def callback(pipe: Any, step: int, timestep: Tensor, kwargs: dict[str, Tensor]) -> dict[str, Tensor]:
        seen.append((step, int(timestep), kwargs["latents"].clone()))
        return kwargs

    with fs.accelerate(pipe, window=5):
        last = pipe(**PROMPTS, generator=generators(4), callback_on_step_end=callback).images
    assert [step for step, _, _ in seen] == list(range(12))
    assert [t for _, t, _ in seen] == pipe.scheduler.timesteps.tolist()
    torch.testing.assert_close(seen[-1][2], last)


def test_a_callback_that_changes_the_latents_is_refused(tmp_path: Path) -> None:
    pipe = pipelines.stable_diffusion(tmp_path)
    with fs.accelerate(pipe, window=5), pytest.raises(RuntimeError, match="changed the latents"):
        pipe(**PROMPTS, callback_on_step_end=lambda p, i, t, k: {"latents": k["latents"] * 2})


def test_an_interrupt_is_refused_with_the_remedy(tmp_path: Path) -> None:
    pipe = pipelines.stable_diffusion(tmp_path)

    def stop(pipe: Any, step: int, timestep: Tensor, kwargs: dict[str, Tensor]) -> dict[str, Tensor]:
        pipe._interrupt = step >= 3
        return kwargs

    with fs.accelerate(pipe, window=2), pytest.raises(RuntimeError, match=r"foresample.restore\(pipe\) first"):
        pipe(**PROMPTS, callback_on_step_end=stop)


def test_a_callback_of_a_bfloat16_pipeline_can_decode_its_latents(tmp_path: Path) -> None:
    """The chain is float32, but the callback gets latents of the loop's own dtype."""
    pipe, previews = pipelines.stable_diffusion(tmp_path).to(dtype=torch.bfloat16), []

    def preview(pipe: Any, step: int, timestep: Tensor, kwargs: dict[str, Tensor]) -> dict[str, Tensor]:
        previews.append(pipe.vae.decode(kwargs["latents"] / pipe.vae.config.scaling_factor).sample)
        return kwargs

    with fs.accelerate(pipe, window=5):
        images = pipe(**PROMPTS, generator=generators(4), callback_on_step_end=preview).images
    assert images.dtype == torch.bfloat16
    assert len(previews) == 12


def test_image_to_image_starts_late(tmp_path: Path) -> None:
    pipe = pipelines.stable_diffusion(tmp_path, kind=diffusers.StableDiffusionImg2ImgPipeline)
    picture = torch.rand(1, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    arguments = {
        "prompt": "a cat",
        "image": picture,
        "strength": 0.6,
        "num_inference_steps": 20,
        "output_type": "latent",
    }
    with fs.accelerate(pipe, window=5):
        images = pipe(**arguments, generator=generators(1)).images
        assert pipe.foresample_report.steps == 12
        assert pipe.foresample_report.calls_mean < 12
    assert images.shape == pipe(**arguments, generator=generators(1)).images.shape


@pytest.mark.parametrize("strength", [0.1, 0.02])
def test_image_to_image_may_start_at_a_repeated_timestep(strength: float, tmp_path: Path) -> None:
    """Rounded timesteps repeat near the data; a start may have the timestep of its predecessor."""
    scheduler = diffusers.DPMSolverMultistepScheduler(
        algorithm_type="sde-dpmsolver++",
        use_exponential_sigmas=True,
        beta_schedule="scaled_linear",
        beta_start=0.00085,
        beta_end=0.012,
    )
    pipe = pipelines.stable_diffusion(tmp_path, scheduler, diffusers.StableDiffusionImg2ImgPipeline)
    told = pipelines.pictured(2, strength=strength, num_inference_steps=100)
    with fs.accelerate(pipe, window=5):
        pipe(**told, generator=generators(2))
        steps = pipe.foresample_report.steps
    assert steps == 100 * strength
    assert scheduler.timesteps[-steps] == scheduler.timesteps[-steps - 1]


class Bad:
    """A drafter that needs no warm-up; all its drafts are rejected."""

    def begin(self, rows: int, window: int, like: Tensor) -> dict[str, Tensor]:
        return {"rows": torch.zeros(rows)}

    def reach(self, memory: dict[str, Tensor], window: int) -> Tensor:
        return torch.full((len(memory["rows"]),), window)

    def guess(self, memory: dict[str, Tensor], x: Tensor, *more: Any) -> Tensor:
        return torch.full_like(x, 50.0)

    def learn(self, memory: dict[str, Tensor], *more: Any) -> dict[str, Tensor]:
        return memory


@pytest.mark.parametrize("kind", ["StableDiffusionPipeline", "StableDiffusionControlNetPipeline"])
def test_a_drafter_without_a_warm_up_counts_every_call_and_fits_into_the_loop(
    kind: str, tmp_path: Path
) -> None:
    case = next(case for case in pipelines.EXACT if case.pipeline == kind and not case.note)
    pipe, calls = case.build(tmp_path), []
    pipe.unet.register_forward_pre_hook(lambda *told: calls.append(1))
    with fs.accelerate(pipe, window=4, drafter=Bad(), trace=False, look=False):
        pipe(**case.arguments(1), generator=generators(1))
        assert pipe.foresample_report.calls_mean == len(calls) <= 12
        assert pipe.foresample_report.rounds == len(calls)


def test_a_prior_that_would_not_be_used_is_refused(tmp_path: Path) -> None:
    pipe, path = pipelines.stable_diffusion(tmp_path), torch.zeros(1, 12, 4, 4, 4)
    with pytest.raises(ValueError, match="a prior would never be used: leave the prior out"):
        fs.accelerate(pipe, drafter=fs.Replay(prior=fs.Prior(path, path)))


def test_what_others_put_on_the_instances_is_put_back(tmp_path: Path) -> None:
    """An offloading hook sits on the network's instance just as we do."""
    pipe = pipelines.stable_diffusion(tmp_path)
    forward, step, seen = pipe.unet.forward, pipe.scheduler.step, []

    def hook(*args: Any, **kwargs: Any) -> Any:
        seen.append(1)
        return forward(*args, **kwargs)

    pipe.unet.forward, pipe.scheduler.step = functools.wraps(forward)(hook), step
    own = pipe.unet.forward
    with fs.accelerate(pipe, window=5):
        pipe(**PROMPTS, generator=generators(4))
        assert seen
    assert vars(pipe.unet)["forward"] is own
    assert vars(pipe.scheduler)["step"] is step


def test_a_network_that_returns_nan_is_named_by_step_and_image(tmp_path: Path) -> None:
    pipe = pipelines.stable_diffusion(tmp_path)
    with torch.no_grad():
        pipe.unet.conv_out.bias.fill_(torch.nan)
    with fs.accelerate(pipe, window=5), pytest.raises(FloatingPointError, match="at step 0 of sample 0"):
        pipe(**PROMPTS, generator=generators(4))


def test_decoded_pictures(tmp_path: Path) -> None:
    pipe = pipelines.stable_diffusion(tmp_path)
    with fs.accelerate(pipe, window=5):
        images = pipe(**PROMPTS | {"output_type": "pil"}, generator=generators(4)).images
    assert [image.size for image in images] == [(8, 8)] * 4


# ------------------------------------------------------------------ what is refused, and when


@pytest.mark.parametrize(
    ("scheduler", "sentence"),
    [
        (lambda: diffusers.UniPCMultistepScheduler(), "adds no noise"),
        (lambda: diffusers.DDPMScheduler(variance_type="learned"), "use variance_type='fixed_small'"),
        (lambda: diffusers.KDPM2AncestralDiscreteScheduler(), "takes two network calls a step"),
    ],
)
def test_schedulers_are_refused_before_the_first_prompt(scheduler: Any, sentence: str, tmp_path: Path) -> None:
    pipe = pipelines.stable_diffusion(tmp_path, scheduler())
    with pytest.raises(ValueError, match=sentence):
        fs.accelerate(pipe)
    assert "_foresample" not in vars(pipe)


def test_ddim_without_noise_is_refused_at_the_call(tmp_path: Path) -> None:
    pipe = pipelines.stable_diffusion(tmp_path, diffusers.DDIMScheduler(**DDIM))
    with fs.accelerate(pipe), pytest.raises(ValueError, match=r"pass eta=1\.0"):
        pipe(**PROMPTS)


def test_a_replaced_scheduler_is_noticed(tmp_path: Path) -> None:
    pipe = pipelines.stable_diffusion(tmp_path)
    fs.accelerate(pipe)
    pipe.scheduler = diffusers.DDPMScheduler()
    with pytest.raises(RuntimeError, match=r"accelerate\(pipe\) again"):
        pipe(**PROMPTS)


@pytest.mark.parametrize("thing", [object(), torch.nn.Linear(1, 1)], ids=["object", "module"])
def test_what_is_no_pipeline_is_refused(thing: Any) -> None:
    with pytest.raises(TypeError, match="cannot be accelerated: pass a diffusers pipeline"):
        fs.accelerate(thing)


# ------------------------------------------------------------------ the embedded model


@pytest.mark.slow
def test_the_embedded_model_through_its_pipeline_takes_as_few_calls() -> None:
    """DDPMPipeline passes no labels, so all images get one; calls agree within their errors."""
    pipe = diffusers.DDPMPipeline.from_pretrained(pretrained.EMBEDDED)
    pipe.set_progress_bar_config(disable=True)
    network = pipe.unet.forward
    pipe.unet.forward = lambda sample, timestep: network(
        sample, timestep, class_labels=torch.full((len(sample),), 7)
    )
    with fs.accelerate(pipe, window=8):
        pipe(batch_size=8, num_inference_steps=50, output_type="np", generator=torch.Generator().manual_seed(0))
        theirs = pipe.foresample_report
    ours = fs.sample(pretrained.load().target(50, [7] * 8), 8, window=8).report
    error = (theirs.calls_error**2 + ours.calls_error**2) ** 0.5
    assert abs(theirs.calls_mean - ours.calls_mean) < 4 * error
    assert theirs.speedup > 2.5
