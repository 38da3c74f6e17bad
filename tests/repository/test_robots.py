"""`benchmarks.policies` and `benchmarks.robots`, at a tiny size."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import policies, robots
from benchmarks.results import Policy, PolicyWarm, RobotClock, load
from recipes import lasa, metaworld
from tests.support import lerobots


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


@pytest.mark.slow
def test_windows_are_chosen_on_other_episodes_and_timed_in_turns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = torch.Generator().manual_seed(0)
    which = torch.arange(60) // 12
    scene = torch.cat([torch.rand(60, 17, generator=generator), torch.eye(5)[which]], 1)
    hand, action = torch.rand((2, 60, 4), generator=generator)
    data = tmp_path / "demonstrations.npz"
    metaworld.Demonstrations(hand, scene, 2 * action - 1, which, metaworld.TASKS).save(data)
    folder = lerobots.folder(lerobots.policy(), tmp_path / "policy")
    opened: list[set[int]] = []
    episodes = robots.episodes

    def noted(loaded: metaworld.LoadedPolicy, some: metaworld.Demonstrations, chosen: Iterable[int]) -> Any:
        opened.append(set(chosen))
        return episodes(loaded, some, opened[-1])

    monkeypatch.setattr(robots, "episodes", noted)
    monkeypatch.setattr(robots, "EPISODES", 2)
    with lerobots.importing():
        robots.clock(folder, data, "cpu", 4, [4], None, 0, "robot-clock", tmp_path)
    clocked, others = opened
    assert clocked
    assert not clocked & others
    rows = load(RobotClock, "robot-clock", tmp_path).rows
    baseline, *more = rows
    assert (baseline.method, baseline.chosen, baseline.faster) == ("sequential", True, None)
    assert [row.chosen for row in more].count(True) == 1
    for row in more:
        assert row.faster is not None
        assert row.faster.turns == row.plans == 4
        assert row.faster.ratio == pytest.approx(baseline.ms.median / row.ms.median)
