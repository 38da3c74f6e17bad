"""Write a trained model as diffusers writes it, and draw from it once to see what was learnt."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Sequence
from pathlib import Path

import torch
from diffusers import DDPMPipeline, DDPMScheduler, UNet2DModel
from torch import Tensor


def export(unet: UNet2DModel, scheduler: DDPMScheduler, labels: Sequence[str], folder: Path) -> int:
    """fp16 weights in diffusers' folder layout, and `labels.json` beside them. Returns the bytes written.

    `DDPMPipeline.from_pretrained(folder)` loads it, in float32.
    """
    half = copy.deepcopy(unet).to(memory_format=torch.contiguous_format).half().cpu()
    shutil.rmtree(folder, ignore_errors=True)
    DDPMPipeline(half, scheduler).save_pretrained(folder, safe_serialization=True)
    (folder / "labels.json").write_text(json.dumps(list(labels)) + "\n")
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


@torch.no_grad()
def draw(unet: UNet2DModel, scheduler: DDPMScheduler, labels: Tensor, steps: int, seed: int) -> Tensor:
    """Pictures (uint8) from plain ancestral sampling in `steps` steps, one for each label."""
    device = labels.device
    generator = torch.Generator(device).manual_seed(seed)
    size, channels = unet.config.sample_size, unet.config.in_channels
    x = torch.randn(len(labels), channels, size, size, generator=generator, device=device)
    scheduler.set_timesteps(steps)
    for t in scheduler.timesteps:
        v = unet(x, t, class_labels=labels).sample
        x = scheduler.step(v, t, x, generator=generator).prev_sample
    return ((x.clamp(-1, 1) + 1) * 127.5).round().to(torch.uint8)
