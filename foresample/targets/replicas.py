"""Several devices for one sample: a call's states are split over replicas of the network.

A round verifies its window in one call, whose states are independent of one another: k devices evaluate
⌈(L + 1)/k⌉ of them each, at the same time, so that a wide window costs the latency of one device's share. The
chain itself stays on the first device; states travel to the replicas and predictions back.

Launches of several devices cannot be captured in one CUDA graph: leave `graph` out.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

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
        self.threads = ThreadPoolExecutor(max(1, len(self.replicas) - 1), thread_name_prefix="replica")

    def predict(self, x: Tensor, step: Tensor, row: Tensor, **extra: Tensor) -> Tensor:
        grad, values = torch.is_grad_enabled(), (x, step, row, *extra.values())
        shares = zip(*(value.tensor_split(len(self.replicas)) for value in values), strict=True)
        work = [(target, *share) for target, share in zip(self.replicas, shares, strict=True) if len(share[0])]
        others = [self.threads.submit(_predict, grad, *part) for part in work[1:]]
        first = [_predict(grad, *part) for part in work[:1]]
        return torch.cat([part.to(x.device) for part in (*first, *(other.result() for other in others))])


def _predict(grad: bool, target: Target, *values: Tensor) -> Tensor:
    device = target.std.device
    with torch.set_grad_enabled(grad):  # each thread has its own
        x, step, row, *extra = (value.to(device, non_blocking=True) for value in values)
        return predict(target, x, step, row, *extra)
