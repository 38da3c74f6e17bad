"""A network must return the same output for the same state: caches, and modules changed by loops or callbacks.

Each of these pipelines once drew from another distribution than the sequential one, silently.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import foresample as fs
from foresample.integrations.diffusers.unchanged import Snapshot
from foresample.integrations.refusal import Refused

diffusers = pytest.importorskip("diffusers")
pytest.importorskip("transformers")
from diffusers import hooks  # noqa: E402
from diffusers.callbacks import IPAdapterScaleCutoffCallback  # noqa: E402
from diffusers.models.attention_processor import AttnProcessor2_0, IPAdapterAttnProcessor2_0  # noqa: E402

from tests.support.pipelines import (  # noqa: E402
    EXACT,
    PROMPTS,
    SIZE,
    cogvideox,
    embedded,
    embeddings,
    flux,
    generators,
    random,
    sd,
    stable_diffusion,
    stable_diffusion_3,
    video,
    wan,
)

pytestmark = pytest.mark.filterwarnings("ignore")
diffusers.logging.set_verbosity_error()


@pytest.fixture
def pipe(tmp_path: Path) -> Any:
    return stable_diffusion(tmp_path)


def draw(pipe: Any, **more: Any) -> Tensor:
    return pipe(**PROMPTS | more, generator=generators(4)).images


# ------------------------------------------------------------------ caches


def pyramid(pipe: Any) -> Any:
    return hooks.PyramidAttentionBroadcastConfig(
        spatial_attention_block_skip_range=2,
        spatial_attention_timestep_skip_range=(100, 900),
        current_timestep_callback=lambda: pipe.current_timestep,
    )


def faster(pipe: Any) -> Any:
    return hooks.FasterCacheConfig(
        current_timestep_callback=lambda: pipe.current_timestep,
        attention_weight_callback=lambda module: 0.3,
        tensor_format="BFCHW",
    )


def magnitude(pipe: Any) -> Any:
    return hooks.MagCacheConfig(num_inference_steps=12, mag_ratios=[1.0] * 12)


CACHES: dict[str, tuple[Callable[[], Any], Callable[[int], dict[str, Any]], Callable[[Any], Any]]] = {
    "PyramidAttentionBroadcast": (cogvideox, functools.partial(video, max_sequence_length=5), pyramid),
    "FasterCache": (cogvideox, functools.partial(video, max_sequence_length=5), faster),
    "MagCache": (flux, lambda n: SIZE | embeddings(n), magnitude),
    "FirstBlockCache": (
        flux,
        lambda n: SIZE | embeddings(n),
        lambda pipe: hooks.FirstBlockCacheConfig(threshold=0.1),
    ),
    "TaylorSeerCache": (flux, lambda n: SIZE | embeddings(n), lambda pipe: hooks.TaylorSeerCacheConfig()),
}


@pytest.mark.parametrize("name", CACHES)
def test_a_cache_is_refused_by_name_before_any_work(name: str) -> None:
    build, arguments, config = CACHES[name]
    pipe, calls = build(), list[int]()
    pipe.transformer.register_forward_pre_hook(lambda module, args: calls.append(1))
    with fs.accelerate(pipe, window=4):
        pipe.transformer.enable_cache(config(pipe))
        with pytest.raises(
            ValueError, match=rf"has a cache \({name}\).*call pipe\.transformer\.disable_cache\(\)"
        ):
            pipe(**arguments(2), generator=generators(2))
        assert not calls
        pipe.transformer.disable_cache()
        pipe(**arguments(2), generator=generators(2))
        assert calls


def test_a_cache_without_a_configuration_is_refused_with_the_call_that_removes_it() -> None:
    pipe = flux()
    hooks.apply_first_block_cache(pipe.transformer, hooks.FirstBlockCacheConfig())
    with (
        fs.accelerate(pipe, window=4),
        pytest.raises(
            ValueError, match=r"call pipe\.transformer\._diffusers_hook.*recurse=True\) first"
        ) as refusal,
    ):
        pipe(**SIZE, **embeddings(2), generator=generators(2))
    assert "fbc_leader_block_hook" in str(refusal.value)


def casting(net: Any) -> None:
    net.enable_layerwise_casting(storage_dtype=torch.bfloat16, compute_dtype=torch.float32)


class Moving(hooks.ModelHook):
    """Moves the weights at each call, as offloading does."""

    def pre_forward(self, module: Any, *args: Any, **kwargs: Any) -> Any:
        for value in module.parameters():
            value.data = value.data.clone()
        return args, kwargs


def offloading(net: Any) -> None:
    hooks.HookRegistry.check_if_exists_or_initialize(net).register_hook(Moving(), "moving")


@pytest.mark.parametrize("hooked", [casting, offloading])
def test_hooks_that_keep_nothing_are_served(hooked: Callable[[Any], None]) -> None:
    pipe = stable_diffusion_3()
    hooked(pipe.transformer)
    with fs.accelerate(pipe, window=4):
        for _ in range(2):
            assert pipe(**embedded(2), generator=generators(2)).images.isfinite().all()


# ------------------------------------------------------------------ callbacks


def with_ip_adapter(pipe: Any) -> None:
    """The last tokens of a prompt count as those of a picture."""
    own = pipe.unet.attn_processors
    for name in own:
        if name.endswith("attn2.processor"):
            own[name] = IPAdapterAttnProcessor2_0(8, cross_attention_dim=16, num_tokens=(4,), scale=1.0)
    pipe.unet.set_attn_processor(own)


def at(when: int, change: Callable[[Any], Any]) -> Callable[..., Any]:
    def switching(pipe: Any, step: int, timestep: Tensor, kwargs: dict[str, Tensor]) -> dict[str, Tensor]:
        if step == when:
            change(pipe)
        return kwargs

    return switching


def scheduler_scaled(pipe: Any) -> None:
    pipe.scheduler.alphas_cumprod.mul_(0.9)


IN_CALLBACKS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "FreeU": (
        lambda pipe: pipe.enable_freeu(0.9, 0.2, 1.2, 1.4),
        r"its unet \(up_blocks.0.s1 from unset to 0.9\)",
    ),
    "training": (lambda pipe: pipe.unet.train(), r"its unet \(training from False to True\)"),
    "weights": (lambda pipe: pipe.unet.conv_in.weight.data.mul_(0.5), ""),
    "weights, by version": (
        lambda pipe: pipe.unet.conv_in.weight.requires_grad_(False).mul_(0.5),
        r"its unet \(the values of conv_in.weight\)",
    ),
    "processors": (
        lambda pipe: pipe.unet.set_attn_processor(AttnProcessor2_0()),
        r"its unet \(.*processor from one AttnProcessor2_0 to one AttnProcessor2_0\)",
    ),
    "a hook": (
        lambda pipe: pipe.unet.conv_in.register_forward_hook(lambda module, args, output: 0.5 * output),
        r"its unet \(conv_in\._forward_hooks\.\d+ from unset to one function\)",
    ),
    "the scheduler": (scheduler_scaled, r"its scheduler \(the values of alphas_cumprod\)"),
    "the scheduler's configuration": (
        lambda pipe: pipe.scheduler.register_to_config(clip_sample=True),
        r"its scheduler \(_internal_dict\.clip_sample from False to True\)",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("when", [0, 3, 11])
@pytest.mark.parametrize("name", IN_CALLBACKS)
def test_a_callback_that_changes_a_module_is_refused(name: str, when: int, pipe: Any) -> None:
    """Also at the last step, when all images are done."""
    change, what = IN_CALLBACKS[name]
    sentence = (
        rf"callback_on_step_end \(switching\) changes the pipeline: {what} at step {when}, .*leave the callback"
    )
    if not what:  # nothing tells of it but the answers
        sentence = (
            r"the pipeline's unet was changed between step \d+ and step \d+ of its loop: for the same state"
        )
    with fs.accelerate(pipe, window=4), pytest.raises(Refused, match=sentence):
        draw(pipe, callback_on_step_end=at(when, change))


@pytest.mark.parametrize("ratio", [0.3, 0.8])
def test_the_ip_adapter_s_own_callback_is_refused(ratio: float, pipe: Any) -> None:
    with_ip_adapter(pipe)
    callback = IPAdapterScaleCutoffCallback(cutoff_step_ratio=ratio, cutoff_step_index=None)
    with (
        fs.accelerate(pipe, window=4),
        pytest.raises(Refused, match=r"\(IPAdapterScaleCutoffCallback\) changes .*scale from \[1\] to \[0\]\)"),
    ):
        draw(pipe, callback_on_step_end=callback)


def test_a_callback_that_only_reads_is_served(pipe: Any) -> None:
    seen: list[float] = []
    with fs.accelerate(pipe, window=4):
        draw(pipe, callback_on_step_end=at(3, lambda pipe: seen.append(float(pipe.unet.conv_in.weight.sum()))))
    assert len(seen) == 1


# ------------------------------------------------------------------ loops


@pytest.mark.parametrize("beta", [0.3, 0.9, 1.0])
def test_gligen_switches_its_fuser_off_in_its_loop(beta: float, tmp_path: Path) -> None:
    """The switch comes at 30 % of the loop, or after all images are done; with 1.0 it never comes, and is served."""
    pipe = sd("StableDiffusionGLIGENPipeline", unet={"attention_type": "gated"})(tmp_path)
    for module in pipe.unet.modules():
        if type(module).__name__ == "GatedSelfAttentionDense":
            nn.init.ones_(module.alpha_attn)
            nn.init.ones_(module.alpha_dense)
    told = {"prompt": "a cat", "num_images_per_prompt": 2, "gligen_phrases": ["cat"]} | SIZE
    told |= {"gligen_boxes": [[0.1, 0.1, 0.8, 0.8]], "gligen_scheduled_sampling_beta": beta}
    with fs.accelerate(pipe, window=4):
        if beta == 1.0:
            assert pipe(**told, generator=generators(2)).images.isfinite().all()
            return
        with pytest.raises(Refused, match=r"loop changes its unet \(.*fuser\.enabled from True to False\)"):
            pipe(**told, generator=generators(2))


@pytest.mark.parametrize("step", [2, 11])
def test_a_loop_that_changes_its_scheduler_is_refused(step: int, pipe: Any) -> None:
    turns = 0

    class Changing(type(pipe)):  # type: ignore[misc]
        @property
        def interrupt(self) -> bool:  # which the loop asks for in every turn
            nonlocal turns
            turns += 1
            if turns == step + 1 + 3:  # three turns are watched first
                scheduler_scaled(self)
            return False

    pipe.__class__ = Changing
    with (
        fs.accelerate(pipe, window=4),
        pytest.raises(Refused, match=r"loop changes its scheduler \(the values of alphas_cumprod\)"),
    ):
        draw(pipe)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda pipe, scaled: 1.1 * scaled, "at step 9 .* scales states in another way"),
        (lambda pipe, scaled: (scheduler_scaled(pipe), scaled)[1], "at step 9 .* makes other states"),  # type: ignore[func-returns-value]
    ],
    ids=["another scale", "another scheduler"],
)
def test_a_scheduler_whose_scaling_was_patched_is_refused(change: Any, sentence: str, pipe: Any) -> None:
    scale = pipe.scheduler.scale_model_input

    def other(sample: Tensor, timestep: Any = None) -> Tensor:
        late = bool((pipe.scheduler.timesteps == timestep).nonzero() == 9)
        return change(pipe, scale(sample, timestep)) if late else scale(sample, timestep)

    pipe.scheduler.scale_model_input = other
    with fs.accelerate(pipe, window=4), pytest.raises(Refused, match=sentence):
        draw(pipe)


# ------------------------------------------------------------------ between images


class Counting(AttnProcessor2_0):
    """Returns other outputs from a certain call on."""

    def __init__(self, start: int) -> None:
        super().__init__()
        self.calls, self.start = 0, start

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        self.calls += 1
        answer = super().__call__(*args, **kwargs)
        return answer * (1 + 0.2 * (self.calls > self.start))


def test_dropout_that_is_switched_on_after_the_first_image_is_refused(pipe: Any) -> None:
    for module in pipe.unet.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.2
    with fs.accelerate(pipe, window=4):
        draw(pipe)
        pipe.unet.train()
        with pytest.raises(
            Refused, match=r"the pipeline's unet draws random numbers: evaluated twice at one state"
        ):
            draw(pipe)
        pipe.unet.eval()
        draw(pipe)


@pytest.mark.parametrize("start", [0, 5, 60])
def test_a_processor_that_counts_is_refused_in_any_image(start: int, pipe: Any) -> None:
    """Refused also where none of this image's calls would have had another output."""
    with fs.accelerate(pipe, window=4):
        draw(pipe)
        pipe.unet.set_attn_processor(Counting(start))
        with pytest.raises(
            Refused, match=r"unet keeps a number between calls \(.*processor\.calls from \d+ to \d+\)"
        ):
            draw(pipe)


@pytest.mark.parametrize("start", range(1, 6))
def test_a_hidden_counter_is_noticed_by_the_outputs(start: int, pipe: Any) -> None:
    """A counter in a closure changes the output from some call of the second image on."""
    calls, forward = [-(10**6)], pipe.unet.forward

    @functools.wraps(forward)
    def other(*args: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        (answer,) = forward(*args, **kwargs)
        return (answer * (1 + 0.01 * (calls[0] > start)),)

    pipe.unet.forward = other
    with fs.accelerate(pipe, window=4):
        draw(pipe)
        calls[0] = 0
        with pytest.raises(
            Refused, match=rf"changed between step {start - 1} and step {start} of its loop: for the same"
        ):
            draw(pipe)


def test_a_network_that_changes_between_images_is_served(pipe: Any) -> None:
    """Each image has the distribution of the network at the time of its call."""
    with fs.accelerate(pipe, window=4):
        one = draw(pipe)
        pipe.enable_freeu(0.9, 0.2, 1.2, 1.4)
        two = draw(pipe)
    assert not torch.equal(one, two)


def test_the_scheduler_is_replayed_for_every_image(pipe: Any) -> None:
    """A scheduler that was changed by hand is not the one that was replayed for the first image."""
    with fs.accelerate(pipe, window=4):
        draw(pipe)
        pipe.scheduler._get_variance = lambda *args, **kwargs: torch.tensor(0.3)
        with pytest.raises(Refused, match="makes other states than the chain read from it"):
            draw(pipe)


def test_a_refused_run_leaves_nothing_behind_for_the_next(pipe: Any) -> None:
    """The first run was refused after its loop was watched; then the network was changed, which is allowed."""
    with fs.accelerate(pipe, window=4):
        draw(pipe)
        pipe.scheduler.step = halved(pipe.scheduler.step)
        with pytest.raises(Refused, match="makes other states"):
            draw(pipe, num_inference_steps=13)
        del pipe.scheduler.step
        pipe.unet.conv_in.weight.data.mul_(1.5)
        draw(pipe)


def halved(step: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(step)
    def other(*args: Any, **kwargs: Any) -> Any:
        first, *rest = step(*args, **kwargs | {"return_dict": False})
        return (0.5 * first, *rest)

    return other


PATCHES: dict[str, Callable[[Any, pytest.MonkeyPatch], Any]] = {
    "a wrapped step": lambda pipe, patch: setattr(pipe.scheduler, "step", halved(pipe.scheduler.step)),
    "a step of its class": lambda pipe, patch: patch.setattr(
        type(pipe.scheduler), "step", halved(type(pipe.scheduler).step)
    ),
    "a helper of its class": lambda pipe, patch: patch.setattr(
        type(pipe.scheduler), "_get_variance", lambda *args, **kwargs: torch.tensor(0.3)
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("window", [4, "auto"])
@pytest.mark.parametrize("name", PATCHES)
def test_a_scheduler_patched_after_the_first_image_is_refused(
    name: str, window: Any, pipe: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However the patch is wrapped, and wherever it is put."""
    with fs.accelerate(pipe, window=window):
        draw(pipe)
        for known in pipe._foresample.known.values():
            known.windows = [4]  # as on a machine where it is faster
        PATCHES[name](pipe, monkeypatch)
        with pytest.raises(
            Refused, match="the DDPMScheduler of this pipeline makes other states than the chain"
        ):
            draw(pipe)


@pytest.mark.parametrize("method", ["step", "scale_model_input"])
def test_patches_that_do_not_name_their_arguments_are_served(method: str, pipe: Any) -> None:
    """On the scheduler and on the network."""
    before = draw(pipe)
    step, forward = getattr(pipe.scheduler, method), pipe.unet.forward
    with fs.accelerate(pipe, window=4):
        ours = draw(pipe)
        setattr(pipe.scheduler, method, lambda *args, **kwargs: step(*args, **kwargs))
        pipe.unet.forward = lambda *args, **kwargs: forward(*args, **kwargs)
        # Without the names in `step`, the pipeline does not give it the generators.
        told = {} if method == "step" else {"generator": generators(4)}
        assert pipe(**PROMPTS, **told).images.isfinite().all()
        if method != "step":
            assert torch.equal(draw(pipe), ours)
    if method != "step":
        assert torch.equal(draw(pipe), before)


def test_a_scheduler_that_scales_otherwise_is_named(tmp_path: Path) -> None:
    """The refusal names the scheduler, not the network that gets the scaled states."""
    pipe = stable_diffusion(tmp_path, diffusers.EulerAncestralDiscreteScheduler())
    scale = pipe.scheduler.scale_model_input
    with fs.accelerate(pipe, window=4):
        draw(pipe)
        pipe.scheduler.scale_model_input = lambda *args: 0.5 * scale(*args)
        with pytest.raises(
            Refused, match=r"the EulerAncestralDiscreteScheduler .* scales states in another way"
        ):
            draw(pipe)


@pytest.mark.slow
@pytest.mark.parametrize("case", [case for case in EXACT if case.draws == 400], ids=str)
def test_autocast_is_rounding(case: Any, tmp_path: Path) -> None:
    """A scheduler that is given an output in bfloat16 rounds to it, also where its latents are float32."""
    pipe = case.build(tmp_path)
    with fs.accelerate(pipe, window=4), torch.autocast("cpu", torch.bfloat16):
        for _ in range(2):
            pipe(**case.arguments(2), generator=generators(2))


def test_latents_of_half_precision_are_rounding_too() -> None:
    """CogVideoX gives its scheduler latents in bfloat16 and an output in float32."""
    pipe = cogvideox().to(torch.bfloat16)
    told = video(2, max_sequence_length=5)
    told |= {name: value.bfloat16() for name, value in told.items() if name.endswith("embeds")}
    with fs.accelerate(pipe, window=4):
        assert pipe(**told, generator=generators(2)).frames.isfinite().all()


def test_rounding_is_learned_for_each_precision(pipe: Any) -> None:
    with fs.accelerate(pipe, window=4):
        with torch.autocast("cpu", torch.bfloat16):
            draw(pipe)
        draw(pipe)
        pipe.unet.to(torch.float64)
        assert len(pipe._foresample.known) == 2


@pytest.mark.parametrize("name", ["transformer", "transformer_2"])
@pytest.mark.parametrize("step", [2, 4, 8])
def test_each_of_two_networks_is_evaluated_again(step: int, name: str) -> None:
    """In place and without a version; after states of a later step than the callback's were evaluated with it."""
    pipe = wan(two=True)
    change = at(step, lambda pipe: getattr(pipe, name).proj_out.weight.data.mul_(1.5))
    with (
        fs.accelerate(pipe, window=4),
        pytest.raises(Refused, match=rf"the pipeline's {name} was changed between"),
    ):
        pipe(**video(2), generator=generators(2), callback_on_step_end=change)


# ------------------------------------------------------------------ the evidence


def test_a_report_carries_its_evidence(pipe: Any) -> None:
    found = []
    with fs.accelerate(pipe, window=4):
        for _ in range(2):
            draw(pipe)
            found.append(pipe.foresample_report)
    first, second = [report.evidence for report in found]
    assert second.asked_again >= found[1].calls_mean - 1
    assert first.asked_again == second.asked_again + 1  # once at the end
    for evidence in (first, second):
        assert 0 <= evidence.largest_change < 1e-5
        assert evidence.steps_replayed == 3 + 12
        assert evidence.trusted == ["answers at states that were not evaluated again"]
    assert "15 steps replayed" in str(found[0])


def test_checks_that_are_switched_off_are_listed_as_trusted(pipe: Any) -> None:
    with fs.accelerate(pipe, window=4, trace=False, look=False):
        draw(pipe)
        evidence = pipe.foresample_report.evidence
    assert (evidence.asked_again, evidence.steps_replayed) == (0, 0)
    assert evidence.trusted == ["look=False", "trace=False", "answers at states that were not evaluated again"]


@pytest.mark.slow
@pytest.mark.parametrize("case", [case for case in EXACT if case.draws == 400], ids=str)
def test_every_run_of_every_pipeline_evaluates_states_again(case: Any, tmp_path: Path) -> None:
    pipe = case.build(tmp_path)
    with fs.accelerate(pipe, window=4, trace=False):
        for _ in range(2):
            pipe(**case.arguments(2), generator=generators(2))
            evidence = pipe.foresample_report.evidence
            assert evidence.asked_again >= pipe.foresample_report.calls_mean - case.parts
            assert evidence.largest_change < 1e-4


# ------------------------------------------------------------------ snapshots


class Lora(nn.Linear):
    """As PEFT keeps a scale: in a dictionary of its layer."""

    def __init__(self) -> None:
        super().__init__(2, 2)
        self.scaling, self.active = {"one": 0.7, "two": 1.0}, ["one"]
        self.table = random(3)


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (lambda net: net[0].scaling.update(one=0.0), "0.scaling.one from 0.7 to 0"),
        (lambda net: net[0].active.append("two"), "0.active from [one] to [one, two]"),
        (lambda net: net[0].table.add_(1), "the values of 0.table"),
        (lambda net: net[0].bias.data.zero_(), None),  # in place and without a version: only answers show it
        (lambda net: setattr(net[0].bias, "data", torch.ones(2)), "the values of 0.bias"),
        (lambda net: setattr(net[0], "bias", None), "0.bias from one Parameter to None"),
        (lambda net: setattr(net[1], "p", 0.5), "1.p from 0.1 to 0.5"),
        (lambda net: net.append(nn.ReLU()), "2 from unset to one ReLU"),
        (lambda net: net[0].scaling.update(one=0.7 * 0.3 / 0.3), None),
        (lambda net: net(torch.ones(1, 2)), None),
    ],
)
def test_a_snapshot_says_what_changed(change: Callable[[Any], Any], what: str | None) -> None:
    net = nn.Sequential(Lora(), nn.Dropout(0.1)).requires_grad_(False).eval()
    snapshot = Snapshot(net)
    assert snapshot.change() is None
    change(net)
    found = snapshot.change()
    assert (None if found is None else str(found)) == what
    snapshot.accept(set())
    assert snapshot.change() is None
