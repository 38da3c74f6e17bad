"""The command line, as a user types it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from foresample.cli import app

runner = CliRunner()
SMALL = ["bench", "mixture", "--dim", "4", "--steps", "8", "--window", "3", "--samples", "5"]


def test_bench_prints_a_table_and_writes_result_and_plot(tmp_path: Path) -> None:
    result = runner.invoke(app, [*SMALL, "--out", str(tmp_path)])
    assert result.exit_code == 0, result.output
    assert "replay, block, secant" in result.output
    saved = json.loads((tmp_path / "mixture-d4-T8-v.json").read_text())
    assert saved["settings"]["steps"] == 8
    assert {"command", "commit", "versions", "machine"} <= set(saved)
    assert len(saved["rows"]) == 7
    assert (tmp_path / "mixture-d4-T8-v.png").read_bytes().startswith(b"\x89PNG")


def test_bench_json_is_json() -> None:
    result = runner.invoke(app, [*SMALL, "--json"])
    rows = json.loads(result.stdout)["rows"]
    assert {row["window"] for row in rows} == {3}
    assert all(row["speedup"] >= 1 for row in rows)


def test_check_passes_and_says_so() -> None:
    result = runner.invoke(app, ["check", "vp", "--samples", "300", "--json"])
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["passed"]


def test_check_of_ones_own_target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine.py").write_text(
        "import foresample as fs\n"
        "def make():\n    return fs.GaussianMixture.of_draft_trees(2).langevin(6, 0.01)\n"
        "class Mixing:\n"
        "    base = make()\n"
        "    shape, std, start, mean = base.shape, base.std, base.start, base.mean\n"
        "    def predict(self, x, step, row):\n"
        "        return self.base.predict(x, step, row) + x.sum(0)\n"
        "mixing = Mixing()\n"
    )
    monkeypatch.chdir(tmp_path)
    assert runner.invoke(app, ["check", "mine:make", "--samples", "200"]).exit_code == 0
    result = runner.invoke(app, ["check", "mine:mixing", "--samples", "200"])
    assert result.exit_code == 1
    assert "mixes rows" in result.output


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["check", "nonsense"], "none of flow, vp, langevin, embedded"),
        (["check", "no_such_module:x"], "cannot load"),
        (["check", "os:sep"], "is not a target"),
        (["check", "--drafter", "psychic"], "--drafter takes one of"),
        ([*SMALL, "--reuse", "w"], "--reuse takes one of x0, eps, v"),
        ([*SMALL, "--churn", "0"], "churn must be positive"),
    ],
)
def test_bad_input_is_one_sentence_and_exit_status_2(arguments: list[str], sentence: str) -> None:
    result = runner.invoke(app, arguments)
    assert result.exit_code == 2
    assert sentence in result.output
    assert "Traceback" not in result.output


def test_an_output_folder_that_cannot_be_made_is_refused_before_the_work(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    result = runner.invoke(app, [*SMALL, "--out", str(tmp_path / "file" / "out")])
    assert result.exit_code == 2
    assert "error:" in result.output
