"""One call split over replicas: the same samples, at the latency of one share."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor

import foresample as fs
from foresample.contracts import affine_chain
from foresample.targets import ChainTarget, replicated
from tests.support.small_chains import CHAINS, HalfMean, flow, mixture
from tests.support.waiting import GUARD


@pytest.mark.parametrize("chain", CHAINS)
@pytest.mark.parametrize("replicas", [1, 2, 3])
def test_replicas_change_nothing(chain: str, replicas: int) -> None:
    target = replicated([CHAINS[chain]() for _ in range(replicas)])
    assert affine_chain(target) is not None  # kernels serve it as they serve the other
    run, plain = (fs.sample(t, 7, window=5, seed=3) for t in (target, CHAINS[chain]()))
    assert torch.equal(run.samples, plain.samples)
    assert torch.equal(run.calls, plain.calls)
    assert torch.equal(fs.sequential(target, 2).samples, fs.sequential(CHAINS[chain](), 2).samples)


@pytest.mark.parametrize("sampler", [partial(fs.sample, window=5), fs.sequential], ids=["sample", "sequential"])
def test_replicas_keep_a_custom_mean(sampler: Callable[..., fs.Run]) -> None:
    base = flow()
    target = HalfMean(base.chain, base.shape, base.network)
    assert torch.equal(sampler(replicated([target] * 2), 5).samples, sampler(target, 5).samples)
    assert not torch.equal(sampler(base, 5).samples, sampler(target, 5).samples)


class Own:
    """A target of one's own make."""

    def __init__(self) -> None:
        base = flow()
        self.shape, self.std, self.start, self.mean = base.shape, base.std, base.start, base.mean
        self.base = base
        self.states: list[int] = []

    def predict(self, x: Tensor, step: Tensor, row: Tensor) -> Tensor:
        assert not torch.is_grad_enabled()
        self.states.append(len(x))
        return self.base.predict(x, step, row)


def test_replicas_of_any_target_get_even_shares() -> None:
    replicas = [Own(), Own()]
    run = fs.sample(replicated(replicas), 1, window=7, look=False)  # which offers no chain: by plain rounds
    torch.testing.assert_close(run.samples, fs.sample(flow(), 1, window=7).samples, rtol=1e-9, atol=1e-9)
    assert sum(replicas[0].states) + sum(replicas[1].states) == int(run.evaluations)
    assert max(replicas[0].states) == max(replicas[1].states) == 4  # of 8


def test_replicas_run_at_once() -> None:
    """Each waits for the other in its call: one after the other they would never meet.

    So a wide window costs one share of the latency, which no clock has to tell.
    """
    meeting = threading.Barrier(2, timeout=GUARD)

    def waiting(target: ChainTarget) -> ChainTarget:
        def network(x: Tensor, time: Tensor, row: Tensor) -> Tensor:
            shares.append(len(x))
            meeting.wait()
            return target.network(x, time, row)

        return replace(target, network=network)

    shares: list[int] = []
    target = replicated([waiting(flow()), waiting(flow())])
    x = torch.randn(16, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    step, row = torch.arange(16), torch.arange(16)
    assert torch.equal(target.predict(x, step, row), flow().predict(x, step, row))
    assert shares == [8, 8]


def test_an_error_in_a_replica_is_raised() -> None:
    def broken(x: Tensor, time: Tensor, row: Tensor) -> Tensor:
        raise RuntimeError("device lost")

    with pytest.raises(RuntimeError, match="device lost"):
        fs.sample(replicated([flow(), replace(flow(), network=broken)]), 2, window=4)


def test_replicas_must_be_of_the_same_target() -> None:
    with pytest.raises(ValueError, match="replicas differ in shape or std: give the same target"):
        replicated([flow(), mixture().flow(16, 0.9)])
    with pytest.raises(ValueError, match="at least one target"):
        replicated([])
    with pytest.raises(TypeError, match="is not a target"):
        replicated([flow(), torch.nn.Linear(2, 2)])  # type: ignore[list-item]


def test_replicas_run_under_the_autocast_of_the_caller() -> None:
    layer, values = torch.nn.Linear(16, 16), (torch.randn(8, 16), torch.full((8,), 5), torch.arange(8))

    def made() -> fs.targets.ChainTarget:
        return fs.targets.vp(
            lambda x, time, row: layer(x), torch.linspace(0.05, 0.99, 20), (16,), predicts="x0"
        )

    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(replicated([made(), made()]).predict(*values), made().predict(*values))


def test_replicas_can_be_copied_after_they_were_used() -> None:
    two = replicated([flow(), flow()])
    values = torch.randn(4, 2, dtype=torch.float64), torch.zeros(4, dtype=torch.int64), torch.arange(4)
    assert torch.equal(copy.deepcopy(two).predict(*values), two.predict(*values))
