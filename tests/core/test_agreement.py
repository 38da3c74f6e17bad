"""The comparison of GPU rounds with plain ones, tested without a GPU.

A plain round is compared with one whose means are a little off, as another order of rounding makes them: rows part,
rightly, and the comparison allows it. It must not allow a round with a mistake.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import foresample as fs
from foresample.core import round as rounds
from foresample.core.noise import seeds_of
from foresample.core.round import Packed, Padded, Speculation, begin, last_draftable
from foresample.core.verify import Verdict
from foresample.targets import ChainTarget
from tests.support import reference
from tests.support.agreement import Settled, assert_rounds_agree, plain_round
from tests.support.small_chains import CHAINS

WINDOW = 7


class Nudged(ChainTarget):
    """The same with means that are off by a relative `nudge`, another one at every state."""

    nudge = 0.0

    def mean(self, *args: Any, **extra: Any) -> Tensor:
        mean = super().mean(*args, **extra)
        return mean * (1 + self.nudge * torch.sin(1e6 * mean))


def nudged(target: ChainTarget, nudge: float) -> ChainTarget:
    twin = Nudged(target.chain, target.shape, target.network)
    object.__setattr__(twin, "nudge", nudge)
    return twin


def along_the_chain(
    chain: str, block: int | None, nudge: float, count: int = 150
) -> list[tuple[Settled, Settled, Tensor]]:
    """Rounds of both, from the same rows each time, and which rows may have parted."""
    target = CHAINS[chain]()
    speculation = Speculation(fs.Replay(), WINDOW, block, True, last_draftable(target.std), Packed())
    rows = begin(target, speculation, seeds_of(1, count))
    found = []
    while (rows.step < len(target.std)).any():
        one, other = (
            plain_round(target, rows, speculation),
            plain_round(nudged(target, nudge), rows, speculation),
        )
        found.append((one, other, assert_rounds_agree(one, other, block)))
        rows = one.after
    return found


def parted(found: list[tuple[Settled, Settled, Tensor]]) -> int:
    return sum(int((one.accepted != other.accepted).sum()) for one, other, _ in found)


@pytest.mark.slow
@pytest.mark.parametrize("block", [None, 1, 4])
@pytest.mark.parametrize("chain", [name for name in CHAINS if name != "single precision"])
def test_rounds_that_round_differently_decide_alike(chain: str, block: int | None) -> None:
    """Almost no row has a choice, so the comparison is sharp."""
    found = along_the_chain(chain, block, 1e-15)
    choices = sum(int(choice.sum()) for *_, choice in found)
    assert choices <= 3
    assert parted(found) <= choices


@pytest.mark.parametrize("block", [None, 1, 4])
def test_rows_differ_only_where_a_uniform_lies_between_two_thresholds(block: int | None) -> None:
    found = along_the_chain("flow", block, 1e-2)
    choices = sum(int(choice.sum()) for *_, choice in found)
    assert 0 < parted(found) <= choices
    settled = sum(int((one.commit.committed > 0).sum()) for one, *_ in found)
    assert choices < 0.2 * settled


def test_single_precision_leaves_little_choice() -> None:
    found = along_the_chain("single precision", None, 1e-7)
    choices, settled = (
        sum(map(int, values))
        for values in zip(*((c.sum(), (one.commit.committed > 0).sum()) for one, _, c in found), strict=True)
    )
    assert choices < 1e-3 * settled


@pytest.mark.parametrize("bug", ["first failure", "last h like an inner one", "window ends by its own noise"])
def test_a_round_that_decides_wrongly_is_caught(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    target = CHAINS["flow"]()
    speculation = Speculation(fs.Replay(), WINDOW, None, True, last_draftable(target.std), Padded())
    rows = begin(target, speculation, seeds_of(1, 300))
    rows = plain_round(target, rows, speculation).after
    with pytest.raises(AssertionError):  # noqa: PT012
        while (rows.step < len(target.std)).any():
            one = plain_round(target, rows, speculation)
            with monkeypatch.context() as patch:
                patch.setattr(rounds, "verify", partial(reference.verify, bug=bug))
                other = plain_round(target, rows, speculation)
            assert_rounds_agree(one, other, None)
            rows = one.after


def test_thresholds_that_are_a_little_off_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hundredth, at every position: no row of a short run might show it, many rows do."""
    honest: Callable[..., Verdict] = rounds.verify

    def lax(*arguments: Any, **options: Any) -> Verdict:
        *values, uniforms = arguments
        return honest(*values, 0.99 * uniforms, **options)

    target = CHAINS["flow"]()
    speculation = Speculation(fs.Replay(), WINDOW, None, True, last_draftable(target.std), Packed())
    rows = begin(target, speculation, seeds_of(1, 300))
    with pytest.raises(AssertionError, match=r"row \d+ kept \d drafts; its uniforms allow \d to \d"):  # noqa: PT012
        while (rows.step < len(target.std)).any():
            one = plain_round(target, rows, speculation)
            with monkeypatch.context() as patch:
                patch.setattr(rounds, "verify", lax)
                other = plain_round(target, rows, speculation)
            assert_rounds_agree(one, other, None)
            rows = one.after
