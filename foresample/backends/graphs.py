"""CUDA graphs: work captured once, replayed without launch overhead."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache

import torch

from foresample.contracts import Target
from foresample.faults import first_line


def require_cuda(target: Target) -> None:
    """Refuse to capture what does not run on a CUDA device, before any work."""
    if target.std.device.type != "cuda":
        raise ValueError("graph=True needs a target on a CUDA device; leave it out on others")


def capture(work: Callable[[], object], device: torch.device) -> torch.cuda.CUDAGraph:
    """A CUDA graph of the work, which runs three times before (compilers, caches)."""
    for _ in range(3):
        warm_up(work, device)
    return record(work, device)


def warm_up(work: Callable[[], object], device: torch.device) -> None:
    """Run work that will be recorded, on the stream of all captures.

    Libraries keep a workspace for every stream they have seen and must not make one during a capture.
    """
    with _aside(device):
        work()


def record(work: Callable[[], object], device: torch.device) -> torch.cuda.CUDAGraph:
    """A CUDA graph of work that was warmed up; recording runs nothing. Other threads may use the device meanwhile."""
    graph = torch.cuda.CUDAGraph()
    with _aside(device):
        torch.cuda.synchronize()
        torch.cuda.empty_cache()  # a graph takes no memory from the common pool
        with _nothing_collected():
            _record(graph, work)
    return graph


@contextmanager
def _aside(device: torch.device) -> Iterator[None]:
    """The stream of all captures, in order with the current stream; without gradients."""
    stream = _stream_aside(device)
    with torch.cuda.device(device), torch.no_grad():
        here = torch.cuda.current_stream()
        stream.wait_stream(here)
        with torch.cuda.stream(stream):
            yield
        here.wait_stream(stream)


def _record(graph: torch.cuda.CUDAGraph, work: Callable[[], object]) -> None:
    """Capture on the current stream; a failure leaves stream and random numbers as they were."""
    generator = torch.cuda.default_generators[torch.cuda.current_device()]
    before, failed = generator.clone_state(), None
    graph.capture_begin(capture_error_mode="thread_local")
    try:
        work()
    except Exception as error:
        failed = error
    try:
        graph.capture_end()
    except RuntimeError as error:
        failed = failed or error  # the first says what happened, this one only that something did
    if failed is not None:
        with suppress(RuntimeError):
            generator.graphsafe_set_state(before)  # it takes itself for captured otherwise
        raise RuntimeError(
            f"the target cannot be captured in a CUDA graph ({first_line(failed)}): it must not read values back "
            "from the device or depend on them; or leave graph=True out"
        ) from failed


@contextmanager
def _nothing_collected() -> Iterator[None]:
    """Without the garbage collector: a graph destroyed while another is captured spoils the capture."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@cache
def _stream_aside(device: torch.device) -> torch.cuda.Stream:
    """One stream for all captures."""
    return torch.cuda.Stream(device)
