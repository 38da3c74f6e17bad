"""Two hundred small changes to a real pipeline's loop: each ends exact or refused, never with another law.

The loop is `StableDiffusionPipeline`'s own source with lines put in. A change that gets through must be exact by its
own untouched loop (`forced.walk`).
"""

from __future__ import annotations

import inspect
import random
import sys
import textwrap
from typing import Any

import pytest
import torch

from foresample.integrations.turns import Refused

diffusers = pytest.importorskip("diffusers")
pytest.importorskip("transformers")
from tests.integrations.forced import walk  # noqa: E402
from tests.pipelines import stable_diffusion  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")

COUNT, STEPS = 200, 6
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
    exec(source[:line] + put + source[line:], vars(sys.modules[kind.__module__]), names)
    call = torch.no_grad()(names["__call__"])
    return type("StableDiffusionPipeline", (kind,), {"__call__": call})


def some(rng: random.Random, text: str) -> str:
    a, b = round(rng.choice([0.5, 0.9, 0.99, 1.001, 1.5]), 3), round(rng.uniform(0.05, 0.95), 2)
    c, k, t = rng.choice([0.5, 2.0, 5.0, 30.0]), rng.randrange(STEPS), rng.choice([100, 300, 700])
    return text.format(a=a, b=b, c=c, k=k, t=t)


@pytest.fixture(scope="module")
def pipe(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return stable_diffusion(
        tmp_path_factory.mktemp("fuzz"), diffusers.DDPMScheduler(clip_sample=True, steps_offset=1)
    )


def outcome(pipe: Any, where: str, what: str, when: str) -> str:
    original = type(pipe)
    told = torch.Generator().manual_seed(3)
    arguments = {
        "prompt_embeds": torch.randn(2, 5, 16, generator=told),
        "negative_prompt_embeds": torch.randn(2, 5, 16, generator=told),
        "num_inference_steps": STEPS,
        "height": 8,
        "width": 8,
        "output_type": "latent",
        "guidance_scale": 3.0,
    }
    pipe.__class__ = changed(where, what, when)
    try:
        run = walk(pipe, arguments, window=3)
    except Refused as sentence:
        return (
            "refused"
            if "foresample.restore(pipe)" in str(sentence)
            else f"refused without a remedy: {sentence}"
        )
    except (RuntimeError, IndexError) as error:  # some of these loops fail by themselves
        with pytest.raises(type(error)):
            pipe(**arguments)
        return "refused"
    finally:
        pipe.__class__ = original
    run.require_exact(1e-4 / COUNT)
    return "exact"


@pytest.mark.slow
@pytest.mark.law
def test_every_change_ends_exact_or_refused(pipe: Any) -> None:
    """False alarm 1e-4."""
    rng, ends = random.Random(0), {"exact": 0, "refused": 0}
    for _ in range(COUNT):
        where, what = rng.choice(CHANGES)
        when = rng.choice(WHEN)
        what, when = some(rng, what), some(rng, when)
        try:
            ends[outcome(pipe, where, what, when)] += 1
        except Exception as error:
            raise AssertionError(f"{where!r}: if {when}: {what}") from error
    assert ends["exact"] >= 20
    assert ends["refused"] >= 100


@pytest.mark.parametrize(
    ("where", "what", "when", "end"),
    [
        (AFTER_STEP, "latents = latents * 0.99", "i == 4", "refused"),
        (AFTER_STEP, "latents = latents.clamp(-30, 30)", "i == 4", "refused"),
        (BEFORE_STEP, "noise_pred = noise_pred * 1.01", "i == 4", "refused"),
        (BEFORE_STEP, "noise_pred = noise_pred.clamp(-0.5, 0.5)", "True", "exact"),
        (AFTER_CALL, f"noise_pred = 0.5 * noise_pred + 0.5 * {CALL}", "True", "exact"),
    ],
)
def test_some_of_them(pipe: Any, where: str, what: str, when: str, end: str) -> None:
    assert outcome(pipe, where, what, when) == end
