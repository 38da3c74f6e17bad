"""The free look on a GPU: beside queued and captured rounds, and with networks whose rounding is coarse."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import foresample as fs
from foresample.chains import Chain
from foresample.core.noise import seeds_of
from foresample.targets import ChainTarget

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def pictures(network: nn.Module, dtype: torch.dtype = torch.float32) -> ChainTarget:
    """A chain of pictures around a network."""
    one = torch.ones(20, device="cuda")
    network = network.to("cuda", dtype)
    return ChainTarget(
        Chain(0.3 * one, one, 0.1 * one),
        torch.Size([3, 16, 16]),
        lambda x, step, row: network(x.to(dtype)).float(),
    )


def convolutions(*between: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 64, 3, padding=1), *between, nn.SiLU(), nn.Conv2d(64, 3, 3, padding=1))


@pytest.mark.parametrize("graph", [False, True], ids=["queued", "captured"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_it_costs_a_few_small_calls_and_changes_nothing(dtype: torch.dtype, graph: bool) -> None:
    for slots in (1, 7):
        target = pictures(convolutions(), dtype)
        looks, bare = (
            fs.Engine(target, window=4, slots=slots, graph=graph, look=look) for look in (True, False)
        )
        run, plain = (engine.sample(seeds_of(1, 9)) for engine in (looks, bare))
        assert run.report.look_calls >= 1
        assert run.report.evidence.largest_change < 0.1
        again = looks.sample(seeds_of(1, 9)).report
        assert (
            not graph or again.look_calls == again.evidence.asked_again == 1
        )  # before the run: it is its second
        assert torch.equal(run.samples, plain.samples)
        assert torch.equal(run.calls, plain.calls)


@pytest.mark.parametrize("graph", [False, True], ids=["queued", "captured"])
def test_networks_without_a_law_are_refused(graph: bool) -> None:
    for module, said in ((nn.BatchNorm2d(64), "mixes rows"), (nn.Dropout(0.2), "draws random numbers")):
        with pytest.raises(ValueError, match=f"the target {said}"):
            fs.sample(pictures(convolutions(module)), 3, window=4, graph=graph)
        assert (
            fs.sample(pictures(convolutions(module).eval()), 3, window=4, graph=graph).samples.isfinite().all()
        )


@pytest.mark.parametrize("graph", [False, True], ids=["queued", "captured"])
def test_a_network_changed_between_runs_is_refused(graph: bool) -> None:
    """Captured rounds read the weights where they are, so they would go on with the changed ones."""
    network = convolutions()
    engine = fs.Engine(pictures(network), window=4, slots=2, graph=graph)
    engine.sample([0, 1])
    with torch.no_grad():
        next(network.parameters()).mul_(1.1)
    with pytest.raises(ValueError, match="the target changed between two calls"):
        list(map(engine.sample, [[seed] for seed in range(2, 40)]))
