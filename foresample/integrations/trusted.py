"""Recognition of a library's own code, and the values that an object holds.

A library's own function behaves the same at every call with the same values. So its loop is watched once for each set
of values that it reads, which are in public attributes: `held` is part of the key of that check. Any other function may
behave differently at the next call, and is checked at every call.
"""

from __future__ import annotations

import os
import sys
from enum import Enum
from typing import Any

import numpy as np
import torch
from torch import Tensor

_TORCH = os.path.dirname(torch.__file__) + os.sep  # its decorators are trusted: inference_mode, for example
_SIMPLE = (bool, int, float, str, Enum, type(None))


def library_name(method: Any, owner: Any) -> str | None:
    """The full name of a bound method, "package.module.Class.method".

    None if the module holds another function by that name, if the method is patched on its instance or its class, or if
    anything but torch wraps it.
    """
    function = getattr(method, "__func__", None)
    if function is None or method.__self__ is not owner or not _in_place(function, owner):
        return None
    return f"{function.__module__}.{function.__qualname__}"


def require_current(method: Any, owner: Any, name: str) -> None:
    """Refuse a method that was replaced on its class since it was accelerated."""
    function = getattr(method, "__func__", None)
    if function is not None and method.__self__ is owner and getattr(type(owner), name, None) is not function:
        raise ValueError(
            f"{type(owner).__name__}.{name} was replaced since it was accelerated: call foresample.restore and "
            "foresample.accelerate again"
        )


def foreign_part(served: Any, package: str) -> str | None:
    """The name of the first part of an object that is not the package's own: its class or a patched method."""
    kind = type(served)
    if kind.__module__.partition(".")[0] != package or _found(kind) is not kind:
        return kind.__qualname__
    for name, value in vars(served).items():
        if callable(value) and hasattr(kind, name):
            return f"{kind.__qualname__}.{name}"
    for name, value in vars(kind).items():
        function = getattr(value, "fget", value)  # a property's
        if not name.startswith("__") and hasattr(function, "__code__") and not _from_file(function, kind):
            return f"{kind.__qualname__}.{name}"
    return None


def held(served: Any) -> tuple:
    """The numbers, strings, tensors and arrays in an object's public attributes, by value.

    Lists of numbers and strings are included. Private attributes, dictionaries and other objects are not: a scheduler
    counts its steps in some of them.
    """
    found: list[Any] = []
    for name, value in sorted(vars(served).items()):
        if name.startswith("_"):
            continue
        if isinstance(value, _SIMPLE):
            found.append((name, value))
        elif isinstance(value, (Tensor, np.ndarray)):
            found.append((name, value.dtype, tuple(value.shape), tuple(value.reshape(-1).tolist())))
        elif isinstance(value, (list, tuple)) and all(isinstance(item, _SIMPLE) for item in value):
            found.append((name, tuple(value)))
    return tuple(found)


def _in_place(function: Any, owner: Any) -> bool:
    defined = next((k for k in type(owner).__mro__ if any(v is function for v in vars(k).values())), None)
    return defined is not None and _found(function) is function and _from_file(function, defined)


def _found(named: Any) -> Any:
    """The object that the module holds by the name of this function or class."""
    found: Any = sys.modules.get(named.__module__)
    for part in named.__qualname__.split("."):
        found = getattr(found, part, None)
    return found


def _from_file(function: Any, kind: type) -> bool:
    """Whether a function, and every one it wraps, is written in its class's file, or in torch."""
    file = getattr(sys.modules.get(kind.__module__), "__file__", None)
    while function is not None:
        code = getattr(function, "__code__", None)
        if code is None or not (code.co_filename == file or code.co_filename.startswith(_TORCH)):
            return False
        function = getattr(function, "__wrapped__", None)
    return True
