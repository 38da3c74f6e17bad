"""`benchmarks.policies` and `benchmarks.robots`, at a tiny size."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks import policies, robots
from benchmarks.results import Policy, PolicyWarm, load
from recipes import lasa


@pytest.fixture(autouse=True)
def few_short_drawings(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(0)
    paths = torch.randn((len(lasa.SHAPES), 1, lasa.POINTS, 2), generator=generator).cumsum(2) / 20
    monkeypatch.setattr(lasa, "demonstrations", lambda folder: paths)
    monkeypatch.setattr(policies, "PLANS_A_DRAWING", 2)


def test_every_window_takes_turns_with_the_sequential_policy(tmp_path: Path) -> None:
    policies.main(repeats=2, windows=[16, 32], plans=4, seed=0, folder=None, out=tmp_path)
    saved = load(Policy, "policy-lasa", tmp_path)
    plain, *accelerated = saved.rows
    assert (plain.window, plain.batch_1.calls, plain.batch_1.faster) == (None, 100, None)
    assert [row.window for row in accelerated] == [16, 32]
    for row in accelerated:
        assert row.batch_1.faster is not None
        assert row.batch_1.faster.turns == 4
        assert row.batch_1.faster.ratio == pytest.approx(plain.batch_1.ms / row.batch_1.ms)
        assert row.batch_1.calls < 100
    call = saved.network_call_ms
    assert saved.network_call_ratio["17"].ratio == pytest.approx(call["1"] / call["17"])


def test_calls_of_plans_started_warm_are_counted(tmp_path: Path) -> None:
    robots.handwriting(repeats=2, pilots=4, data=None, out=tmp_path)
    rows = load(PolicyWarm, "policy-warm", tmp_path).rows
    assert len(rows) == 3 * 4
    assert all(row.calls < 100 for row in rows)
