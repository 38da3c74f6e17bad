"""Failures while a CUDA graph is captured, and the state that they leave behind."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch

from foresample.backends.graphs import capture

pytestmark = pytest.mark.gpu
DEVICE = torch.device("cuda")


def test_garbage_with_a_graph_in_it_is_not_collected_while_another_is_captured() -> None:
    """PyTorch no longer collects before a capture, and a graph destroyed within one spoils it."""
    x = torch.zeros(1, device=DEVICE)
    gc.disable()
    try:
        cycle: list[Any] = [capture(lambda: x.add_(1), DEVICE)]
        cycle.append(cycle)
        del cycle
    finally:
        gc.enable()

    def work() -> None:
        _ = [[[] for _ in range(100)] for _ in range(100)]  # enough for the collector to wake up
        x.add_(1)

    graph = capture(work, DEVICE)
    x.zero_()
    graph.replay()
    assert x.item() == 1
    assert gc.isenabled()


def test_a_failed_capture_names_its_cause_and_leaves_nothing_behind() -> None:
    x, stream = torch.ones(1, device=DEVICE), torch.cuda.current_stream()

    def reads_back() -> None:
        x.add_(x.item())

    with pytest.raises(RuntimeError, match=r"cannot be captured .*capturing.*graph=True out"):
        capture(reads_back, DEVICE)
    assert torch.cuda.current_stream() == stream
    assert torch.randn(4, device=DEVICE).isfinite().all()  # the generator is not taken for captured
    graph = capture(lambda: x.fill_(3), DEVICE)
    x.zero_()
    graph.replay()
    assert x.item() == 3
