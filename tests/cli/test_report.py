"""`foresample report`: what the other commands wrote, as a page."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tests.cli.common import refuses, succeeds


def test_what_all_commands_wrote(tmp_path: Path, tunes: Callable[[int | None], list[int]]) -> None:
    results = tmp_path / "results"
    succeeds("sample", "--target", "flow", "--count", "5", "--out", results / "sample")
    tunes(None)
    succeeds("sample", "--target", "flow", "--count", "5", "--window", "auto", "--out", results / "sequential")
    succeeds("generate", "--target", "flow", "--count", "5", "--out", results / "dataset")
    succeeds("check", "--samples", "50", "--out", results / "check.json")
    succeeds("tune", "--target", "flow", "--window", "2", "--out", results / "tune.json")
    succeeds("bench", "mixture", "--dim", "2", "--steps", "8", "--samples", "3", "--out", results)
    out = tmp_path / "new" / "page.html"
    assert succeeds("report", results, "--out", out) == f"wrote {out}\n"
    page = out.read_text()
    for name in ("sample/report", "sequential/report", "dataset/manifest", "check", "tune", "mixture-d2-T8-v"):
        assert name in page
    assert "no results of foresample" not in page


def test_bad_input(tmp_path: Path) -> None:
    out = tmp_path / "page.html"
    refuses("no folder of results at", "report", tmp_path / "nowhere", "--out", out)
    refuses("no result files in", "report", tmp_path, "--out", out)
    refuses("cannot write", "report", tmp_path, "--out", tmp_path)
    (tmp_path / "check.json").write_text('{"kind": "check"}')
    refuses(" is missing; write it again", "report", tmp_path, "--out", out)
    refuses("Missing argument 'DIR'", "report")
    assert not out.exists()
