"""Several devices for one sample: a call's states are split over replicas of the network.

A round verifies its window in one call, whose states are independent of one another: k devices evaluate
⌈(L + 1)/k⌉ of them each, at the same time, so that a wide window costs the latency of one device's share. The
chain itself stays on the first device; states travel to the replicas and predictions back.

Launches of several devices cannot be captured in one CUDA graph: leave `graph` out.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from foresample.contracts import Target, Wrapper, predict, require_target


def replicated(replicas: Sequence[Target]) -> Target:
    """The first of these targets, its calls split over all of them.

    Args:
        replicas: the same target several times, each on its own device.
    """
    if not replicas:
        raise ValueError("replicated needs at least one target: give one per device")
    first = replicas[0]
    for target in replicas:
        require_target(target)
        if target.shape != first.shape or not torch.equal(target.std.cpu(), first.std.cpu()):
            raise ValueError("replicas differ in shape or std: give the same target, once for each device")
    return _Replicated(replicas)


class _Replicated(Wrapper):
    """The first target, whose predictions all replicas share, each making those of its part of the states."""

    def __init__(self, replicas: Sequence[Target]) -> None:
        super().__init__(replicas[0])
        self.replicas = list(replicas)

    @cached_property
    def threads(self) -> ThreadPoolExecutor:
        """A thread for each replica but the first."""
        return ThreadPoolExecutor(max(1, len(self.replicas) - 1), thread_name_prefix="replica")

    def __getstate__(self) -> dict[str, Any]:
        """The attributes without the threads, which a copy makes anew."""
        return {name: value for name, value in vars(self).items() if name != "threads"}

    def predict(self, x: Tensor, step: Tensor, row: Tensor, **extra: Tensor) -> Tensor:
        values = x, step, row, *extra.values()
        shares = zip(*(value.tensor_split(len(self.replicas)) for value in values), strict=True)
        work = [
            (_Modes.here(target.std.device.type), target, *share)
            for target, share in zip(self.replicas, shares, strict=True)
            if len(share[0])
        ]
        others = [self.threads.submit(_predict, *part) for part in work[1:]]
        first = [_predict(*part) for part in work[:1]]
        return torch.cat([part.to(x.device) for part in (*first, *(other.result() for other in others))])


class _Modes(NamedTuple):
    """Modes of torch that each thread has for itself."""

    grad: bool
    autocast: bool
    dtype: torch.dtype

    @classmethod
    def here(cls, device: str) -> _Modes:
        """The modes of this thread, for a kind of device."""
        dtype = torch.get_autocast_dtype(device)
        return cls(torch.is_grad_enabled(), torch.is_autocast_enabled(device), dtype)


def _predict(modes: _Modes, target: Target, *values: Tensor) -> Tensor:
    device = target.std.device
    with torch.set_grad_enabled(modes.grad), torch.autocast(device.type, modes.dtype, modes.autocast):
        x, step, row, *extra = (value.to(device, non_blocking=True) for value in values)
        return predict(target, x, step, row, *extra)
