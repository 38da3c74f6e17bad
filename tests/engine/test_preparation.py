"""Preparation: a compiled network is compiled at most twice, and reports count the time apart."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
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


class Clock:
    """A clock that only compiling and calls move: 100 seconds a graph, and one a call."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        for module in ("core.preparation", "core.report", "engine.engine", "baseline"):
            monkeypatch.setattr(f"foresample.{module}.perf_counter", lambda: self.now)

    def compile(self, graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        self.now += 100
        return graph.forward

    def target(self) -> ChainTarget:
        base = compiled(self.compile)

        def network(x: Tensor, time: Tensor, row: Tensor) -> Tensor:
            self.now += 1
            return base.network(x, time, row)

        return replace(base, network=network)


def test_compiling_counts_as_preparation_and_not_as_sampling(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = fs.Engine(Clock(monkeypatch).target(), window=3, look=False)
    first, second = engine.sample([1]).report, engine.sample([2]).report
    assert (first.preparation_seconds, second.preparation_seconds) == (200, 0)
    assert first.target_seconds == first.seconds == first.rounds
    assert "seconds to prepare" in str(first)
    assert "seconds to prepare" not in str(second)
    assert json.loads(first.to_json())["preparation_seconds"] == first.preparation_seconds


def test_the_sequential_sampler_counts_compiling_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    report = fs.sequential(Clock(monkeypatch).target(), 2).report
    assert report.preparation_seconds == 100
    assert report.target_seconds == report.seconds == report.steps


def test_measuring_windows_counts_as_preparation(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = fs.Engine(Clock(monkeypatch).target(), window="auto")
    assert engine.sample([1]).report.preparation_seconds >= 200
