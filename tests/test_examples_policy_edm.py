"""The examples of policies and EDM denoisers run, and need fewer calls than steps."""

from __future__ import annotations

import pytest

pytest.importorskip("diffusers")

from examples import edm, policy


def test_the_policy_draws() -> None:
    calls = policy.main(plans=2)
    assert len(calls) == 2
    assert max(calls) < 70


def test_edm() -> None:
    run = edm.main(steps=24, count=8)
    assert run.samples.shape == (8, 16)
    assert run.speedup > 1.2
