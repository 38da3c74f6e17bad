"""No drafter looks ahead, and one that does so ever so slightly is found."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

import foresample as fs
from foresample.checks.adaptedness import drafter_is_adapted
from tests.law.test_law import SHARES, SUITE_LEVEL, smallest_p_value
from tests.support.small_chains import DRAFTERS, LooksAhead, Zero, constant_drift, flow


@pytest.mark.slow
@pytest.mark.parametrize("name", DRAFTERS)
@pytest.mark.parametrize("window", [1, 2, 6])
def test_every_drafter_is_adapted(name: str, window: int) -> None:
    target = flow()
    assert drafter_is_adapted(DRAFTERS[name](target), target, window).passed


class FutureAverage(fs.Replay):
    """A slope from sums over the whole window: the tempting mistake."""

    def guess(
        self,
        memory: fs.drafters.DrafterMemory,
        x: Tensor,
        position: int,
        step: Tensor,
        row: Tensor,
        before: fs.drafters.PreviousDraft | None,
    ) -> Tensor:
        return memory["predictions"][:, position] + 1e-9 * memory["predictions"].mean(1)


class RespondsTooEarly(fs.Replay):
    """Uses the response, which is of the whole old path, within that path."""

    def guess(
        self,
        memory: fs.drafters.DrafterMemory,
        x: Tensor,
        position: int,
        step: Tensor,
        row: Tensor,
        before: fs.drafters.PreviousDraft | None,
    ) -> Tensor:
        return memory["predictions"][:, position] + memory["response"].unsqueeze(1) * x


class CutsTooEarly(fs.Replay):
    """Ends the horizon one position before what it knows of the sweeps allows."""

    def learn(
        self, memory: fs.drafters.DrafterMemory, path: fs.drafters.DraftPath, committed: Tensor
    ) -> fs.drafters.DrafterMemory:
        cut = super().learn(memory, path, committed)["visited"] + committed - 1
        return super().learn(
            memory, replace(path, length=torch.where(cut < path.length, cut - 1, cut)), committed
        )


LOOK_AHEAD = [LooksAhead(), FutureAverage(), RespondsTooEarly(), CutsTooEarly()]


@pytest.mark.parametrize("drafter", LOOK_AHEAD, ids=lambda d: type(d).__name__)
def test_even_a_slight_look_ahead_is_found(drafter: fs.Drafter) -> None:
    assert not drafter_is_adapted(drafter, flow(), 6).passed


class OneRowLooksAhead(LooksAhead):
    """Misbehaves for some samples only."""

    def guess(
        self,
        memory: fs.drafters.DrafterMemory,
        x: Tensor,
        position: int,
        step: Tensor,
        row: Tensor,
        before: fs.drafters.PreviousDraft | None,
    ) -> Tensor:
        ahead = super().guess(memory, x, position, step, row, before)
        honest = fs.Replay.guess(self, memory, x, position, step, row, before)
        return torch.where((row % 20 == 7).unsqueeze(1), ahead, honest)


@pytest.mark.slow
@pytest.mark.parametrize("rows", [8, 64, 500, 100_000])
def test_a_look_ahead_in_few_rows_is_found(rows: int) -> None:
    assert not drafter_is_adapted(OneRowLooksAhead(), flow(), 6, rows=rows).passed
    assert drafter_is_adapted(fs.Replay(), flow(), 6, rows=rows).passed


@pytest.mark.slow
def test_only_existing_rows_are_used() -> None:
    seen: set[int] = set()

    class Notes(fs.Replay):
        def prime(self, memory: fs.drafters.DrafterMemory, row: Tensor) -> fs.drafters.DrafterMemory:
            seen.update(row.tolist())
            return memory

    for rows in (1, 5, 40, 3000):
        seen.clear()
        assert drafter_is_adapted(Notes(), flow(), 3, rows=rows).passed
        assert min(seen) == 0
        assert max(seen) == rows - 1
        assert len(seen) == min(rows, len(seen)) >= min(rows, 32)


@pytest.mark.slow
def test_states_too_large_to_hold_for_all_rows_are_tested_in_parts() -> None:
    target = fs.GaussianMixture.of_draft_trees(50_000).langevin(8, 0.01)
    widest = 0

    class Notes(fs.Frozen):
        def begin(self, rows: int, window: int, like: Tensor) -> fs.drafters.DrafterMemory:
            nonlocal widest
            widest = max(widest, rows)
            return super().begin(rows, window, like)

    assert drafter_is_adapted(Notes("nearest"), target, 1).passed
    assert 1 < widest < 64


# ------------------------------------------------------------------ how far a window reaches


@dataclass(frozen=True)
class Reaches(fs.Replay):
    """Drafts two transitions where its memory of one position of the window is large, else one."""

    at: int = 0

    def reach(self, memory: fs.drafters.DrafterMemory, window: int) -> Tensor:
        large = memory["predictions"][:, self.at].flatten(1).norm(dim=1) > 1
        return memory["ready"] * torch.where(large, 2, 1).clamp(max=window)


def test_reach_may_depend_on_what_is_known_at_its_step_and_on_nothing_later() -> None:
    """At position 1 it is known whether the transition is drafted: its prediction uses no noise of that step."""
    for at in range(5):
        found = drafter_is_adapted(Reaches(at=at), flow(), 6)
        assert found.passed == (at <= 1)
        assert found.passed or "the reach of a window changes when only later steps change" in found.detail


class PeeksAtItsNoise(Zero):
    """Drafts where the noise of the next transition, which the last path was drafted with, is negative."""

    def begin(self, rows: int, window: int, like: Tensor) -> fs.drafters.DrafterMemory:
        return {"next": like.new_zeros(rows)}

    def reach(self, memory: fs.drafters.DrafterMemory, window: int) -> Tensor:
        return (memory["next"] <= 0) * window

    def learn(
        self, memory: fs.drafters.DrafterMemory, path: fs.drafters.DraftPath, committed: Tensor
    ) -> fs.drafters.DrafterMemory:
        row, width = torch.arange(len(committed)), path.innovations.shape[1]
        noise = path.innovations[row, committed.clamp(max=width - 1), 0]
        return {"next": torch.where(committed < path.length, noise, 0.0)}


def test_a_reach_that_depends_on_unspent_noise_is_found() -> None:
    assert not drafter_is_adapted(PeeksAtItsNoise(), constant_drift(), 6).passed
    assert not fs.check(constant_drift(), window=6, samples=20, drafter=PeeksAtItsNoise()).findings[1].passed


@pytest.mark.law
def test_a_reach_that_looks_ahead_breaks_the_distribution_and_any_other_keeps_it() -> None:
    """The rule is needed, and is no stricter than that."""
    level = SUITE_LEVEL / SHARES
    assert smallest_p_value(flow("x0"), 10_000, 21, window=6, drafter=Reaches(at=1)) > level
    broken = smallest_p_value(constant_drift(), 20_000, 21, window=6, block=1, drafter=PeeksAtItsNoise())
    assert broken < level
