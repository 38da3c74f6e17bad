"""`foresample tune`."""

from __future__ import annotations

from pathlib import Path

from foresample.results import TuneResult, read_result
from tests.cli.common import refuses, succeeds

SMALL = ["tune", "--target", "flow", "--steps", "6"]


def test_a_table_and_an_advice(tmp_path: Path) -> None:
    told = succeeds(*SMALL, "--window", "2", "--window", "3", "--out", tmp_path / "new" / "tune.json")
    assert "6 steps, 1 at a time" in told
    assert "ample" in told.splitlines()[-2]
    read = read_result(tmp_path / "new" / "tune.json")
    assert isinstance(read, TuneResult)
    assert [trial.window for trial in read.trials] in ([2, 3], [2])
    assert read.settings["windows"] == [2, 3]
    assert read.settings["target"] == "flow"


def test_auto_tries_all_windows(tmp_path: Path) -> None:
    succeeds(*SMALL, "--window", "auto", "--json", "--out", tmp_path / "tune.json")
    read = read_result(tmp_path / "tune.json")
    assert isinstance(read, TuneResult)
    assert read.settings["windows"] == [2, 4, 8, 16, 32, 64]


def test_a_model(folder: Path) -> None:
    assert "9 steps" in succeeds("tune", "--model", folder, "--steps", "9", "--window", "2", "--label", "hat")


def test_a_file_that_cannot_be_written_is_refused_before_the_work(tmp_path: Path) -> None:
    refuses(f"cannot write {tmp_path}: name another file", *SMALL, "--out", tmp_path)
    (tmp_path / "file").write_text("")
    refuses("cannot write to", *SMALL, "--out", tmp_path / "file" / "tune.json")


def test_a_chain_with_nothing_to_draft_has_no_window() -> None:
    refuses(
        "a chain of 1 step without a transition that can be drafted", "tune", "--target", "flow", "--steps", "1"
    )


def test_numbers_this_machine_cannot_hold() -> None:
    refuses("10000000000000 samples would take", *SMALL, "--slots", 25 * 10**11)
