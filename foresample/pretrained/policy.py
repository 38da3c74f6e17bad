"""A small trained diffusion policy of human handwriting: a pen that draws a given shape.

It is a small version of LeRobot's diffusion policy: from the pen's position, its velocity and the wanted shape it plans
the next 16 velocities with a conditional 1-D U-Net and DDPM (100 steps, squaredcos_cap_v2, clipped, epsilon), and its
objects have the names of LeRobot's (`policy.diffusion.unet`, `.noise_scheduler`, `.conditional_sample`). Executing 8 of
the 16 and planning again draws the shape. `recipes/lasa.py` trains it.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from diffusers import DDPMScheduler
from safetensors.torch import load_file
from torch import Tensor, nn

ASSET = Path(__file__).parent / "lasa_policy"
SHAPES = ("Sshape", "WShape", "Sine", "Multi_Models_1")
STARTS = ((0.69, 0.81), (-0.82, 0.51), (-0.88, -0.18), (-0.94, -0.14))
"""Approximate first positions of each shape's demonstrations."""


@dataclass(frozen=True)
class PolicyConfig:
    """Sizes of the policy, with LeRobot's names where it has one."""

    shapes: tuple[str, ...] = SHAPES
    horizon: int = 16
    n_action_steps: int = 8
    action_dim: int = 2
    channels: tuple[int, int] = (48, 96)
    embedding: int = 32
    num_train_timesteps: int = 100
    speed: float = 1.0
    """Largest velocity of the demonstrations, in units of position a point: an action of 1."""

    @property
    def condition_dim(self) -> int:
        return 4 + len(self.shapes)

    @property
    def action_feature(self) -> Any:
        return SimpleNamespace(shape=(self.action_dim,))


def _convolution(before: int, after: int) -> nn.Sequential:
    return nn.Sequential(nn.Conv1d(before, after, 3, padding=1), nn.GroupNorm(8, after), nn.Mish())


class Block(nn.Module):
    """Two convolutions; the condition scales and shifts in between (FiLM)."""

    def __init__(self, before: int, after: int, condition: int) -> None:
        super().__init__()
        self.first, self.film = _convolution(before, after), nn.Linear(condition, 2 * after)
        self.second = _convolution(after, after)
        self.skip = nn.Conv1d(before, after, 1) if before != after else nn.Identity()

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        scale, shift = self.film(condition).unsqueeze(2).chunk(2, 1)
        return self.second((1 + scale) * self.first(x) + shift) + self.skip(x)


class ActionUnet(nn.Module):
    """A conditional U-Net along the plan: unet(sample [B, horizon, action], timestep [B], global_cond)."""

    def __init__(self, config: PolicyConfig) -> None:
        super().__init__()
        (wide, deep), size = config.channels, config.embedding
        condition = size + config.condition_dim
        self.embedding = size
        self.time = nn.Sequential(nn.Linear(size, 2 * size), nn.Mish(), nn.Linear(2 * size, size))
        self.enter = Block(config.action_dim, wide, condition)
        self.shrink = nn.Conv1d(wide, wide, 3, stride=2, padding=1)
        self.middle = nn.ModuleList([Block(wide, deep, condition), Block(deep, deep, condition)])
        self.grow = nn.ConvTranspose1d(deep, wide, 4, stride=2, padding=1)
        self.leave = Block(2 * wide, wide, condition)
        self.out = nn.Conv1d(wide, config.action_dim, 1)

    def forward(self, sample: Tensor, timestep: Tensor, global_cond: Tensor) -> Tensor:
        count = self.embedding // 2
        rate = torch.exp(torch.arange(count, device=sample.device) * (-math.log(1e4) / (count - 1)))
        angle = timestep.unsqueeze(1) * rate
        time_features = self.time(torch.cat([angle.sin(), angle.cos()], 1).to(sample.dtype))
        condition = torch.cat([time_features, global_cond], 1)
        wide = self.enter(sample.transpose(1, 2), condition)
        x = self.shrink(wide)
        for block in self.middle:
            x = block(x, condition)
        x = self.leave(torch.cat([self.grow(x), wide], 1), condition)
        return self.out(x).transpose(1, 2)


class DiffusionModel(nn.Module):
    """The sampler, with the attributes and the arguments of LeRobot's `DiffusionModel`."""

    def __init__(self, config: PolicyConfig, unet: nn.Module | None = None) -> None:
        super().__init__()
        self.config = config
        self.unet = ActionUnet(config) if unet is None else unet
        self.noise_scheduler = DDPMScheduler(
            num_train_timesteps=config.num_train_timesteps,
            beta_schedule="squaredcos_cap_v2",
            clip_sample=True,
            prediction_type="epsilon",
        )
        self.num_inference_steps = config.num_train_timesteps

    def conditional_sample(
        self,
        batch_size: int,
        global_cond: Tensor | None = None,
        generator: torch.Generator | None = None,
        noise: Tensor | None = None,
    ) -> Tensor:
        """Plans [batch_size, horizon, action], step after step."""
        weight = next(self.parameters())
        sample = noise
        if sample is None:
            shape = (batch_size, self.config.horizon, self.config.action_dim)
            sample = torch.randn(shape, generator=generator, dtype=weight.dtype, device=weight.device)
        self.noise_scheduler.set_timesteps(self.num_inference_steps)
        for t in self.noise_scheduler.timesteps:
            timestep = torch.full((len(sample),), int(t), device=sample.device)
            output = self.unet(sample, timestep, global_cond=global_cond)
            sample = self.noise_scheduler.step(output, t, sample, generator=generator).prev_sample
        return sample


class LasaPolicy(nn.Module):
    """A pen that draws a given shape: plans velocities from its position and its last velocity."""

    def __init__(self, config: PolicyConfig) -> None:
        super().__init__()
        self.config = config
        self.diffusion = DiffusionModel(config)

    def condition(self, position: Tensor, velocity: Tensor, shape: Tensor) -> Tensor:
        """The network's condition, from positions and velocities [B, 2] in data units and shapes [B] by number."""
        which = nn.functional.one_hot(shape, len(self.config.shapes)).to(position.dtype)
        return torch.cat([position, velocity / self.config.speed, which], 1)

    @torch.no_grad()
    def predict_action_chunk(
        self, position: Tensor, velocity: Tensor, shape: Tensor, generator: torch.Generator | None = None
    ) -> Tensor:
        """The velocities to execute before planning again, [B, n_action_steps, 2], in data units."""
        condition = self.condition(position, velocity, shape)
        plan = self.diffusion.conditional_sample(len(position), global_cond=condition, generator=generator)
        return self.config.speed * plan[:, : self.config.n_action_steps]


def load(folder: Path = ASSET) -> LasaPolicy:
    """The trained policy, ready to plan."""
    values = json.loads((folder / "config.json").read_text())
    del values["training"]
    lists = {name: tuple(value) for name, value in values.items() if isinstance(value, list)}
    policy = LasaPolicy(PolicyConfig(**{**values, **lists}))
    policy.load_state_dict(load_file(folder / "model.safetensors"))
    return policy.eval().requires_grad_(False)
