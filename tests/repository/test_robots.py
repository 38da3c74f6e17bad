"""`benchmarks.policies` and `benchmarks.robots`, at a tiny size."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import typer

from benchmarks import policies, robot_clock, robot_plans, robot_profile, robots
from benchmarks.kinds.robots import Deadlines, Policy, PolicyWarm, RobotClock, RobotProfile, RobotSuccess
from benchmarks.results import load
from foresample.core.round import Padded
from foresample.engine import Engine
from foresample.integrations.policies import planner
from recipes import lasa, metaworld
from tests.support import lerobots
from tests.support.captures import Device


@pytest.fixture(autouse=True)
def few_short_drawings(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(0)
    paths = torch.randn((len(lasa.SHAPES), 1, lasa.POINTS, 2), generator=generator).cumsum(2) / 20
    monkeypatch.setattr(lasa, "demonstrations", lambda folder: paths)
    monkeypatch.setattr(policies, "PLANS_A_DRAWING", 2)


@pytest.fixture(autouse=True)
def switches_of_torch() -> Iterator[None]:
    """The benchmarks set these as LeRobot's scripts do; they are put back after each test."""
    before = torch.backends.cudnn.benchmark, torch.backends.cuda.matmul.allow_tf32
    yield
    torch.backends.cudnn.benchmark, torch.backends.cuda.matmul.allow_tf32 = before


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


def policy_and_data(folder: Path, moments: int = 12) -> tuple[Path, Path]:
    """LeRobot's policy, small and untrained, and made-up demonstrations: five episodes of so many moments."""
    generator = torch.Generator().manual_seed(0)
    which = torch.arange(5).repeat_interleave(moments)
    scene = torch.cat([torch.rand(5 * moments, 17, generator=generator), torch.eye(5)[which]], 1)
    hand, action = torch.rand((2, 5 * moments, 4), generator=generator)
    data = folder / "demonstrations.npz"
    metaworld.Demonstrations(hand, scene, 2 * action - 1, which, metaworld.TASKS).save(data)
    return lerobots.folder(lerobots.policy(), folder / "policy"), data


def clock(folder: Path, data: Path, out: Path, **options: Any) -> RobotClock:
    given: dict[str, Any] = {
        "device": "cpu", "precision": "float32", "channels_last": False, "windows": [4], "learned": 0,
        "compiled": False, "autotune": False, "eager": True, "plans": 8, "repeats": 2, "seconds": 0.0, "name": "clock",
    }  # fmt: skip
    with lerobots.importing():
        robot_clock.clock(folder, data, out=out, **given | options)
    return load(RobotClock, "clock", out)


@pytest.mark.slow
def test_windows_are_chosen_and_priors_learned_on_other_episodes_and_timed_in_turns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, data = policy_and_data(tmp_path, moments=160)
    opened: list[set[int]] = []
    episodes = robot_plans.episodes

    def noted(loaded: metaworld.LoadedPolicy, some: metaworld.Demonstrations, chosen: Iterable[int]) -> Any:
        opened.append(set(chosen))
        return episodes(loaded, some, opened[-1])

    monkeypatch.setattr(robot_clock, "episodes", noted)
    monkeypatch.setattr(robot_plans, "EPISODES", 2)
    saved = clock(folder, data, tmp_path, learned=32)
    others, learned_on, clocked = opened
    assert clocked
    assert not clocked & (others | learned_on)
    baseline, warm, learned = saved.rows
    assert (baseline.method, baseline.chosen, baseline.faster) == ("sequential", True, None)
    assert (baseline.plans, baseline.calls.most) == (4, 20)
    assert [row.chosen for row in (warm, learned)].count(True) == 1
    assert (warm.warm, warm.prior, warm.learned_from) == (True, False, 0)
    assert (learned.warm, learned.prior, learned.learned_from) == (False, True, 32)
    for row in (warm, learned):
        assert row.faster is not None
        assert (row.faster.turns, row.plans) == (4, 8)
        assert row.calls.most < 20
        assert row.faster.ratio == pytest.approx(baseline.ms.median / row.ms.median)


def test_the_first_few_episodes_are_of_several_tasks_and_none_is_timed_and_learned_from() -> None:
    each = torch.arange(500)
    data = metaworld.Demonstrations(torch.zeros(500, 4), torch.zeros(500, 22), torch.zeros(500, 4), each, ())
    timed, other = robot_plans.timed_episodes(data), robot_plans.other_episodes(data)
    assert sorted([*timed, *other]) == each.tolist()
    assert 40 <= len(timed) <= 50
    for numbers in (timed, other, robot_plans.other_episodes(data, 60)):
        assert {number // 100 for number in numbers[:20]} == set(range(5))


@pytest.mark.slow
def test_demonstrations_of_other_tasks_than_the_policys_are_refused(tmp_path: Path) -> None:
    folder, data = policy_and_data(tmp_path)
    recorded = metaworld.Demonstrations.load(data)
    with lerobots.importing():
        loaded = metaworld.load(folder)
    with pytest.raises(typer.BadParameter, match=r"demonstrations are of push-v3, .* give --data"):
        robot_plans.episodes(dataclasses.replace(loaded, tasks=("assembly-v3",)), recorded, [0])


@pytest.mark.slow
def test_a_side_that_fails_is_named_and_the_others_are_timed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, data = policy_and_data(tmp_path)
    accelerated = robot_clock.Sides.accelerated

    def failing(sides: Any, window: int, *more: Any) -> Any:
        if window == 4:
            raise RuntimeError("out of memory")
        return accelerated(sides, window, *more)

    monkeypatch.setattr(robot_clock.Sides, "accelerated", failing)
    monkeypatch.setattr(robot_plans, "EPISODES", 2)
    with pytest.raises(typer.Exit):
        clock(folder, data, tmp_path, windows=[4, 8])
    saved = load(RobotClock, "clock", tmp_path)
    assert [row.window for row in saved.rows] == [None, 8]
    assert saved.settings.failed == ["window 4: out of memory"]


@pytest.mark.slow
def test_all_sides_share_the_weights_and_a_half_network_plans_in_float32(tmp_path: Path) -> None:
    folder, data = policy_and_data(tmp_path)
    with lerobots.importing():
        loaded, plain = (robot_clock.load(folder, "cpu", name) for name in ("bfloat16", "float32"))
    recorded = metaworld.Demonstrations.load(data)
    seen = robot_plans.episodes(loaded, recorded, [0])[0][0]
    wanted = robot_clock.Wanted([4], compiled=False, autotune=False, eager=True, graph=False)
    sides = robot_clock.prepared(wanted, loaded.policy, seen, None, [])
    assert [side.name for side in sides] == ["sequential, eager", "window 4, last plan, eager"]
    weights = [{w.data_ptr() for w in side.policy.parameters()} for side in sides]
    assert weights[0] == weights[1]
    network = loaded.policy.diffusion.unet
    assert all(w.dtype == torch.bfloat16 for w in network.network.parameters())
    assert all(torch.as_tensor(side.plan(seen)).dtype == torch.float32 for side in sides)
    x, time, condition = torch.randn(3, 16, 4), torch.tensor([0, 7, 19]), torch.randn(3, 52)
    ours, full = (n(x, time, global_cond=condition) for n in (network, plain.policy.diffusion.unet))
    torch.testing.assert_close(ours, full, atol=0.05, rtol=0.05)
    assert not torch.equal(ours, full)


@pytest.mark.slow
def test_the_rounds_of_a_plan_are_timed_by_width(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, data = policy_and_data(tmp_path)
    Device(monkeypatch)
    monkeypatch.setenv("FORESAMPLE_PLAIN", "1")

    def fixed(*arguments: Any) -> Engine:
        made = Engine(*arguments)
        made.speculation = dataclasses.replace(made.speculation, layout=Padded())
        return made

    monkeypatch.setattr(planner, "Engine", fixed)
    monkeypatch.setattr(robot_clock, "call_seconds", lambda *_, **__: 0.001)
    with lerobots.importing():
        loaded = robot_clock.load(folder, "cpu", "float32")
    courses = robot_plans.episodes(loaded, metaworld.Demonstrations.load(data), [0, 1])
    sides = robot_clock.Sides(loaded.policy, loaded.policy.diffusion.unet, "eager", courses[0][0])
    side = sides.accelerated(7, None, None)
    plans = side.policy.diffusion.conditional_sample.plans
    plans.settings = dataclasses.replace(plans.settings, graph=True)
    side.plan(courses[0][0])
    found = side.of_rounds(courses)
    assert found["network_ms"] == 1.0
    assert found["rounds_ms"] > found["round_ms"] > 0


@pytest.mark.slow
def test_a_network_in_channels_last_predicts_the_same(tmp_path: Path) -> None:
    folder, _ = policy_and_data(tmp_path)
    with lerobots.importing():
        ours, plain = (robot_clock.load(folder, "cpu", "float32", last).policy for last in (True, False))
    parts = [one for one in ours.modules() if isinstance(one, robot_clock.ChannelsLast)]
    assert {part.run.__name__ for part in parts} == {"conv2d", "conv_transpose2d"}
    assert not any(isinstance(one, torch.nn.Conv1d | torch.nn.ConvTranspose1d) for one in ours.modules())
    assert all(part.weight.is_contiguous(memory_format=torch.channels_last) for part in parts)
    x, time, condition = torch.randn(3, 16, 4), torch.tensor([0, 7, 19]), torch.randn(3, 52)
    found, wanted = (one.diffusion.unet(x, time, global_cond=condition) for one in (ours, plain))
    torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-4)


@pytest.mark.slow
def test_the_time_of_a_call_is_split_by_kind_of_kernel(tmp_path: Path) -> None:
    folder, _ = policy_and_data(tmp_path)
    with lerobots.importing():
        robot_profile.profile(folder, "cpu", "float32", False, [1, 5], False, "profile", tmp_path)
    saved = load(RobotProfile, "profile", tmp_path)
    assert saved.settings.weight_bytes == 4 * saved.settings.parameters
    one, five = saved.rows
    assert (one.states, five.states) == (1, 5)
    assert five.gflop == pytest.approx(5 * one.gflop)
    for row in saved.rows:
        assert row.busy > 0
        assert {"matrix products and convolutions", "normalisation"} <= {kind.name for kind in row.kinds}
        assert row.longest == sorted(row.longest, key=lambda kernel: -kernel.ms)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("sm90_xmma_fprop_implicit_gemm_tf32f32_tf32f32_f32_nhwckrsc_nhwc", robot_profile.PRODUCTS),
        ("nvjet_hsh_128x8_64x12_4x1_v_bz_TNT", robot_profile.PRODUCTS),
        ("triton_poi_fused_convolution_mish_native_group_norm_3", robot_profile.ELEMENTS),
        ("triton_per_fused_native_group_norm_7", robot_profile.NORMS),
        ("void at::native::(anonymous namespace)::RowwiseMomentsCUDAKernel<float>", robot_profile.NORMS),
        ("void cudnn::ops::nchwToNhwcKernel<float, float>", robot_profile.COPIES),
        ("void at::native::(anonymous namespace)::CatArrayBatchedCopy<float>", robot_profile.COPIES),
        ("void at::native::vectorized_elementwise_kernel<4, at::native::mish>", robot_profile.ELEMENTS),
        ("Memcpy DtoD (Device -> Device)", robot_profile.COPIES),
    ],
)
def test_kernels_are_sorted_by_their_names(name: str, kind: str) -> None:
    assert robot_profile.kind_of(name) == kind


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
