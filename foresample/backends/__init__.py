"""The choice of a backend: plain PyTorch, Triton on CUDA, or Numba on a CPU.

Drafting a window is a linear recurrence per element, and verifying it takes two sums and a few scalars per
transition: hundreds of small operations in plain PyTorch, which take longer than a small network. Triton and Numba do
the same work in a few passes and agree with plain PyTorch to rounding (tests/backends). Each offers the
functions of a `Backend`, and a round for affine chains, the default drafter and recycled noise (`backends.rounds`).

Only `backend_for` chooses. Triton and Numba are imported only once chosen. With FORESAMPLE_PLAIN=1 in the environment a
CPU uses plain PyTorch, which is slower and draws the same samples up to rounding.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor

from foresample.contracts import AffineChain, Target
from foresample.core import noise as streams
from foresample.core import report
from foresample.core.noise import STEP, Normal
from foresample.core.report import Count

Transition = Callable[[AffineChain, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], None]
"""One step of the sequential sampler, in place: chain, x, prediction, previous prediction, seed, step (which is not
advanced), fault."""


@dataclass(frozen=True)
class Backend:
    """The functions that every backend offers."""

    name: str
    normal: Normal  # like `core.noise.normal`
    count: Count  # adds a round to a tally, like `core.report.count`
    transition: Transition | None  # for affine chains; None leaves it to `baseline`
    change_basis: Callable[[Tensor, Tensor, Tensor], Tensor]  # left · x · right, for x [B, rows, columns]
    prepare: Callable[[torch.dtype], None]  # compiles what `transition` needs, before any clock runs


def _product(left: Tensor, x: Tensor, right: Tensor) -> Tensor:
    return left @ x @ right


def _nothing(dtype: torch.dtype) -> None:
    pass


PLAIN = Backend("plain", streams.normal, report.count, None, _product, _nothing)


def backend_for(device: torch.device, dtype: torch.dtype) -> Backend:
    """The fastest backend for this device and dtype."""
    if device.type == "cuda" and find_triton():
        return _triton()
    plain = device.type != "cpu" or dtype not in (torch.float32, torch.float64)
    if plain or os.environ.get("FORESAMPLE_PLAIN") == "1" or not _find_numba():
        return PLAIN
    return _numba()


def backend_of(target: Target) -> Backend:
    """The fastest backend for this target's states."""
    return backend_for(target.std.device, target.std.dtype)


def normal(
    seed: Tensor, shape: torch.Size, dtype: torch.dtype, *, stream: int = STEP, step: Tensor, draw: Tensor
) -> Tensor:
    """`core.noise.normal` of the fastest backend."""
    return backend_for(seed.device, dtype).normal(seed, shape, dtype, stream=stream, step=step, draw=draw)


def extra_noise(target: Target, seed: Tensor, step: Tensor) -> Tensor | None:
    """`core.noise.extra_noise` of the fastest backend."""
    return streams.extra_noise(target, seed, step, backend_of(target).normal)


@cache
def find_triton() -> bool:
    """Whether Triton can compile for a device here."""
    return torch.cuda.is_available() and find_spec("triton") is not None


@cache
def _find_numba() -> bool:
    return find_spec("numba") is not None


@cache
def _triton() -> Backend:
    from foresample.backends.triton import basis, noise, tally, transition

    return Backend("Triton", noise.normal, tally.count, transition.transition, basis.change, _nothing)


@cache
def _numba() -> Backend:
    from foresample.backends.numba import noise, tally, transition

    return Backend("Numba", noise.normal, tally.count, transition.transition, _product, transition.prepare)
