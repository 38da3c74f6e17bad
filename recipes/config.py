"""The two models, as data: network, noise schedule and how long to train.

Both predict v = α ε − σ x₀ (Salimans & Ho 2022). The cosine schedule ends at almost no signal, where an
ε-network's x₀ = (x − σ ε) / α divides its error by nearly 0; with v, x₀ = α x − σ v is well conditioned at
every step, and plain MSE on v is a balanced loss whose target has about unit variance at every noise level.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from diffusers import DDPMScheduler, UNet2DModel

from recipes.data import CIFAR_LABELS, FASHION_LABELS

SCHEDULE: dict[str, Any] = {
    "num_train_timesteps": 1000,
    "beta_schedule": "squaredcos_cap_v2",
    "prediction_type": "v_prediction",
    "variance_type": "fixed_small",
    "clip_sample": True,
}


@dataclass(frozen=True)
class Recipe:
    """Everything a training run depends on besides its data, seed and length."""

    name: str
    labels: tuple[str, ...]
    unet: dict[str, Any]
    steps: int
    batch: int
    lr: float
    warmup: int
    flip: bool = False
    ema: float = 0.9995
    schedule: dict[str, Any] = field(default_factory=lambda: dict(SCHEDULE))

    def build(self) -> tuple[UNet2DModel, DDPMScheduler]:
        """The network with fresh weights (from torch's global generator) and its schedule."""
        return UNet2DModel(**self.unet), DDPMScheduler(**self.schedule)


# 28 → 14 → 7: three levels, attention at 7×7 only, one layer a block. 2.9 M parameters and 0.6 GFLOP a picture:
# the demo runs it on a laptop's CPU, and its fp16 weights fit in 6 MB.
# No mirror images: every shoe of this data set points left, and the model should say so.
FASHION = Recipe(
    name="fashion-mnist",
    labels=FASHION_LABELS,
    unet={
        "sample_size": 28,
        "in_channels": 1,
        "out_channels": 1,
        "block_out_channels": (32, 64, 128),
        "layers_per_block": 1,
        "down_block_types": ("DownBlock2D", "DownBlock2D", "AttnDownBlock2D"),
        "up_block_types": ("AttnUpBlock2D", "UpBlock2D", "UpBlock2D"),
        "attention_head_dim": 32,
        "norm_num_groups": 8,
        "resnet_time_scale_shift": "scale_shift",
        "num_class_embeds": 10,
    },
    steps=12_000,
    batch=512,
    lr=1e-3,
    warmup=500,
)

# 32 → 16 → 8, attention at 16×16 and 8×8; wide at full size, where colour and texture are made.
# 10.6 M parameters: 21.4 MB in fp16.
CIFAR = Recipe(
    name="cifar10",
    labels=CIFAR_LABELS,
    unet={
        "sample_size": 32,
        "in_channels": 3,
        "out_channels": 3,
        "block_out_channels": (96, 128, 160),
        "layers_per_block": 2,
        "down_block_types": ("DownBlock2D", "AttnDownBlock2D", "AttnDownBlock2D"),
        "up_block_types": ("AttnUpBlock2D", "AttnUpBlock2D", "UpBlock2D"),
        "attention_head_dim": 32,
        "norm_num_groups": 32,
        "resnet_time_scale_shift": "scale_shift",
        "num_class_embeds": 10,
    },
    steps=15_000,
    batch=512,
    lr=8e-4,
    flip=True,
    warmup=500,
)

RECIPES = {recipe.name: recipe for recipe in (FASHION, CIFAR)}
