"""The golden comparison notices a sample that changed in its last bit."""

from __future__ import annotations

import pytest

from tests.golden import differences, draw_here

SOME = r"/vp eps/replay/block=None recycle=True"


def test_the_same_code_draws_the_same_bits_and_a_rounding_change_is_reported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("FORESAMPLE_PLAIN", "1")
    before = draw_here("plain", SOME)
    assert before
    assert differences(before, draw_here("plain", SOME)) == []
    monkeypatch.setenv("FORESAMPLE_PLAIN", "0")  # the same numbers up to rounding
    assert differences(before, draw_here("plain", SOME))


def test_a_vanished_or_refused_case_is_reported() -> None:
    record = {"samples": "a", "calls": "b"}
    assert differences({"one": record}, {}) == ["one: vanished"]
    assert differences({}, {"one": record}) == ["one: not recorded before"]
    assert differences({"one": {"refused": "a"}}, {"one": {"refused": "b"}})
    assert not differences({"one": {"refused": "a"}}, {"one": {"refused": "b"}}, reworded=True)
    assert differences({"one": record}, {"one": {"refused": "b"}}, reworded=True)
