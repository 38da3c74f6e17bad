"""A diffusers DDPM folder (`unet/`, `scheduler/`, `model_index.json`) as a target.

The chain is the one `DDPMPipeline` walks, as the reader of schedulers sees it. Weights are read from safetensors
only; nothing is unpickled.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from foresample.chains import scheduler_chain
from foresample.targets import ChainTarget, Kind, from_scheduler

EMBEDDED = Path(__file__).parent / "fashion_mnist"
"""The class-conditional Fashion-MNIST model that ships inside the package."""


@dataclass(frozen=True)
class Pretrained:
    """A network with its noise schedule and, if it is conditional, the names of its classes."""

    unet: torch.nn.Module
    scheduler: Any
    labels: list[str]
    shape: torch.Size
    device: torch.device
    dtype: torch.dtype
    """The network's."""

    def label_index(self, label: str) -> int:
        """The class of a name or a number, or an error that lists them."""
        return label_index(self.labels, label)

    def target(
        self,
        steps: int,
        labels: Sequence[int] | Tensor | None = None,
        *,
        reuse: Kind = "x0",
    ) -> ChainTarget:
        """Ancestral sampling in `steps` steps; labels are taken in turn, by default all there are.

        Sample i has class labels[i % len(labels)]. The chain is float32, whatever the network runs in.
        """
        most = self.scheduler.config.num_train_timesteps
        if not 1 <= steps <= most:
            raise ValueError(
                f"this model was trained with {most} timesteps: ask for 1 to {most} steps, not {steps}"
            )
        self.scheduler.set_timesteps(steps)
        classes = torch.as_tensor(range(len(self.labels)) if labels is None else labels, device=self.device)

        def denoiser(x: Tensor, time: Tensor, row: Tensor) -> Tensor:
            condition = {}
            if self.labels:
                condition["class_labels"] = classes[row % len(classes)]
            return self.unet(x.to(self.dtype), time, **condition).sample

        return from_scheduler(self.scheduler, denoiser, self.shape, reuse=reuse, device=self.device)


def label_index(labels: list[str], label: str) -> int:
    """The class of a name or a number, or an error that lists them."""
    if label in labels:
        return labels.index(label)
    if label.isdigit() and int(label) < len(labels):
        return int(label)
    if not labels:
        raise ValueError("this model is not conditional: leave the label out")
    raise ValueError(f"unknown label {label!r}: choose one of {', '.join(labels)}")


@dataclass(frozen=True)
class Recipe:
    """Which target to make of which folder: a function without arguments that any process can be sent."""

    path: Path
    steps: int
    label: str | None = None
    """Class of all samples, by name or number; all in turn by default."""
    reuse: Kind = "x0"
    device: str = "cpu"
    half: bool = False
    """Run the network in bfloat16."""
    compiled: bool = False

    def __call__(self) -> ChainTarget:
        model = load(
            self.path, self.device, torch.bfloat16 if self.half else torch.float32, compiled=self.compiled
        )
        return model.target(self.steps, self._classes(model.labels), reuse=self.reuse)

    def labels(self) -> list[int] | None:
        """The classes that samples have in turn."""
        return self._classes(self.names())

    def names(self) -> list[str]:
        """The names of all classes, none for a network without."""
        return _labels(self.path, _read_json(self.path / "unet" / "config.json"))

    def about(self) -> dict[str, Any]:
        """What decides on the samples beside the chain: the network's weights and how they are used."""
        weights = _weights(self.path)
        return {
            "model": self.path.resolve().name,
            "weights": hashlib.sha256(weights.read_bytes()).hexdigest()[:16],
            "reuse": self.reuse,
            "network": "bfloat16" if self.half else "float32",
        }

    def _classes(self, names: list[str]) -> list[int] | None:
        if self.label is not None:
            return [label_index(names, self.label)]
        return list(range(len(names))) or None


def load(
    path: str | Path = EMBEDDED,
    device: str | torch.device = "cpu",
    dtype: torch.dtype = torch.float32,
    *,
    compiled: bool = False,
) -> Pretrained:
    """Open a diffusers DDPM folder; by default the embedded Fashion-MNIST model.

    The network runs in `dtype`, and `compiled` by torch.compile if asked (once for each number of states).
    """
    try:
        from diffusers import DDPMScheduler, UNet2DModel
    except ImportError:
        raise ImportError("models need the diffusers extra: pip install 'foresample[models]'") from None
    path = Path(path)
    index = _read_json(path / "model_index.json")
    parts = {name: index.get(name, [None, None])[-1] for name in ("unet", "scheduler")}
    if parts != {"unet": "UNet2DModel", "scheduler": "DDPMScheduler"}:
        raise ValueError(
            f"{path} holds {index.get('_class_name', 'no pipeline')} with {parts['unet']} and "
            f"{parts['scheduler']}; this loader takes a UNet2DModel with a DDPMScheduler"
        )
    weights = _weights(path)
    scheduler = DDPMScheduler.from_config(_read_json(path / "scheduler" / "scheduler_config.json"))
    scheduler.set_timesteps(1)
    scheduler_chain(scheduler)  # refuses what has no exact coupling, before the weights are read
    config = _read_json(path / "unet" / "config.json")
    unet = UNet2DModel.from_config(config)
    _load_weights(unet, weights)
    size = unet.config.sample_size
    height, width = (size, size) if isinstance(size, int) else size
    device = torch.device(device)
    shape = torch.Size([unet.config.in_channels, height, width])
    unet = torch.nn.Module.to(unet, device, dtype).eval().requires_grad_(False)  # diffusers' own warns of casts
    network = cast(torch.nn.Module, torch.compile(unet, dynamic=False)) if compiled else unet
    return Pretrained(network, scheduler, _labels(path, config), shape, device, dtype)


def _labels(path: Path, config: dict[str, Any]) -> list[str]:
    """The names of the classes, none for a network without."""
    count, names = config.get("num_class_embeds") or 0, path / "labels.json"
    return (json.loads(names.read_text()) if names.is_file() else [str(i) for i in range(count)])[:count]


def _weights(path: Path) -> Path:
    weights = path / "unet" / "diffusion_pytorch_model.safetensors"
    if not weights.is_file():
        raise FileNotFoundError(
            f"{weights} does not exist: weights are read from safetensors only (save_pretrained writes them)"
        )
    return weights


def _load_weights(unet: torch.nn.Module, path: Path) -> None:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        state = {name: value.float() for name, value in load_file(path).items()}
        unet.load_state_dict(state)
    except SafetensorError as error:
        raise ValueError(f"{path} is corrupt ({error}): copy or download it again") from None
    except RuntimeError as error:
        first = str(error).splitlines()[1].strip() if "\n" in str(error) else str(error)
        raise ValueError(f"{path} does not fit the network of config.json beside it ({first})") from None


def _read_json(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text())
    except FileNotFoundError:
        raise FileNotFoundError(f"{path} does not exist: not the folder of a diffusers DDPM pipeline") from None
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON ({error})") from None
