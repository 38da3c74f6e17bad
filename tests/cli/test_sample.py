"""`foresample sample`: its samples, files and output."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
import termios
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import foresample as fs
from foresample import pretrained
from foresample.cli.sample import RunBars
from tests.cli.common import invoke, refuses, succeeds
from tests.support.waiting import GUARD, wait_for

Tunes = Callable[[int | None], list[int]]


def small(folder: Path, out: Path, *more: str) -> list[object]:
    fixed = ["sample", "--model", folder, "--count", 5, "--steps", 9, "--window", 3, "--out", out]
    return [*fixed, *more]


def files(out: Path) -> set[str]:
    return {path.name for path in out.iterdir()}


def test_pictures_samples_and_report(folder: Path, tmp_path: Path) -> None:
    told = succeeds(*small(folder, tmp_path, "--compare", "--label", "coat", "--slots", "2"))
    assert "network calls" in told
    assert "in turns, after a warm-up" in told
    assert files(tmp_path) == {"samples.png", "compare.png", "run.png", "samples.safetensors", "report.json"}
    for name in ("samples.png", "compare.png", "run.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")
    saved = load_file(tmp_path / "samples.safetensors")
    assert saved["labels"].tolist() == [1] * 5
    again = fs.sample(pretrained.load(folder).target(9, [1] * 5), seeds=saved["seeds"], window=3, slots=2)
    assert torch.equal(saved["samples"], again.samples)
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["kind"] == "sample"
    assert report["settings"]["labels"] == ["hat", "coat", "shoe"]
    assert report["sequential"]["calls_mean"] == 9
    assert report["speculative"]["calls_mean"] == pytest.approx(float(again.calls.double().mean()))
    assert len(report["turns"]["plain"]["seconds"]) == len(report["turns"]["ours"]["seconds"]) >= 2
    assert {"command", "commit", "versions", "machine"} <= set(report)


def test_the_report_can_be_read_back(folder: Path, tmp_path: Path) -> None:
    printed = json.loads(succeeds(*small(folder, tmp_path, "--json")))
    read = json.loads((tmp_path / "report.json").read_text())
    assert read["speculative"]["mismatch"][0] is None  # never examined: null, not NaN
    assert read["sequential"] == printed["sequential"] == {"calls_mean": 9}
    assert read["turns"] is None  # without --compare nothing is said about the sequential sampler's time
    assert load_file(tmp_path / "samples.safetensors")["labels"].tolist() == [0, 1, 2, 0, 1]


def test_samples_that_are_not_pictures(tmp_path: Path) -> None:
    succeeds("sample", "--target", "flow", "--count", "5", "--compare", "--out", tmp_path)
    assert files(tmp_path) == {"samples.safetensors", "report.json", "run.png"}
    saved = load_file(tmp_path / "samples.safetensors")
    target = fs.GaussianMixture.of_draft_trees(2).flow(16, 1.0)
    assert torch.equal(saved["samples"], fs.sample(target, 5).samples)
    assert set(saved) == {"samples", "seeds"}


def test_the_window_can_be_measured(tmp_path: Path, tunes: Tunes) -> None:
    asked = tunes(4)
    told = succeeds(
        "sample", "--target", "vp", "--count", "5", "--slots", "2", "--window", "auto", "--out", tmp_path
    )
    assert "take window 4" in told
    assert asked == [2]
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["settings"]["window"] == report["speculative"]["window"] == 4


def test_samples_are_sequential_where_no_window_gains(tmp_path: Path, tunes: Tunes) -> None:
    tunes(None)
    told = succeeds("sample", "--target", "vp", "--count", "5", "--window", "auto", "--out", tmp_path)
    assert "no window gains (the best is 3: 0.50× predicted; of its round the network takes" in " ".join(
        told.split()
    )
    assert "Sampled sequentially: 16 calls a sample" in told
    assert files(tmp_path) == {"samples.safetensors", "report.json"}
    target = fs.GaussianMixture.of_draft_trees(2).vp(torch.linspace(0.01, 0.99, 16, dtype=torch.float64))
    assert torch.equal(load_file(tmp_path / "samples.safetensors")["samples"], fs.sequential(target, 5).samples)
    read = json.loads((tmp_path / "report.json").read_text())
    assert (read["settings"]["window"], read["speculative"]["calls_mean"], read["sequential"]["seconds"]) == (
        0,
        16,
        read["speculative"]["seconds"],
    )


def test_rounds_replayed_from_graphs_have_no_observer(
    mine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    class OnAGpu(fs.Engine):
        def __init__(self, target: fs.Target, *, graph: bool = False, **settings: Any) -> None:
            super().__init__(target, **settings)
            self.graph = graph

        def sample(self, seeds: Any, observe: Any = None, **how: Any) -> fs.Run:
            asked.append((self.graph, len(seeds), observe is not None))
            return super().sample(seeds, observe, **how)

    monkeypatch.setattr("foresample.cli.sample.Engine", OnAGpu)
    succeeds("sample", "--target", f"{mine}:make", "--count", "5", "--graph", "--out", tmp_path)
    assert asked == [(True, 5, False), (False, 1, True)]  # the second for the picture of the run
    assert {"samples.safetensors", "report.json", "run.png"} <= files(tmp_path)


def test_a_chain_with_nothing_to_draft(tmp_path: Path) -> None:
    """One step: no draft, no mismatch, nothing to plot on a log scale; and a report all the same."""
    for more in ([], ["--window", "auto"]):
        out = tmp_path / str(len(more))
        told = succeeds("sample", "--target", "flow", "--steps", "1", "--count", "3", "--out", out, *more)
        assert "wrote" in told
        read = json.loads((out / "report.json").read_text())
        assert read["speculative"]["calls_mean"] == 1


def test_the_report_is_saved_even_if_the_picture_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("foresample.cli.sample.paint", None)
    assert invoke("sample", "--target", "flow", "--count", "3", "--out", tmp_path).exit_code
    assert json.loads((tmp_path / "report.json").read_text())["kind"] == "sample"


def test_a_window_longer_than_the_chain_is_cut(tmp_path: Path) -> None:
    arguments = ["sample", "--target", "flow", "--steps", "4", "--count", "3", "--out"]
    succeeds(*arguments, tmp_path / "far", "--window", 10**9)
    succeeds(*arguments, tmp_path / "near", "--window", 3)
    far, near = (load_file(tmp_path / name / "samples.safetensors")["samples"] for name in ("far", "near"))
    assert torch.equal(far, near)
    assert json.loads((tmp_path / "far" / "report.json").read_text())["settings"]["window"] == 3


# ------------------------------------------------------------------ what goes wrong


def test_numbers_too_large_for_this_machine_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("foresample.cli.sample.Engine", None)
    flow = ["sample", "--target", "flow", "--out", tmp_path]
    refuses("1000000000000 samples would take 32 TB of memory, but only", *flow, "--count", 10**12)
    refuses("should be less than or equal to 1000000", *flow, "--steps", 10**12)


def test_testing_the_folder_leaves_the_user_s_files_alone(tmp_path: Path) -> None:
    (tmp_path / ".writable").write_text("mine")
    succeeds("sample", "--target", "flow", "--count", "3", "--out", tmp_path)
    assert (tmp_path / ".writable").read_text() == "mine"


def test_a_folder_that_cannot_be_written_is_refused_before_the_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setattr("foresample.cli.sample.Engine", None)
    refuses(
        f"cannot write to {tmp_path}/file/out (Not a directory): name another folder with --out",
        *("sample", "--target", "flow", "--out", tmp_path / "file" / "out"),
    )


@pytest.mark.parametrize("name", ["samples.safetensors", "report.json", "run.png"])
def test_a_folder_in_the_place_of_a_file_is_refused_before_the_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    (tmp_path / name).mkdir()
    monkeypatch.setattr("foresample.cli.sample.Engine", None)
    refuses(
        f"cannot write {tmp_path / name}: name another folder", "sample", "--target", "flow", "--out", tmp_path
    )


def test_without_matplotlib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setattr("foresample.cli.sample.Engine", None)
    sentence = "this needs matplotlib, which is not installed: pip install 'matplotlib"
    refuses(sentence, "sample", "--target", "flow", "--out", tmp_path)


def test_a_network_that_breaks(mine: str) -> None:
    """The exit status is 3, as documented."""
    result = invoke("sample", "--target", "mine:Broken")
    assert result.exit_code == 3
    assert "error: the network returned NaN or infinity at step 0 of sample 1" in result.stderr


@pytest.mark.parametrize("window", [3, "auto"], ids=["speculative", "sequential"])
def test_an_interrupted_run_keeps_samples_begun_at_least_as_many_rounds_ago_as_the_chain_has_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tunes: Tunes, window: object
) -> None:
    """Which samples are kept is decided before they are drawn; the first to finish would be a biased selection."""
    tunes(None)
    how = [
        "sample",
        "--target",
        "flow",
        "--slots",
        "2",
        "--count",
        "9",
        "--window",
        window,
        "--out",
    ]  # 16 steps
    succeeds(*how, tmp_path / "whole")
    rounds, begun, done = 0, {}, 0

    def stop(bars: RunBars, name: str, commit: fs.Commit) -> None:
        nonlocal rounds, done
        rounds += 1
        begun.update({int(sample): rounds for sample in commit.sample[commit.step == 0]})
        done += int((commit.step + commit.committed == 16).sum())
        if rounds == 18:
            raise KeyboardInterrupt

    monkeypatch.setattr(RunBars, "update", stop)
    result = invoke(*how, tmp_path / "cut")
    assert result.exit_code == 130
    fair = [sample for sample, start in begun.items() if start + 16 <= 19]
    kept, whole = (load_file(tmp_path / name / "samples.safetensors") for name in ("cut", "whole"))
    assert fair == list(range(len(fair)))
    assert 0 < len(fair) <= done < 9
    assert torch.equal(kept["samples"], whole["samples"][: len(fair)])
    assert torch.equal(kept["seeds"], whole["seeds"][: len(fair)])
    if window == 3:
        assert len(fair) < done
        said = f"interrupted: {done} of 9 samples were finished; the first {len(fair)} are saved in"
    else:  # sequential samples are all done in the same number of rounds
        assert len(fair) == done
        said = f"interrupted: {done} of 9 samples were finished, saved in"
    assert said in " ".join(result.stderr.split())


@pytest.mark.parametrize("place", ["Sequential.sample", "time_in_turns"], ids=["baseline", "turns"])
def test_a_comparison_that_is_interrupted_leaves_the_finished_run(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(f"foresample.cli.sample.{place}", interrupt)
    result = invoke(*small(folder, tmp_path, "--compare"))
    assert result.exit_code == 130
    assert result.stderr == f"interrupted: the samples are in {tmp_path}, and the comparison was not finished\n"
    compared = {"compare.png"} if place == "time_in_turns" else set()
    assert files(tmp_path) == {"samples.png", "run.png", "samples.safetensors", "report.json"} | compared
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["speculative"]["count"] == len(load_file(tmp_path / "samples.safetensors")["samples"]) == 5
    assert report["turns"] is None


def test_files_of_an_earlier_run_do_not_stay_beside_other_samples(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    succeeds(*small(folder, tmp_path, "--compare"))
    succeeds("sample", "--target", "flow", "--count", "3", "--out", tmp_path)
    left = {"samples.safetensors", "report.json", "run.png", "notes.txt"}
    assert files(tmp_path) == left

    def stop(bars: RunBars, name: str, commit: fs.Commit) -> None:
        if (commit.step + commit.committed == 16).any() and int(commit.sample.max()) > 5:
            raise KeyboardInterrupt

    monkeypatch.setattr(RunBars, "update", stop)
    again = ["sample", "--target", "flow", "--count", "20", "--seed", "9", "--out", tmp_path]
    assert invoke(*again).exit_code == 130  # all were begun at once: none is saved, and the earlier run stays
    assert files(tmp_path) == left
    assert invoke(*again, "--slots", "1").exit_code == 130
    assert files(tmp_path) == {"samples.safetensors", "notes.txt"}


def test_a_run_interrupted_when_only_quick_samples_are_finished_keeps_none(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop_after_the_first(bars: RunBars, name: str, commit: fs.Commit) -> None:
        if (commit.step + commit.committed == 9).any():
            raise KeyboardInterrupt

    monkeypatch.setattr(RunBars, "update", stop_after_the_first)
    result = invoke(*small(folder, tmp_path))
    assert result.exit_code == 130
    assert (
        "of 5 samples were finished; none is saved: the samples that finish first are not a fair"
        in result.stderr
    )
    assert not (tmp_path / "samples.safetensors").exists()


def test_files_have_the_permissions_of_the_umask(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        succeeds("sample", "--target", "flow", "--count", "2", "--out", tmp_path)
    finally:
        os.umask(before)
    assert "samples.safetensors" in files(tmp_path)
    for name in files(tmp_path):
        assert (tmp_path / name).stat().st_mode & 0o777 == 0o640, name


HELD = """
import time
from dataclasses import replace
from pathlib import Path
import foresample as fs

def make():
    base, seen = fs.GaussianMixture.of_draft_trees(2).langevin(50, 0.01), []

    def network(x, step, row):
        seen.append(len(x))
        if len(seen) == 4:
            Path("held").touch()
            time.sleep(3600)  # Ctrl-C comes here
        return base.network(x, step, row)

    return replace(base, network=network)
"""


@pytest.mark.slow
def test_control_c_stops_a_real_process(tmp_path: Path) -> None:
    """The process has a terminal, so it draws bars; the network holds it in its fourth call."""
    (tmp_path / "held.py").write_text(HELD)
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (24, 100))
    process = subprocess.Popen(
        [sys.executable, "-m", "foresample", "sample", "--target", "held:make", "--count", "7", "--out", "out"],
        stdout=theirs,
        stderr=theirs,
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )

    def held() -> bool:
        assert process.poll() is None, os.read(ours, 100_000).decode()
        return (tmp_path / "held").exists()

    try:
        wait_for(held, "the fourth call")
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=GUARD) == 130
    finally:
        process.kill()
        process.wait()
    screen = os.read(ours, 100_000)
    assert b"calls" in screen
    assert b"interrupted: 0 of 7 samples were finished" in screen
    assert b"Traceback" not in screen
