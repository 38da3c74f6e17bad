"""`foresample tune`."""

from __future__ import annotations

import json
from pathlib import Path

from foresample.engine.tuning import Point
from tests.cli.common import invoke, refuses, succeeds

SMALL = ["tune", "--target", "flow", "--steps", "6"]


def test_tune_prints_a_table_and_its_advice(tmp_path: Path) -> None:
    told = succeeds(*SMALL, "--window", "2", "--window", "3", "--out", tmp_path / "new" / "tune.json")
    assert "6 steps, 1 at a time" in told
    assert "ample" in told.splitlines()[-2]
    read = json.loads((tmp_path / "new" / "tune.json").read_text())
    assert [trial["window"] for trial in read["trials"]] in ([2, 3], [2])
    assert read["settings"]["windows"] == [2, 3]
    assert read["settings"]["target"] == "flow"


def test_auto_tries_all_windows(tmp_path: Path) -> None:
    succeeds(*SMALL, "--window", "auto", "--json", "--out", tmp_path / "tune.json")
    read = json.loads((tmp_path / "tune.json").read_text())
    assert read["settings"]["windows"] == "auto"
    assert {2, 4} <= {trial["window"] for trial in read["trials"]}


def test_auto_and_given_windows_are_all_tried(tmp_path: Path) -> None:
    succeeds(*SMALL, "--window", "auto", "--window", "3", "--json", "--out", tmp_path / "tune.json")
    read = json.loads((tmp_path / "tune.json").read_text())
    assert read["settings"]["windows"] == [2, 3, 4, 8, 16, 32, 64]


def test_a_saved_tuning_can_be_given_as_the_window(tmp_path: Path) -> None:
    """A run of the same kind takes it without measuring; another kind of run is refused, as is another file."""
    file, flow = tmp_path / "tune.json", ["--target", "flow", "--steps", "6"]
    succeeds("tune", *flow, "--window", "2", "--slots", "4", "--out", file)
    succeeds("check", *flow, "--window", file, "--slots", "4", "--samples", "200")
    refuses(
        "this tuning is of 6 steps with 4 samples at a time, not of 6 steps with 5",
        *("check", *flow, "--window", file, "--slots", "5", "--samples", "200"),
    )
    refuses("nor a file of foresample tune --out", "check", *flow, "--window", tmp_path / "none.json")
    refuses(
        "not of 6 steps with 200: draw 4 at a time (slots=4, --slots 4), or measure again",
        *("check", *flow, "--window", file, "--samples", "200"),
    )
    other = file.rename(tmp_path / "tune.txt")
    succeeds("check", *flow, "--window", other, "--slots", "4", "--samples", "200")
    file.write_text("[]")
    refuses("holds no tuning", "check", *flow, "--window", file, "--slots", "4", "--samples", "200")


def test_several_slots_print_a_frontier(tmp_path: Path) -> None:
    told = succeeds(
        *(*SMALL, "--slots", "1", "--slots", "2", "--window", "2", "--out", tmp_path / "frontier.json")
    )
    assert "samples a second" in told
    assert "Take " in told
    read = json.loads((tmp_path / "frontier.json").read_text())
    assert [tuning["slots"] for tuning in read["tunings"]] == [1, 2]
    assert f"wrote {tmp_path / 'frontier.json'}" in told
    assert f"Take {Point(**read['best'])}." in told
    refuses(
        "holds tunings for several numbers of slots",
        *("check", "--target", "flow", "--steps", "6", "--window", tmp_path / "frontier.json"),
    )
    refuses("--within chooses between several --slots", *SMALL, "--within", "5")


def test_a_deadline_that_no_setting_meets_is_refused_after_the_findings_are_written(tmp_path: Path) -> None:
    two, out = [*SMALL, "--slots", "1", "--slots", "2", "--window", "2"], tmp_path / "frontier.json"
    for more in ([], ["--json"]):
        result = invoke(*two, "--within", "0.0001", "--out", out, *more)
        assert result.exit_code == 2
        assert "no way to sample is within 0.1 µs here" in " ".join(result.stderr.split())
        assert json.loads(out.read_text())["best"] is None
        if more:
            assert json.loads(result.stdout) == json.loads(out.read_text())
        else:
            assert f"wrote {out}" in result.stdout
        out.unlink()
    given = json.loads(succeeds(*two, "--within", "100000", "--json"))
    assert given["best"]["samples_per_second"] > 0


def test_a_model(folder: Path) -> None:
    assert "9 steps" in succeeds("tune", "--model", folder, "--steps", "9", "--window", "2", "--label", "hat")


def test_a_file_that_cannot_be_written_is_refused_before_the_work(tmp_path: Path) -> None:
    refuses(f"cannot write {tmp_path}: name another file", *SMALL, "--out", tmp_path)
    (tmp_path / "file").write_text("")
    refuses("(File exists): name another file", *SMALL, "--out", tmp_path / "file" / "tune.json")


def test_a_chain_with_nothing_to_draft_has_no_window() -> None:
    refuses(
        "a chain of 1 step without a transition that can be drafted", "tune", "--target", "flow", "--steps", "1"
    )


def test_numbers_too_large_for_this_machine_are_refused() -> None:
    refuses("10000000000000 samples would take", *SMALL, "--slots", 25 * 10**11)
