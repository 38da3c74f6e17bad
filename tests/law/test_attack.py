"""The attack of `attack.py` at 2·10⁵ samples a case, and mistakes that it must find with fewer."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from foresample.core import round as rounds
from foresample.core.round import Rows, Speculation
from tests.law.attack import CASES, CHAINS, LEVEL, Case, attack, smallest, walk
from tests.support import reference

pytestmark = [pytest.mark.law, pytest.mark.slow]

BAR = LEVEL / len(CASES)


@pytest.mark.parametrize("number", range(len(CASES)), ids=lambda i: str(CASES[i]))
def test_the_attack_finds_no_error(number: int) -> None:
    p, worst, _ = attack(CASES[number], seed=1 + number)
    assert p > BAR, worst


@pytest.mark.parametrize("case", [case for case in CASES if case.cut_off], ids=str)
def test_forced_cases_happen_often(case: Case) -> None:
    forced, usual = (Case(**{**vars(case), "cut_off": c}).draw(500, seed=3) for c in (case.cut_off, None))
    assert (forced != usual).any((1, 2)).mean() > 0.3


# ------------------------------------------------------------------ what must be found


@pytest.mark.parametrize(
    ("bug", "drafter", "samples"),
    [
        ("first failure", "1 std off", 10_000),
        ("noise reused", "1 std off", 20_000),
        ("per-step residual", "1 std off", 50_000),
        ("window ends by its own noise", "nonsense", 5_000),
    ],
)
def test_broken_verification_is_found(
    bug: str, drafter: str, samples: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rounds, "verify", partial(reference.verify, bug=bug))
    assert attack(Case("pulled", drafter), samples)[0] < BAR


def test_noise_of_the_round_before_instead_of_fresh_noise_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a first window, which only a drafter without warm-up has, that is the noise being examined."""
    monkeypatch.setattr(rounds, "_redrawn", redrawn_before)
    assert attack(Case("pulled", "1 std off", recycle=False), 50_000)[0] < BAR


def redrawn_before(rows: Rows, step: torch.Tensor, speculation: Speculation) -> torch.Tensor:
    return rounds._stream(speculation, rows.seed, step, rows.noise, draw=rows.round)


def test_a_correction_over_any_distance_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without FAR, float32 would round the corrected state by several std."""
    monkeypatch.setattr("foresample.core.verify.FAR", 1e9)
    assert attack(Case("pulled in float32", "3e7 std off", window=2), 2_000)[0] < BAR


def test_paths_of_the_reference_pass_and_slightly_different_ones_do_not() -> None:
    chain = CHAINS["bimodal"]()
    paths, others = walk(chain, 50_000, 1), walk(chain, 50_000, 2)
    assert smallest(chain, paths, others)[0] > BAR
    swapped = paths.copy()
    swapped[::20, 3] = others[::20, 3]  # a twentieth of all states at one step are another's
    assert smallest(chain, swapped, others)[0] < BAR
