"""Comparisons on equal terms: no method gets more states a call than the others."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from torch import Tensor
from typer.testing import CliRunner, Result

import foresample as fs
from benchmarks import agreement, curves, quality_cost, rivals
from benchmarks.curves import BATCHES, METHODS, PROBLEMS, TREES, Problem, measure, shapes, tuned
from benchmarks.kinds.quality import Agreement, AgreementRow, AgreementSettings, QualityCost, QualityCostPoint
from benchmarks.kinds.rivals import Curves, CurveSettings
from benchmarks.peers import nodes
from benchmarks.results import load, save
from tests.support.small_chains import CHAINS, flow, mixture


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


@pytest.mark.slow
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


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_a_batch_wider_than_the_chain_is_cut(method: str) -> None:
    target = Watched(flow("x0"))
    shape = shapes(64, len(target.std))[-1] if method in TREES else None
    run = METHODS[method](target, 5, 3, 64, shape)
    assert run.samples.shape == (5, 2)
    assert target.most <= 64
    assert method in TREES or target.most <= len(target.std)


def test_a_point_has_the_cost_of_its_samples() -> None:
    target = flow("x0")
    point = measure("default", 5, target, "x0", None, 40, 7, part=10)
    calls = torch.cat([fs.sample(target, 10, window=4, seed=7 + i).calls for i in range(0, 40, 10)]).double()
    assert point.calls == pytest.approx(float(calls.mean()))
    assert point.calls_error == pytest.approx(float(calls.std()) / math.sqrt(40))
    assert point.speedup == pytest.approx(16 / point.calls)
    assert point.speedup_error == pytest.approx(point.speedup * point.calls_error / point.calls)
    assert point.evaluations_error > 0
    assert measure("sequential", 1, target, "x0", None, 4, 7, part=4).calls == 16


@pytest.mark.slow
def test_pilots_choose_the_better_setting() -> None:
    """Between a good prediction to reuse and a useless one, the good one; and a tree of the candidates."""
    grid = torch.linspace(0.02, 0.98, 14, dtype=torch.float64)
    good, bad = mixture().vp(grid, reuse="x0"), mixture().vp(grid, reuse="eps")
    for method in ("default", "reflection-nearest", "dgrs"):
        reuse, shape = tuned(method, 9, {"eps": bad, "x0": good}, 40, 40)
        assert reuse == "x0"
        assert shape is None or shape in shapes(9, 14)
    assert tuned("asd", 9, {"eps": bad, "x0": good}, 1, 1) == ("x0", None)


@pytest.mark.slow
def test_curves_are_saved_row_by_row_and_resume_after_an_interruption(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem = Problem("small", {"v": flow("v"), "x0": flow("x0")})
    settings = CurveSettings(
        problem="small",
        target="small",
        steps=16,
        reuse=["v", "x0"],
        samples=12,
        seed=0,
        pilots=4,
        part=4,
        device="cpu",
        half=False,
    )
    path, methods = tmp_path / "curves-small.json", ["default", "blocks-parent", "rass"]
    asked: list[tuple[str, int]] = []

    def counted(method: str, states: int, *arguments: object) -> tuple[str, curves.Shape | None]:
        asked.append((method, states))
        if len(asked) == 3:
            raise KeyboardInterrupt
        return tuned(method, states, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(curves, "tuned", counted)
    with pytest.raises(KeyboardInterrupt):
        curves.curves(path, problem, settings, methods, [5, 20, 64])
    cut = load(Curves, "curves-small", tmp_path)
    assert [row.method for row in cut.rows] == ["sequential", "default", "blocks-parent"]
    rows = curves.curves(path, problem, settings, methods, [5, 20, 64])
    assert asked[3:] == [("rass", 5), ("default", 20), ("blocks-parent", 20), ("rass", 20), ("rass", 64)]
    saved = load(Curves, "curves-small", tmp_path)
    assert saved.rows == rows
    assert saved.settings == settings
    assert saved.command is not None
    assert saved.commands == [saved.command]
    assert saved.versions
    wide = [row for row in rows if row.method == "default" and row.states >= 16]
    assert wide[0] == replace(wide[1], states=20)
    assert [row.samples for row in rows if row.method == "rass"] == [10, 10, 10]
    result = command("redraw", "--out", str(tmp_path))
    assert result.exit_code == 0, result.output
    assert (tmp_path / "curves-small.png").stat().st_size > 10_000
    # Other settings: nothing is taken over.
    assert curves.begun(Curves, path, replace(settings, samples=9)) is None


@pytest.mark.parametrize("name", ["mixture", "langevin", "wells", "fashion"])
def test_every_chain_of_the_comparison_can_be_sampled(name: str) -> None:
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


def command(*arguments: str) -> Result:
    app = typer.Typer()
    app.command()(curves.main)
    return CliRunner().invoke(app, arguments)


@pytest.mark.parametrize("arguments", [["nothing"], ["mixture", "--methods", "default, magic"]])
def test_the_command_refuses_unknown_arguments(arguments: list[str]) -> None:
    assert command(*arguments).exit_code == 2


# ------------------------------------------------------------------ quality against cost


def tiny_costs(out: Path, *methods: str, turns: int = 0, model: str = "mixture") -> list[QualityCostPoint]:
    """The rows of a small run."""
    quality_cost.main(
        model=model,
        steps=4,
        count=20,
        sets=2,
        window=3,
        tolerances="1",
        few="2",
        chosen=",".join(methods),
        seed=0,
        part=300,
        turns=turns,
        half=False,
        device="cpu",
        out=out,
    )
    return load(QualityCost, f"quality-cost-{model}", out).rows


def test_quality_against_cost_at_a_tiny_size(tmp_path: Path) -> None:
    keys = ["sequential", "default", "paradigms", "parataa", "ddpm", "ddim", "dpmpp-2m"]
    first = tiny_costs(tmp_path, *keys[:2])
    rows = tiny_costs(tmp_path, *keys, turns=2)  # goes on where the first was cut
    assert [row.method for row in rows] == keys
    assert [replace(row, alone_ms=None, faster=None) for row in rows[:2]] == first
    assert [row.detail for row in rows] == ["", "window 3", *["tolerance 1"] * 2, *["2 steps"] * 3]
    assert [row.exact for row in rows] == [True, True, False, False, False, False, False]
    assert rows[0].calls == 4
    assert rows[5].evaluations == 2
    assert rows[0].faster is None
    for row in rows:
        assert row.distance > 0
        assert row.distance_error
        assert row.to_data_error
        assert row.alone_ms
    assert all(row.faster is not None and row.faster.turns == 2 for row in rows[1:])


@pytest.mark.slow
def test_plans_are_compared_observation_by_observation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The demonstrations stand in for a download."""
    paths = torch.randn(4, 1, 100, 2, generator=torch.Generator().manual_seed(0)).cumsum(2) / 50
    monkeypatch.setattr(quality_cost.lasa, "demonstrations", lambda: paths)
    rows = tiny_costs(tmp_path, "sequential", "ddpm", model="policy")
    assert [row.calls for row in rows] == [4, 2]
    source = quality_cost.MODELS["policy"](4, "cpu", False)
    assert torch.equal(source.real(20, 0), source.real(170, 1)[150:])


def test_costs_of_the_same_settings_are_one_and_drawn_as_one(tmp_path: Path) -> None:
    """The tight tolerances were measured later: they are listed with their method, and drawn in its line."""
    loose, tight, policy = (
        load(QualityCost, f"quality-cost-{name}") for name in ("cifar10", "cifar10-tight", "policy")
    )
    whole, other = QualityCost.joined([loose, policy, tight])
    assert (whole.name, other) == (loose.name, QualityCost.joined([policy])[0])
    assert sorted(map(repr, whole.rows)) == sorted(map(repr, loose.rows + tight.rows))
    assert [row.method for row in whole.rows if row.steps is None and row.tolerance is None] == [
        "sequential", "default", "reflection-nearest", "blocks-parent",
    ]  # fmt: skip
    assert [row.tolerance for row in whole.rows if row.method == "parataa"] == [0.01, 0.03, 0.1, 0.3, 1.0]
    assert whole.floor is whole.rows[0]
    rivals.main(tmp_path)
    assert (tmp_path / "rivals.png").stat().st_size > 10_000


# ------------------------------------------------------------------ labels that the classifier sees


def seen(agree: int, pictures: int, network: str = "float32", sampler: str = "sequential") -> AgreementRow:
    return AgreementRow(
        network=network, sampler=sampler, seed=1, pictures=pictures, agree=agree, calls=1.0, seconds=1.0
    )


def test_agreement_has_wilsons_interval_and_one_test_of_both_networks(tmp_path: Path) -> None:
    scipy_stats = pytest.importorskip("scipy.stats")
    for agree, count in ((0, 10), (3, 10), (937, 1000), (1000, 1000)):
        right = scipy_stats.binomtest(agree, count).proportion_ci(method="wilson")
        assert seen(agree, count).interval == pytest.approx((right.low, right.high))

    tables = ([[40, 60], [70, 30]], [[55, 45], [52, 48]])
    rows = [
        seen(table[i][0], 100, network, sampler)
        for network, table in zip(("float32", "bfloat16"), tables, strict=True)
        for i, sampler in enumerate(("sequential", "speculative"))
    ]
    settings = AgreementSettings(steps=1, window=1, slots=1, count=100)
    save(tmp_path / "both.json", "agreement", settings, rows=rows, calls=[])
    both = load(Agreement, "both", tmp_path)
    squares = [scipy_stats.chi2_contingency(table, correction=False).statistic for table in tables]
    assert both.p_value == pytest.approx(scipy_stats.chi2.sf(sum(squares), 2))
    assert both.differences()["float32"][0] == pytest.approx(0.3)
    alone = replace(both, rows=rows[:3])
    assert alone.p_value == pytest.approx(scipy_stats.chi2.sf(squares[0], 1))
    with pytest.raises(ValueError, match="there are both sets of none"):
        _ = replace(both, rows=rows[:1]).p_value


@pytest.mark.slow
def test_agreement_resumes_after_an_interruption(tmp_path: Path) -> None:
    how: dict[str, Any] = {
        "count": 10,
        "steps": 2,
        "window": 1,
        "slots": 5,
        "most": 9,
        "device": "cpu",
        "out": tmp_path,
    }
    agreement.main(only=["float32"], sampler=["sequential"], **how)
    (first,) = load(Agreement, "fashion_mnist-agreement", tmp_path).rows
    agreement.main(only=None, sampler=None, **how)
    saved = load(Agreement, "fashion_mnist-agreement", tmp_path)
    assert [(row.network, row.sampler) for row in saved.rows] == list(agreement.SEEDS)
    assert saved.rows[0] == first  # the clock with it
    assert len(set(agreement.SEEDS.values())) == len(saved.rows)
    assert [row.states for row in saved.calls] == [1, 9, 1, 9]
    assert all(row.most < 0.1 * row.answer for row in saved.calls)
    assert 0 <= saved.p_value <= 1
