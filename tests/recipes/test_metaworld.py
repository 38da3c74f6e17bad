"""The Meta-World recipe on a few made-up demonstrations: LeRobot's policy trained, resumed, saved and read again."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from typer.testing import CliRunner

from recipes import metaworld
from recipes.data import DataError
from tests.support import lerobots


def demonstrations() -> metaworld.Demonstrations:
    generator = torch.Generator().manual_seed(0)
    which = torch.nn.functional.one_hot(torch.arange(60) // 12, 5).float()
    return metaworld.Demonstrations(
        torch.rand(60, 4, generator=generator),
        torch.cat([torch.rand(60, 17, generator=generator), which], 1),
        torch.rand(60, 4, generator=generator) * 2 - 1,
        torch.arange(60) // 12,
        metaworld.TASKS,
    )


def test_demonstrations_are_read_back_unchanged(tmp_path: Path) -> None:
    data = demonstrations()
    data.save(tmp_path / "some.npz")
    again = metaworld.Demonstrations.load(tmp_path / "some.npz")
    for name, value in vars(data).items():
        mine = getattr(again, name)
        assert mine == value if isinstance(value, tuple) else torch.equal(mine, value)
    (tmp_path / "some.npz").write_bytes(b"no")
    with pytest.raises(DataError, match="holds no demonstrations"):
        metaworld.Demonstrations.load(tmp_path / "some.npz")


def test_other_tasks_can_be_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recorded: list[tuple[tuple[str, ...], int, int]] = []

    def record(tasks: tuple[str, ...], count: int, seed: int) -> metaworld.Demonstrations:
        recorded.append((tasks, count, seed))
        return demonstrations()

    monkeypatch.setattr(metaworld, "record", record)
    for chosen in ([], ["--task", "assembly-v3", "--task", "box-close-v3"]):
        out = str(tmp_path / "some.npz")
        result = CliRunner().invoke(metaworld.app, ["record", "--count", "3", "--out", out, *chosen])
        assert result.exit_code == 0, result.output
    assert recorded == [(metaworld.TASKS, 3, 0), (("assembly-v3", "box-close-v3"), 3, 0)]


def test_a_task_without_an_expert_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    policies = ModuleType("metaworld.policies")
    policies.ENV_POLICY_MAP = {"push-v3": None}  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "metaworld", ModuleType("metaworld"))
    monkeypatch.setitem(sys.modules, "metaworld.policies", policies)
    result = CliRunner().invoke(metaworld.app, ["record", "--task", "push-v3", "--task", "fly-v3"])
    assert result.exit_code == 1
    assert "--task fly-v3: Meta-World has no expert for it, only for push-v3." in result.output


@pytest.mark.slow
def test_training_writes_what_lerobot_reads(tmp_path: Path) -> None:
    data = demonstrations()
    with lerobots.importing():
        trained, facts = metaworld.train(data, "tiny", tmp_path, steps=3, batch=8)
        loaded = metaworld.load(tmp_path)
        with pytest.raises(DataError, match="holds another training"):
            metaworld.train(data, "tiny", tmp_path, steps=3, batch=8, seed=1)
    assert facts["steps"] == 3
    assert loaded.tasks == metaworld.TASKS
    for name, value in trained.state_dict().items():
        torch.testing.assert_close(loaded.policy.state_dict()[name], value, rtol=1e-3, atol=1e-4)
    seen = {name: value for name, value in data.features().items() if name != "action"}
    normal = loaded.before(seen)
    assert float(normal["observation.state"].abs().max()) <= 1 + 1e-5
    chunk = {name: normal[name][:2].unsqueeze(0) for name in seen}
    assert loaded.after(loaded.policy.diffusion.generate_actions(chunk)[:, 0]).shape == (1, 4)


@pytest.mark.slow
def test_the_shipped_policy_is_small_and_plans_actions_within_their_range() -> None:
    assert sum(path.stat().st_size for path in metaworld.ASSET.iterdir()) < 20e6
    with lerobots.importing():
        loaded = metaworld.load()
    scene = torch.cat([torch.zeros(1, 17), torch.eye(5)[:1]], 1)
    seen = loaded.before({"observation.state": torch.zeros(1, 4), "observation.environment_state": scene})
    chunk = {
        n: seen[n].unsqueeze(1).expand(1, 2, -1)
        for n in seen
        if n.startswith("observation.") and seen[n] is not None
    }
    with torch.no_grad():
        plan = loaded.policy.diffusion.generate_actions(chunk)
    assert plan.shape == (1, 8, 4)
    assert float(plan.abs().max()) <= 1 + 1e-4
