"""CUDA graphs: work captured once, replayed without launch overhead."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch

from foresample.contracts import Target


def require_cuda(target: Target) -> None:
    """Refuse to capture what does not run on a CUDA device, before any work."""
    if target.std.device.type != "cuda":
        raise ValueError("graph=True needs a target on a CUDA device; leave it out on others")


def capture(work: Callable[[], object], device: torch.device) -> torch.cuda.CUDAGraph:
    """A CUDA graph of the work, run a few times before (compilers, caches)."""
    graph, aside = torch.cuda.CUDAGraph(), _stream_aside(device)
    with torch.cuda.device(device), torch.no_grad():
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):
            for _ in range(3):
                work()
        torch.cuda.current_stream().wait_stream(aside)
        try:
            with torch.cuda.graph(graph):
                work()
        except RuntimeError as error:
            raise RuntimeError(
                f"the target cannot be captured in a CUDA graph ({str(error).splitlines()[0]}): it must not "
                "read values back from the device or depend on them; or leave graph=True out"
            ) from error
    return graph


@cache
def _stream_aside(device: torch.device) -> torch.cuda.Stream:
    """One stream for all warm-ups: libraries keep a workspace for every stream they have seen."""
    return torch.cuda.Stream(device)
