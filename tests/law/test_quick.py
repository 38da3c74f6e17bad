"""One case of the law with its broken twin, without the mark `law`: `make quick` also sees a sampler that is wrong.

The case is one of `test_law.py`, with its seed: it takes no part of the false-alarm budget.
"""

from __future__ import annotations

from functools import partial

import pytest

from foresample.core import round as rounds
from tests.law.test_law import SHARES, SUITE_LEVEL, smallest_p_value
from tests.support import reference
from tests.support.small_chains import flow


@pytest.mark.parametrize("bug", [None, "noise reused"])
def test_samples_have_the_distribution_of_the_chain_and_those_of_a_broken_twin_do_not(
    bug: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORESAMPLE_PLAIN", "1")
    if bug is not None:
        monkeypatch.setattr(rounds, "verify", partial(reference.verify, bug=bug))
    exact = smallest_p_value(flow(), 20_000, 14, window=14) > SUITE_LEVEL / SHARES
    assert exact == (bug is None)
