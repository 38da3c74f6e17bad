"""A tiny class-conditional DDPM with random weights, saved by diffusers itself."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch


def save_tiny_model(path: Path) -> Path:
    """Three classes of grey pictures, 8×8."""
    import diffusers

    torch.manual_seed(0)
    unet = diffusers.UNet2DModel(
        sample_size=8,
        in_channels=1,
        out_channels=1,
        layers_per_block=1,
        block_out_channels=(8, 16),
        norm_num_groups=4,
        down_block_types=("DownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "UpBlock2D"),
        num_class_embeds=3,
    )
    scheduler = diffusers.DDPMScheduler(beta_schedule="squaredcos_cap_v2", prediction_type="v_prediction")
    diffusers.DDPMPipeline(unet.half(), scheduler).save_pretrained(path, safe_serialization=True)
    (path / "labels.json").write_text('["hat", "coat", "shoe"]')
    return path


def copy_model(folder: Path, to: Path, **scheduler: object) -> Path:
    """The same with other settings of its scheduler."""
    shutil.copytree(folder, to)
    config = to / "scheduler" / "scheduler_config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), **scheduler}))
    return to
