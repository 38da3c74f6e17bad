"""`foresample bench mixture`."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from foresample.cli.bench import METHODS
from foresample.results import LABELS, BenchResult, read_result
from tests.cli.common import refuses, succeeds

SMALL = ["bench", "mixture", "--dim", "4", "--steps", "8", "--window", "3", "--samples", "5"]


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
    told = succeeds(*SMALL, "--out", tmp_path)
    assert all(LABELS[method] in told for method in METHODS)
    read = read_result(tmp_path / "mixture-d4-T8-v.json")
    assert isinstance(read, BenchResult)
    assert read.settings.steps == 8
    assert [row.method for row in read.rows] == list(METHODS)
    assert read.command is not None
    assert (tmp_path / "mixture-d4-T8-v.png").read_bytes().startswith(b"\x89PNG")


def test_json_is_json() -> None:
    rows = json.loads(succeeds(*SMALL, "--json"))["rows"]
    assert {row["window"] for row in rows} == {3}
    assert all(row["speedup"] >= 1 for row in rows)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--reuse", "w"], "--reuse takes one of x0, eps, v"),
        (["--churn", "0"], "churn must be positive"),
        (["--churn", "nan"], "churn must be positive"),
        (["--churn", "inf"], "must be finite"),
        (["--dim", "0"], "greater than or equal to 1"),
        (["--dim", "two"], "--dim"),
        (["--out", "/dev/null/out"], "cannot write to /dev/null/out"),
    ],
)
def test_bad_input(arguments: list[str], sentence: str) -> None:
    refuses(sentence, *SMALL, *arguments)


def test_without_matplotlib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setattr("foresample.cli.bench.sample", None)
    refuses("pip install 'foresample[cli]'", *SMALL, "--out", tmp_path)


def test_numbers_this_machine_cannot_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("foresample.cli.bench.sample", None)
    refuses("5 samples of dimension 1000000000000 at a time, each with a window of 3,", *SMALL, "--dim", 10**12)
    refuses("ask for fewer --samples", *SMALL, "--samples", 10**12)


def test_a_window_beyond_the_chain_is_cut() -> None:
    rows = json.loads(succeeds(*SMALL, "--window", 10**9, "--json"))["rows"]
    assert {row["window"] for row in rows} == {3, 7}
