"""Settings: one value for all who take them, checked in one place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import foresample as fs
from foresample.settings import WINDOW, Settings
from tests.support.small_chains import flow, mixture

TAKERS: dict[str, Callable[..., Any]] = {
    "sample": lambda **settings: fs.sample(flow(), 2, **settings),
    "stream": lambda **settings: fs.stream(flow(), 2, **settings),
    "Engine": lambda **settings: fs.Engine(flow(), **settings),
    "tune": lambda **settings: fs.tune(flow(), **settings),
}
"""Everything that takes settings by keyword."""


@pytest.mark.parametrize("taker", TAKERS)
@pytest.mark.parametrize(
    ("name", "remedy"),
    [("blok", "did you mean block"), ("recycled", "did you mean recycle"), ("colour", "are ")],
)
def test_a_misspelt_setting_is_refused_by_its_name(taker: str, name: str, remedy: str) -> None:
    with pytest.raises(TypeError, match=rf"{name} is not a setting here: .*{remedy}"):
        TAKERS[taker](**{name: 1})


@pytest.mark.parametrize("taker", [name for name in TAKERS if name != "tune"])
@pytest.mark.parametrize(
    ("setting", "sentence"),
    [
        ({"window": 0}, "window must be a whole number of at least 1, not 0"),
        ({"window": "wide"}, "window must be a whole number of at least 1, 'auto' or a Tuning, not 'wide'"),
        ({"window": True}, "window must be a whole number of at least 1, not True"),
        ({"window": 2.0}, r"window must be a whole number of at least 1, not 2\.0"),
        ({"block": 0}, "block must be a whole number of at least 1, not 0"),
        ({"slots": 0}, "slots must be a whole number of at least 1, not 0"),
    ],
)
def test_a_wrong_setting_is_refused_everywhere(taker: str, setting: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        TAKERS[taker](**setting)


@pytest.mark.parametrize("taker", TAKERS)
def test_a_class_in_place_of_a_drafter_is_refused(taker: str) -> None:
    with pytest.raises(TypeError, match="is not a drafter"):
        TAKERS[taker](drafter=fs.Replay)


def test_tune_refuses_a_given_window() -> None:
    with pytest.raises(TypeError, match="window is not a setting here: the settings are drafter, block"):
        fs.tune(flow(), window=4)  # type: ignore[call-overload]


def test_the_window_has_the_same_default_everywhere() -> None:
    target = mixture().flow(30, 1.0)
    assert fs.sample(target, 2).report.window == WINDOW == Settings().window == 16
    assert fs.Engine(target).speculation.window == WINDOW


def test_slots_default_to_the_count_of_a_call_or_to_one() -> None:
    assert fs.sample(flow(), 5).report.slots == 5
    assert fs.sample(flow(), 5, slots=9).report.slots == 5
    assert fs.sample(flow(), 5, slots=2).report.slots == 2
    assert fs.Engine(flow()).slots == 1


def test_auto_is_sequential_where_nothing_can_be_drafted() -> None:
    assert fs.sample(mixture().flow(1, 1.0), 2, window="auto").report.method == "sequential"


def test_keywords_override_the_given_settings() -> None:
    base = Settings(window=4, block=2, drafter=fs.Frozen("nearest"))
    changed = Settings.of({"window": 8, "drafter": None}, base)
    assert (changed.window, changed.block, changed.drafter) == (8, 2, base.drafter)
    engine = fs.Engine(flow(), base, block=3)
    assert (engine.speculation.window, engine.speculation.block) == (4, 3)
