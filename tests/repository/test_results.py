"""Result files: what is written is read, and what does not fit is refused in one sentence."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.names import label
from benchmarks.result_files import (
    KINDS,
    BenchResult,
    CheckResult,
    DatasetResult,
    ResultError,
    read_result,
    read_results,
)
from foresample.provenance import make_result, provenance, write_result
from tests.support.saved import BENCH, DATASET, FILES, save


def test_every_kind_is_read_from_any_folder(tmp_path: Path) -> None:
    foreign = {"notes.json": [1], "other.json": {"kind": "letter", "x": 1}}
    found = read_results(save(tmp_path, {**FILES, **foreign}))
    assert {type(result) for result in found.found} == {KINDS[data["kind"]] for data in FILES.values()}
    assert found.foreign == ["notes.json", "other.json"]
    (dataset,) = found.of(DatasetResult)
    assert (dataset.name, dataset.path) == ("data/manifest", tmp_path / "data/manifest.json")
    assert dataset.origins[0].command == "foresample something --seed 1"
    assert dataset.origins[0].machine.gpu == "NVIDIA H200"
    assert dataset.costs.calls_mean == 5.13


def test_written_results_are_read_back(tmp_path: Path) -> None:
    path = tmp_path / "new" / "check.json"
    findings = [{"question": "law", "passed": False, "detail": "p", "tests": 3, "smallest_p": 1e-9}]
    write_result(path, make_result("check", {"window": 3}, passed=False, level=0.001, findings=findings))
    result = read_result(path)
    assert isinstance(result, CheckResult)
    assert not result.findings[0].passed
    assert result.settings == {"window": 3}
    assert set(result.versions) == {"foresample", "python", "torch"}


def test_a_command_can_be_typed_again_without_its_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    for out in (["--out", "a folder"], ["--out=a folder"]):
        monkeypatch.setattr(
            "sys.argv", ["/some/where/clock.py", "latency", "--way", "compiled, searched", *out, "-x"]
        )
        assert provenance()["command"] == "clock.py latency --way 'compiled, searched' -x"


def test_missing_measurements_are_written_as_null(tmp_path: Path) -> None:
    write_result(tmp_path / "x.json", {"kind": "x", "a": float("nan"), "b": [float("inf"), 1.0]})
    assert json.loads((tmp_path / "x.json").read_text()) == {"kind": "x", "a": None, "b": [None, 1.0]}


def test_results_are_sorted_by_name_with_numbers_by_value(tmp_path: Path) -> None:
    names = ["T300", "T30", "b/x", "T4", "²"]
    found = read_results(save(tmp_path, {f"{name}.json": BENCH for name in names})).of(BenchResult)
    assert [result.name for result in found] == ["T4", "T30", "T300", "b/x", "²"]


def test_methods_are_keys_with_labels() -> None:
    assert label("reflection-nearest") == "reflection, nearest"
    assert label("somebody-elses") == "somebody-elses"


def changed(data: dict[str, Any], value: Any, *at: Any) -> dict[str, Any]:
    """The result with something else at this place; ... takes it out."""
    data = copy.deepcopy(data)
    inside: Any = data
    for key in at[:-1]:
        inside = inside[key]
    if value is ...:
        del inside[at[-1]]
    else:
        inside[at[-1]] = value
    return data


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        (json.dumps(BENCH, indent=2)[:300], "cannot be read as JSON"),
        ('{"kind": ' + "[" * 100_000, "cannot be read as JSON"),
        ('{"kind": "bench", "rows": NaN}', "NaN is no JSON number"),
        ('{"kind": "bench", "rows": -Infinity}', "-Infinity is no JSON number"),
        (changed(BENCH, ..., "rows"), "rows is missing"),
        (changed(BENCH, [], "rows"), "rows is [], not a list with something in it"),
        (changed(BENCH, 3, "rows"), "rows is 3, not a list"),
        (changed(BENCH, ["x"], "rows"), "rows[0] is 'x', not an object"),
        (changed(BENCH, ..., "rows", 1, "speedup_error"), "rows[1].speedup_error is missing"),
        (changed(BENCH, "2", "rows", 0, "speedup"), "rows[0].speedup is '2', not a finite number"),
        (changed(BENCH, True, "rows", 0, "speedup"), "rows[0].speedup is True, not a finite number"),
        (changed(BENCH, 10**400, "rows", 0, "speedup"), "rows[0].speedup is 1"),
        (changed(BENCH, 0, "rows", 0, "speedup"), "rows[0].speedup is 0, not a positive number"),
        (changed(BENCH, -1, "rows", 0, "speedup_error"), "rows[0].speedup_error is -1, not a number from 0 on"),
        (changed(BENCH, 2.5, "rows", 0, "window"), "rows[0].window is 2.5, not a whole number"),
        (changed(BENCH, 0, "rows", 0, "window"), "rows[0].window is 0, not a whole number from 1 on"),
        (changed(BENCH, None, "rows", 0, "method"), "rows[0].method is None, not a text"),
        (changed(BENCH, ["x"], "versions"), "versions is ['x'], not an object"),
        (changed(BENCH, 3, "versions", "torch"), "versions.torch is 3, not a text"),
        (changed(BENCH, "fast", "machine"), "machine is 'fast', not an object"),
        (changed(DATASET, 1, "law"), "law is 1, not an object"),
        (changed(DATASET, [], "runs"), "runs is [], not a list with something in it"),
    ],
)
def test_a_defect_is_one_sentence_with_file_place_and_remedy(tmp_path: Path, data: Any, sentence: str) -> None:
    save(tmp_path, {"fine.json": BENCH, "bad.json": data})
    with pytest.raises(ResultError) as raised:
        read_results(tmp_path)
    told = str(raised.value)
    assert told.startswith(f"{tmp_path / 'bad.json'}: {sentence}")
    assert told.endswith("; write it again with its command, or take it out of the folder")
    assert len(told) < 300


@pytest.mark.parametrize(
    ("files", "sentence"),
    [
        (None, "no folder of results at"),
        ({}, "no result files in"),
        (
            {"x.json": "{}", "y.json": '{"kind": ["bench"]}', "z.json": "NaN", "w.json": "{1}"},
            "none of the 4 JSON",
        ),
    ],
)
def test_a_folder_without_results_is_refused(
    tmp_path: Path, files: dict[str, Any] | None, sentence: str
) -> None:
    folder = tmp_path / "results"
    if files is not None:
        folder.mkdir()
        save(folder, files)
    with pytest.raises(ResultError) as raised:
        read_results(folder)
    assert sentence in str(raised.value)
    assert str(folder) in str(raised.value)
    assert "\n" not in str(raised.value)
