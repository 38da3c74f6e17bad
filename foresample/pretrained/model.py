"""A diffusers DDPM folder (`unet/`, `scheduler/`, `model_index.json`) as a target.

The chain is the one `DDPMPipeline` walks, as the reader of schedulers sees it. Weights are read from safetensors
only; nothing is unpickled. The numbers a folder gives are looked at before anything is built from them, and the
network is sketched without memory before it is made: what does not fit together is refused in one sentence.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from reprlib import repr as shortened
from typing import Annotated, Any, cast

import torch
from torch import Tensor

from foresample.chains import Kind, scheduler_chain
from foresample.schema import Rule, Some, Unfit, parse_json, read_object, read_plain
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
        return _labels(self.path, _read_json(self.path / "unet" / "config.json", NetworkNumbers))

    def about(self) -> dict[str, Any]:
        """What decides on the samples beside the chain: the network's weights and how they are used."""
        weights = _weights(self.path)
        _weight_shapes(weights)  # refuses what are none, of whatever size
        with weights.open("rb") as file:
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
        return {part: _shallow(_read_json(self.path / part / file)) for part, file in files.items()}

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
    index = _read_json(path / "model_index.json")
    parts = [index.get(name) for name in ("unet", "scheduler")]
    parts = [part[-1] if isinstance(part, list) and part else part for part in parts]
    if parts != ["UNet2DModel", "DDPMScheduler"]:
        name, unet, other = (
            part if isinstance(part, str) and part.isidentifier() and len(part) < 80 else shortened(part)
            for part in (index.get("_class_name"), *parts)
        )
        raise ValueError(
            f"{path} holds {name} with {unet} and {other}; this loader takes a UNet2DModel with a DDPMScheduler"
        )
    weights = _weights(path)
    settings = path / "scheduler" / "scheduler_config.json"
    scheduler = _made(DDPMScheduler, settings, _read_json(settings, SchedulerNumbers))
    with _blamed_on(settings, but=ValueError):
        scheduler.set_timesteps(scheduler.config.num_train_timesteps)
        chain = scheduler_chain(scheduler)  # refuses what has no exact coupling, before the weights are read
    if scheduler.config.variance_type == "learned_range":
        raise ValueError(
            f"{settings}: this loader's networks return as many channels as they take and have no learned variance: "
            "use variance_type='fixed_small', or foresample.targets.from_scheduler with your own network"
        )
    if not torch.isfinite(chain.std).all():
        raise ValueError(
            f"{settings}: its betas give a noise that is NaN or infinite; they must be between 0 and 1"
        )
    settings = path / "unet" / "config.json"
    config = _read_json(settings, NetworkNumbers)
    labels = _labels(path, config)
    with torch.device("meta"):
        sketch = _made(UNet2DModel, settings, config)
    shape = _require_fitting(sketch, settings, weights)
    unet = _made(UNet2DModel, settings, config)
    _load_weights(unet, weights)
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


# ---------------------------------------------------------------- what a folder may say

_Few = Annotated[int, Rule("a whole number from 1 to 64", lambda value: 1 <= value <= 64)]
_Many = Annotated[int, Rule("a whole number from 1 to 65536", lambda value: 1 <= value <= 2**16)]
_Million = Annotated[int, Rule("a whole number from 1 to 1000000", lambda value: 1 <= value <= 10**6)]
_Beta = Annotated[float, Rule("a number between 0 and 1", lambda value: 0 <= value <= 1)]


@dataclass(frozen=True)
class _Object:
    """Any object."""


@dataclass(frozen=True, kw_only=True)
class NetworkNumbers:
    """Of unet/config.json, what decides on how much is built; diffusers judges the rest."""

    sample_size: Any
    in_channels: _Many
    out_channels: _Many
    layers_per_block: _Few = 1
    block_out_channels: Some[_Many]
    down_block_types: Some[str]
    up_block_types: Some[str]
    num_class_embeds: _Million | None = None


@dataclass(frozen=True, kw_only=True)
class SchedulerNumbers:
    """Of scheduler/scheduler_config.json, what decides on the chain; diffusers judges the rest."""

    num_train_timesteps: _Million = 1000
    beta_start: _Beta = 0.0
    beta_end: _Beta = 0.0
    beta_schedule: str = ""
    trained_betas: Some[_Beta] | None = None
    variance_type: str = ""
    prediction_type: str = ""
    clip_sample: bool = False
    clip_sample_range: float = 0.0
    thresholding: bool = False
    timestep_spacing: str = ""
    steps_offset: int = 0


def _labels(path: Path, config: dict[str, Any]) -> list[str]:
    """The names of the classes, none for a network without."""
    count, file = config.get("num_class_embeds") or 0, path / "labels.json"
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


def _made(kind: Any, file: Path, config: dict[str, Any]) -> Any:
    """What diffusers makes of a config."""
    with _blamed_on(file):
        return kind.from_config(config)


@contextmanager
def _blamed_on(file: Path, but: type[Exception] | tuple[()] = ()) -> Iterator[None]:
    """Errors of somebody else's code, of whatever kind, are about what this file says; but for our own."""
    try:
        yield
    except but:
        raise
    except Exception as error:
        first = printable((str(error).strip().splitlines() or ["without a word"])[0][:300])
        raise ValueError(f"{file} makes no network or schedule ({type(error).__name__}: {first})") from None


def _require_fitting(sketch: Any, file: Path, weights: Path) -> torch.Size:
    """The shape of a state, if the network takes and returns states of one shape and these are its weights."""
    size = sketch.config.sample_size
    try:
        height, width = (size, size) if isinstance(size, int) else size
        shape = torch.Size([sketch.config.in_channels, height, width])
        if not all(1 <= length <= 2**16 for length in shape):
            raise ValueError
    except (TypeError, ValueError):
        raise ValueError(f"{file}: sample_size is {size!r}, not the pixels of a picture's sides") from None
    with _blamed_on(file), torch.no_grad(), torch.device("meta"):
        classes = sketch.config.num_class_embeds
        condition = {"class_labels": torch.zeros(1, dtype=torch.int64)} if classes else {}
        returned = sketch(torch.zeros(1, *shape), torch.zeros(1, dtype=torch.int64), **condition).sample.shape[
            1:
        ]
    if returned != shape:
        raise ValueError(
            f"{file}: the network takes states of {list(shape)} and returns {list(returned)}; "
            "this loader takes one that returns what it takes"
        )
    wanted = {name: list(value.shape) for name, value in sketch.state_dict().items()}
    found = _weight_shapes(weights)
    for name in sorted({*wanted, *found}):
        if wanted.get(name) != found.get(name):
            told = f"{name} is {found.get(name)} there and {wanted.get(name)} here"
            raise ValueError(f"{weights} does not fit the network of config.json beside it ({told})")
    return shape


def _weight_shapes(path: Path) -> dict[str, list[int]]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, "pt") as file:
            return {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise ValueError(f"{path} is corrupt ({error}): copy or download it again") from None


def _weights(path: Path) -> Path:
    weights = path / "unet" / "diffusion_pytorch_model.safetensors"
    if not weights.is_file():
        raise FileNotFoundError(
            f"{weights} does not exist: weights are read from safetensors only (save_pretrained writes them)"
        )
    return weights


def _load_weights(unet: torch.nn.Module, path: Path) -> None:
    from safetensors.torch import load_file

    unet.load_state_dict({name: value.float() for name, value in load_file(path).items()})


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


def _shallow(config: dict[str, Any]) -> dict[str, Any]:
    """A configuration without its notes (_class_name, …); lists and objects in it as text."""
    kept = {name: value for name, value in config.items() if not name.startswith("_")}
    return {name: json.dumps(v) if isinstance(v, (dict, list)) else v for name, v in kept.items()}


def _read_json(path: Path, kind: type = _Object) -> dict[str, Any]:
    """An object with what this kind must have."""
    data = _json(path)
    try:
        read_object(kind, data)
    except Unfit as unfit:
        raise ValueError(f"{path}: {unfit}; compare it with a folder that diffusers has saved") from None
    return data
