"""Checks of a foreign network, and its arguments by row, for all integrations."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor


def require_fixed(
    network: Any, whose: str = "the network", remedy: str = ": call its eval() before sampling"
) -> None:
    """Refuse a network in training mode that draws random numbers or mixes rows: it has no transition distribution."""
    modules = network.modules() if isinstance(network, torch.nn.Module) else ()
    random = (torch.nn.modules.dropout._DropoutNd, torch.nn.modules.batchnorm._BatchNorm)
    for module in modules:
        if module.training and isinstance(module, random) and getattr(module, "p", 1) > 0:
            raise ValueError(f"{whose} is in training mode and has {type(module).__name__}{remedy}")


def for_rows(value: Any, row: Tensor, count: int) -> Any:
    """The part of a value that belongs to these rows, where it has one entry for each of `count` samples.

    Tensors, arrays and lists of strings of that length are indexed, other containers are searched for them, and
    everything else is returned as it is.
    """
    if isinstance(value, Tensor):
        return value[row.to(value.device)] if value.ndim > 0 and len(value) == count else value
    if isinstance(value, np.ndarray):
        return value[row.cpu().numpy()] if value.ndim > 0 and len(value) == count else value
    if isinstance(value, dict):
        return {name: for_rows(item, row, count) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        if len(value) == count and all(isinstance(item, str) for item in value):  # prompts
            return type(value)(value[i] for i in row.tolist())
        items = [for_rows(item, row, count) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return value
