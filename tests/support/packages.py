"""Real modules of packages that people sample with, imported without what the tests have no use for.

`packages.txt` installs them without their dependencies. What a module imports for its training loop or its command line
(torchvision, accelerate, …) is stood in for while it is imported, by modules that have every name and do nothing.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any


class Placeholder(ModuleType):
    """A module that has every name; each is a class that does nothing."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__ = []  # a package, for those who import from within

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {"__init__": lambda self, *args, **options: None})


class _Shell(ModuleType):
    """A package without what its `__init__` does; it is of no version."""

    __version__ = "0"


def load(module: str, *, without: tuple[str, ...] = ()) -> Any:
    """A module of an installed package, its own `__init__` left out; the test fails where it is not installed."""
    if module in sys.modules:
        return sys.modules[module]
    package = module.partition(".")[0]
    found = importlib.util.find_spec(package)
    if found is None or found.submodule_search_locations is None:
        raise ModuleNotFoundError(f"{package} is not installed: pip install --no-deps -r tests/packages.txt")
    # Of the package itself what is named is left out anyhow: it takes long to import.
    missing = [name for name in without if name.startswith(f"{package}.") or not _importable(name)]
    sys.modules.update({name: Placeholder(name) for name in missing})
    place = Path(next(iter(found.submodule_search_locations)))
    parts = module.split(".")
    for depth in range(1, len(parts)):  # packages without what their `__init__` brings
        name = ".".join(parts[:depth])
        if name not in sys.modules:
            shell = _Shell(name)
            shell.__path__ = [str(place.joinpath(*parts[1:depth]))]
            shell.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
            shell.__spec__.submodule_search_locations = shell.__path__
            sys.modules[name] = shell
    try:
        return importlib.import_module(module)
    finally:
        for name in missing:
            del sys.modules[name]


def load_whole(package: str, *, without: tuple[str, ...]) -> Any:
    """An installed package with its own `__init__`; of `without`, what is not installed is stood in for meanwhile."""
    if package in sys.modules:
        return sys.modules[package]
    if importlib.util.find_spec(package) is None:
        raise ModuleNotFoundError(f"{package} is not installed: pip install --no-deps -r tests/packages.txt")
    finder = _Placeholders([name for name in without if not _importable(name)])
    sys.meta_path.append(finder)
    try:
        return importlib.import_module(package)
    finally:
        sys.meta_path.remove(finder)
        for name in [name for name in sys.modules if name.partition(".")[0] in finder.missing]:
            del sys.modules[name]


class _Placeholders(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds a placeholder for any module of packages that are missing."""

    def __init__(self, missing: list[str]) -> None:
        self.missing = missing

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        missing = name.partition(".")[0] in self.missing
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if missing else None

    def create_module(self, spec: Any) -> ModuleType:
        return Placeholder(spec.name)

    def exec_module(self, module: ModuleType) -> None: ...


def _importable(name: str) -> bool:
    try:
        return name in sys.modules or importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False
