"""`benchmarks.policies` and `benchmarks.robots`, at a tiny size."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import typer

from benchmarks import policies, robots
from benchmarks.results import Deadlines, Policy, PolicyWarm, RobotClock, RobotSuccess, load
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


def policy_and_data(folder: Path) -> tuple[Path, Path]:
    """LeRobot's policy, small and untrained, and made-up demonstrations."""
    generator = torch.Generator().manual_seed(0)
    which = torch.arange(60) // 12
    scene = torch.cat([torch.rand(60, 17, generator=generator), torch.eye(5)[which]], 1)
    hand, action = torch.rand((2, 60, 4), generator=generator)
    data = folder / "demonstrations.npz"
    metaworld.Demonstrations(hand, scene, 2 * action - 1, which, metaworld.TASKS).save(data)
    return lerobots.folder(lerobots.policy(), folder / "policy"), data


@pytest.mark.slow
def test_windows_are_chosen_on_other_episodes_and_timed_in_turns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, data = policy_and_data(tmp_path)
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


class Physics:
    """Episodes that never move and never succeed; keeps the actions of every step."""

    def __init__(self, tasks: tuple[str, ...], count: int, workers: int) -> None:
        self.tasks, self.task = tasks, torch.arange(len(tasks)).repeat_interleave(count)
        self.executed = list[np.ndarray]()

    def begin(self) -> np.ndarray:
        return np.zeros((len(self.task), 2, 39))

    def step(self, actions: np.ndarray, active: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        self.executed.append(actions)
        return self.begin(), np.zeros(len(self.task), dtype=bool)

    def end(self) -> None: ...


@pytest.mark.slow
def test_methods_are_timed_in_turns_and_the_robot_waits_for_the_median_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, data = policy_and_data(tmp_path)
    methods, timed = ["DDPM", "accelerated", "DDIM-5"], tmp_path / "robot-deadlines.json"
    monkeypatch.setattr(robots, "Physics", Physics)
    with lerobots.importing():
        robots.deadlines(folder, data, "cpu", 4, 4, methods, "robot-deadlines", tmp_path)
        waited, plain = (
            robots.success(folder, data, "cpu", 1, 1, 4, 0, methods, None, given, 80, 0, "success", tmp_path)
            or load(RobotSuccess, "success", tmp_path)
            for given in (timed, None)
        )
    with pytest.raises(typer.BadParameter, match="has no times of DDIM-10; it has DDPM, accelerated, DDIM-5"):
        robots.waits_of(timed, ["DDPM", "DDIM-10"])
    clock = load(Deadlines, "robot-deadlines", tmp_path)
    assert clock.settings.deadline_ms == pytest.approx(100)
    assert [(row.method, row.plans, row.faster is None) for row in clock.rows] == [
        ("DDPM", 4, True),
        ("accelerated", 4, False),
        ("DDIM-5", 4, False),
    ]
    for row in clock.rows:
        assert 0 <= row.late <= row.plans
        assert (
            (waited.settings.waits[row.method] - 1) * 12.5
            < row.ms.median
            <= waited.settings.waits[row.method] * 12.5
        )
    assert plain.settings.waits == {}
    assert plain.methods == waited.methods == methods
    calls = {row.method: row.calls for row in plain.rows}
    assert calls["DDPM"] == 20 > calls["accelerated"] > 1
    assert calls["DDIM-5"] == 5
    for saved in (waited, plain):
        for one in saved.rows:
            assert one.plans == 5 * (80 // (saved.settings.waits.get(one.method, 0) + 8))
            assert (one.episodes, one.successes, one.low) == (1, 0, 0)


@pytest.mark.slow
def test_a_robot_that_waits_for_its_plan_holds_still_and_keeps_its_gripper(tmp_path: Path) -> None:
    folder, _ = policy_and_data(tmp_path)
    physics: Any = Physics(metaworld.TASKS, 1, 1)
    with lerobots.importing():
        robots.roll_out(metaworld.load(folder), physics, 0, longest=29, wait=3)
    first, second = physics.executed
    assert first.shape == second.shape == (5, 3 + 8, 4)
    assert not first[:, :3, :3].any()
    assert not second[:, :3, :3].any()
    assert (first[:, :3, 3] == -1).all()
    assert (second[:, :3, 3] == first[:, -1:, 3]).all()
