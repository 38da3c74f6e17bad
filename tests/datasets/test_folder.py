"""One run in one folder: what happens to a folder that is moved, removed, copied or taken over while a run writes."""

from __future__ import annotations

import fcntl
import pickle
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import foresample as fs
from foresample.datasets import folder as folders
from foresample.datasets.folder import FolderLost, claim_folder
from foresample.datasets.manifest import Status
from tests.datasets.disturbing import Start, alive, assert_identical, inodes, shards
from tests.datasets.process import COUNT, SHARD, Gate, draw
from tests.support.small_chains import flow
from tests.support.waiting import wait_for


def removed(out: Path) -> None:
    gone = out.rename(out.with_name("gone"))  # at once, whatever is being written in it
    shutil.rmtree(gone, ignore_errors=True)


def removed_and_made_anew(out: Path) -> None:
    removed(out)
    out.mkdir()


def renamed_and_made_anew(out: Path) -> None:
    out.rename(out.with_name("elsewhere"))
    out.mkdir()


def renamed_and_copied_back(out: Path) -> None:
    """The copy has the same lock file with the same token, but no process has locked it."""
    out.rename(out.with_name("elsewhere"))
    shutil.copytree(out.with_name("elsewhere"), out, ignore=shutil.ignore_patterns("*.tmp"))


def renamed_and_drawn_anew(out: Path) -> None:
    """Rename the folder and let a second driver draw into a new one."""
    out.rename(out.with_name("elsewhere"))
    draw(out)


@pytest.mark.slow
@pytest.mark.parametrize(
    "harm",
    [removed, removed_and_made_anew, renamed_and_made_anew, renamed_and_copied_back, renamed_and_drawn_anew],
)
@pytest.mark.parametrize("after", [100, COUNT])
def test_a_run_stops_with_an_error_when_its_folder_is_replaced(
    undisturbed: Path, tmp_path: Path, harm: Callable[[Path], None], after: int
) -> None:
    """While samples are drawn, and when all are."""
    out = tmp_path / "out"
    there: dict[str, int] = {}

    def disturb(status: Status) -> None:
        if status.samples >= after and not there:
            harm(out)
            there.update(inodes(out) if out.exists() else {}, done=1)

    with pytest.raises(
        OSError, match=r"was moved, removed or taken over by another run while this run was writing"
    ):
        draw(out, progress=disturb)
    there.pop("done")
    assert (inodes(out) if out.exists() else {}) == there
    if harm is renamed_and_drawn_anew:
        assert_identical(out, undisturbed)
    elsewhere = out.with_name("elsewhere")
    if elsewhere.exists():  # what was written before is there
        draw(elsewhere)
        assert_identical(elsewhere, undisturbed)


def test_a_folder_replaced_while_a_run_begins_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder is replaced between opening and locking its lock file; another run then has its own lock."""
    out, lock = tmp_path / "out", fcntl.flock

    def replaced(file: Any, how: int) -> None:
        monkeypatch.setattr(fcntl, "flock", lock)
        out.rename(tmp_path / "elsewhere")
        draw(out)
        lock(file, how)

    monkeypatch.setattr(fcntl, "flock", replaced)
    with pytest.raises(OSError, match="was moved, removed or taken over"):
        draw(out)
    assert fs.inspect_dataset(out).complete


def test_a_file_removed_after_it_was_written_is_reported(undisturbed: Path, tmp_path: Path) -> None:
    def lose(status: Status) -> None:
        if status.samples == COUNT:
            (tmp_path / "shard-00001.safetensors").unlink(missing_ok=True)

    with pytest.raises(OSError, match=r"1 of the files of .* have gone .*\(shard-00001.safetensors first\)"):
        draw(tmp_path, progress=lose)
    assert draw(tmp_path).complete
    assert_identical(tmp_path, undisturbed)


@pytest.mark.slow
def test_a_worker_that_outlives_its_driver_writes_nothing_into_the_folder_of_the_next(
    undisturbed: Path, tmp_path: Path, gate: Gate, start: Start
) -> None:
    out = tmp_path / "out"
    driver = start(out, orphans=True, slots=8, gate=gate.folder, held_from=3 * SHARD + 5)
    driver.wait_until(lambda: gate.waiting() and len(shards(out)) >= 2, "its worker stands at the gate")
    (worker,) = gate.waiting()
    assert worker != driver.pid
    driver.signal(signal.SIGKILL)
    driver.ended()
    (out / "shard-00000.safetensors").unlink()  # the second run draws it anew
    assert draw(out).complete
    before, lock = inodes(out), (out / ".owner").read_text()
    gate.open()
    wait_for(lambda: not alive(worker), "the worker to end")
    assert "was moved, removed or taken over by another run" in driver.log.read_text()
    assert "Traceback" not in driver.log.read_text()
    assert inodes(out) == before
    assert (out / ".owner").read_text() == lock
    assert_identical(out, undisturbed)


def test_a_new_run_is_refused_while_a_worker_of_the_last_one_renames_its_file(tmp_path: Path) -> None:
    with claim_folder(tmp_path) as claim:
        worker = pickle.loads(pickle.dumps(claim))
        worker.write("shard-00000.safetensors", b"")
    with (
        folders._opened(tmp_path) as directory,
        worker._held(directory),
        pytest.raises(BlockingIOError, match="a worker of an earlier run is writing to"),
        claim_folder(tmp_path),
    ):
        pass
    with claim_folder(tmp_path), pytest.raises(FolderLost):
        worker.write("shard-00001.safetensors", b"")
    assert not list(tmp_path.glob("*00001*"))
    assert not list(tmp_path.glob(".*.tmp"))


# ------------------------------------------------------------------ refusals


def test_a_refused_run_leaves_nothing_that_blocks_the_next(
    undisturbed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("shutil.disk_usage", lambda path: shutil._ntuple_diskusage(2**20, 0, 2**14))
        with pytest.raises(OSError, match="ask for fewer samples"):
            fs.generate(flow(), 10 * COUNT, out=tmp_path, window=4, shard=SHARD)
    assert not (tmp_path / "manifest.json").exists()
    draw(tmp_path)
    assert_identical(tmp_path, undisturbed)


def test_the_settings_of_a_run_without_a_shard_can_be_changed(undisturbed: Path, tmp_path: Path) -> None:
    def ends(status: Status) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        draw(tmp_path, seed=77, progress=ends)
    assert (tmp_path / "manifest.json").exists()
    draw(tmp_path)
    assert_identical(tmp_path, undisturbed)
