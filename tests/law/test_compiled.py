"""The law of the output through the compiled round; the budget is that of `test_law`."""

from __future__ import annotations

from dataclasses import replace

import pytest

pytest.importorskip("numba", reason="numba is not installed: pip install 'foresample[fast]'")

import foresample as fs
from foresample.backends.rounds import Round, round_for
from foresample.core.round import Speculation
from foresample.engine import slots as engine_slots
from foresample.targets import ChainTarget
from tests.law.test_law import BLOCKS, SHARES, SUITE_LEVEL, smallest_p_value
from tests.support.small_chains import CHAINS, DRAFTERS, flow, strays

pytestmark = pytest.mark.law


@pytest.fixture(autouse=True)
def _compiled_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled rounds whatever the environment says; a test fails if another round is used."""
    monkeypatch.setenv("FORESAMPLE_PLAIN", "0")
    honest = round_for

    def compiled(target: fs.Target, speculation: Speculation) -> Round:
        chosen = honest(target, speculation)
        assert chosen.propose.__module__ == "foresample.backends.numba.round"
        return chosen

    monkeypatch.setattr(engine_slots, "round_for", compiled)


@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("drafter", ["secant", "warm"])
@pytest.mark.parametrize("chain", CHAINS)
def test_every_setting_has_the_law_of_the_chain(chain: str, drafter: str, block: str) -> None:
    target = CHAINS[chain]()
    settings = {"drafter": DRAFTERS[drafter](target), "block": BLOCKS[block]}
    assert smallest_p_value(target, 5_000, 31, every=3, window=6, **settings) > SUITE_LEVEL / SHARES


@pytest.mark.parametrize(
    ("chain", "window", "block"), [("flow", 14, None), ("ddpm", 12, None), ("interrupted", 6, 2)]
)
def test_the_law_holds_at_a_hundred_thousand_samples(chain: str, window: int, block: int | None) -> None:
    p = smallest_p_value(CHAINS[chain](), 100_000, 32, window=window, block=block)
    assert p > SUITE_LEVEL / SHARES


@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("chain", ["flow", "multistep"])
def test_windows_that_end_early_have_the_law(chain: str, block: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A mismatch of half a std ends them here, so most do."""
    monkeypatch.setattr("foresample.core.verify.FAR", 0.5)
    p = smallest_p_value(CHAINS[chain](), 5_000, 33, every=3, window=10, block=BLOCKS[block])
    assert p > SUITE_LEVEL / SHARES


def test_a_network_that_breaks_where_only_drafts_go_does_no_harm() -> None:
    assert smallest_p_value(strays(), 20_000, 34, window=10) > SUITE_LEVEL / SHARES


def test_rounds_of_another_chain_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Verification that takes the gap between the means for a fifth smaller than it is."""
    honest = round_for

    def lax(target: ChainTarget, speculation: Speculation) -> Round:
        chain = replace(target.chain, prediction_weight=0.8 * target.chain.prediction_weight)
        wrong, (propose, settle) = replace(target, chain=chain), honest(target, speculation)
        return Round(propose, lambda _, *more: settle(wrong, *more))

    monkeypatch.setattr(engine_slots, "round_for", lax)
    assert smallest_p_value(flow(), 20_000, 35, window=14) < SUITE_LEVEL / SHARES
