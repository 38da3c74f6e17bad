"""Three hundred small changes to a real pipeline: each ends exact or refused, never with another distribution.

The loop is `StableDiffusionPipeline`'s own source with lines put in; or a module or the scheduler is changed in the
loop, in a callback, or after the first image; or a network keeps a cache. A change that gets through must be exact by
its own untouched loop (`forced.walk`). By hand, more of them, of seed 7:

    python -m tests.integrations.test_fuzz 1000 7
"""

from __future__ import annotations

import copy
import functools
import inspect
import random
import sys
import tempfile
import textwrap
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import foresample as fs
from foresample.integrations.diffusers.again import Reevaluation
from foresample.integrations.diffusers.unchanged import Unchanged
from foresample.integrations.refusal import Refused

diffusers = pytest.importorskip("diffusers")
pytest.importorskip("transformers")
from diffusers import hooks  # noqa: E402
from diffusers.models.attention_processor import AttnProcessor  # noqa: E402

from tests.integrations.forced import walk  # noqa: E402
from tests.support.pipelines import SIZE, embeddings, flux, generators, stable_diffusion  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")

COUNT, STEPS = 300, 6
START = "if self.interrupt:"
BEFORE_CALL = "# predict the noise residual"
AFTER_CALL = "# perform guidance"
BEFORE_STEP = "# compute the previous noisy sample x_t -> x_t-1"
AFTER_STEP = "if callback_on_step_end is not None:"
CALL = "self.unet(latent_model_input, t, encoder_hidden_states=prompt_embeds, return_dict=False)[0]"
CHANGES: list[tuple[str, str]] = [
    # where, what; {a} is a number near 1, {b} one between 0 and 1
    (AFTER_STEP, "latents = latents * {a}"),
    (AFTER_STEP, "latents = latents + 0.0"),
    (AFTER_STEP, "latents = latents.clamp(-{c}, {c})"),
    (AFTER_STEP, "latents = {b} * latents + (1 - {b}) * torch.ones_like(latents)"),
    (AFTER_STEP, "latents = torch.cat([torch.zeros_like(latents[:, :1]), latents[:, 1:]], 1)"),
    (AFTER_STEP, "latents = torch.cat([latents[:, :1] * {a}, latents[:, 1:]], 1)"),
    (AFTER_STEP, "latents = torch.cat([torch.full_like(latents[:, :1], float(i)), latents[:, 1:]], 1)"),
    (AFTER_STEP, "latents = latents + {b} * torch.randn(latents.shape)"),
    (AFTER_STEP, "latents = latents.roll(1, -1)"),
    (AFTER_STEP, "latents = latents.flip(0)"),
    (AFTER_STEP, "latents = latents - latents.mean(0, keepdim=True)"),
    (AFTER_STEP, "latents = latents.to(torch.bfloat16).to(torch.float32)"),
    (AFTER_STEP, "latents = self.scheduler.step(noise_pred, t, latents, return_dict=False)[0]"),
    (AFTER_STEP, CALL),
    (AFTER_STEP, "self._guidance_scale = {c}"),
    (AFTER_STEP, "self._guidance_scale = self._guidance_scale * {a}"),
    (AFTER_STEP, "prompt_embeds = prompt_embeds * {a}"),
    (AFTER_STEP, "prompt_embeds *= {a}"),
    (AFTER_STEP, "break"),
    (START, "latents = latents * {a}"),
    (START, "latents = latents.clamp(-{c}, {c})"),
    (START, "continue"),
    (START, "t = timesteps[min(i + 1, len(timesteps) - 1)]"),
    (START, "self._guidance_rescale = {b}"),
    (BEFORE_CALL, "latent_model_input = latent_model_input * {a}"),
    (BEFORE_CALL, "latent_model_input = latent_model_input.clamp(-{c}, {c})"),
    (BEFORE_CALL, "latent_model_input = latent_model_input + {b} * torch.randn(latent_model_input.shape)"),
    (BEFORE_CALL, "latent_model_input[:1] = 0"),
    (AFTER_CALL, "noise_pred = noise_pred * {a}"),
    (AFTER_CALL, "noise_pred = noise_pred.clamp(-{b}, {b})"),
    (AFTER_CALL, "noise_pred = {b} * noise_pred + (1 - {b}) * " + CALL),
    (AFTER_CALL, CALL),
    (AFTER_CALL, "noise_pred = noise_pred - noise_pred.mean(0, keepdim=True)"),
    (AFTER_CALL, "noise_pred = " + CALL.replace("t, ", "t // 2, ", 1)),
    (BEFORE_STEP, "noise_pred = noise_pred + {b}"),
    (BEFORE_STEP, "noise_pred = noise_pred / noise_pred.std((1, 2, 3), keepdim=True)"),
    (BEFORE_STEP, "noise_pred = noise_pred + {b} * latents"),
    (BEFORE_STEP, "noise_pred = noise_pred.flip(0)"),
    (BEFORE_STEP, "noise_pred = noise_pred.where(noise_pred < {c}, 0.0 * noise_pred)"),
    (BEFORE_STEP, "noise_pred = noise_pred * (1 + {b} * float(t) / 1000)"),
    (BEFORE_STEP, "t = timesteps[0]"),
    (BEFORE_STEP, "latents = latents * {a}"),
]
WHEN = ["True", "True", "i == {k}", "i >= {k}", "i < {k}", "i % 2 == 0", "t < {t}", "latents.abs().max() > {c}"]


def changed(where: str, what: str, when: str) -> Any:
    """The pipeline's class with one line more in its loop."""
    kind = diffusers.StableDiffusionPipeline
    source = textwrap.dedent(inspect.getsource(inspect.unwrap(kind.__call__)))
    source = source[source.index("def __call__") :]
    loop = source.index("for i, t in enumerate(timesteps)")
    at = source.index(where, loop)
    line = source.rindex("\n", 0, at) + 1
    indent = " " * (at - line)
    put = f"{indent}if {when}:\n{indent}    {what}\n"
    names: dict[str, Any] = {}
    known = vars(sys.modules[kind.__module__]) | {
        "nn": nn,
        "SWITCH": SWITCH,
        "scaled": scaled,
        "AttnProcessor": AttnProcessor,
    }
    exec(source[:line] + put + source[line:], known, names)
    call = torch.no_grad()(names["__call__"])
    return type("StableDiffusionPipeline", (kind,), {"__call__": call})


def some(rng: random.Random, text: str) -> str:
    a, b = round(rng.choice([0.5, 0.9, 0.99, 1.001, 1.5]), 3), round(rng.uniform(0.05, 0.95), 2)
    c, k, t = rng.choice([0.5, 2.0, 5.0, 30.0]), rng.randrange(STEPS), rng.choice([100, 300, 700])
    return text.format(a=a, b=b, c=c, k=k, t=t)


Trial = tuple[str, Callable[[], str]]
"""A change in words, and how a run with it ends."""
SWITCH = {"scale": 1.0}
"""Read by every network here, and seen by nobody: no attribute of it changes."""
MODULES = [
    # statements about the pipeline {p}
    "{p}.unet.train()",
    "{p}.unet.eval()",
    "{p}.enable_freeu(0.9, {b}, 1.2, 1.4)",
    "{p}.unet.conv_in.weight.data.mul_({a})",
    "{p}.unet.conv_out.bias.add_({b})",
    "{p}.unet.conv_out.weight.data = {a} * {p}.unet.conv_out.weight.data",
    "{p}.unet.conv_in.weight.mul_(1.0)",
    "{p}.unet.set_attn_processor(AttnProcessor())",
    "{p}.unet.mid_block.attentions[0].transformer_blocks[0].attn2.scale = {b}",
    "{p}.unet.conv_norm_out.eps = {b}",
    "{p}.unet.conv_act = nn.Identity()",
    "{p}.unet.time_proj.downscale_freq_shift = {b}",
    "{p}.unet.conv_in.register_forward_hook(lambda module, args, output: {a} * output)",
    "{p}.unet.forward = scaled({p}.unet.forward, {a})",
    "{p}.unet.a_note = {b}",
    "{p}.unet.requires_grad_(False)",
    "{p}.vae.train()",
    "{p}.text_encoder.train()",
    "{p}._a_note = {b}",
    "{p}._guidance_scale = {c}",
    "{p}.scheduler.alphas_cumprod.mul_({b})",
    "{p}.scheduler.register_to_config(clip_sample=True)",
    "{p}.scheduler.register_to_config(thresholding=True)",
    "{p}.scheduler.variance_type = 'fixed_large'",
    "{p}.scheduler.one = torch.tensor({a})",
    "SWITCH.update(scale={a})",
    "SWITCH.update(scale=1.0)",
    "torch.manual_seed({k})",
]


def scaled(forward: Callable[..., Any], factor: float) -> Callable[..., Any]:
    @functools.wraps(forward)
    def other(*args: Any, **kwargs: Any) -> Any:
        return (forward(*args, **kwargs)[0] * factor,)

    return other


# ------------------------------------------------------------------ caches


class Cache(nn.Module):
    """Stands before a layer, and answers from earlier calls now and then."""

    def __init__(self, layer: nn.Module, kind: str, every: int, factor: float, hidden: bool) -> None:
        super().__init__()
        self.layer, self.kind, self.every, self.factor = layer, kind, every, factor
        self.memory: dict[Any, Any] = {}
        self.hidden, self.closure, self.calls = hidden, [0], 0

    def forward(self, x: Tensor) -> Tensor:
        self.closure[0] += 1
        if not self.hidden:
            self.calls += 1
        count, answer, last = self.closure[0], self.layer(x), self.memory.get("last")
        self.memory["last"] = answer
        if self.kind == "reuse" and count % self.every == 0 and last is not None and last.shape == answer.shape:
            return last
        if self.kind == "alternate" and count % self.every == 0:
            return answer * self.factor
        if self.kind == "blend" and last is not None:
            return answer + 0.1 * self.factor * last.mean()
        if self.kind == "from" and count > self.every:
            return answer * self.factor
        if self.kind == "memo":  # the same for the same input: harmless
            return self.memory.setdefault((tuple(x.shape), float(x.double().sum())), answer)
        return answer


KNOWN: dict[str, Callable[[Any, random.Random], Any]] = {
    "FirstBlockCache": lambda pipe, rng: hooks.FirstBlockCacheConfig(threshold=rng.random()),
    "MagCache": lambda pipe, rng: hooks.MagCacheConfig(num_inference_steps=STEPS, mag_ratios=[1.0] * STEPS),
    "TaylorSeerCache": lambda pipe, rng: hooks.TaylorSeerCacheConfig(cache_interval=rng.randrange(2, 5)),
    "PyramidAttentionBroadcast": lambda pipe, rng: hooks.PyramidAttentionBroadcastConfig(
        spatial_attention_block_skip_range=rng.randrange(2, 4),
        current_timestep_callback=lambda: pipe.current_timestep,
    ),
}


def known_cache(fuzzed: Fuzzed, rng: random.Random) -> Trial:
    """A cache of diffusers' own."""
    pipe, name = flux(), rng.choice(list(KNOWN))
    pipe.transformer.enable_cache(KNOWN[name](pipe, rng))

    def end() -> str:
        told = SIZE | embeddings(2) | {"num_inference_steps": STEPS}
        with fs.accelerate(pipe, window=3), pytest.raises(ValueError, match=rf"{name}.*disable_cache\(\)"):
            pipe(**told, generator=generators(2))
        return "refused"

    return name, end


# ------------------------------------------------------------------ one change


class Fuzzed:
    """A pipeline that is as new before each run."""

    def __init__(self, folder: Path) -> None:
        scheduler = diffusers.DDPMScheduler(clip_sample=False, steps_offset=1)
        self.pipe = stable_diffusion(folder, scheduler)
        for module in self.pipe.unet.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.2
        self.kind = type(self.pipe)
        self.new = {
            name: copy.deepcopy(getattr(self.pipe, name))
            for name in ("unet", "vae", "text_encoder", "scheduler")
        }
        told = torch.Generator().manual_seed(3)
        self.arguments = {
            "prompt_embeds": torch.randn(6, 5, 16, generator=told),
            "negative_prompt_embeds": torch.randn(6, 5, 16, generator=told),
            "num_inference_steps": STEPS,
            "height": 8,
            "width": 8,
            "output_type": "latent",
            "guidance_scale": 3.0,
        }

    def renew(self) -> None:
        SWITCH["scale"] = 1.0
        for name, part in self.new.items():
            setattr(self.pipe, name, copy.deepcopy(part))
        vars(self.pipe).pop("_a_note", None)
        self.pipe.unet.register_forward_hook(lambda module, args, output: (output[0] * SWITCH["scale"],))

    def outcome(self, loop: Any = None, prepare: Callable[[], Any] = lambda: None, **more: Any) -> str:
        """The outcome of a run with this class of the loop."""

        def begin() -> None:
            self.renew()
            prepare()

        self.pipe.__class__ = loop or self.kind
        try:
            run = walk(self.pipe, self.arguments, window=3, prepare=begin, **more)
        except Refused as sentence:
            known = any(word in str(sentence) for word in ("foresample.restore(pipe)", "look=False"))
            return "refused" if known else f"refused without a remedy: {sentence}"
        except (RuntimeError, IndexError) as error:  # some of these loops fail by themselves
            begin()
            with pytest.raises(type(error)):
                self.pipe(**self.arguments)
            return "refused"
        finally:
            fs.restore(self.pipe)
            self.pipe.__class__ = self.kind
        run.require_exact(1e-4 / COUNT)
        return "exact"


@pytest.fixture(scope="module")
def fuzzed(tmp_path_factory: pytest.TempPathFactory) -> Fuzzed:
    return Fuzzed(tmp_path_factory.mktemp("fuzz"))


def loop_change(fuzzed: Fuzzed, rng: random.Random) -> Trial:
    (where, what), when = rng.choice(CHANGES), rng.choice(WHEN)
    what, when = some(rng, what), some(rng, when)
    return f"{where!r}: if {when}: {what}", lambda: fuzzed.outcome(changed(where, what, when))


def module_in_loop(fuzzed: Fuzzed, rng: random.Random) -> Trial:
    what, when = some(rng, rng.choice(MODULES).replace("{p}", "self")), some(rng, rng.choice(WHEN))
    where = rng.choice([START, BEFORE_CALL, AFTER_CALL, AFTER_STEP])
    return f"{where!r}: if {when}: {what}", lambda: fuzzed.outcome(changed(where, what, when))


def module_in_callback(fuzzed: Fuzzed, rng: random.Random) -> Trial:
    what, when = some(rng, rng.choice(MODULES).replace("{p}", "pipe")), some(rng, rng.choice(WHEN[:-1]))

    def callback(pipe: Any, i: int, t: Tensor, kwargs: dict[str, Tensor]) -> dict[str, Tensor]:
        exec(f"if {when}: {what}", globals(), {"pipe": pipe, "i": i, "t": t})
        return kwargs

    return f"callback: if {when}: {what}", lambda: fuzzed.outcome(callback=callback)


def module_between_images(fuzzed: Fuzzed, rng: random.Random) -> Trial:
    what = some(rng, rng.choice(MODULES).replace("{p}", "pipe"))

    def between() -> None:
        with torch.no_grad():
            exec(what, globals(), {"pipe": fuzzed.pipe})

    return f"between images: {what}", lambda: fuzzed.outcome(between=between)


def cache(fuzzed: Fuzzed, rng: random.Random) -> Trial:
    """A cache of somebody's own: a layer that answers from earlier calls, by a counter that can be seen or not."""
    kind, factor = (
        rng.choice(["reuse", "alternate", "blend", "from", "memo", "none"]),
        rng.choice([0.5, 0.9, 1.01]),
    )
    every, hidden, where = rng.randrange(1, 4), rng.random() < 0.5, rng.choice(["conv_in", "conv_out"])

    def prepare() -> None:
        net = fuzzed.pipe.unet
        setattr(net, where, Cache(getattr(net, where), kind, every, factor, hidden))

    return f"{where}: {kind} {every} {factor}, {hidden=}", lambda: fuzzed.outcome(prepare=prepare)


KINDS: dict[str, Callable[[Fuzzed, random.Random], Trial]] = {
    "loop": loop_change,
    "module in the loop": module_in_loop,
    "module in a callback": module_in_callback,
    "module between images": module_between_images,
    "cache": cache,
    "diffusers' cache": known_cache,
}
WEIGHTS = (30, 25, 15, 12, 15, 3)


def ends(fuzzed: Fuzzed, count: int, seed: int) -> Counter[tuple[str, str]]:
    """The outcomes of so many changes, by their kind."""
    rng, found = random.Random(seed), Counter[tuple[str, str]]()
    for _ in range(count):
        kind = rng.choices(list(KINDS), WEIGHTS)[0]
        what, run = KINDS[kind](fuzzed, rng)
        try:
            end = run()
        except Exception as error:
            raise AssertionError(f"{kind}, {what}") from error
        assert end in ("exact", "refused"), (kind, what, end)
        found[kind, end] += 1
    return found


@pytest.mark.slow
@pytest.mark.law
def test_every_change_ends_exact_or_refused(fuzzed: Fuzzed) -> None:
    """False alarm 1e-4."""
    found = ends(fuzzed, COUNT, 0)
    by_end = Counter[str]()
    for (_, end), number in found.items():
        by_end[end] += number
    assert by_end["exact"] >= 30
    assert by_end["refused"] >= 150
    assert {kind for kind, end in found if end == "exact"} >= set(KINDS) - {"diffusers' cache"}
    assert {kind for kind, end in found if end == "refused"} == set(KINDS)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("where", "what", "when", "end"),
    [
        (AFTER_STEP, "latents = latents * 0.99", "i == 4", "refused"),
        (AFTER_STEP, "latents = latents.clamp(-30, 30)", "i == 4", "refused"),
        (BEFORE_STEP, "noise_pred = noise_pred * 1.01", "i == 4", "refused"),
        (BEFORE_STEP, "noise_pred = noise_pred.clamp(-0.5, 0.5)", "True", "exact"),
        (AFTER_CALL, f"noise_pred = 0.5 * noise_pred + 0.5 * {CALL}", "True", "exact"),
        (START, "self.unet.conv_in.weight.data.mul_(0.5)", "i == 5", "refused"),
        (START, "SWITCH.update(scale=0.5)", "i == 5", "refused"),
        (AFTER_STEP, "self.scheduler.one = torch.tensor(1.5)", "i == 3", "refused"),
        (AFTER_STEP, "self.vae.train()", "i == 3", "exact"),
    ],
)
def test_some_of_them(fuzzed: Fuzzed, where: str, what: str, when: str, end: str) -> None:
    assert fuzzed.outcome(changed(where, what, when)) == end


TWINS: dict[str, Callable[[Fuzzed], str]] = {
    "weights in the loop": lambda f: f.outcome(
        changed(START, "self.unet.conv_out.weight.data.mul_(0.5)", "i == 4")
    ),
    "a hidden switch": lambda f: f.outcome(changed(START, "SWITCH.update(scale=0.5)", "i == 4")),
    "a callback": lambda f: f.outcome(callback=lambda pipe, i, t, k: SWITCH.update(scale=1 + (i == 3)) or k),
    "dropout after the first image": lambda f: f.outcome(between=lambda: f.pipe.unet.train()),
    "a cache": lambda f: f.outcome(
        prepare=lambda: setattr(f.pipe.unet, "conv_out", Cache(f.pipe.unet.conv_out, "alternate", 2, 0.5, True))
    ),
}


@pytest.mark.law
@pytest.mark.parametrize("name", TWINS)
def test_without_asking_again_the_fuzz_would_notice(
    name: str, fuzzed: Fuzzed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Broken twins: changes that are refused, with the guards switched off.

    They are late ones: before drafts are kept, the loop's own step is that of all states.
    """
    assert TWINS[name](fuzzed) == "refused"
    monkeypatch.setattr(Unchanged, "change", lambda *args: None)
    monkeypatch.setattr(Reevaluation, "_require_alike", lambda *args: None)
    monkeypatch.setattr(Reevaluation, "_require_as_watched", lambda *args: None)
    with pytest.raises(AssertionError):
        TWINS[name](fuzzed)


if __name__ == "__main__":
    many, seed = (int(word) for word in [*sys.argv[1:], "300", "0"][:2])
    with tempfile.TemporaryDirectory() as folder:
        for (kind, end), number in sorted(ends(Fuzzed(Path(folder)), many, seed).items()):
            print(f"{kind:<24}{end:<10}{number:>5}")
