"""A little of `tests.fuzz` in every run of the suite; by hand it runs for an hour."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest

pytest.importorskip("diffusers")

from tests.fuzz import Ground, fuzz


@pytest.mark.slow
def test_readers_accept_a_damaged_file_or_refuse_it_in_one_sentence(tmp_path: Path) -> None:
    with warnings.catch_warnings(action="ignore"):  # diffusers has a word on odd configs
        fuzz(Ground(tmp_path / "ground"), 40)
