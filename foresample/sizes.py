"""Memory and disk space of this machine, so that work that cannot fit is refused before it begins.

Estimates are lower bounds, so only work that cannot succeed is refused.
"""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Sequence
from pathlib import Path

import torch

_CGROUP = Path("/sys/fs/cgroup/memory.max")  # the limit of a container


def machine_memory(device: torch.device | str = "cpu") -> int:
    """Bytes of memory of the machine, or of a GPU."""
    device = torch.device(device)
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    try:
        return min(memory, int(_CGROUP.read_text()))
    except (OSError, ValueError):  # not in a container, or in one without a limit
        return memory


def state_bytes(shape: Sequence[int], dtype: torch.dtype) -> int:
    """Bytes of one state."""
    return math.prod(shape) * dtype.itemsize


def round_bytes(rows: int, window: int, state: int) -> int:
    """The least bytes that these rows take: the window's noise, states and predictions."""
    return 3 * rows * (window + 1) * state


def require_memory(needed: int, what: str, remedy: str, device: torch.device | str = "cpu") -> None:
    """Refuse work that needs more bytes than the machine has."""
    if needed > (there := machine_memory(device)):
        raise ValueError(
            f"{what} would take {readable(needed)} of memory, but only {readable(there)} exist: {remedy}"
        )


def require_disk(needed: int, folder: Path, what: str, remedy: str) -> None:
    """Refuse files that need more bytes than are free on the folder's disk."""
    if needed > (free := shutil.disk_usage(folder).free):
        raise OSError(
            f"{what} would take {readable(needed)}, but only {readable(free)} are free at {folder}: {remedy}"
        )


def readable(size: int) -> str:
    """A number of bytes as readable text."""
    if size >= 1000**7:
        return "more than a million PB"
    power = min(5, max(0, (len(str(size)) - 1) // 3))
    shown = round(size / 1000**power, 1)
    return f"{shown:g} {('bytes', 'kB', 'MB', 'GB', 'TB', 'PB')[power]}"
