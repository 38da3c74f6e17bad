"""The state of a training run on disk: safetensors for numbers, JSON for the rest, never a pickle.

    RUN/checkpoint-00001200/state.safetensors   weight.*, ema.*, moment1.*, moment2.* in float32
    RUN/checkpoint-00001200/run.json            what the run is, where it stands, its losses so far

There is no random state to keep: the order of the data and the noise of step k come from generators seeded by
(seed, k), so `step` says it all.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn


class CheckpointError(RuntimeError):
    """A checkpoint that cannot be used; the message is one sentence with the remedy."""


@dataclass
class Run:
    """Identity and progress of a run. `total` is None until a time budget has been turned into steps."""

    name: str
    seed: int
    batch: int
    lr: float
    warmup: int
    total: int | None = None
    step: int = 0
    seconds: float = 0.0
    history: list[tuple[int, float]] = field(default_factory=list)


def flatten(unet: nn.Module, ema: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Weights, their average and AdamW's two moments under one flat set of names."""
    state = {}
    averages = dict(ema.named_parameters())
    for name, weight in unet.named_parameters():
        state[f"weight.{name}"] = weight
        state[f"ema.{name}"] = averages[name]
        if weight in optimizer.state:
            state[f"moment1.{name}"] = optimizer.state[weight]["exp_avg"]
            state[f"moment2.{name}"] = optimizer.state[weight]["exp_avg_sq"]
    return {name: tensor.detach().contiguous().cpu() for name, tensor in state.items()}


def restore(
    state: dict[str, Tensor], step: int, unet: nn.Module, ema: nn.Module, optimizer: torch.optim.AdamW
) -> None:
    """Undo `flatten`, in place, in each parameter's own device and memory format."""
    averages = dict(ema.named_parameters())
    on_device = optimizer.defaults["fused"] or optimizer.defaults["capturable"]
    try:
        with torch.no_grad():
            for name, weight in unet.named_parameters():
                weight.copy_(state[f"weight.{name}"])
                averages[name].copy_(state[f"ema.{name}"])
                optimizer.state[weight] = {
                    "step": torch.tensor(float(step), device=weight.device if on_device else "cpu"),
                    "exp_avg": torch.zeros_like(weight).copy_(state[f"moment1.{name}"]),
                    "exp_avg_sq": torch.zeros_like(weight).copy_(state[f"moment2.{name}"]),
                }
    except (KeyError, RuntimeError) as error:
        raise CheckpointError(
            f"the checkpoint belongs to another network ({error}): choose another --out folder."
        ) from None


def save(folder: Path, run: Run, state: dict[str, Tensor]) -> Path:
    """Write a checkpoint beside the older one, and drop the older only once the new one is whole."""
    target = folder / f"checkpoint-{run.step:08d}"
    scratch = folder / "writing"
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(parents=True)
    save_file(state, scratch / "state.safetensors")
    (scratch / "run.json").write_text(json.dumps(asdict(run)) + "\n")
    shutil.rmtree(target, ignore_errors=True)
    scratch.rename(target)
    for old in folder.glob("checkpoint-*"):
        if old != target:
            shutil.rmtree(old)
    return target


def latest(folder: Path) -> Path | None:
    """The newest checkpoint of a run folder, if it has one."""
    return max(folder.glob("checkpoint-*"), default=None)


def load(path: Path) -> tuple[Run, dict[str, Tensor]]:
    """Read one checkpoint."""
    try:
        fields = json.loads((path / "run.json").read_text())
        fields["history"] = [(int(step), float(loss)) for step, loss in fields["history"]]
        return Run(**fields), load_file(path / "state.safetensors")
    except (OSError, ValueError, TypeError, KeyError, SafetensorError) as error:
        raise CheckpointError(f"{path} is damaged ({error}): delete it and run again.") from None
