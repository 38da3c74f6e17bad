"""Compiling functions with Numba, and the folder that keeps the result.

Compiling takes seconds, so its results are kept in a folder on each machine. Numba detects changes only in a function's
own file, but functions call one another across files and copy constants of the plain round. So the folder's name is a
hash of all these sources: changed sources get another folder. If none can be written, every process compiles again.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import numba

_PACKAGE = Path(__file__).parents[2]
_CONSTANTS = ("core/coupling.py", "core/noise.py", "core/verify.py", "drafters/replay.py", "faults.py")


def compiled(function: Callable[..., Any]) -> Any:
    """The function compiled at its first call; every operation as written."""
    return _compiled(function, False)


def summing(function: Callable[..., Any]) -> Any:
    """Like `compiled`, but sums may be reordered, always in the same way, so that they run in vectors."""
    return _compiled(function, {"reassoc", "contract"})


def _compiled(function: Callable[..., Any], fastmath: Any) -> Any:
    folder = cache_folder()
    with _kept_in(folder):  # dividing by 0 gives infinity, as in PyTorch
        compile_ = numba.njit(cache=folder is not None, nogil=True, error_model="numpy", fastmath=fastmath)
        return compile_(function)


@cache
def cache_folder() -> Path | None:
    """The folder for compiled functions; None where nothing can be written."""
    digest = hashlib.sha256()
    for path in [*sorted(Path(__file__).parent.glob("*.py")), *(_PACKAGE / name for name in _CONSTANTS)]:
        digest.update(path.read_bytes())
    try:
        base = os.environ.get("NUMBA_CACHE_DIR") or os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        folder = Path(base, "foresample", digest.hexdigest()[:16])
        folder.mkdir(parents=True, exist_ok=True)
        return folder if os.access(folder, os.W_OK) else None
    except (OSError, RuntimeError):  # read-only, or no home
        return None


@contextmanager
def _kept_in(folder: Path | None) -> Iterator[None]:
    """Point Numba's cache setting, which it reads when a function is decorated, to the folder."""
    config: Any = numba.config
    before = config.CACHE_DIR
    config.CACHE_DIR = before if folder is None else str(folder)
    try:
        yield
    finally:
        config.CACHE_DIR = before
