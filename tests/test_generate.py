"""Datasets: whatever happens to the processes that draw one, it ends up bit-identical to an undisturbed one."""

from __future__ import annotations

import importlib.util
import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import foresample as fs
from foresample.selftest import samples_law
from foresample.datasets.generation import Status
from foresample.core.noise import seeds_of
from tests.chains import flow, mixture
from tests.dataset import AT_STEP, BREAKS, COUNT, SHARD, WINDOW, Make, draw

ROOT = Path(__file__).parent.parent
SHARDS = -(-COUNT // SHARD)

needs_ray = pytest.mark.skipif(
    importlib.util.find_spec("ray") is None, reason="ray is not installed: pip install 'foresample[ray]'"
)


def shards(out: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(out.glob("shard-*.safetensors"))}


def inodes(out: Path) -> dict[str, int]:
    """A file that was written again has another."""
    return {path.name: path.stat().st_ino for path in out.glob("shard-*.safetensors")}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("datasets") / "undisturbed"
    assert draw(out).complete
    return out


def assert_identical(out: Path, undisturbed: Path) -> None:
    """The same bytes, nothing twice, nothing missing, nothing left over."""
    assert shards(out) == shards(undisturbed)
    index = torch.cat([load_file(path)["index"] for path in sorted(out.glob("shard-*"))])
    assert torch.equal(index, torch.arange(COUNT))
    assert not list(out.glob(".*.tmp"))
    manifest = json.loads((out / "manifest.json").read_text())
    assert manifest["costs"] == json.loads((undisturbed / "manifest.json").read_text())["costs"]
    assert manifest["failures"] == []


def command(out: Path, **settings: object) -> list[str]:
    return [sys.executable, "-m", "tests.dataset", str(out), json.dumps(settings)]


ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


def run(out: Path, **settings: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(out, **settings), cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True, timeout=300
    )


@pytest.fixture
def start() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts a process, and sees that it ends with the test."""
    started: list[subprocess.Popen[str]] = []

    def popen(out: Path, **settings: object) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            command(out, **settings), cwd=ROOT, env=ENVIRONMENT, stderr=subprocess.PIPE, text=True
        )
        started.append(process)
        return process

    yield popen
    for process in started:
        process.kill()
        process.wait(timeout=60)
        if process.stderr is not None:
            process.stderr.close()


def wait_for(condition: Callable[[], object], process: subprocess.Popen[str], seconds: float = 60) -> None:
    until = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None, "it ended too soon"
        assert time.monotonic() < until
        time.sleep(0.005)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


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


@pytest.mark.parametrize("slots", [5, 400])
def test_slots_change_nothing(undisturbed: Path, tmp_path: Path, slots: int) -> None:
    draw(tmp_path, slots=slots)
    assert_identical(tmp_path, undisturbed)


def test_the_size_of_shards_changes_the_files_and_not_the_samples(undisturbed: Path, tmp_path: Path) -> None:
    one, other = (torch.cat(list(d.samples())) for d in (draw(tmp_path, shard=299), fs.inspect_dataset(undisturbed)))
    assert torch.equal(one, other)


def test_a_finished_dataset_is_left_alone(undisturbed: Path) -> None:
    before = inodes(undisturbed)
    calls: list[Status] = []
    assert draw(undisturbed, progress=calls.append).complete
    assert inodes(undisturbed) == before
    assert [status.samples for status in calls] == [COUNT]


def test_labels_are_taken_in_turn_and_progress_is_told(tmp_path: Path) -> None:
    told: list[Status] = []
    draw(tmp_path, labels=[3, 1, 4], progress=told.append)
    labels = torch.cat([load_file(path)["labels"] for path in sorted(tmp_path.glob("shard-*"))])
    assert torch.equal(labels, torch.tensor([3, 1, 4]).repeat(COUNT // 3))
    assert [status.samples for status in told] == sorted(status.samples for status in told)
    assert len({status.samples for status in told}) > SHARDS
    assert told[-1].samples == COUNT
    assert told[-1].accepted_mean == pytest.approx(16 / told[-1].calls_mean - 1)


# ------------------------------------------------------------------ interrupted


def test_a_killed_process_and_the_next(
    undisturbed: Path, tmp_path: Path, start: Callable[..., subprocess.Popen[str]]
) -> None:
    process = start(tmp_path, pause=0.02)
    wait_for(lambda: len(shards(tmp_path)) >= 2, process)
    process.send_signal(signal.SIGKILL)
    process.wait(timeout=60)
    before = inodes(tmp_path)
    assert 2 <= len(before) < SHARDS
    assert not fs.inspect_dataset(tmp_path).complete
    assert run(tmp_path, slots=9).returncode == 0
    assert_identical(tmp_path, undisturbed)
    assert before.items() <= inodes(tmp_path).items()  # kept, not drawn again
    runs = json.loads((tmp_path / "manifest.json").read_text())["runs"]
    assert [r["drawn"] for r in runs] == [None, COUNT - SHARD * len(before)]


def test_control_c_keeps_every_finished_sample(
    undisturbed: Path, tmp_path: Path, start: Callable[..., subprocess.Popen[str]]
) -> None:
    process = start(tmp_path, pause=0.02)
    wait_for(lambda: len(shards(tmp_path)) >= 2, process)
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=60) == 130
    found = fs.inspect_dataset(tmp_path).manifest
    assert found["costs"]["samples"] % SHARD  # those of open shards, too
    assert found["runs"][0]["drawn"] == found["costs"]["samples"]
    assert draw(tmp_path).manifest["runs"][1]["found"] == found["costs"]["samples"]
    assert_identical(tmp_path, undisturbed)


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
        draw(tmp_path, lambda: replace(base, network=network), progress=told.append)  # type: ignore[arg-type]
    assert 0 < fs.inspect_dataset(tmp_path).manifest["costs"]["samples"] == told[-1].samples
    draw(tmp_path)
    assert_identical(tmp_path, undisturbed)


def test_torn_and_corrupt_shards_are_drawn_again_and_no_others(undisturbed: Path, tmp_path: Path) -> None:
    draw(tmp_path)
    paths = sorted(tmp_path.glob("shard-*"))
    data = paths[1].read_bytes()
    paths[0].write_bytes(b"")
    paths[1].write_bytes(data[: len(data) // 2])
    for path, at in ((paths[2], -5), (paths[3], 60), (paths[4], 2)):  # a sample, the header, its length
        changed = bytearray(path.read_bytes())
        changed[at] ^= 1
        path.write_bytes(changed)
    paths[6].write_bytes(paths[5].read_bytes())  # sound, and another's
    paths[7].unlink()
    (tmp_path / ".shard-00007.safetensors.0.tmp").write_bytes(b"half a shard")
    before = inodes(tmp_path)
    assert not fs.inspect_dataset(tmp_path).complete
    assert fs.inspect_dataset(tmp_path).manifest["costs"]["samples"] == SHARD
    assert draw(tmp_path).complete
    assert_identical(tmp_path, undisturbed)
    assert [name for name, inode in inodes(tmp_path).items() if before.get(name) == inode] == [paths[5].name]


# ------------------------------------------------------------------ a full disk


def test_a_full_disk(undisturbed: Path, tmp_path: Path) -> None:
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


def test_a_limit_on_files(undisturbed: Path, tmp_path: Path) -> None:
    """The same without mounting: files may have the bytes of the first manifest, and a shard has more."""
    limited = subprocess.run(
        command(tmp_path),
        cwd=ROOT,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=300,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (1800, 1800)),
    )
    assert limited.returncode == 2
    assert "shard-00000.safetensors (File too large): see to that" in limited.stderr
    assert "shard-00000.safetensors" not in shards(tmp_path)
    assert not list(tmp_path.glob(".*.tmp"))
    draw(tmp_path)
    assert_identical(tmp_path, undisturbed)


# ------------------------------------------------------------------ a sample that breaks


def test_a_broken_sample_is_named_and_tried_again_by_the_next_run(undisturbed: Path, tmp_path: Path) -> None:
    flag, out = tmp_path / "flag", tmp_path / "out"
    flag.touch()
    for attempt in range(2):
        assert run(out, breaks_while=str(flag)).returncode == 3
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
    base, broke = flow(), []

    def network(x: Tensor, step: Tensor, row: Tensor) -> Tensor:
        prediction = base.network(x, step, row)
        if not broke and (row == BREAKS).any():
            broke.append(True)
            prediction[row == BREAKS] = torch.nan
        return prediction

    assert draw(tmp_path, lambda: replace(base, network=network)).complete  # type: ignore[arg-type]
    assert broke
    assert_identical(tmp_path, undisturbed)


def test_a_sample_that_ends_as_no_number_is_a_failure(tmp_path: Path) -> None:
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
    assert fs.generate(base, 5, out=tmp_path, window=4, shard=3).complete


# ------------------------------------------------------------------ two at once


def test_two_runs_on_one_folder(
    undisturbed: Path, tmp_path: Path, start: Callable[..., subprocess.Popen[str]]
) -> None:
    first = start(tmp_path, pause=0.3)
    wait_for(lambda: shards(tmp_path), first)
    second = run(tmp_path)
    assert second.returncode == 2
    assert f"another run (process {first.pid} on " in second.stderr
    assert "wait for it, or choose another folder" in second.stderr
    assert first.poll() is None
    first.kill()
    first.wait(timeout=60)  # nobody cleans up after it
    draw(tmp_path)
    assert_identical(tmp_path, undisturbed)


# ------------------------------------------------------------------ Ray


@needs_ray
def test_a_worker_killed_in_the_middle_of_a_shard(
    undisturbed: Path, tmp_path: Path, start: Callable[..., subprocess.Popen[str]]
) -> None:
    pids, out = tmp_path / "pids", tmp_path / "out"
    pids.mkdir()
    process = start(out, ray="local", cpus=1, pause=0.03, pids=str(pids), slots=8)
    wait_for(lambda: len(shards(out)) >= 1, process)
    victim = min(int(path.name) for path in pids.iterdir())
    os.kill(victim, signal.SIGKILL)
    kept = inodes(out)
    assert process.wait(timeout=300) == 0
    assert_identical(out, undisturbed)
    assert len(kept) < SHARDS
    assert kept.items() <= inodes(out).items()
    assert len(list(pids.iterdir())) > os.cpu_count()  # another took its place


@needs_ray
def test_a_driver_killed_on_ray_and_the_next(
    undisturbed: Path, tmp_path: Path, start: Callable[..., subprocess.Popen[str]]
) -> None:
    pids, out = tmp_path / "pids", tmp_path / "out"
    pids.mkdir()
    flag = tmp_path / "flag"
    flag.touch()
    process = start(out, ray="local", cpus=1, pause=0.03, pids=str(pids), slots=8, breaks_while=str(flag))
    wait_for(lambda: len(shards(out)) >= 1, process)
    process.kill()
    process.wait(timeout=60)
    until = time.monotonic() + 120
    while any(alive(int(path.name)) for path in pids.iterdir()):
        assert time.monotonic() < until, "workers outlive their driver"
        time.sleep(0.05)
    kept = inodes(out)
    assert 1 <= len(kept) < SHARDS
    broken = run(out, ray="local", cpus=1, breaks_while=str(flag))  # where a sample breaks
    assert broken.returncode == 3, broken.stderr
    assert [failure.index for failure in fs.inspect_dataset(out).failures] == [BREAKS]
    draw(out)  # the last word is this process's own
    assert_identical(out, undisturbed)


@needs_ray
def test_an_address_where_nobody_answers(tmp_path: Path) -> None:
    with pytest.raises(ConnectionError, match=r"no Ray cluster at 127.0.0.1:1 .*: start one, or say auto"):
        draw(tmp_path, ray="127.0.0.1:1")


# ------------------------------------------------------------------ the law


def test_the_law_check_passes_and_can_fail(tmp_path: Path) -> None:
    dataset = draw(tmp_path, law=200, slots=64)
    assert dataset.law is not None
    assert dataset.law.passed
    assert dataset.law.samples == COUNT
    assert draw(tmp_path).law == dataset.law  # nothing was drawn: it still holds
    parts = [part + 0.5 for part in dataset.samples()]
    assert not samples_law(flow(), parts, seeds_of(1, 200), 64).passed
    narrow = [0.7 * part for part in dataset.samples()]
    assert not samples_law(flow(), narrow, seeds_of(1, 300), 64).passed


# ------------------------------------------------------------------ bad input


@pytest.mark.parametrize("name", ["count", "shard", "window", "slots"])
@pytest.mark.parametrize("value", [0, -1, 2.5, True])
def test_numbers_must_be_numbers(tmp_path: Path, name: str, value: object) -> None:
    out = tmp_path / "out"
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
    undisturbed: Path, other: dict[str, object], sentence: str
) -> None:
    before = shards(undisturbed)
    with pytest.raises(ValueError, match=sentence):
        draw(undisturbed, **other)
    assert shards(undisturbed) == before


def test_other_targets_are_refused(undisturbed: Path) -> None:
    for target in (mixture().flow(17, 1.0), mixture().flow(16, 0.9), mixture(3).flow(16, 1.0)):
        with pytest.raises(ValueError, match=r"holds a dataset with other settings \((shape|steps|std) "):
            draw(undisturbed, lambda target=target: target)  # type: ignore[arg-type, misc]


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"settings": {}}', "\x00"])
def test_a_corrupt_manifest_is_refused_and_can_be_written_anew(
    undisturbed: Path, tmp_path: Path, text: str
) -> None:
    draw(tmp_path)
    manifest = tmp_path / "manifest.json"
    manifest.write_text(text)
    for look in (draw, fs.inspect_dataset):
        with pytest.raises(ValueError, match=r"manifest.json is corrupt \(.*\): move it away and run again"):
            look(tmp_path)
    manifest.unlink()
    before = inodes(tmp_path)
    draw(tmp_path)
    assert inodes(tmp_path) == before
    assert_identical(tmp_path, undisturbed)


def test_without_a_manifest_shards_of_other_settings_are_not_overwritten(tmp_path: Path) -> None:
    draw(tmp_path)
    (tmp_path / "manifest.json").unlink()
    before = shards(tmp_path)
    with pytest.raises(ValueError, match="is sound, but was drawn with other settings: choose another folder"):
        draw(tmp_path, seed=6)
    assert shards(tmp_path) == before


def test_a_folder_without_a_dataset_is_refused_by_inspect(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="not a folder of foresample generate"):
        fs.inspect_dataset(tmp_path)


def test_what_is_no_target_and_what_makes_none(tmp_path: Path) -> None:
    for thing in (None, 3, lambda: None):
        with pytest.raises(TypeError, match="is not a target"):
            fs.generate(thing, 5, out=tmp_path, window=4)  # type: ignore[arg-type]


def test_settings_of_ray_and_labels(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="pass a function that does, not the target itself"):
        fs.generate(flow(), 5, out=tmp_path, window=4, ray="auto")
    with pytest.raises(ValueError, match="give ray='auto' as well"):
        fs.generate(flow(), 5, out=tmp_path, window=4, cpus=2)
    with pytest.raises(ValueError, match="labels is empty"):
        fs.generate(flow(), 5, out=tmp_path, window=4, labels=[])


def test_a_plain_target_is_taken_too(undisturbed: Path, tmp_path: Path) -> None:
    fs.generate(Make()(), COUNT, out=tmp_path, window=WINDOW, shard=SHARD, seed=5)
    assert_identical(tmp_path, undisturbed)
