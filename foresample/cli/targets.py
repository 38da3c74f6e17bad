"""The target that a command's options ask for: one way to build it, for every command that takes one.

It comes from a model folder (`--model`, the embedded one by default) or goes by a name (`--target`). Either way the
options become a `Source` first, which makes the target here or in a worker elsewhere.
"""

from __future__ import annotations

import importlib
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol, cast, get_args

import torch

from foresample import pretrained
from foresample.chains import Kind
from foresample.cli.console import echo, require_modules, wait_line
from foresample.contracts import Target, require_target, resolve_window
from foresample.core.round import can_draft
from foresample.engine.tuning import Tuning, tune
from foresample.sizes import require_memory, round_bytes, state_bytes
from foresample.targets import GaussianMixture

MIXTURES = ("flow", "vp", "langevin")
BUILT_IN = (*MIXTURES, "embedded")


class Source(Protocol):
    """Makes the target; any process can be sent one."""

    def __call__(self) -> Target:
        """The target."""

    def labels(self) -> list[int] | None:
        """The classes that samples have in turn, if they have any."""

    def names(self) -> list[str]:
        """The names of all classes."""

    def about(self) -> dict[str, Any]:
        """What decides on the samples beside the chain, for those who read the result."""

    def configurations(self) -> dict[str, Any]:
        """The configurations of a model folder, part by part; a target without any has none."""


@dataclass(frozen=True)
class NamedTarget:
    """A mixture by its name, or the object (or function without arguments) at 'package.module:name'."""

    name: str
    steps: int | None
    device: str | None
    folder: Path
    """Where modules are looked for first, as `python -m` does."""

    def __call__(self) -> Target:
        target = self._mixture(self.steps or 16) if self.name in MIXTURES else self._own()
        device = target.std.device
        if self.device is not None and torch.device(self.device).type != device.type:
            raise ValueError(
                f"{self.name} is on {device}, and --device {self.device} moves only models: have it made there"
            )
        return target

    def labels(self) -> None:
        return None

    def names(self) -> list[str]:
        return []

    def about(self) -> dict[str, Any]:
        return {"target": self.name}

    def configurations(self) -> dict[str, Any]:
        return {}

    def _mixture(self, steps: int) -> Target:
        mixture = GaussianMixture.of_draft_trees(2)
        if self.name == "flow":
            return mixture.flow(steps, 1.0)
        if self.name == "vp":
            return mixture.vp(torch.linspace(0.01, 0.99, steps, dtype=torch.float64))
        return mixture.langevin(steps, 0.01)

    def _own(self) -> Target:
        module, _, attribute = self.name.partition(":")
        if str(self.folder) not in sys.path:
            sys.path.insert(0, str(self.folder))
        try:
            found = getattr(importlib.import_module(module), attribute)
            made = isinstance(found, Target) and not isinstance(found, type)
            target = found() if callable(found) and not made else found
            require_target(target)
        except (Exception, SystemExit) as error:  # of any kind: it is somebody else's module
            raise ValueError(f"cannot load {self.name!r}: {type(error).__name__}: {error}") from error
        return cast(Target, target)


def choose_source(
    *,
    model: Path | None,
    target: str | None,
    steps: int | None,
    default_steps: int,
    label: str | None,
    reuse: str | None,
    device: str | None,
    half: bool,
    compiled: bool,
    elsewhere: bool = False,
) -> Source:
    """What these options ask for, or a refusal of those that do not go together.

    `elsewhere`: the target is made by workers, whose devices are not ours to look at.
    """
    if device is not None:
        require_device(device, elsewhere=elsewhere)
    if model is not None and target is not None:
        raise ValueError("--model and --target both say what to sample: give one of them")
    if target is None or target == "embedded":
        require_modules("diffusers", "safetensors")
        folder = (model or pretrained.EMBEDDED).resolve()
        return pretrained.Recipe(
            folder, steps or default_steps, label, require_kind(reuse or "x0"), device or "cpu", half, compiled
        )
    options: dict[str, object] = {"label": label, "reuse": reuse, "half": half, "compiled": compiled}
    if target not in MIXTURES:
        if not all(target.partition(":")):
            raise ValueError(
                f"{target!r} is none of {', '.join(BUILT_IN)}; name your own target as 'package.module:name'"
            )
        options["steps"] = steps
    given = [f"--{name}" for name, value in options.items() if value]
    if given:
        them = "it" if len(given) == 1 else "them"
        raise ValueError(
            f"{' and '.join(given)} cannot apply to --target {target}: leave {them} out, or name a --model"
        )
    return NamedTarget(target, steps, device, Path.cwd())


def require_kind(reuse: str) -> Kind:
    """What may be reused, or a refusal."""
    if reuse not in get_args(Kind):
        raise ValueError(f"--reuse takes one of {', '.join(get_args(Kind))}, not {reuse!r}")
    return cast(Kind, reuse)


def require_device(device: str, *, elsewhere: bool = False) -> None:
    """Refuse a device that is not there."""
    kind, _, number = device.partition(":")
    if kind not in ("cpu", "cuda") or (":" in device and not (kind == "cuda" and number.isdecimal())):
        raise ValueError(f"--device takes cpu, cuda or cuda:N, not {device!r}")
    if kind == "cuda" and not elsewhere and int(number or 0) >= torch.cuda.device_count():
        raise ValueError(
            f"there is no {device} here: torch {torch.__version__} sees {torch.cuda.device_count()} GPUs; "
            "leave --device out to run on the CPU"
        )


def require_room(target: Target, *, samples: int, slots: int = 0, window: int = 0) -> None:
    """Refuse numbers that this machine cannot hold, before any of the work."""
    std = target.std
    state = state_bytes(target.shape, std.dtype)
    require_memory(samples * (state + 16), f"{samples} samples", "ask for fewer", std.device)
    require_memory(
        round_bytes(slots, window, state),
        f"{slots} samples at a time, each with a window of {window},",
        "ask for fewer --slots or a smaller --window",
        std.device,
    )


def read_window(window: str) -> int | Literal["auto"] | Tuning:
    """The window that an option names."""
    if window == "auto":
        return "auto"
    return Tuning.load(window) if window.endswith(".json") else int(window)


class ChosenWindow(NamedTuple):
    """The window to draft with, and whether drafting is faster than the sequential sampler, as far as is known."""

    number: int
    pays: bool


def choose_window(window: str, target: Target, *, slots: int, graph: bool, quiet: bool) -> ChosenWindow:
    """The number asked for, or what the chain has room for; for auto the fastest here, which is measured now; or what a
    file of `foresample tune` says."""
    if window.endswith(".json"):
        found = Tuning.load(window).window_for(len(target.std), slots)
        return ChosenWindow(found or 1, pays=found is not None)
    if window != "auto":
        return ChosenWindow(resolve_window(int(window), len(target.std)), pays=True)
    if not can_draft(target):
        if not quiet:
            echo("This chain has no transition that can be drafted.")
        return ChosenWindow(1, pays=False)
    with wait_line(quiet=quiet) as say:
        tuning = tune(target, slots=slots, graph=graph, progress=say)
    best = max(tuning.trials, key=lambda trial: trial.gain)
    if not quiet:
        none = f"With {slots} at a time no window gains: the best, {best.window}, comes to {tuning.gain:.2f}×"
        echo((tuning.advice if tuning.window else none) + ".")
    return ChosenWindow(best.window, pays=tuning.window is not None)
