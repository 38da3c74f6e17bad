"""Drafting with another target's network."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import foresample as fs
from foresample.contracts import Wrapper
from foresample.targets import ChainTarget
from tests.support.small_chains import flow, mixture, single_precision, worse


class Used(Wrapper):
    """A target that uses its states up, as it may."""

    def predict(self, x: Tensor, step: Tensor, row: Tensor, **extra: Tensor) -> Tensor:
        prediction = super().predict(x, step, row, **extra)
        x.mul_(0.5)
        return prediction


def test_a_draft_model_may_write_into_its_states() -> None:
    cheap = worse(flow())
    one, two = (fs.sample(flow(), 9, window=5, drafter=fs.DraftModel(d)).samples for d in (cheap, Used(cheap)))
    assert torch.equal(one, two)


def test_a_drafter_that_writes_into_the_states_of_its_window_is_refused() -> None:
    class Writes(fs.DraftModel):
        def guess(
            self, memory: Any, x: Tensor, position: int, step: Tensor, row: Tensor, before: Any
        ) -> Tensor:
            return self.target.predict(x, step, row)

    with pytest.raises(ValueError, match=r"Writes.guess writes into the states it is given: work on a copy"):
        fs.sample(flow(), 3, window=5, drafter=Writes(Used(flow())))
    drafter = Writes(worse(flow()))
    assert fs.sample(flow(), 3, window=5, drafter=drafter).samples.isfinite().all()


@pytest.mark.parametrize("use", ["sample", "check"])
@pytest.mark.parametrize(
    "other",
    [mixture(3).flow(16, 1.0), mixture().flow(9, 1.0), single_precision()],
    ids=["shape", "steps", "dtype"],
)
def test_a_draft_model_of_another_chain_is_refused(other: ChainTarget, use: str) -> None:
    with pytest.raises(ValueError, match=r"the draft model's states are .*: make both for one chain"):
        getattr(fs, use)(
            flow(), window=4, drafter=fs.DraftModel(other), **({"count": 2} if use == "sample" else {})
        )
