"""Preparation: a compiled network is compiled at most twice, and reports count the time apart."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from time import sleep
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter

import foresample as fs
from foresample.targets import ChainTarget


@pytest.fixture(autouse=True)
def _nothing_compiled() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Dense(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(5, 16), nn.SiLU(), nn.Linear(16, 4))

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        return self.layers(torch.cat([x, time.unsqueeze(1)], 1))


def compiled(backend: Callable[..., Any]) -> ChainTarget:
    network = torch.compile(Dense().requires_grad_(False), dynamic=True, backend=cast(Any, backend))
    alpha_bar = torch.linspace(0.01, 0.99, 12)
    return fs.targets.vp(lambda x, time, row: network(x, time.float()), alpha_bar, (4,), predicts="x0")


def test_any_number_of_states_is_compiled_at_most_twice() -> None:
    counter = CompileCounter()
    target = compiled(counter)
    for slots in (1, 5, 2):
        for window in (3, 11):
            fs.sample(target, 5, window=window, slots=slots)
    fs.sequential(target, 1)
    fs.sequential(target, 5)
    assert counter.frame_count == 2


def slowly(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
    sleep(0.2)
    return graph.forward


def test_compiling_counts_as_preparation_and_not_as_sampling() -> None:
    engine = fs.Engine(compiled(slowly), window=3)
    first, second = engine.sample([1]).report, engine.sample([2]).report
    assert first.preparation_seconds > 0.4
    assert second.preparation_seconds < 0.1
    assert first.target_seconds <= first.seconds < 0.4
    assert "seconds to prepare" in str(first)
    assert "seconds to prepare" not in str(second)
    assert json.loads(first.to_json())["preparation_seconds"] == first.preparation_seconds


def test_the_sequential_sampler_counts_compiling_apart() -> None:
    report = fs.sequential(compiled(slowly), 2).report
    assert report.preparation_seconds > 0.2
    assert report.target_seconds <= report.seconds < 0.2


def test_measuring_windows_counts_as_preparation() -> None:
    engine = fs.Engine(compiled(slowly), window="auto")
    assert engine.sample([1]).report.preparation_seconds > 0.4
