"""Comparisons on equal terms: nobody gets more states a call than the others, and what the saved files say."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

import foresample as fs
from benchmarks import curves, quality_cost, tables
from benchmarks.curves import BATCHES, METHODS, PROBLEMS, TREES, Problem, measure, shapes, tuned
from benchmarks.peers import nodes
from benchmarks.tables import RESULTS
from tests.chains import CHAINS, flow, mixture

FILES = tables.curve_files()


class Watched:
    """A target that notes the most states a sample had in one call."""

    def __init__(self, target: fs.Target) -> None:
        self.shape, self.std, self.start, self.mean = target.shape, target.std, target.start, target.mean
        self._predict = target.predict
        self.most = 0

    def predict(self, x: Tensor, step: Tensor, row: Tensor) -> Tensor:
        self.most = max(self.most, int(torch.bincount(row).max()))
        return self._predict(x, step, row)


@pytest.mark.parametrize("steps", [2, 30, 300])
@pytest.mark.parametrize("states", [2, 3, *BATCHES])
def test_trees_fit_in_the_batch(states: int, steps: int) -> None:
    candidates = shapes(states, steps)
    assert candidates
    assert all(1 + nodes(shape) <= states for shape in candidates)
    assert all(len(shape) <= max(1, steps - 1) for shape in candidates)
    assert len(set(candidates)) == len(candidates)
    assert candidates[0] == (1,) * min(states - 1, steps - 1)


@pytest.mark.parametrize("states", [2, 5, 9])
@pytest.mark.parametrize("method", METHODS)
def test_no_call_has_more_states_than_the_batch_and_some_have_as_many(method: str, states: int) -> None:
    chain = CHAINS["langevin"]()
    for shape in shapes(states, len(chain.std)) if method in TREES else [None]:
        target = Watched(chain)
        METHODS[method](target, 20, 3, states, shape)
        assert target.most <= states
        if shape is None or 1 + nodes(shape) == states:
            assert target.most == states


@pytest.mark.parametrize("method", METHODS)
def test_a_batch_wider_than_the_chain_is_cut(method: str) -> None:
    target = Watched(flow("x0"))
    shape = shapes(64, len(target.std))[-1] if method in TREES else None
    run = METHODS[method](target, 5, 3, 64, shape)
    assert run.samples.shape == (5, 2)
    assert target.most <= 64
    assert method in TREES or target.most <= len(target.std)


def test_a_point_says_what_its_samples_cost() -> None:
    target = flow("x0")
    point = measure("default", 5, target, "x0", None, 40, 7, part=10)
    calls = torch.cat([fs.sample(target, 10, window=4, seed=7 + i).calls for i in range(0, 40, 10)]).double()
    assert point.calls == pytest.approx(float(calls.mean()))
    assert point.calls_error == pytest.approx(float(calls.std()) / math.sqrt(40))
    assert point.speedup == pytest.approx(16 / point.calls)
    assert point.speedup_error == pytest.approx(point.speedup * point.calls_error / point.calls)
    assert point.evaluations_error > 0
    assert point.seconds > 0
    assert measure("sequential", 1, target, "x0", None, 4, 7, part=4).calls == 16


def test_pilots_choose_what_is_better() -> None:
    """Between a good prediction to reuse and a useless one, the good one; and a tree of the candidates."""
    grid = torch.linspace(0.02, 0.98, 14, dtype=torch.float64)
    good, bad = mixture().vp(grid, reuse="x0"), mixture().vp(grid, reuse="eps")
    for method in ("default", "reflection, nearest", "D-GRS"):
        reuse, shape = tuned(method, 9, {"eps": bad, "x0": good}, 40, 40)
        assert reuse == "x0"
        assert shape is None or shape in shapes(9, 14)
    assert tuned("ASD", 9, {"eps": bad, "x0": good}, 1, 1) == ("x0", None)


def test_curves_are_saved_row_by_row_and_go_on_where_they_were_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem = Problem("small", {"v": flow("v"), "x0": flow("x0")})
    settings = {
        "target": "small",
        "steps": 16,
        "reuse": ["v", "x0"],
        "samples": 12,
        "seed": 0,
        "pilots": 4,
        "alone": 2,
    }
    path, methods = tmp_path / "curves-small.json", ["default", "blocks, parent", "RASS"]
    asked: list[tuple[str, int]] = []

    def counted(method: str, states: int, *arguments: object) -> tuple[str, None]:
        asked.append((method, states))
        if len(asked) == 3:
            raise KeyboardInterrupt
        return tuned(method, states, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(curves, "tuned", counted)
    with pytest.raises(KeyboardInterrupt):
        curves.curves(path, problem, settings, methods, [5, 20, 64], part=4)
    assert [row["method"] for row in json.loads(path.read_text())["rows"]] == [
        "sequential",
        "default",
        "blocks, parent",
    ]
    rows = curves.curves(path, problem, settings, methods, [5, 20, 64], part=4)
    assert asked[3:] == [("RASS", 5), ("default", 20), ("blocks, parent", 20), ("RASS", 20), ("RASS", 64)]
    saved = json.loads(path.read_text())
    assert saved["rows"] == rows
    assert {"command", "commit", "versions", "machine"} <= set(saved)
    wide = [row for row in rows if row["method"] == "default" and row["states"] >= 16]
    assert wide[0] == {**wide[1], "states": 20}
    assert [row["samples"] for row in rows if row["method"] == "RASS"] == [10, 10, 10]
    curves.picture(tmp_path / "curves.png", "small", rows)
    assert (tmp_path / "curves.png").stat().st_size > 10_000
    # Other settings: nothing is taken over.
    assert curves.saved_rows(path, {**settings, "samples": 9}) == ([], [])


@pytest.mark.parametrize("name", ["mixture", "langevin", "wells", "fashion"])
def test_the_chains_compared_are_there(name: str) -> None:
    make, steps = PROBLEMS[name]
    problem = make(3, "cpu", False)
    assert steps >= 30
    for target in problem.targets.values():
        assert len(target.std) == 3
        assert fs.sequential(target, 2, seed=0).samples.isfinite().all()


def test_the_force_of_the_posterior_is_a_gradient() -> None:
    (target,) = curves.posterior(3, "cpu", False).targets.values()
    none = torch.zeros(1, dtype=torch.int64)
    jacobian = torch.func.jacrev(lambda w: target.predict(w.unsqueeze(0), none, none)[0])
    hessian = -jacobian(torch.randn(64, dtype=torch.float64, generator=torch.Generator().manual_seed(1)))
    torch.testing.assert_close(hessian, hessian.T)
    values = torch.linalg.eigvalsh(hessian)
    assert 1 <= values[0] < 0.5 * values[-1]
    assert 0.005 * values[-1] < 0.1 * 2


def test_the_command_refuses_what_it_does_not_know() -> None:
    import typer

    app = typer.Typer()
    app.command()(curves.main)
    for arguments in (["nothing"], ["mixture", "--methods", "default; magic"]):
        result = CliRunner().invoke(app, arguments)
        assert result.exit_code == 2


# ------------------------------------------------------------------ what was measured


def test_there_are_results_of_every_target() -> None:
    assert {name.split("-")[1] for name in FILES} == set(curves.PROBLEMS)
    assert {"curves-mixture-T30", "curves-mixture-T300"} <= set(FILES)


@pytest.mark.parametrize("name", FILES)
def test_the_default_is_ahead_of_every_exact_peer_from_5_to_64_states(name: str) -> None:
    rows, low, high = FILES[name]["rows"], *tables.LEAD
    sizes = [n for n in tables.batches(rows) if low <= n <= high]
    assert sizes == [n for n in curves.BATCHES if low <= n <= high]
    for states in sizes:
        ours = next(row for row in rows if row["method"] == "default" and row["states"] == states)
        peers = [row for row in rows if row["method"] not in tables.OURS and row["states"] == states]
        assert all(ours["calls"] < peer["calls"] for peer in peers), states


@pytest.mark.parametrize("name", FILES)
def test_saved_curves_are_on_equal_terms(name: str) -> None:
    saved = FILES[name]
    steps = saved["settings"]["steps"]
    assert "dirty" not in saved["commit"]
    assert not any("/" in part for command in saved["commands"] for part in command.split())
    for row in saved["rows"]:
        assert row["exact"]
        assert row["evaluations"] <= row["states"] * row["calls"] * (1 + 1e-9)
        assert row["speedup"] == pytest.approx(steps / row["calls"])
        assert row["speedup_error"] == pytest.approx(row["speedup"] * row["calls_error"] / row["calls"])
        assert row["calls"] >= steps / row["states"]
        if row["method"] in TREES:
            assert 1 + nodes(tuple(map(int, row["shape"].split("-")))) <= row["states"]
        else:
            assert row["shape"] is None
        assert row["reuse"] in saved["settings"]["reuse"]


# ------------------------------------------------------------------ quality against cost


def test_quality_against_cost_at_a_tiny_size(tmp_path: Path) -> None:
    names = [
        "sequential",
        "default, window 3",
        "ParaDiGMS, tolerance 1",
        "DDIM, 2 steps",
        "DPM-Solver++ 2M, 2 steps",
    ]
    quality_cost.main(
        steps=4,
        count=10,
        window=3,
        tolerances="1",
        few="2",
        chosen=";".join(names),
        seed=0,
        part=10,
        half=False,
        device="cpu",
        out=tmp_path,
    )
    saved = json.loads((tmp_path / "quality-cost-fashion.json").read_text())
    rows = {row["method"]: row for row in saved["rows"]}
    assert list(rows) == names
    assert rows["sequential"]["calls"] == 4
    assert [rows[name]["exact"] for name in names] == [True, True, False, False, False]
    assert rows["DDIM, 2 steps"]["evaluations"] == 2
    assert all(row["distance"] > 0 for row in rows.values())


@pytest.mark.skipif(not (RESULTS / "quality-cost-fashion.json").exists(), reason="not measured yet")
def test_the_saved_quality_has_its_floor() -> None:
    rows = tables.result("quality-cost-fashion")["rows"]
    floor = next(row for row in rows if row["method"] == "sequential")
    assert floor["exact"]
    assert any(row["exact"] and row["calls"] < floor["calls"] for row in rows)
    assert any(not row["exact"] for row in rows)
