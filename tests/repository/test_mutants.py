"""The text that each mutant replaces is in the source; otherwise `make mutants` stops before the first one."""

from __future__ import annotations

import pytest

from tests.mutants import NASTY, ROOT, SPARED


@pytest.mark.parametrize(("file", "old"), sorted({(file, old) for file, old, _ in NASTY}))
def test_the_text_that_a_mutant_replaces_occurs_once(file: str, old: str) -> None:
    assert (ROOT / "foresample" / file).read_text().count(old) == 1


@pytest.mark.parametrize(("file", "line"), sorted({(file, line) for file, line, _, _ in SPARED}))
def test_every_spared_line_still_exists(file: str, line: str) -> None:
    assert line in [text.strip() for text in (ROOT / "foresample" / file).read_text().splitlines()]
