"""Datasets: whatever happens to the processes that draw one, it ends bit-identical to an undisturbed one."""

from __future__ import annotations

import json
import re
import resource
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import foresample as fs
from foresample.checks.samples import samples_law
from foresample.contracts import Wrapper
from foresample.core.noise import seeds_of
from foresample.datasets.manifest import Status
from foresample.engine.tuning import Trial
from tests.datasets.disturbing import SHARDS, Start, assert_identical, inodes, run, shards
from tests.datasets.process import AT_STEP, BREAKS, COUNT, SHARD, WINDOW, Gate, Make, draw
from tests.support.small_chains import flow, mixture

# ------------------------------------------------------------------ undisturbed


def test_a_dataset_holds_what_sample_draws(undisturbed: Path) -> None:
    plain = fs.sample(flow(), COUNT, window=WINDOW, seed=5)
    dataset = fs.inspect_dataset(undisturbed)
    assert torch.equal(torch.cat(list(dataset.samples())), plain.samples)
    files = [load_file(path) for path in sorted(undisturbed.glob("shard-*"))]
    assert torch.equal(torch.cat([f["seeds"] for f in files]), seeds_of(5, COUNT))
    assert torch.equal(torch.cat([f["calls"] for f in files]), plain.calls)
    costs = dataset.manifest["costs"]
    assert costs["calls_mean"] == pytest.approx(plain.report.calls_mean)
    assert costs["accepted_mean"] == pytest.approx(plain.report.accepted_mean)
    assert costs["speedup"] == pytest.approx(plain.speedup)
    assert dataset.complete
    (first,) = dataset.manifest["runs"]
    assert first["drawn"] == COUNT
    assert {"command", "commit", "versions", "machine", "peak_mib"} <= set(first)


def test_files_left_by_a_killed_worker_are_removed(undisturbed: Path, tmp_path: Path) -> None:
    """A killed worker has left half a shard, which appears during this run."""
    left = tmp_path / f".shard-00000.safetensors.{'0' * 32}.tmp"
    draw(tmp_path, progress=lambda status: left.write_bytes(b"half a shard"))
    assert_identical(tmp_path, undisturbed)


@pytest.mark.parametrize("slots", [5, 400])
def test_slots_change_nothing(undisturbed: Path, tmp_path: Path, slots: int) -> None:
    draw(tmp_path, slots=slots)
    assert_identical(tmp_path, undisturbed)


def test_the_size_of_shards_changes_the_files_and_not_the_samples(undisturbed: Path, tmp_path: Path) -> None:
    one, other = (
        torch.cat(list(d.samples())) for d in (draw(tmp_path, shard=299), fs.inspect_dataset(undisturbed))
    )
    assert torch.equal(one, other)


def test_one_sample_in_one_shard_of_its_own(tmp_path: Path) -> None:
    started = perf_counter()
    dataset = fs.generate(flow(), 1, out=tmp_path, window=1, shard=1)
    assert 0 < dataset.manifest["runs"][0]["seconds"] < perf_counter() - started
    assert dataset.fair == 1
    assert fs.inspect_dataset(tmp_path).complete
    costs = dataset.manifest["costs"]
    assert (costs["calls_mean"], costs["evaluations_mean"]) == (costs["calls"], costs["evaluations"])


def test_a_finished_dataset_is_left_alone(undisturbed: Path, tmp_path: Path) -> None:
    out = shutil.copytree(undisturbed, tmp_path / "out")
    before = inodes(out)
    calls: list[Status] = []
    assert draw(out, progress=calls.append).complete
    assert inodes(out) == before
    assert [status.samples for status in calls] == [COUNT]


def test_labels_are_used_in_turn_and_progress_is_reported(tmp_path: Path) -> None:
    told: list[Status] = []
    draw(tmp_path, labels=[3, 1, 4], progress=told.append)
    labels = torch.cat([load_file(path)["labels"] for path in sorted(tmp_path.glob("shard-*"))])
    assert torch.equal(labels, torch.tensor([3, 1, 4]).repeat(COUNT // 3))
    assert [status.samples for status in told] == sorted(status.samples for status in told)
    assert len({status.samples for status in told}) > SHARDS
    assert told[-1].samples == COUNT
    assert told[-1].accepted_mean == pytest.approx(16 / told[-1].calls_mean - 1)


# ------------------------------------------------------------------ interrupted

HELD = 3 * SHARD + 5
"""A sample in the middle of a shard. When it gets one of eight slots, two shards are whole, for no sample takes
as many calls as forty others in seven slots."""


@pytest.mark.slow
def test_the_next_process_finishes_the_dataset_of_a_killed_one(
    undisturbed: Path, tmp_path: Path, gate: Gate, start: Start
) -> None:
    out = tmp_path / "out"
    process = start(out, slots=8, gate=gate.folder, held_from=HELD)
    process.wait_until(lambda: gate.waiting() and len(shards(out)) >= 2, "it stands at the gate")
    process.signal(signal.SIGKILL)
    process.ended()
    before = inodes(out)
    assert 2 <= len(before) < SHARDS
    assert not fs.inspect_dataset(out).complete
    assert run(out, {"slots": 9}).returncode == 0
    assert_identical(out, undisturbed)
    assert before.items() <= inodes(out).items()  # kept, not drawn again
    runs = json.loads((out / "manifest.json").read_text())["runs"]
    assert [r["drawn"] for r in runs] == [None, COUNT - SHARD * len(before)]


@pytest.mark.slow
def test_control_c_keeps_every_finished_sample(
    undisturbed: Path, tmp_path: Path, gate: Gate, start: Start
) -> None:
    out = tmp_path / "out"
    process = start(out, slots=8, gate=gate.folder, held_from=HELD)
    process.wait_until(gate.waiting, "it stands at the gate")
    process.signal(signal.SIGINT)
    assert process.ended() == 130
    found = fs.inspect_dataset(out).manifest
    assert 2 * SHARD < found["costs"]["samples"] < COUNT
    assert found["costs"]["samples"] % SHARD  # those of open shards, too
    assert found["runs"][0]["drawn"] == found["costs"]["samples"]
    assert draw(out).manifest["runs"][1]["found"] == found["costs"]["samples"]
    assert_identical(out, undisturbed)


class Asked:
    """Returns True from the nth call on."""

    def __init__(self, times: int) -> None:
        self.left = times

    def __call__(self) -> bool:
        self.left -= 1
        return self.left <= 0


def test_a_stopped_run_finishes_the_samples_it_has_begun_which_are_the_next_in_order(
    undisturbed: Path, tmp_path: Path
) -> None:
    whole = torch.cat(list(fs.inspect_dataset(undisturbed).samples()))
    base, begun, before = flow(), set[int](), 0
    stop = Asked(0)

    def network(x: Tensor, time: Tensor, row: Tensor) -> Tensor:
        if stop.left < times:  # drawing has begun; the fingerprint comes before
            begun.update(row.tolist())
        return base.network(x, time, row)

    for times in (20, 25):  # the second begins with a fair prefix, and ends with a longer one
        stop = Asked(times)
        dataset = draw(tmp_path, lambda: replace(base, network=network), stop=stop)
        assert begun == set(range(dataset.fair))
        assert before < dataset.fair == dataset.in_order == dataset.manifest["costs"]["samples"] < COUNT
        assert dataset.manifest["runs"][-1]["drawn"] == dataset.fair - before
        assert torch.equal(torch.cat(list(dataset.samples())), whole[: dataset.fair])
        assert len(shards(tmp_path)) == -(-dataset.fair // SHARD)  # no empty one
        before = dataset.fair
        assert fs.inspect_dataset(tmp_path).fair == before
    assert draw(tmp_path, stop=lambda: False).fair == COUNT
    assert_identical(tmp_path, undisturbed)


def test_a_run_stopped_before_it_begins_leaves_no_shard(tmp_path: Path) -> None:
    out = tmp_path / "made" / "on the way"
    dataset = draw(out, stop=lambda: True)
    assert not shards(out)
    assert list(dataset.samples()) == []
    assert dataset.law is None


def test_a_run_that_resumes_after_an_interrupted_one_is_fair_only_when_complete(tmp_path: Path) -> None:
    """The samples of the first run are a selection of quick ones, whatever the second run does."""

    class Cut(Exception):
        pass

    def cut(status: Status) -> None:
        if status.samples > 100:
            raise Cut

    with pytest.raises(Cut):
        draw(tmp_path / "one", slots=1, progress=cut)
    alone = fs.inspect_dataset(tmp_path / "one")  # a prefix, whose next sample took too long
    assert alone.fair == 0 < alone.in_order == alone.manifest["costs"]["samples"]
    with pytest.raises(Cut):
        draw(tmp_path, progress=cut)
    assert fs.inspect_dataset(tmp_path).fair == 0
    dataset = draw(tmp_path, stop=Asked(20))
    assert dataset.fair == 0 < dataset.in_order < COUNT
    with pytest.warns(UserWarning, match="the first 0 are known to be fair"):
        dataset.samples()
    assert draw(tmp_path).fair == COUNT


def test_the_first_sample_of_a_shard_may_be_the_one_that_breaks(tmp_path: Path) -> None:
    base = flow()

    def network(x: Tensor, time: Tensor, row: Tensor) -> Tensor:
        return torch.where((row == SHARD).unsqueeze(1), torch.nan, base.network(x, time, row))

    dataset = draw(tmp_path, lambda: replace(base, network=network))
    found = fs.inspect_dataset(tmp_path)
    assert [f.index for f in dataset.failures] == [f.index for f in found.failures] == [SHARD]
    assert found.unsound == {}
    assert found.in_order == SHARD


def test_a_shard_lost_after_the_fair_samples_leaves_them_fair(undisturbed: Path, tmp_path: Path) -> None:
    out = shutil.copytree(undisturbed, tmp_path / "out")
    (out / "shard-00002.safetensors").unlink()
    assert fs.inspect_dataset(out).fair == 2 * SHARD


def test_a_fair_stop_on_ray_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="leave out stop"):
        draw(tmp_path, ray="auto", stop=lambda: False)


def test_an_error_of_the_target_keeps_every_finished_sample(undisturbed: Path, tmp_path: Path) -> None:
    base, calls = flow(), 0

    def network(x: Tensor, step: Tensor, row: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        if calls == 50:
            raise RuntimeError("out of memory")
        return base.network(x, step, row)

    told: list[Status] = []
    with pytest.raises(RuntimeError, match="out of memory"):
        draw(tmp_path, lambda: replace(base, network=network), progress=told.append)
    assert 0 < fs.inspect_dataset(tmp_path).manifest["costs"]["samples"] == told[-1].samples
    draw(tmp_path)
    assert_identical(tmp_path, undisturbed)


def test_torn_and_corrupt_shards_are_drawn_again_and_no_others(undisturbed: Path, tmp_path: Path) -> None:
    out = shutil.copytree(undisturbed, tmp_path / "out")
    paths = sorted(out.glob("shard-*"))
    data = paths[1].read_bytes()
    paths[0].write_bytes(b"")
    paths[1].write_bytes(data[: len(data) // 2])
    for path, at in ((paths[2], -5), (paths[3], 60), (paths[4], 2)):  # a sample, the header, its length
        changed = bytearray(path.read_bytes())
        changed[at] ^= 1
        path.write_bytes(changed)
    paths[6].write_bytes(paths[5].read_bytes())  # sound, and another's
    paths[7].unlink()
    (out / f".shard-00007.safetensors.{'0' * 32}.tmp").write_bytes(b"half a shard")
    before = inodes(out)
    assert not fs.inspect_dataset(out).complete
    assert fs.inspect_dataset(out).manifest["costs"]["samples"] == SHARD
    assert draw(out).complete
    assert_identical(out, undisturbed)
    assert [name for name, inode in inodes(out).items() if before.get(name) == inode] == [paths[5].name]


# ------------------------------------------------------------------ a full disk


@pytest.mark.slow
def test_a_full_disk_is_reported(undisturbed: Path, tmp_path: Path) -> None:
    where = tmp_path / "disk"
    where.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=36k", "tmpfs", str(where)]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("mounting a small file system is not permitted here")
    try:
        full = run(where / "out")
        assert full.returncode == 2
        assert "No space left on device): see to that and run the same command again" in full.stderr
        assert "Traceback" not in full.stderr
        found = fs.inspect_dataset(where / "out")
        assert 0 < found.manifest["costs"]["samples"] < COUNT
        subprocess.run(["mount", "-o", "remount,size=1m", str(where)], check=True)
        draw(where / "out")
        assert_identical(where / "out", undisturbed)
    finally:
        subprocess.run(["umount", str(where)], check=True)


@pytest.mark.slow
def test_a_limit_on_file_sizes_is_reported(tmp_path: Path) -> None:
    """The same without mounting: files may have the bytes of the first manifest, and a shard has more."""
    whole, out = tmp_path / "whole", tmp_path / "out"
    draw(whole, shard=150)
    limit = min(map(len, shards(whole).values())) - 1
    limited = run(
        out, {"shard": 150}, preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    )
    assert limited.returncode == 2
    assert "shard-00000.safetensors (File too large): see to that" in limited.stderr
    assert "shard-00000.safetensors" not in shards(out)
    assert not list(out.glob(".*.tmp"))
    draw(out, shard=150)
    assert_identical(out, whole)


# ------------------------------------------------------------------ a sample that breaks


@pytest.mark.slow
def test_a_broken_sample_is_named_and_tried_again_by_the_next_run(undisturbed: Path, tmp_path: Path) -> None:
    flag, out = tmp_path / "flag", tmp_path / "out"
    flag.touch()
    for attempt in range(2):
        assert run(out, {"breaks_while": flag}).returncode == 3
        manifest = json.loads((out / "manifest.json").read_text())
        (failure,) = manifest["failures"]
        assert failure["index"] == BREAKS
        assert failure["seed"] == int(seeds_of(5, COUNT)[BREAKS])
        assert failure["step"] == AT_STEP
        assert f"NaN or infinity at step {AT_STEP} of sample {BREAKS}" in failure["error"]
        assert manifest["costs"]["samples"] == COUNT - 1
        assert manifest["runs"][-1]["drawn"] == (0 if attempt else COUNT - 1)
    before = inodes(out)
    flag.unlink()
    draw(out)
    assert_identical(out, undisturbed)
    assert sum(before[name] != inode for name, inode in inodes(out).items()) == 1


def test_a_sample_that_breaks_once_is_drawn_once_more(undisturbed: Path, tmp_path: Path) -> None:
    base = flow()
    broke: list[bool] = []

    def network(x: Tensor, step: Tensor, row: Tensor) -> Tensor:
        prediction = base.network(x, step, row)
        if not broke and (row == BREAKS).any():
            broke.append(True)
            prediction[row == BREAKS] = torch.nan
        return prediction

    assert draw(tmp_path, lambda: replace(base, network=network)).complete
    assert broke
    assert_identical(tmp_path, undisturbed)


def test_a_sample_that_ends_as_nan_is_a_failure(tmp_path: Path) -> None:
    base = flow()

    class Ends:
        shape, std, start, predict = base.shape, base.std, base.start, base.predict

        def mean(self, x: Tensor, prediction: Tensor, step: Tensor) -> Tensor:
            bad = (step == 15) & (x[:, 0] > 1)
            return torch.where(bad.unsqueeze(1), torch.nan, base.mean(x, prediction, step))

    dataset = fs.generate(Ends(), 20, out=tmp_path, window=4, shard=10)
    assert 0 < len(dataset.failures) < 20
    assert all(failure.step == 16 for failure in dataset.failures)
    assert dataset.manifest["costs"]["samples"] == 20 - len(dataset.failures)


def test_a_network_that_always_breaks_leaves_an_empty_dataset(tmp_path: Path) -> None:
    base = flow()
    nothing = replace(base, network=lambda x, step, row: x * torch.nan)
    dataset = fs.generate(nothing, 5, out=tmp_path, window=4, shard=3)
    assert [failure.index for failure in dataset.failures] == [0, 1, 2, 3, 4]
    assert not any(dataset.manifest["costs"].values())
    assert fs.generate(base, 5, out=tmp_path, window=4, shard=3).complete


# ------------------------------------------------------------------ two at once


@pytest.mark.slow
def test_two_runs_on_one_folder_are_refused(
    undisturbed: Path, tmp_path: Path, gate: Gate, start: Start
) -> None:
    out = tmp_path / "out"
    first = start(out, gate=gate.folder)
    first.wait_until(gate.waiting, "it stands at the gate")
    second = run(out)
    assert second.returncode == 2
    assert f"another run (process {first.pid} on " in second.stderr
    assert "wait for it, or choose another folder" in second.stderr
    assert first.popen.poll() is None
    first.signal(signal.SIGKILL)  # so it cannot clean up
    first.ended()
    draw(out)
    assert_identical(out, undisturbed)


# ------------------------------------------------------------------ the law


@pytest.mark.law
def test_the_law_check_passes_and_can_fail(tmp_path: Path) -> None:
    dataset = draw(tmp_path, law=200, slots=64)
    assert dataset.law is not None
    assert dataset.law.passed
    assert dataset.law.samples == COUNT
    assert draw(tmp_path).law == dataset.law  # nothing was drawn: it still holds
    plain = fs.sequential(flow(), 300, seed=1).samples
    parts = [part + 0.5 for part in dataset.samples()]
    assert not samples_law(plain[:200], parts).passed
    narrow = [0.7 * part for part in dataset.samples()]
    assert not samples_law(plain, narrow).passed


@pytest.mark.parametrize(
    ("count", "law", "sentence"),
    [
        (10, -5, "law must be a whole number of at least 1, not -5"),
        (10, 1, "a comparison of 10 samples with 1 sequential one cannot fail, .*: give --law 8 or more"),
        (4, 1000, "a comparison of 4 samples with 1000 sequential ones cannot fail, .*: leave --law out"),
    ],
)
def test_a_distribution_check_that_cannot_fail_is_refused_before_the_work(
    tmp_path: Path, count: int, law: int, sentence: str
) -> None:
    with pytest.raises(ValueError, match=sentence):
        fs.generate(lambda: pytest.fail("made"), count, out=tmp_path / "out", law=law)
    assert not (tmp_path / "out").exists()


def test_a_dataset_is_compared_with_as_many_sequential_samples_as_were_requested(tmp_path: Path) -> None:
    """The target has an observation for each of its samples, and none for more."""
    base, table = flow(), torch.linspace(-1, 1, 10, dtype=torch.float64)
    target = replace(base, network=lambda x, time, row: base.network(x, time, row) + table[row].unsqueeze(1))
    dataset = fs.generate(target, 10, out=tmp_path, window=4, law=30)
    assert dataset.law is not None
    assert (dataset.law.samples, dataset.law.sequential) == (10, 30)


def test_more_sequential_samples_than_fit_into_memory_are_refused_before_the_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fs.Engine, "draw", None)
    with pytest.raises(ValueError, match="1000000000000 sequential samples would take"):
        fs.generate(flow(), 10, out=tmp_path, window=4, law=10**12)


# ------------------------------------------------------------------ a window of 0


def test_a_window_of_0_draws_sequentially(tmp_path: Path) -> None:
    dataset = fs.generate(flow(), 7, out=tmp_path, window=0, shard=3)
    assert (dataset.manifest["settings"]["window"], dataset.manifest["settings"]["method"]) == (0, "sequential")
    assert torch.equal(torch.cat(list(dataset.samples())), fs.sequential(flow(), 7).samples)
    (tmp_path / "manifest.json").unlink()
    before = inodes(tmp_path)
    assert fs.generate(flow(), 7, out=tmp_path, window=0, shard=3).complete
    assert inodes(tmp_path) == before


# ------------------------------------------------------------------ bad input


@pytest.mark.parametrize("name", ["count", "shard", "window", "slots"])
@pytest.mark.parametrize("value", [0, -1, 2.5, True, False])
def test_numbers_must_be_positive_whole_numbers(tmp_path: Path, name: str, value: object) -> None:
    out = tmp_path / "out"
    if name == "window" and type(value) is int:
        value -= 1  # 0 draws sequentially
    with pytest.raises(ValueError, match=f"{name} must be a whole number of at least 1, not {value!r}"):
        fs.generate(flow(), **{"count": 5, "out": out, "window": 4, name: value})  # type: ignore[arg-type]
    assert not out.exists()


def test_a_folder_that_cannot_be_written_is_refused_before_the_target_is_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match=r"cannot write to .*file/out \(Not a directory\): choose another folder"):
        fs.generate(lambda: pytest.fail("made"), 5, out=tmp_path / "file" / "out", window=4)


@pytest.mark.parametrize(
    ("other", "sentence"),
    [
        ({"seed": 6}, r"other settings \(seed 5 there and 6 here\): give the same ones to go on with it"),
        ({"shard": 50}, r"\(shard 40 there and 50 here\)"),
        ({"about": {"model": "b"}}, r"\(model None there and 'b' here\)"),
        ({"labels": [1]}, r"\(labels None there and \[1\] here\)"),
        ({"drafter": fs.Frozen("head")}, r"\(method 'Replay.* there and .Frozen.* here\)"),
    ],
    ids=str,
)
def test_other_settings_are_refused_by_their_names(
    undisturbed: Path, other: dict[str, Any], sentence: str
) -> None:
    before = shards(undisturbed)
    with pytest.raises(ValueError, match=sentence):
        draw(undisturbed, **other)
    assert shards(undisturbed) == before


def test_other_targets_are_refused(undisturbed: Path) -> None:
    for target in (mixture().flow(17, 1.0), mixture().flow(16, 0.9), mixture(3).flow(16, 1.0)):
        with pytest.raises(ValueError, match=r"holds a dataset with other settings \((shape|steps|std) "):
            draw(undisturbed, lambda target=target: target)  # type: ignore[misc]


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"settings": {}}', "\x00"])
def test_a_corrupt_manifest_is_refused_and_can_be_written_anew(
    undisturbed: Path, tmp_path: Path, text: str
) -> None:
    out = shutil.copytree(undisturbed, tmp_path / "out")
    manifest = out / "manifest.json"
    manifest.write_text(text)
    for look in (draw, fs.inspect_dataset):
        with pytest.raises(ValueError, match=r"manifest.json is corrupt \(.*\): move it away and run again"):
            look(out)
    manifest.unlink()
    before = inodes(out)
    draw(out)
    assert inodes(out) == before
    assert_identical(out, undisturbed)


def test_without_a_manifest_shards_of_other_settings_are_not_overwritten(
    undisturbed: Path, tmp_path: Path
) -> None:
    out = shutil.copytree(undisturbed, tmp_path / "out")
    (out / "manifest.json").unlink()
    before = shards(out)
    with pytest.raises(
        ValueError, match=r"is sound, but was drawn with other settings: give the same ones, .* the same window"
    ):
        draw(out, seed=6)
    assert shards(out) == before


def test_a_folder_without_a_dataset_is_refused_by_inspect(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="not a folder of foresample generate"):
        fs.inspect_dataset(tmp_path)


def test_shards_without_a_manifest_can_be_described_after_the_command_has_run_again(
    undisturbed: Path, tmp_path: Path
) -> None:
    out = shutil.copytree(undisturbed, tmp_path / "out")
    (out / "manifest.json").unlink()
    with pytest.raises(
        FileNotFoundError, match=r"has shards, but no manifest.json: run the command that drew them"
    ):
        fs.inspect_dataset(out)


def test_where_no_folder_can_be_locked_datasets_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "fcntl", None)  # as on Windows
    with pytest.raises(OSError, match="datasets need Linux or macOS"):
        fs.generate(flow(), 5, out=tmp_path / "out", window=4)
    assert not (tmp_path / "out").exists()


def test_objects_and_functions_that_give_no_target_are_refused(tmp_path: Path) -> None:
    for thing in (None, 3, lambda: None):
        with pytest.raises(TypeError, match="is not a target"):
            fs.generate(thing, 5, out=tmp_path, window=4)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "hint"), [("slot", "did you mean slots?"), ("engine", "the settings are window")]
)
def test_a_misspelt_setting_is_refused_by_name_before_anything_is_made(
    tmp_path: Path, name: str, hint: str
) -> None:
    with pytest.raises(TypeError, match=f"{name} is not a setting here: {re.escape(hint)}"):
        fs.generate(flow(), 5, out=tmp_path / "new", **{name: 3})  # type: ignore[arg-type]
    assert not (tmp_path / "new").exists()


def test_empty_labels_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="labels is empty"):
        fs.generate(flow(), 5, out=tmp_path, window=4, labels=[])


def test_a_target_can_be_given_instead_of_a_function(undisturbed: Path, tmp_path: Path) -> None:
    fs.generate(Make()(), COUNT, out=tmp_path, window=WINDOW, shard=SHARD, seed=5)
    assert_identical(tmp_path, undisturbed)


@pytest.mark.parametrize(
    ("about", "sentence"),
    [
        ({"count": 5}, "about must not have count, which generate sets itself: choose another name"),
        ({"std": "x", "seed": 3}, "about must not have seed, std, which generate sets itself"),
        ({"model": 5}, "about's model must be a string, not int"),
        ({"weight": float("nan")}, "about cannot be kept as JSON"),
        ({"weight": object()}, "about cannot be kept as JSON"),
    ],
)
def test_about_must_not_replace_settings_of_generate(
    tmp_path: Path, about: dict[str, object], sentence: str
) -> None:
    """about={"count": 5} used to draw five samples and report a complete dataset."""
    with pytest.raises((TypeError, ValueError), match=sentence):
        fs.generate(flow(), 10, out=tmp_path / "new", window=4, about=about)
    assert not (tmp_path / "new").exists()


def test_labels_are_whole_numbers(tmp_path: Path) -> None:
    for labels in ([2.5], torch.tensor([1.0]), ["3"]):
        with pytest.raises(TypeError, match="labels are whole numbers"):
            fs.generate(flow(), 5, out=tmp_path, window=4, labels=labels)  # type: ignore[arg-type]
    assert fs.generate(flow(), 5, out=tmp_path, window=4, labels=torch.tensor([3, 4])).complete


@pytest.mark.parametrize("window", [4, "sequential"])
def test_a_failure_ends_with_the_hint_of_its_target(tmp_path: Path, window: int | str) -> None:
    class Breaks(Wrapper):
        def predict(self, x: Tensor, step: Tensor, row: Tensor, **extra: Tensor) -> Tensor:
            return super().predict(x, step, row, **extra) * torch.nan

    target = Breaks(flow())
    target.fault_hint = "; warm it up first"
    tuning = fs.Tuning(len(target.std), 5, 1e-3, [Trial(2, 15, 1e-3, 1e-3, 9.0, 0.4)], None, None)
    how = tuning if window == "sequential" else 4
    dataset = fs.generate(target, 5, out=tmp_path, window=how, slots=5)
    assert len(dataset.failures) == 5
    assert all(failure.error.endswith("; warm it up first") for failure in dataset.failures)
