"""`foresample check`."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cli.common import invoke, refuses, succeeds

SMALL = ["--samples", "200"]
Tunes = Callable[[int | None], list[int]]


@pytest.mark.parametrize("arguments", [["vp"], ["--target", "vp"]], ids=["argument", "option"])
def test_a_passed_check_is_printed(arguments: list[str]) -> None:
    told = json.loads(succeeds("check", *arguments, *SMALL, "--json"))
    assert told["passed"]
    assert told["settings"]["target"] == "vp"


def test_the_default_target_is_flow_and_the_result_is_saved(tmp_path: Path) -> None:
    told = succeeds("check", *SMALL, "--steps", "8", "--drafter", "nearest", "--out", tmp_path / "check.json")
    assert "ok    distribution" in told
    read = json.loads((tmp_path / "check.json").read_text())
    assert all(finding["passed"] for finding in read["findings"])
    assert {"target": "flow", "steps": 8, "drafter": "nearest", "slots": 200}.items() <= read[
        "settings"
    ].items()


def test_the_smallest_shift_that_the_samples_can_find_is_printed() -> None:
    assert "note  distribution" in succeeds("check", "flow", "--samples", "10")
    told = json.loads(succeeds("check", "flow", *SMALL, "--json"))
    assert 0 < told["findings"][2]["smallest_shift"] < 1
    assert "200 samples reveal, 95 times in 100, a mean that is off by" in told["findings"][2]["detail"]


def test_a_model(folder: Path) -> None:
    told = succeeds("check", "--model", folder, "--steps", "5", "--window", "3", "--samples", "20", "--json")
    assert json.loads(told)["settings"]["model"] == "tiny"


def test_a_failed_check_exits_with_1(mine: str) -> None:
    succeeds("check", "mine:make", *SMALL)
    result = invoke("check", "mine:Mixing", *SMALL, "--out", "check.json")
    assert result.exit_code == 1
    assert "mixes rows" in result.output
    assert not json.loads(Path("check.json").read_text())["passed"]


def test_the_window_can_be_measured(tunes: Tunes) -> None:
    asked = tunes(None)
    assert "no guess of a window of 3 depends on later steps" in succeeds("check", *SMALL, "--window", "auto")
    assert asked == [200]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["nonsense"], "take one of flow, vp, langevin, embedded"),
        (["no_such_module:x"], "cannot load"),
        (["vp", "--target", "flow"], "'vp' and --target flow both say what to check"),
        (["vp", "--model", "somewhere"], "--model and --target both say what to sample"),
        (["--drafter", "psychic"], "--drafter takes one of"),
        (["--level", "0"], "--level is a probability between 0 and 1, not 0"),
        (["--level", "-5"], "--level is a probability between 0 and 1, not -5"),
        (["--level", "nan"], "--level is a probability between 0 and 1, not nan"),
        (["--graph"], "'foresample generate --graph --law 1000'"),
        (["--label", "2"], "--label cannot apply to flow, the default target"),
        (["vp", "--label", "2"], "--label cannot apply to --target vp"),
        (["--samples", "3"], "greater than or equal to 10"),
        (["--out", "."], "cannot write .: name another file"),
        (["langevin", "--steps", "1"], "nothing to speculate on"),
    ],
)
def test_bad_input(arguments: list[str], sentence: str) -> None:
    refuses(sentence, "check", *arguments)


def test_help_does_not_name_a_default_model() -> None:
    assert "Fashion-MNIST" not in succeeds("check", "--help")
    assert "Fashion-MNIST" in succeeds("sample", "--help").replace("│", " ")


def test_a_window_longer_than_the_chain_is_cut() -> None:
    told = json.loads(succeeds("check", "flow", "--steps", "4", "--window", 10**9, "--samples", "50", "--json"))
    assert told["settings"]["window"] == 3


def test_numbers_too_large_for_this_machine_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("foresample.cli.check.check", None)
    refuses("200000000000 samples would take 6.4 TB of memory", "check", "flow", "--samples", 10**11)
