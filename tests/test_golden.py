"""Samples, calls and evaluations of every chain × drafter × block × noise mode, bit for bit those of a saved file.

A net under refactoring, of the plain round. `python -m tests.test_golden` writes the file anew where a change of bits
is meant.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import foresample as fs
from tests import pipelines
from tests.policies import lerobot, lowdim, plan_lerobot, plan_lowdim
from tests.small_chains import CHAINS, worse

FILE = Path(__file__).with_name("golden.json")


def digest(*values: torch.Tensor) -> str:
    sha256 = hashlib.sha256()
    for value in values:
        sha256.update(value.detach().cpu().contiguous().view(torch.uint8).numpy().data)
    return sha256.hexdigest()[:16]


def of_run(run: fs.Run) -> str:
    return digest(run.samples, run.calls, run.evaluations)


def chains() -> Iterator[tuple[str, str]]:
    drafters = {
        "head": lambda target: fs.Frozen("head"),
        "parent": lambda target: fs.Frozen("parent"),
        "nearest": lambda target: fs.Frozen("nearest"),
        "replay": lambda target: fs.Replay(secant=False),
        "secant": lambda target: fs.Replay(),
        "model": lambda target: fs.DraftModel(worse(target)),
    }
    for chain, make in CHAINS.items():
        target = make()
        yield f"{chain}, sequential", of_run(fs.sequential(target, 30, seed=3))
        yield f"{chain}, 7 slots", of_run(fs.sample(target, 30, window=5, slots=7, seed=3))
        for name, drafter in drafters.items():
            for block in (1, 4, None):
                for recycle in (True, False):
                    how: dict[str, Any] = {"drafter": drafter(target), "block": block, "recycle": recycle}
                    run = fs.sample(target, 30, window=6, seed=3, **how)
                    yield f"{chain}, {name}, block {block}, {'recycled' if recycle else 'fresh'}", of_run(run)


def models() -> Iterator[tuple[str, str]]:
    torch.set_num_threads(1)
    model = fs.pretrained.load()
    for reuse in ("x0", "v"):
        target = model.target(20, [3, 8], reuse=reuse)
        yield f"embedded, {reuse}", of_run(fs.sample(target, 4, window=6, seed=1))
        yield f"embedded, {reuse}, sequential", of_run(fs.sequential(target, 2, seed=1))


def of_pipelines() -> Iterator[tuple[str, str]]:
    import diffusers

    torch.set_num_threads(1)
    schedulers = {
        "DDPM": diffusers.DDPMScheduler(clip_sample=False, steps_offset=1),
        "DDPM fixed_large": diffusers.DDPMScheduler(clip_sample=True, variance_type="fixed_large"),
        "DDPM threshold": diffusers.DDPMScheduler(thresholding=True),
        "DDIM": diffusers.DDIMScheduler(),
        "DPM": diffusers.DPMSolverMultistepScheduler(algorithm_type="sde-dpmsolver++"),
        "Euler": diffusers.EulerAncestralDiscreteScheduler(prediction_type="v_prediction"),
    }
    with tempfile.TemporaryDirectory() as folder:
        for name, scheduler in schedulers.items():
            pipe = pipelines.stable_diffusion(Path(folder), scheduler)
            with fs.accelerate(pipe, window=6):
                latents = pipe(
                    ["a b", "c"], num_inference_steps=14, output_type="latent", eta=0.7,
                    generator=[torch.Generator().manual_seed(s) for s in (1, 2)],
                ).images  # fmt: skip
                report = pipe.foresample_report
                costs = torch.tensor([report.rounds, report.evaluations])
                yield f"Stable Diffusion, {name}", digest(latents, costs)
        pipe = pipelines.stable_diffusion_3()
        embeds = {"prompt_embeds": torch.zeros(1, 3, 16), "pooled_prompt_embeds": torch.zeros(1, 16)}
        with fs.accelerate(pipe, window=6):
            latents = pipe(
                **embeds, num_inference_steps=14, output_type="latent", height=16, width=16, guidance_scale=1.0,
                generator=torch.Generator().manual_seed(1),
            ).images  # fmt: skip
            yield "Stable Diffusion 3", digest(latents)


def policies() -> Iterator[tuple[str, str]]:
    for name, make, plan in (("lerobot", lerobot, plan_lerobot), ("lowdim", lowdim, plan_lowdim)):
        policy = make()
        with fs.accelerate(policy, window=6):
            yield name, digest(plan(policy, 5, torch.Generator().manual_seed(4)))


def datasets() -> Iterator[tuple[str, str]]:
    with tempfile.TemporaryDirectory() as folder:
        made = fs.generate(CHAINS["flow"](), 50, out=folder, window=6, shard=20, slots=8, seed=2)
        costs = made.manifest["costs"]
        counted = torch.tensor([costs["calls"], costs["evaluations"]])
        yield "dataset", digest(torch.cat(list(made.samples())), counted)


PARTS = {
    "chains": chains,
    "models": models,
    "pipelines": of_pipelines,
    "policies": policies,
    "datasets": datasets,
}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("part", PARTS)
def test_the_bits_are_those_of_the_saved_file(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORESAMPLE_PLAIN", "1")
    saved = json.loads(FILE.read_text())[part]
    assert dict(PARTS[part]()) == saved


if __name__ == "__main__":
    os.environ["FORESAMPLE_PLAIN"] = "1"
    FILE.write_text(json.dumps({name: dict(part()) for name, part in PARTS.items()}, indent=1) + "\n")
