"""`python -m benchmarks.mixture`: methods × windows on one target."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from benchmarks.mixture import METHODS, app
from benchmarks.names import LABELS
from benchmarks.result_files import BenchResult, read_result

SMALL = ["--dim", "4", "--steps", "8", "--window", "3", "--samples", "5"]


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, [*SMALL, *map(str, arguments)])


def test_every_method_has_a_key_and_words() -> None:
    assert list(METHODS) == [
        "reflection-head",
        "reflection-nearest",
        "per-step-parent-fresh",
        "block-parent-fresh",
        "replay-per-step",
        "replay-block",
        "default",
    ]
    assert set(METHODS) <= set(LABELS)


def test_a_table_a_result_and_a_plot(tmp_path: Path) -> None:
    told = run("--out", tmp_path).output
    assert all(LABELS[method] in told for method in METHODS)
    read = read_result(tmp_path / "mixture-d4-T8-v.json")
    assert isinstance(read, BenchResult)
    assert read.settings.steps == 8
    assert [row.method for row in read.rows] == list(METHODS)
    assert read.command is not None
    assert (tmp_path / "mixture-d4-T8-v.png").read_bytes().startswith(b"\x89PNG")


def test_the_json_can_be_read_and_a_window_longer_than_the_chain_is_cut() -> None:
    rows = json.loads(run("--window", 10**9, "--json").output)["rows"]
    assert {row["window"] for row in rows} == {3, 7}
    assert all(row["speedup"] >= 1 for row in rows)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--reuse", "w"], "--reuse takes one of x0, eps, v"),
        (["--churn", "0"], "churn must be positive"),
        (["--churn", "nan"], "churn must be positive"),
        (["--churn", "inf"], "must be finite"),
        (["--out", "/dev/null/out"], "cannot write to /dev/null/out"),
        (["--dim", 10**12], "5 samples of dimension 1000000000000 at a time, each with a window of 3,"),
        (["--samples", 10**12], "ask for fewer --samples"),
    ],
)
def test_bad_input(arguments: list[object], sentence: str) -> None:
    result = run(*arguments)
    assert result.exit_code != 0
    assert sentence in str(result.exception)
