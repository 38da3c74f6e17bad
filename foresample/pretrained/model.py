"""A diffusers DDPM folder (`unet/`, `scheduler/`, `model_index.json`) as a target.

The chain is the one that `DDPMPipeline` draws, as `chains.schedulers` reads it. diffusers reads the folder, and this
module checks the result: weights that do not fit the network, a network that returns another shape than it takes, and a
schedule without an exact chain are each refused in one sentence. Weights are read from safetensors only; nothing is
unpickled.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from reprlib import repr as shortened
from typing import Any, cast

import torch
from torch import Tensor

from foresample.chains import Kind, scheduler_chain
from foresample.schema import Unfit, parse_json, read_plain
from foresample.targets import ChainTarget, from_scheduler
from foresample.text import printable

EMBEDDED = Path(__file__).parent / "fashion_mnist"
"""The class-conditional Fashion-MNIST model that ships inside the package."""
_CACHED = 5 * 2**20  # bytes of one layer's output; with more, every state takes longer


@dataclass(frozen=True)
class Pretrained:
    """A network (in `dtype`) with its noise schedule and, if it is conditional, the names of its classes."""

    unet: torch.nn.Module
    scheduler: Any
    labels: list[str]
    shape: torch.Size
    device: torch.device
    dtype: torch.dtype
    for_many: torch.nn.Module | None = None
    """The compiled network for calls on several states; None where the network is not compiled. On a GPU it holds
    weights of its own, since channels-last is faster there for several states and slower for one."""

    def label_index(self, label: str) -> int:
        """The class of a name or a number, or an error that lists them."""
        return _label_index(self.labels, label)

    def target(
        self, steps: int, labels: Sequence[int] | Tensor | None = None, *, reuse: Kind = "x0"
    ) -> ChainTarget:
        """Ancestral sampling in `steps` steps; labels are taken in turn, all of them by default.

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
            condition = [classes[row % len(classes)]] if self.labels else []
            return self._evaluated(x.to(self.dtype), time, *condition)

        return from_scheduler(self.scheduler, denoiser, self.shape, reuse=reuse, device=self.device)

    def _evaluated(self, *given: Tensor) -> Tensor:
        """The network's output at states, their times and classes.

        On a CPU they are evaluated in chunks whose first layer, about the largest, is assumed to fit into the caches.
        """
        count, parts = len(given[0]), 1
        if self.device.type == "cpu":
            channels, (_, height, width) = cast(Any, self.unet).config.block_out_channels[0], self.shape
            parts = -(-count // max(1, _CACHED // int(channels * height * width * self.dtype.itemsize)))
        if parts <= 1:
            return self._forward(*given)
        chunks = zip(*(value.chunk(parts) for value in given), strict=True)
        return torch.cat([self._forward(*chunk) for chunk in chunks])

    def _forward(self, *given: Tensor) -> Tensor:
        if self.for_many is None or len(given[0]) == 1:
            return self.unet(*given).sample
        for value in given:
            torch._dynamo.maybe_mark_dynamic(value, 0)
        return self.for_many(*given).sample


@dataclass(frozen=True)
class Recipe:
    """Makes a target from a folder: a function without arguments that can be sent to any process."""

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
        dtype = torch.bfloat16 if self.half else torch.float32
        model = load(self.path, self.device, dtype, compiled=self.compiled)
        return model.target(self.steps, self.labels(), reuse=self.reuse)

    def labels(self) -> list[int] | None:
        """The classes that samples take in turn."""
        names = self.names()
        return list(range(len(names))) or None if self.label is None else [_label_index(names, self.label)]

    def names(self) -> list[str]:
        """The names of all classes; empty for an unconditional network."""
        count = _config(self.path / "unet" / "config.json").get("num_class_embeds")
        return _labels(self.path, count if isinstance(count, int) else 0)

    def about(self) -> dict[str, Any]:
        """Settings that samples depend on besides the chain: the network's weights and how they are used."""
        with _weights(self.path / "unet").open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        return {
            "model": self.path.resolve().name,
            "weights": digest[:16],
            "reuse": self.reuse,
            "network": "bfloat16" if self.half else "float32",
        }

    def configurations(self) -> dict[str, dict[str, Any]]:
        """The settings of its scheduler and network, lists and objects as text; one dataset has one of each."""
        files = {"scheduler": "scheduler_config.json", "unet": "config.json"}
        return {
            part: {
                name: json.dumps(value) if isinstance(value, (dict, list)) else value
                for name, value in _config(self.path / part / file).items()
                if not name.startswith("_")  # notes such as _class_name
            }
            for part, file in files.items()
        }


def load(
    path: str | Path = EMBEDDED,
    device: str | torch.device = "cpu",
    dtype: torch.dtype = torch.float32,
    *,
    compiled: bool = False,
) -> Pretrained:
    """Open a diffusers DDPM folder; by default the embedded Fashion-MNIST model.

    Args:
        path: the folder.
        device: where the network runs.
        dtype: of the network; the chain stays float32.
        compiled: compile the network with torch.compile: for one state, and for any number of states.
    """
    try:
        from diffusers import DDPMScheduler, UNet2DModel
    except ImportError:
        raise ImportError(
            "models need diffusers, which is missing: pip install diffusers safetensors pillow"
        ) from None
    path, device = Path(path), torch.device(device)
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ValueError(
            f"there is no {device} here: torch {torch.__version__} sees {torch.cuda.device_count()} GPUs; "
            "load the model on the CPU"
        )
    _require_parts(path, _json(path / "model_index.json"))
    scheduler = _read_scheduler(DDPMScheduler, path / "scheduler")
    unet = _read_network(UNet2DModel, path / "unet")
    shape = _shape(unet.config, path / "unet")
    labels = _labels(path, unet.config.num_class_embeds or 0)
    unet = torch.nn.Module.to(unet, device, dtype).eval().requires_grad_(False)  # diffusers' own warns of casts
    network, for_many = compile_network(unet) if compiled else (unet, None)
    return Pretrained(network, scheduler, labels, shape, device, dtype, for_many)


class _ChannelsLast(torch.nn.Module):
    """A copy of a network in channels-last, which takes its states in any layout."""

    def __init__(self, unet: torch.nn.Module) -> None:
        super().__init__()
        self.unet = cast(Any, torch.nn.Module.to)(deepcopy(unet), memory_format=torch.channels_last)

    def forward(self, x: Tensor, *given: Tensor) -> Any:
        return self.unet(x.contiguous(memory_format=torch.channels_last), *given)


def compile_network(unet: torch.nn.Module, **options: Any) -> tuple[torch.nn.Module, torch.nn.Module]:
    """The network compiled for calls on one state, and for calls on several; with options of torch.compile."""
    for_one = torch.compile(unet, dynamic=False, **options)
    on_gpu = next(unet.parameters()).is_cuda
    for_many = torch.compile(_ChannelsLast(unet), dynamic=False, **options) if on_gpu else for_one
    return cast(torch.nn.Module, for_one), cast(torch.nn.Module, for_many)


def _require_parts(path: Path, index: Any) -> None:
    """Refuse a folder of another pipeline, by its model_index.json."""
    index = index if isinstance(index, dict) else {}
    parts = [
        part[-1] if isinstance(part, list) and part else part for part in map(index.get, ("unet", "scheduler"))
    ]
    if parts != ["UNet2DModel", "DDPMScheduler"]:
        name, unet, other = (
            part if isinstance(part, str) and part.isidentifier() and len(part) < 80 else shortened(part)
            for part in (index.get("_class_name"), *parts)
        )
        raise ValueError(
            f"{path} holds {name} with {unet} and {other}; this loader takes a UNet2DModel with a DDPMScheduler"
        )


def _read_scheduler(kind: Any, folder: Path) -> Any:
    """The noise schedule; one that has no exact chain here is refused, before any weights are read."""
    with _naming_folder(folder):
        scheduler = kind.from_pretrained(folder, local_files_only=True)
    with _naming_folder(folder, but=ValueError):
        scheduler.set_timesteps(scheduler.config.num_train_timesteps)
        chain = scheduler_chain(scheduler)
    if scheduler.config.variance_type == "learned_range":
        raise ValueError(
            f"{folder}: this loader's networks return as many channels as they take and have no learned variance: "
            "use variance_type='fixed_small', or foresample.targets.from_scheduler with your own network"
        )
    if not torch.isfinite(chain.std).all():
        raise ValueError(
            f"{folder}: its betas give a noise that is NaN or infinite; they must be between 0 and 1"
        )
    return scheduler


def _read_network(kind: Any, folder: Path) -> Any:
    """The network with exactly the weights it needs."""
    _weights(folder)
    options = {"use_safetensors": True, "low_cpu_mem_usage": False, "output_loading_info": True}
    with _naming_folder(folder):
        unet, info = kind.from_pretrained(folder, local_files_only=True, **options)
    strange = [name for kind in ("missing_keys", "unexpected_keys", "mismatched_keys") for name in info[kind]]
    if strange:
        raise ValueError(
            f"{folder}: its weights do not fit the network of config.json ({shortened(strange)}): copy or download the "
            "folder again"
        )
    return unet.float()


def _shape(config: Any, folder: Path) -> torch.Size:
    """The shape of a state."""
    size = config.sample_size
    sides = [size, size] if isinstance(size, int) else size
    pair = isinstance(sides, (list, tuple)) and len(sides) == 2
    if not pair or not all(type(n) is int and n > 0 for n in sides):
        raise ValueError(f"{folder}: sample_size is {shortened(size)}, not the pixels of a picture's sides")
    if config.in_channels != config.out_channels:
        raise ValueError(
            f"{folder}: the network takes {config.in_channels} channels and returns {config.out_channels}; this loader "
            "takes one that returns what it takes"
        )
    return torch.Size([config.in_channels, *sides])


def _weights(folder: Path) -> Path:
    weights = folder / "diffusion_pytorch_model.safetensors"
    if not weights.is_file():
        raise FileNotFoundError(
            f"{weights} does not exist: weights are read from safetensors only (save_pretrained writes them)"
        )
    return weights


def _labels(path: Path, count: int) -> list[str]:
    """The names of the classes; empty for an unconditional network."""
    file = path / "labels.json"
    if not file.exists():
        return [str(i) for i in range(count)]
    names = _json(file)
    if not isinstance(names, list) or not all(type(name) is str for name in names):
        raise ValueError(
            f"{file} is not a list of names: give one name for each class, in order, or delete the file"
        )
    if len(names) != count or len(set(names)) != count:
        raise ValueError(
            f"{file} has {len(set(names))} names, and the network has {count} classes: give one for each, in order"
        )
    return names


def _label_index(labels: list[str], label: str) -> int:
    if label in labels:
        return labels.index(label)
    if label.isdecimal() and int(label) < len(labels):
        return int(label)
    if not labels:
        raise ValueError("this model is not conditional: leave the label out")
    raise ValueError(f"unknown label {label!r}: choose one of {', '.join(labels)}")


@contextmanager
def _naming_folder(folder: Path, but: type[Exception] | tuple[()] = ()) -> Iterator[None]:
    """Turn any error of diffusers' code into one that names the folder it was reading; errors of type `but` pass."""
    try:
        yield
    except but:
        raise
    except Exception as error:
        first = printable(" ".join(str(error).split())[:300]) or "no message"
        raise ValueError(
            f"diffusers cannot read {folder} ({type(error).__name__}: {first}): compare it with a folder that "
            "save_pretrained has written"
        ) from None


def _config(path: Path) -> dict[str, Any]:
    """A configuration that diffusers has saved."""
    config = _json(path)
    if not isinstance(config, dict):
        raise ValueError(f"{path} is not a configuration: compare it with one that save_pretrained has written")
    return config


def _json(path: Path) -> Any:
    try:
        return parse_json(read_plain(path).decode())
    except OSError as error:
        why = "does not exist" if isinstance(error, FileNotFoundError) else f"cannot be read ({error.strerror})"
        raise type(error)(f"{path} {why}: not the folder of a diffusers DDPM pipeline") from None
    except (Unfit, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not valid JSON ({error})") from None
