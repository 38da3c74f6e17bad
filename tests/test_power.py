"""The errors that `foresample.check` finds or misses: the table of docs/guarantee.md, row by row."""

from __future__ import annotations

import pytest

from tests.power import SAMPLES, TWINS, row, written


def test_the_table_has_a_row_for_each_twin() -> None:
    """`python -m tests.power` writes it."""
    assert list(written()) == list(TWINS)


@pytest.mark.law
@pytest.mark.parametrize("name", TWINS)
def test_at_2000_samples_the_table_says_what_is_found(name: str) -> None:
    assert row(name, SAMPLES[:1]) == written()[name][:2]


@pytest.mark.law
@pytest.mark.slow
@pytest.mark.parametrize("name", TWINS)
def test_at_20000_samples_the_table_says_what_is_found(name: str) -> None:
    assert row(name, SAMPLES[1:]) == [name, *written()[name][2:]]
