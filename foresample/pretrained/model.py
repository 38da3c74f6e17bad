"""A diffusers DDPM folder (`unet/`, `scheduler/`, `model_index.json`) as a target.

The chain is the one `DDPMPipeline` walks, as the reader of schedulers sees it. diffusers reads the folder; here its
answer is judged: weights that do not fill the network, a network that returns another shape than it takes, or a
schedule without an exact chain are refused in one sentence. Weights are read from safetensors only; nothing is
unpickled.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
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
_CACHED = 5 * 2**20  # bytes of a layer's numbers; evaluated beside more of them, every state takes longer


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
            condition = [classes[row % len(classes)]] if self.labels else []
            return self._said(x.to(self.dtype), time, *condition)

        return from_scheduler(self.scheduler, denoiser, self.shape, reuse=reuse, device=self.device)

    def _said(self, *given: Tensor) -> Tensor:
        """What the network says of states, their times and classes; a CPU evaluates a few at a time."""
        count = len(given[0])
        if self.device.type != "cpu" or count <= (most := self._at_a_time()):
            return self.unet(*given).sample
        parts = zip(*(value.chunk(-(-count // most)) for value in given), strict=True)
        return torch.cat([self.unet(*part).sample for part in parts])

    def _at_a_time(self) -> int:
        """States whose numbers in the first layer, about the largest there are, a CPU's caches are taken to hold."""
        _, height, width = self.shape
        channels = cast(Any, self.unet).config.block_out_channels[0]
        return max(1, _CACHED // int(channels * height * width * self.dtype.itemsize))


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
        count = _config(self.path / "unet" / "config.json").get("num_class_embeds")
        return _labels(self.path, count if isinstance(count, int) else 0)

    def about(self) -> dict[str, Any]:
        """What decides on the samples beside the chain: the network's weights and how they are used."""
        with _weights(self.path / "unet").open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        return {
            "model": self.path.resolve().name,
            "weights": digest[:16],
            "reuse": self.reuse,
            "network": "bfloat16" if self.half else "float32",
        }

    def configurations(self) -> dict[str, dict[str, Any]]:
        """What the folder says of its scheduler and network: samples of one dataset have one of each."""
        files = {"scheduler": "scheduler_config.json", "unet": "config.json"}
        return {part: _shallow(_config(self.path / part / file)) for part, file in files.items()}

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
    path, device = Path(path), _require_device(device)
    _require_parts(path, _json(path / "model_index.json"))
    scheduler = _read(DDPMScheduler, path / "scheduler")
    _require_chain(scheduler, path / "scheduler")
    unet = _read_network(UNet2DModel, path / "unet")
    shape = _shape(unet.config, path / "unet")
    labels = _labels(path, unet.config.num_class_embeds or 0)
    unet = torch.nn.Module.to(unet, device, dtype).eval().requires_grad_(False)  # diffusers' own warns of casts
    network = cast(torch.nn.Module, torch.compile(unet, dynamic=False)) if compiled else unet
    return Pretrained(network, scheduler, labels, shape, device, dtype)


def _require_device(device: str | torch.device) -> torch.device:
    device = torch.device(device)
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ValueError(
            f"there is no {device} here: torch {torch.__version__} sees {torch.cuda.device_count()} GPUs; "
            "load the model on the CPU"
        )
    return device


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


def _require_chain(scheduler: Any, folder: Path) -> None:
    """Refuse a schedule that has no exact chain here, before any weights are read."""
    with _blamed_on(folder, but=ValueError):
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


def _read(kind: Any, folder: Path, **options: Any) -> Any:
    """What diffusers makes of a folder."""
    with _blamed_on(folder):
        return kind.from_pretrained(folder, local_files_only=True, **options)


def _read_network(kind: Any, folder: Path) -> Any:
    """The network with exactly the weights it needs."""
    _weights(folder)
    options = {"use_safetensors": True, "low_cpu_mem_usage": False, "output_loading_info": True}
    unet, info = _read(kind, folder, **options)
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
    if (
        not isinstance(sides, (list, tuple))
        or len(sides) != 2
        or not all(type(n) is int and n > 0 for n in sides)
    ):
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
    """The names of the classes, none for a network without."""
    file = path / "labels.json"
    if not file.exists():
        return [str(i) for i in range(count)]
    names = _json(file)
    if not isinstance(names, list) or not all(type(name) is str for name in names):
        raise ValueError(f"{file} is not a list of names: give one for each class, in order, or take it away")
    if len(names) != count or len(set(names)) != count:
        raise ValueError(
            f"{file} has {len(set(names))} names, and the network has {count} classes: give one for each, in order"
        )
    return names


@contextmanager
def _blamed_on(folder: Path, but: type[Exception] | tuple[()] = ()) -> Iterator[None]:
    """Errors of somebody else's code, of whatever kind, are about what this folder holds; but for our own."""
    try:
        yield
    except but:
        raise
    except Exception as error:
        first = printable(" ".join(str(error).split())[:300]) or "without a word"
        raise ValueError(
            f"diffusers cannot read {folder} ({type(error).__name__}: {first}): compare it with a folder that "
            "save_pretrained has written"
        ) from None


def _json(path: Path) -> Any:
    try:
        return parse_json(read_plain(path).decode())
    except FileNotFoundError:
        raise FileNotFoundError(f"{path} does not exist: not the folder of a diffusers DDPM pipeline") from None
    except OSError as error:
        raise OSError(
            f"{path} cannot be read ({error.strerror}): not the folder of a diffusers DDPM pipeline"
        ) from None
    except (Unfit, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not valid JSON ({error})") from None


def _config(path: Path) -> dict[str, Any]:
    """A configuration that diffusers has saved."""
    config = _json(path)
    if not isinstance(config, dict):
        raise ValueError(f"{path} is not a configuration: compare it with one that save_pretrained has written")
    return config


def _shallow(config: dict[str, Any]) -> dict[str, Any]:
    """A configuration without its notes (_class_name, …); lists and objects in it as text."""
    kept = {name: value for name, value in config.items() if not name.startswith("_")}
    return {name: json.dumps(v) if isinstance(v, (dict, list)) else v for name, v in kept.items()}
