"""Makes the target and the window from a command's options, in the same way for every command.

The target comes from a model folder (`--model`, the embedded one by default) or from a name (`--target`). Either way
the options first become a source, a function without arguments that makes the target in this process or in a worker.
"""

from __future__ import annotations

import importlib
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

import torch

from foresample.cli.console import echo, wait_line
from foresample.cli.options import MIXTURES, Check, Sample, TargetOptions, require_kind
from foresample.contracts import Target, require_target, resolve_window
from foresample.core.round import can_draft
from foresample.engine.tuning import Tuning, tune
from foresample.pretrained import EMBEDDED, Recipe
from foresample.sizes import require_memory, round_bytes, state_bytes
from foresample.targets.mixture import GaussianMixture


@dataclass(frozen=True)
class NamedTarget:
    """A mixture by its name, or the object (or function without arguments) at 'package.module:name'."""

    name: str
    steps: int | None
    device: str | None
    folder: Path
    """The folder searched for modules first, as `python -m` does."""

    def __call__(self) -> Target:
        target = self._mixture(self.steps or 16) if self.name in MIXTURES else self._own()
        device = target.std.device
        if self.device is not None and torch.device(self.device).type != device.type:
            raise ValueError(
                f"{self.name} is on {device}, and --device {self.device} moves only models: make it there"
            )
        return target

    def labels(self) -> None:
        """A target has no classes."""

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
        except (Exception, SystemExit) as error:  # the user's module may raise anything
            raise ValueError(f"cannot load {self.name!r}: {type(error).__name__}: {error}") from error
        return cast(Target, target)


Source = Recipe | NamedTarget


def make_source(options: TargetOptions, *, elsewhere: bool = False) -> Source:
    """The source of the target, from checked options.

    `elsewhere`: workers on other machines make the target, so its device cannot be checked here.
    """
    device = torch.device(options.device or "cpu")
    if device.type == "cuda" and not elsewhere and (device.index or 0) >= torch.cuda.device_count():
        raise ValueError(
            f"there is no {options.device} here: torch {torch.__version__} sees {torch.cuda.device_count()} GPUs; "
            "leave --device out to run on the CPU"
        )
    if not options.is_model:
        return NamedTarget(str(options.target), options.steps, options.device, Path.cwd())
    return Recipe(
        (options.model or EMBEDDED).resolve(),
        options.steps or options.default_steps,
        options.label,
        require_kind(options.reuse or "x0"),
        options.device or "cpu",
        options.half,
        options.compiled,
    )


def described(options: TargetOptions, source: Source, chain: Target) -> dict[str, Any]:
    """The settings that all results have: the target, and how it ran."""
    return {
        **source.about(),
        "steps": len(chain.std),
        "label": options.label,
        "device": str(chain.std.device),
        "compiled": options.compiled,
        "graph": options.graph,
    }


def require_room(target: Target, *, samples: int, slots: int = 0, window: int = 0) -> None:
    """Refuse numbers of samples that do not fit this machine's memory, before any work."""
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
    return int(window) if window.isdecimal() else Tuning.load(window)


def choose_window(options: Sample | Check, target: Target, *, samples: int, slots: int) -> tuple[int, bool]:
    """The window to draft with, and False if measurements found the sequential sampler faster.

    The window is the option's number, cut to the chain; for auto the fastest window here, measured now; or the window
    in a file of `foresample tune`. Numbers that do not fit this machine's memory are refused.
    """
    named, steps, gains = read_window(options.window), len(target.std), True
    require_room(target, samples=samples, slots=slots)
    if isinstance(named, Tuning):
        found = named.window_for(steps, slots)
        window, gains = found or 1, found is not None
    elif isinstance(named, int):
        window = resolve_window(named, steps)
    elif can_draft(target):
        with wait_line(quiet=options.as_json) as say:
            tuning = tune(target, slots=slots, graph=options.graph, progress=say)
        if not options.as_json:
            echo(f"{tuning.advice}.")
        window, gains = tuning.best.window, tuning.window is not None
    else:
        if not options.as_json:
            echo("This chain has no transition that can be drafted.")
        window, gains = 1, False
    require_room(target, samples=samples, slots=slots, window=window)
    return window, gains
