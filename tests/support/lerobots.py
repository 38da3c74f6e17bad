"""LeRobot's real policy and server, where `packages.txt` has installed them, without what they never use here.

LeRobot's modules import what its datasets, cameras and motors need. A policy of states calls none of it, so modules
that are not installed are replaced, while LeRobot is imported, by modules that have every name and do nothing.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from recipes import metaworld

UNUSED = (
    "accelerate", "av", "cv2", "datasets", "dateutil", "deepdiff", "gymnasium", "imageio", "jsonlines", "matplotlib",
    "pandas", "pyarrow", "requests", "serial", "termcolor", "torchcodec", "torchvision", "wandb",
)  # fmt: skip


class _Anything(type):
    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Nothing


class _Nothing(metaclass=_Anything):
    """A class that has every name; an object of it does nothing, and decorates nothing."""

    def __init__(self, *args: Any, **options: Any) -> None: ...

    def __init_subclass__(cls, **options: Any) -> None: ...

    def __class_getitem__(cls, item: Any) -> type:
        return cls

    def __call__(self, *args: Any, **options: Any) -> Any:
        return args[0] if args else self


class _Module(ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Nothing


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Comes last: what is installed is found before."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name.partition(".")[0] in UNUSED:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: Any) -> ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: ModuleType) -> None: ...


@contextmanager
def importing() -> Iterator[None]:
    """LeRobot's modules can be imported here; the test fails where LeRobot is not installed."""
    if importlib.util.find_spec("lerobot") is None:
        raise ModuleNotFoundError("lerobot is not installed: pip install --no-deps -r tests/packages.txt")
    for name in ("diffusers", "transformers.modeling_utils"):
        importlib.import_module(name)  # they look for what is installed: before anything pretends to be
    finder = _Finder()
    sys.meta_path.append(finder)
    try:
        import lerobot.utils.import_utils as known

        for name in vars(known).copy():  # what LeRobot would import only because it is there: transformers, …
            if name.startswith("_") and name.endswith("_available"):
                setattr(known, name, False)
        yield
    finally:
        sys.meta_path.remove(finder)
        for name in [name for name, module in sys.modules.items() if isinstance(module, _Module)]:
            del sys.modules[name]


def policy(steps: int = 20, size: str = "tiny") -> Any:
    """LeRobot's `DiffusionPolicy` for states, untrained and small, in eval mode."""
    with importing(), torch.random.fork_rng([]):
        torch.manual_seed(0)
        made = metaworld.build(size, steps=steps)
    return made.eval().requires_grad_(False)


def observation(made: Any, count: int = 1) -> dict[str, torch.Tensor]:
    """An observation of such a policy, the same for each of `count` plans."""
    features, steps = made.config.input_features, made.config.n_obs_steps
    return {n: torch.linspace(-1, 1, f.shape[0]).expand(count, steps, -1) for n, f in features.items()}


def folder(made: Any, place: Path) -> Path:
    """The policy saved as LeRobot reads it."""
    with importing():
        data = metaworld.Demonstrations(
            torch.rand(8, 4), torch.rand(8, 17 + len(metaworld.TASKS)), torch.rand(8, 4) * 2 - 1, torch.zeros(8).long(),
            metaworld.TASKS,
        )  # fmt: skip
        metaworld.save(made, metaworld.processors(made, data), place, {"tasks": list(metaworld.TASKS)})
    return place
