"""Rounds whose calls the caller answers are the engine's rounds."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import foresample as fs
from foresample.backends import backend_of
from foresample.contracts import Target, predict
from foresample.core import noise as streams
from foresample.core.report import Tally
from foresample.core.round import Packed, Speculation, begin, last_draftable
from foresample.engine.slots import Finished, HandedRounds
from tests.support.small_chains import CHAINS

WINDOW, SEEDS = 5, streams.seeds_of(3, 7)


def answered(target: Target) -> Finished:
    drafter = fs.Replay().for_target(target)
    speculation = Speculation(
        drafter, WINDOW, None, True, last_draftable(target.std), Packed(), backend_of(target).normal
    )
    tally = Tally(WINDOW, len(target.std), target.std.device)
    rounds = HandedRounds(target, begin(target, speculation, SEEDS), speculation, tally, lambda commit: None)
    while (call := rounds.call) is not None:
        rounds.answer(predict(target, call.x, call.step, call.row, call.extra))
    assert rounds.finished is not None
    return rounds.finished


@pytest.mark.parametrize("chain", ["ddpm", "multistep", "interrupted"])
def test_handed_rounds_give_the_samples_of_the_engine(chain: str) -> None:
    target = CHAINS[chain]()
    done, run = answered(target), fs.sample(target, seeds=SEEDS, window=WINDOW)
    assert torch.equal(done.index, torch.arange(len(SEEDS)))
    torch.testing.assert_close(done.x, run.samples)
    assert torch.equal(done.calls, run.calls)
    assert torch.equal(done.evaluations, run.evaluations)


def test_no_nan_sample_is_handed_out() -> None:
    target = CHAINS["ddpm"]()
    weight = target.chain.state_weight.clone()
    weight[-1] = torch.inf
    with pytest.raises(FloatingPointError, match=r"the state at step 14 of sample \d is NaN or infinite"):
        answered(replace(target, chain=replace(target.chain, state_weight=weight)))
