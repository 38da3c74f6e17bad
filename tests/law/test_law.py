"""The law of the output, at one stated false-alarm budget, and broken samplers that must be caught.

Every test compares speculative samples with sequential ones and with the chain itself: projections and norms of
states and increments at every step (the joint law of consecutive states), and innovations against N(0, I). A
correct sampler fails anywhere in this folder with probability at most SUITE_LEVEL: each of the SHARES test cases
may use an equal part of it (and seeds are fixed, so a green suite stays green).

High dimension has no power: everything here is one- or two-dimensional.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import foresample as fs
from foresample.checks.adaptedness import drafter_is_adapted
from foresample.checks.distribution import Recorder, law_tests
from foresample.checks.kolmogorov import ks_normal
from foresample.contracts import earlier_predictions
from foresample.core import noise
from foresample.core import round as rounds
from foresample.core.noise import seeds_of
from foresample.core.round import Rows, Speculation
from foresample.core.verify import verify
from tests.support import reference
from tests.support.small_chains import (
    CHAINS,
    DRAFTERS,
    NOISIER,
    LooksAhead,
    Zero,
    constant_drift,
    flow,
    strays,
    two_noises,
)

pytestmark = pytest.mark.law

SUITE_LEVEL = 1e-3
SHARES = 530

BLOCKS = {"per step": 1, "blocks of 4": 4, "whole window": None}


@pytest.fixture(autouse=True)
def _plain_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """The plain round, which this file breaks; the compiled one has a file of its own."""
    monkeypatch.setenv("FORESAMPLE_PLAIN", "1")


def smallest_p_value(target: fs.Target, samples: int, seed: int, every: int = 1, **settings: Any) -> float:
    """The smallest p-value of all tests along the chain, corrected for their number."""
    first = 1 + earlier_predictions(target)
    steps = [k for k in range(first, len(target.std)) if target.std[k] > 0][::every]
    seeds = seeds_of(seed, 2 * samples)
    ours, theirs = (Recorder(steps, target, samples, seeds=part) for part in seeds.split(samples))
    fs.sample(target, seeds=seeds[:samples], observe=ours.from_sample(0), **settings)
    fs.sequential(target, seeds=seeds[samples:], observe=theirs.from_sample(0))
    p_values = [p for _, p in law_tests(target, ours, theirs, seed)]
    return min(p_values) * len(p_values)


@pytest.mark.parametrize("recycle", [True, False], ids=["recycled", "fresh"])
@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("chain", CHAINS)
def test_every_setting_has_the_law_of_the_chain(chain: str, drafter: str, block: str, recycle: bool) -> None:
    target = CHAINS[chain]()
    settings = {"drafter": DRAFTERS[drafter](target), "block": BLOCKS[block], "recycle": recycle}
    assert smallest_p_value(target, 5_000, 11, every=3, window=6, **settings) > SUITE_LEVEL / SHARES


@pytest.mark.parametrize(
    ("chain", "window", "settings"),
    [
        ("flow", 14, {}),
        ("flow", 5, {"block": 2}),
        ("flow", 14, {"drafter": fs.Frozen("parent"), "recycle": False}),
        ("ddpm", 12, {}),
        ("langevin", 13, {}),
        ("interrupted", 6, {}),
    ],
    ids=str,
)
def test_the_law_holds_at_a_hundred_thousand_samples(chain: str, window: int, settings: dict[str, Any]) -> None:
    assert smallest_p_value(CHAINS[chain](), 100_000, 12, window=window, **settings) > SUITE_LEVEL / SHARES


@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("dim", [1, 2])
def test_a_constant_mismatch_of_one_std(dim: int, block: str) -> None:
    p = smallest_p_value(constant_drift(dim), 50_000, 13, window=6, drafter=Zero(), block=BLOCKS[block])
    assert p > SUITE_LEVEL / SHARES


def test_fresh_noise_is_fresh_in_a_first_window() -> None:
    """Most drafters have no first window, because their first round is a bare call; `Zero` has one."""
    p = smallest_p_value(constant_drift(), 30_000, 13, window=6, drafter=Zero(), recycle=False)
    assert p > SUITE_LEVEL / SHARES


def far_off(by: float) -> tuple[fs.Target, fs.Drafter]:
    """A random walk in float32, with drafts that many std away."""
    base = constant_drift(drift=0.0)
    chain = base.chain.to("cpu", torch.float32)
    return replace(base, chain=chain, network=lambda x, step, row: torch.zeros_like(x)), Zero(by)


def test_no_correction_is_made_over_a_distance_that_rounding_spoils() -> None:
    """A state corrected over 3·10⁶ std would be rounded by a quarter of one; over 10³ std nothing is lost."""
    target, drafter = far_off(3e6)
    assert smallest_p_value(target, 20_000, 13, window=3, drafter=drafter) > SUITE_LEVEL / SHARES
    target, drafter = far_off(1e3)
    assert fs.sample(target, 1, window=3, drafter=drafter).report.drafted > 0


@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("chain", ["flow", "multistep"])
def test_windows_that_end_early_have_the_law(
    chain: str, drafter: str, block: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mismatch of half a std ends them here, so most do."""
    monkeypatch.setattr("foresample.core.verify.FAR", 0.5)
    target = CHAINS[chain]()
    settings = {"drafter": DRAFTERS[drafter](target), "block": BLOCKS[block], "recycle": drafter != "parent"}
    assert smallest_p_value(target, 5_000, 18, every=3, window=10, **settings) > SUITE_LEVEL / SHARES


@pytest.mark.parametrize("block", ["per step", "whole window"])
@pytest.mark.parametrize("drafter", ["parent", "secant", "warm"])
@pytest.mark.parametrize("chain", NOISIER)
def test_extra_noise_and_third_order_have_the_law(chain: str, drafter: str, block: str) -> None:
    target = NOISIER[chain]()
    settings = {"drafter": DRAFTERS[drafter](target), "block": BLOCKS[block], "recycle": drafter != "parent"}
    assert smallest_p_value(target, 3_000, 20, every=3, window=6, **settings) > SUITE_LEVEL / SHARES


def test_a_network_that_breaks_where_only_drafts_go_does_no_harm() -> None:
    """NaN where drafts stray and the chain does not go: many do."""
    target, broken = strays(), []
    network = target.network

    def watched(x: Tensor, time: Tensor, row: Tensor) -> Tensor:
        prediction = network(x, time, row)
        broken.append(int(prediction.isnan().any(1).sum()))
        return prediction

    p = smallest_p_value(replace(target, network=watched), 20_000, 19, window=10)
    assert p > SUITE_LEVEL / SHARES
    assert sum(broken) > 1_000


# ------------------------------------------------------------------ what must be caught


def test_the_reference_verification_has_the_law_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shows that the broken twins below are caught because of their bugs."""
    monkeypatch.setattr(rounds, "verify", reference.verify)
    assert smallest_p_value(flow(), 20_000, 14, window=14) > SUITE_LEVEL / SHARES


@pytest.mark.parametrize("bug", reference.BUGS)
def test_broken_verification_is_caught(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rounds, "verify", partial(reference.verify, bug=bug))
    if bug == "per-step residual":  # hides on the mixture
        p = smallest_p_value(constant_drift(), 50_000, 14, window=6, drafter=Zero())
    else:
        p = smallest_p_value(flow(), 20_000, 14, window=14)
    assert p < SUITE_LEVEL / SHARES


def test_a_draft_that_peeks_at_its_own_noise_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = rounds.draft_path

    def peeking(
        target: fs.Target, drafter: fs.Drafter, rows: Rows, step: Tensor, std: Tensor, extra: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        class Peek:
            begin, reach, learn = drafter.begin, drafter.reach, drafter.learn

            def guess(
                self,
                memory: fs.drafters.DrafterMemory,
                x: Tensor,
                position: int,
                step: Tensor,
                row: Tensor,
                before: fs.drafters.PreviousDraft | None,
            ) -> Tensor:
                return drafter.guess(memory, x, position, step, row, before) + 0.5 * rows.noise[:, position]

        return honest(target, Peek(), rows, step, std, extra)

    monkeypatch.setattr(rounds, "draft_path", peeking)
    assert smallest_p_value(flow(), 20_000, 15, window=14) < SUITE_LEVEL / SHARES


def test_a_drafter_that_looks_ahead_is_caught_by_the_law_and_by_adaptedness() -> None:
    target = flow("x0")
    assert smallest_p_value(target, 20_000, 16, window=14, drafter=LooksAhead()) < SUITE_LEVEL / SHARES
    assert not drafter_is_adapted(LooksAhead(), target, 6).passed


def _peeks_at_the_noise(target: fs.Target, seed: Tensor, step: Tensor, normal: noise.Normal) -> Tensor:
    """ξ is not of a stream of its own but made of the noise of the step."""
    at, seed = step.flatten(), seed.unsqueeze(1).expand_as(step).flatten()
    drawn = normal(seed, target.shape, target.std.dtype, step=at, draw=torch.zeros_like(at))
    return drawn.view(*step.shape, *target.shape)


def _fresh_in_every_round(target: fs.Target, seed: Tensor, step: Tensor, _: noise.Normal) -> Tensor:
    """ξ is drawn again whenever a step is drafted again."""
    return torch.randn(*step.shape, *target.shape, dtype=target.std.dtype)


@pytest.mark.parametrize("bug", [_peeks_at_the_noise, _fresh_in_every_round])
def test_extra_noise_that_is_not_drawn_ahead_is_caught(bug: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only rounds get the wrong noise: the sequential sampler and the test itself use the right one."""
    monkeypatch.setattr(rounds, "streams", SimpleNamespace(**{**vars(noise), "extra_noise": bug}))
    assert smallest_p_value(two_noises(), 5_000, 21, every=3, window=6) < SUITE_LEVEL / SHARES


def test_extra_noise_drawn_anew_in_the_verification_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = rounds._target_means

    def fresh(target: fs.Target, draft: rounds.Draft, predictions: Tensor, history: Tensor) -> Tensor:
        assert draft.extra is not None
        return honest(target, replace(draft, extra=torch.randn_like(draft.extra)), predictions, history)

    monkeypatch.setattr(rounds, "_target_means", fresh)
    assert smallest_p_value(two_noises(), 5_000, 22, every=3, window=6) < SUITE_LEVEL / SHARES


def test_noise_of_the_round_before_instead_of_fresh_noise_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a first window that is the noise just examined; drafters that begin with a bare call would never show it."""

    def redrawn(rows: Rows, step: Tensor, speculation: Speculation) -> Tensor:
        return rounds._stream(speculation, rows.seed, step, rows.noise, draw=rows.round)

    monkeypatch.setattr(rounds, "_redrawn", redrawn)
    p = smallest_p_value(constant_drift(), 30_000, 13, window=6, drafter=Zero(), recycle=False)
    assert p < SUITE_LEVEL / SHARES


def test_corrections_over_any_distance_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("foresample.core.verify.FAR", 1e9)
    target, drafter = far_off(3e6)
    assert smallest_p_value(target, 20_000, 13, window=3, drafter=drafter) < SUITE_LEVEL / SHARES


# ------------------------------------------------------------------ the recycling theorem itself


@pytest.mark.parametrize("block", BLOCKS)
def test_noise_left_by_a_round_is_fresh_given_the_number_of_drafts_kept(block: str) -> None:
    """Theory, section 4: given τ, the noise behind the corrected state is N(0, I), also jointly with it."""
    rows, width = 200_000, 5
    generator = torch.Generator().manual_seed(17)
    drawn = torch.randn(rows, width, 2, generator=generator, dtype=torch.float64)
    mean = torch.zeros_like(drawn)
    # The target's mean depends on the path so far, as it does in a chain.
    past = drawn.cumsum(1)[..., 0] - drawn[..., 0]
    drift = torch.stack([0.6 + 0.5 * past.tanh(), torch.full_like(past, 0.4)], 2)
    verdict = verify(
        drawn,
        mean,
        drift,
        torch.ones(rows, width, dtype=torch.float64),
        torch.full((rows,), width),
        torch.rand(rows, width, generator=generator, dtype=torch.float64),
        block=BLOCKS[block],
    )
    p_values = []
    for kept in range(width - 1):
        rejected = verdict.accepted == kept
        left = verdict.noise[rejected]
        corrected = left[:, kept, 0] - left[:, kept, 0].median()
        for z in left[:, kept + 1 :].flatten(1).T:
            p_values.append(ks_normal(z.numpy()))
            p_values.append(ks_normal((corrected.sign() * z).numpy()))
    assert min(p_values) * len(p_values) > SUITE_LEVEL / SHARES
