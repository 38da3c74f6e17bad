"""Speculative sampling of a text-to-image pipeline.

    python examples/stable_diffusion.py stabilityai/stable-diffusion-2-1-base "a lighthouse in a storm"

Any pipeline folder or hub name with a U-Net or a transformer will do. The scheduler must add noise, so this example
sets DPM-Solver++ 2M SDE.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from diffusers import DiffusionPipeline, DPMSolverMultistepScheduler

import foresample


def draw(pipe: Any, prompt: str, **arguments: Any) -> Any:
    """Pictures of a prompt, and the report of their run."""
    pipe.scheduler = DPMSolverMultistepScheduler.from_config(
        pipe.scheduler.config, algorithm_type="sde-dpmsolver++"
    )
    with foresample.accelerate(pipe, window=16):
        images = pipe(prompt, **arguments).images
        return images, pipe.foresample_report


if __name__ == "__main__":
    name, prompt = sys.argv[1], sys.argv[2]
    device = "cuda" if torch.cuda.is_available() else "cpu"
    pipe = DiffusionPipeline.from_pretrained(name, torch_dtype=torch.float16 if device == "cuda" else None)
    images, report = draw(
        pipe.to(device), prompt, num_inference_steps=50, generator=[torch.Generator().manual_seed(0)]
    )
    images[0].save("lighthouse.png")
    print(report)
