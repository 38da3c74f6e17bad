"""Checks of a foreign network, and its arguments by row, for all integrations."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import numpy as np
from torch import Tensor, nn

_OF_TORCH = vars(nn.Module()).keys() - {"training"}
"""What torch keeps in every module: hooks, and tables of tensors and parts."""


def parts_of(network: Any) -> dict[nn.Module, None]:
    """The network and its parts, each once: `network.modules()`, which also makes names and so takes much longer."""
    found: dict[nn.Module, None] = {}
    left = [network] if isinstance(network, nn.Module) else []
    while left:
        if (module := left.pop()) not in found:
            found[module] = None
            left += [part for part in reversed(module._modules.values()) if part is not None]
    return found


def held_by(network: Any) -> tuple:
    """Key of a captured network: the graph has fixed where its tensors lie, and the values its modules hold."""
    parts = parts_of(network)
    tables = [table for part in parts for table in (part._parameters, part._buffers)]
    places = [tensor.data_ptr() for table in tables for tensor in table.values() if tensor is not None]
    values = [
        value
        for part in parts
        for name, value in vars(part).items()
        if name not in _OF_TORCH and isinstance(value, (bool, int, float, str))
    ]
    return (*places, *values)


def require_fixed(
    network: Any, whose: str = "the network", remedy: str = ": call its eval() before sampling"
) -> None:
    """Refuse a network in training mode that draws random numbers or mixes rows: it has no transition distribution."""
    random = (nn.modules.dropout._DropoutNd, nn.modules.batchnorm._BatchNorm)
    for part in parts_of(network):
        if part.training and isinstance(part, random) and getattr(part, "p", 1) > 0:
            raise ValueError(f"{whose} is in training mode and has {type(part).__name__}{remedy}")


def for_rows(value: Any, row: Tensor, count: int) -> Any:
    """The part of a value that belongs to these rows, where it has one entry for each of `count` samples.

    Tensors, arrays and lists of strings of that length are indexed, other containers are searched for them, and
    everything else is returned as it is. Containers keep their types.
    """
    if isinstance(value, Tensor):
        return value[row.to(value.device)] if value.ndim > 0 and len(value) == count else value
    if isinstance(value, np.ndarray):
        return value[row.cpu().numpy()] if value.ndim > 0 and len(value) == count else value
    if isinstance(value, dict):
        return _like(value, {name: for_rows(item, row, count) for name, item in value.items()})
    if isinstance(value, (list, tuple)):
        if len(value) == count and all(isinstance(item, str) for item in value):  # prompts
            return type(value)(value[i] for i in row.tolist())
        items = [for_rows(item, row, count) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return value


def _like(given: dict[Any, Any], items: dict[Any, Any]) -> dict[Any, Any]:
    """A dictionary of the type of another; a plain one if that type is not made from a dictionary."""
    kind: Any = type(given)
    if kind is dict:
        return items
    factory = (given.default_factory,) if isinstance(given, defaultdict) else ()
    try:
        return kind(*factory, items)
    except TypeError:
        return items
