"""The round once more: in four kernels for CUDA, and compiled for the CPU.

Drafting a window is a linear recurrence per element; verification is two sums per transition and a few scalars.
In plain PyTorch that is hundreds of small launches, more time than a small network takes. `kernels.round` does
it in four, which agree with `core.round` to rounding (tests/gpu). They are written for the
case that matters, affine chains with the default drafter and recycled noise; all others take the plain round.

Nothing here is imported, and Triton is not needed, unless a CUDA device is at hand. On a CPU the same four are compiled
by Numba where that is installed (`foresample[fast]`): `kernels.cpu`. FORESAMPLE_PLAIN=1 in the environment keeps to
the plain round there: the same samples up to rounding, slower.
"""

from __future__ import annotations

import os
from functools import cache
from importlib.util import find_spec

import torch

from foresample.contracts import Target, affine_chain


@cache
def available() -> bool:
    """Whether kernels can be compiled here."""
    return torch.cuda.is_available() and find_spec("triton") is not None


def serve(target: Target) -> bool:
    """Whether there are kernels for this target's chain, here."""
    return target.std.is_cuda and available() and affine_chain(target) is not None


def compiles(device: torch.device, dtype: torch.dtype = torch.float64) -> bool:
    """Whether work on numbers of this kind is compiled for the CPU."""
    wanted = device.type == "cpu" and dtype in (torch.float32, torch.float64)
    return wanted and os.environ.get("FORESAMPLE_PLAIN") != "1" and _has_numba()


@cache
def _has_numba() -> bool:
    return find_spec("numba") is not None
