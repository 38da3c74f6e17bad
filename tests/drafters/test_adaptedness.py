"""No drafter looks ahead, and one that does so ever so slightly is found."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

import foresample as fs
from foresample.selftest import drafter_is_adapted
from tests.small_chains import DRAFTERS, LooksAhead, flow


@pytest.mark.parametrize("name", DRAFTERS)
@pytest.mark.parametrize("window", [1, 2, 6])
def test_every_drafter_is_adapted(name: str, window: int) -> None:
    target = flow()
    assert drafter_is_adapted(DRAFTERS[name](target), target, window).passed


class FutureAverage(fs.Replay):
    """A gain from sums over the whole window: the tempting mistake."""

    def guess(
        self,
        memory: fs.DrafterMemory,
        x: Tensor,
        position: int,
        step: Tensor,
        row: Tensor,
        before: fs.PreviousDraft | None,
    ) -> Tensor:
        return memory["predictions"][:, position] + 1e-9 * memory["predictions"].mean(1)


class RespondsTooEarly(fs.Replay):
    """Uses the response, which is of the whole old path, within that path."""

    def guess(
        self,
        memory: fs.DrafterMemory,
        x: Tensor,
        position: int,
        step: Tensor,
        row: Tensor,
        before: fs.PreviousDraft | None,
    ) -> Tensor:
        return memory["predictions"][:, position] + memory["response"].unsqueeze(1) * x


class CutsTooEarly(fs.Replay):
    """Ends the horizon one position before what it knows of the sweeps allows."""

    def learn(self, memory: fs.DrafterMemory, path: fs.DraftPath, committed: Tensor) -> fs.DrafterMemory:
        cut = super().learn(memory, path, committed)["visited"] + committed - 1
        return super().learn(
            memory, replace(path, length=torch.where(cut < path.length, cut - 1, cut)), committed
        )


LOOK_AHEAD = [LooksAhead(), FutureAverage(), RespondsTooEarly(), CutsTooEarly()]


@pytest.mark.parametrize("drafter", LOOK_AHEAD, ids=lambda d: type(d).__name__)
def test_even_a_slight_look_ahead_is_found(drafter: fs.Drafter) -> None:
    assert not drafter_is_adapted(drafter, flow(), 6).passed
