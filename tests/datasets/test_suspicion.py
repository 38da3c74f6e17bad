"""Limits on the trust in a folder: no biased selection, no stale verdict, no foreign file."""

from __future__ import annotations

import json
import os
import shutil
import signal
import stat
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save
from torch import Tensor

import foresample as fs
from foresample.baseline import Sequential
from foresample.core.noise import seeds_of
from foresample.datasets import workers
from foresample.datasets.folder import write_atomically
from foresample.datasets.manifest import plan_of
from foresample.datasets.shards import _checksum
from foresample.datasets.workers import Filling, LocalWorker
from foresample.settings import Settings
from tests.datasets.disturbing import assert_identical, inodes, shards
from tests.datasets.process import BREAKS, COUNT, SHARD, WINDOW, draw
from tests.support.small_chains import flow


@pytest.fixture
def out(undisturbed: Path, tmp_path: Path) -> Path:
    """A whole dataset to be tampered with."""
    return shutil.copytree(undisturbed, tmp_path / "out")


@pytest.fixture(autouse=True)
def _no_hang() -> Iterator[None]:
    """A pipe that is waited for is a failure, not the end of all tests."""
    signal.alarm(300)
    yield
    signal.alarm(0)


def breaking_off(at: int) -> fs.Target:
    """The chain, whose network is gone at this call of the sampler; looks and fingerprints take at most four states."""
    base, calls = flow(), 0

    def network(x: Tensor, step: Tensor, row: Tensor) -> Tensor:
        nonlocal calls
        calls += len(x) > 4
        if calls == at:
            raise RuntimeError("gone")
        return base.network(x, step, row)

    return replace(base, network=network)


def interrupted(out: Path) -> fs.Dataset:
    with pytest.raises(RuntimeError, match="gone"):
        draw(out, lambda: breaking_off(24))
    return fs.inspect_dataset(out)


# ------------------------------------------------------------------ the first to finish


def test_an_interrupted_dataset_hands_out_a_prefix(undisturbed: Path, tmp_path: Path) -> None:
    whole = torch.cat(list(fs.inspect_dataset(undisturbed).samples()))
    dataset = interrupted(tmp_path)
    finished = dataset.manifest["costs"]["samples"]
    assert 0 < dataset.in_order < finished < COUNT
    with pytest.warns(
        UserWarning, match=f"{finished} samples only the first {dataset.in_order} are handed out"
    ):
        handed = torch.cat(list(dataset.samples()))
    assert torch.equal(handed, whole[: dataset.in_order])
    everything = torch.cat(list(dataset.samples(everything=True)))
    assert len(everything) == finished
    indices = torch.cat([load_file(path)["index"] for path in sorted(tmp_path.glob("shard-*"))])
    assert torch.equal(everything, whole[indices])
    assert dataset.in_order not in indices
    assert json.loads((tmp_path / "manifest.json").read_text())["in_order"] == dataset.in_order


def test_a_missing_shard_ends_the_prefix(out: Path) -> None:
    (out / "shard-00002.safetensors").unlink()
    dataset = fs.inspect_dataset(out)
    assert dataset.in_order == 2 * SHARD
    with pytest.warns(UserWarning, match="biased selection"):
        assert sum(map(len, dataset.samples())) == 2 * SHARD
    assert sum(map(len, dataset.samples(everything=True))) == COUNT - SHARD


def test_a_broken_sample_ends_the_prefix(tmp_path: Path) -> None:
    base = flow()

    def network(x: Tensor, step: Tensor, row: Tensor) -> Tensor:
        return torch.where((row == BREAKS).unsqueeze(1), torch.nan, base.network(x, step, row))

    dataset = draw(tmp_path, lambda: replace(base, network=network), law=50)
    assert (dataset.in_order, dataset.manifest["costs"]["samples"]) == (BREAKS, COUNT - 1)
    assert dataset.law is None  # not checked, since one is missing


def test_the_law_of_a_selection_is_not_checked(tmp_path: Path) -> None:
    dataset = interrupted(tmp_path)
    plan, worker = (
        plan_of(tmp_path, dataset.manifest),
        LocalWorker(flow(), Settings(slots=8)),
    )
    with pytest.raises(
        ValueError, match=rf"sample {dataset.in_order} is missing .* biased selection, whose distribution"
    ):
        worker.law(plan, 50)


def test_the_law_is_checked_against_seeds_that_are_not_the_dataset_s(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against its own, sequential and speculative samples would share noise, and the test would be blind."""
    used: list[Tensor] = []

    class Watched(Sequential):
        def sample(self, seeds: Tensor, *observe: Any, **how: Any) -> fs.Run:
            used.append(seeds)
            return super().sample(seeds, *observe, **how)

    monkeypatch.setattr(workers, "Sequential", Watched)
    dataset = draw(tmp_path, law=200)
    own = torch.cat([load_file(path)["seeds"] for path in sorted(tmp_path.glob("shard-*"))])
    assert len(used[0]) == len(set(used[0].tolist())) == 200
    assert not set(used[0].tolist()) & set(own.tolist())
    assert dataset.law is not None
    assert dataset.law.samples == COUNT


@pytest.mark.parametrize("harm", ["missing", "torn", "other"])
def test_a_verdict_is_dropped_when_its_shards_change(tmp_path: Path, harm: str) -> None:
    assert draw(tmp_path, law=50).law is not None
    assert fs.inspect_dataset(tmp_path).law is not None
    shard = tmp_path / "shard-00003.safetensors"
    if harm == "missing":
        shard.unlink()
    elif harm == "torn":
        shard.write_bytes(shard.read_bytes()[:-8])
    else:  # sound, but not the one that was checked
        forge(shard, lambda tensors: tensors["samples"].add_(1))
    assert fs.inspect_dataset(tmp_path).law is None
    if harm != "other":
        with pytest.raises(RuntimeError, match="gone"):
            draw(tmp_path, lambda: breaking_off(2))
        assert json.loads((tmp_path / "manifest.json").read_text())["law"] is None
    assert draw(tmp_path).law is None
    assert json.loads((tmp_path / "manifest.json").read_text())["law"] is None


# ------------------------------------------------------------------ files that are not ours


def test_only_our_own_leftover_files_are_removed(out: Path, undisturbed: Path, tmp_path: Path) -> None:
    hexes = "0123456789abcdef" * 2
    ours = [f".shard-00007.safetensors.{hexes}.tmp", f".manifest.json.{hexes}.tmp"]
    others = [
        ".notes.tmp",
        ".shard-00007.safetensors.0.tmp",
        f"shard-00007.safetensors.{hexes}.tmp",
        ".x.json.tmp",
    ]
    for name in [*ours, *others]:
        (out / name).write_text("left")
    folder, link = out / f".shard-00001.safetensors.{hexes}.tmp", out / f".shard-00002.safetensors.{hexes}.tmp"
    folder.mkdir()
    treasure = tmp_path / "treasure"
    treasure.write_text("gold")
    link.symlink_to(treasure)
    assert draw(out).complete
    assert not any((out / name).exists() for name in ours)
    assert all((out / name).read_text() == "left" for name in others)
    assert folder.is_dir()
    assert link.is_symlink()
    assert treasure.read_text() == "gold"
    assert shards(out) == shards(undisturbed)


def as_link(path: Path, treasure: Path) -> None:
    path.symlink_to(treasure)


def as_hard_link(path: Path, treasure: Path) -> None:
    path.hardlink_to(treasure)


def as_folder(path: Path, treasure: Path) -> None:
    path.mkdir()


def as_pipe(path: Path, treasure: Path) -> None:
    os.mkfifo(path)


Replace = Callable[[Path, Path], None]


@pytest.mark.parametrize("other", [as_link, as_hard_link, as_folder, as_pipe])
@pytest.mark.parametrize("text", ["gold", "", "process 7"])  # the last two look like locks of ours
def test_a_lock_that_is_not_a_plain_file_is_refused(
    out: Path, tmp_path: Path, other: Replace, text: str
) -> None:
    treasure = tmp_path / "treasure"
    treasure.write_text(text)
    (out / ".lock").unlink()
    other(out / ".lock", treasure)
    with pytest.raises(OSError, match=r"\.lock .*: choose another folder"):
        draw(out)
    assert treasure.read_text() == text


def test_the_lock_of_another_program_is_refused(tmp_path: Path) -> None:
    (tmp_path / ".lock").write_text('{"version": 3}')
    with pytest.raises(OSError, match="was not written by foresample: choose another folder"):
        draw(tmp_path)
    assert (tmp_path / ".lock").read_text() == '{"version": 3}'


@pytest.mark.parametrize("name", ["manifest.json", "shard-00003.safetensors"])
@pytest.mark.parametrize("other", [as_link, as_folder, as_pipe])
def test_anything_but_a_plain_file_is_refused(out: Path, tmp_path: Path, name: str, other: Replace) -> None:
    treasure = (out / name).rename(tmp_path / "treasure")
    other(out / name, treasure)
    before = treasure.read_bytes()
    for look in (fs.inspect_dataset, draw):
        with pytest.raises(OSError, match=rf"{name} cannot be read \(it is .*\): move it away"):
            look(out)
    assert treasure.read_bytes() == before


# ------------------------------------------------------------------ manifests


def changed(value: Any, *at: str) -> Callable[[dict[str, Any]], None]:
    def change(manifest: dict[str, Any]) -> None:
        for key in at[:-1]:
            manifest = manifest[key]
        manifest[at[-1]] = value

    return change


NESTED: Any = 0
for _ in range(100):
    NESTED = [NESTED]


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (changed(0, "settings", "shard"), r"settings.shard is 0, not a whole number from 1"),
        (changed("x", "settings", "count"), r"settings.count is 'x', not a whole number"),
        (changed(10**60, "settings", "count"), r"settings.count is 1"),
        (
            changed(2**53 + 1, "settings", "count"),
            r"settings.count is 9007199254740993, not a whole number from 1",
        ),
        (changed(None, "settings"), "settings is None, not an object"),
        (changed(-1, "settings", "seed"), "settings.seed is -1, not"),
        (changed(2**63, "settings", "seed"), "settings.seed is 9223372036854775808, not"),
        (changed([], "settings", "labels"), r"settings.labels is \[\], not a list with something in it"),
        (changed([2, 0], "settings", "shape"), r"settings.shape\[1\] is 0"),
        (changed("int8", "settings", "dtype"), "settings.dtype is 'int8', not one of float16"),
        (changed(0, "settings", "steps"), "settings.steps is 0"),
        (changed(NESTED, "settings", "model"), r"cannot be read as JSON \(nested more than 32 deep"),
        (changed([], "runs"), r"runs is \[\], not a list with something in it"),
        (changed({"passed": True}, "law"), "law.tests is missing"),
        (changed([{"file": 3}], "shards"), r"shards\[0\].file is 3, not a text"),
        (changed([{"index": "x"}], "failures"), r"failures\[0\].index is 'x'"),
        (changed(float("nan"), "costs", "speedup"), "NaN is no JSON number"),
    ],
)
def test_a_corrupt_manifest_is_refused_in_one_sentence(
    out: Path, change: Callable[[dict[str, Any]], None], sentence: str
) -> None:
    path = out / "manifest.json"
    manifest = json.loads(path.read_text())
    change(manifest)
    path.write_text(json.dumps(manifest))
    before = path.read_bytes()
    for look in (fs.inspect_dataset, draw):
        with pytest.raises(
            ValueError, match=rf"manifest.json is corrupt \({sentence}.*move it away and run again"
        ):
            look(out)
    assert path.read_bytes() == before


def test_other_settings_are_named_in_a_short_sentence_however_long_they_are(out: Path) -> None:
    path = out / "manifest.json"
    manifest = json.loads(path.read_text())
    manifest["settings"] |= {"method": "x" * 5000, "y" * 5000: 1, **{f"more {i}": i for i in range(99)}}
    path.write_text(json.dumps(manifest))
    with pytest.raises(ValueError, match=r"other settings \(method 'xxx") as raised:
        draw(out)
    assert len(str(raised.value)) < 1500


def test_deep_nesting(out: Path) -> None:
    for text in ('{"settings": ' + "[" * 100_000, '{"settings": ' * 100_000):
        (out / "manifest.json").write_text(text)
        with pytest.raises(ValueError, match=r"manifest.json is corrupt \(cannot be read as JSON"):
            fs.inspect_dataset(out)


# ------------------------------------------------------------------ shards


def forge(path: Path, change: Callable[[dict[str, Tensor]], object], **about: Any) -> None:
    """Change a shard, and give it the checksum that it must have."""
    from safetensors import safe_open

    with safe_open(path, "pt") as file:
        told = {**json.loads(file.metadata()["foresample"]), **about}
    tensors = load_file(path)
    change(tensors)
    tensors = {name: value.contiguous() for name, value in tensors.items()}
    del told["sha256"]
    told["sha256"] = _checksum(told, tensors)
    path.write_bytes(save(tensors, {"foresample": json.dumps(told, sort_keys=True)}))


def nothing(tensors: dict[str, Tensor]) -> None:
    pass


def one_nan(tensors: dict[str, Tensor]) -> None:
    tensors["samples"][7, 1] = torch.nan


FORGED: list[tuple[Callable[[dict[str, Tensor]], object], dict[str, Any], str]] = [
    (one_nan, {}, "some of its samples are NaN or infinite"),
    (lambda t: t.update(samples=t["samples"][:, :1]), {}, "its samples are F64 [40, 1], not F64 [40, 2]"),
    (lambda t: t.update(samples=t["samples"].float()), {}, "its samples are F32 [40, 2], not F64 [40, 2]"),
    (lambda t: t.update(seeds=seeds_of(6, SHARD)), {}, "its seeds are not those of its samples"),
    (lambda t: t["index"].add_(SHARD), {}, "its indices are not some of 120 … 159 in order"),
    (lambda t: t.update(index=t["index"].flip(0)), {}, "its indices are not some of 120 … 159 in order"),
    (lambda t: t["index"][1:].copy_(t["index"][:-1].clone()), {}, "its indices are not some of"),
    (
        lambda t: t.update({n: v.repeat(2, *[1] * (v.ndim - 1)) for n, v in t.items()}),
        {},
        "it has [80] samples",
    ),
    (lambda t: t.pop("calls"), {}, "its calls are nothing, not I64 [40]"),
    (lambda t: t.update(more=torch.zeros(3)), {}, "its more are F32 [3], not nothing"),
    (lambda t: t.update(index=t["index"].unsqueeze(1)), {}, "its calls are I64 [40], not I64 [40, 1]"),
    (lambda t: t["calls"].neg_(), {}, "its samples have cost nothing, or too much"),
    (lambda t: t["evaluations"][3:4].zero_(), {}, "its samples have cost nothing, or too much"),
    (lambda t: t["calls"][5:6].fill_(2**41), {}, "its samples have cost nothing, or too much"),
    (nothing, {"number": 4}, "it is shard 4"),
    (nothing, {"number": "x"}, "it is torn or corrupt (number is 'x', not a whole number)"),
    (nothing, {"failures": None}, "it is torn or corrupt (failures is None, not a list)"),
    (
        nothing,
        {"failures": [{"index": 121, "seed": 1, "step": 1, "error": ""}]},
        "sample 121, which it says broke",
    ),
]


@pytest.mark.parametrize(("change", "about", "why"), FORGED, ids=[why for _, _, why in FORGED])
def test_a_forged_shard_with_a_right_checksum_does_not_count(
    out: Path,
    undisturbed: Path,
    change: Callable[[dict[str, Tensor]], object],
    about: dict[str, Any],
    why: str,
) -> None:
    path = out / "shard-00003.safetensors"
    forge(path, change, **about)
    before = inodes(out)
    dataset = fs.inspect_dataset(out)
    assert not dataset.complete
    assert list(dataset.unsound) == [path.name]
    assert why in dataset.unsound[path.name]
    assert draw(out).complete
    assert_identical(out, undisturbed)
    assert [name for name, inode in inodes(out).items() if before[name] != inode] == [path.name]


@pytest.mark.parametrize("labels", [None, [3, 1]])
def test_a_sample_takes_as_many_bytes_in_its_file_as_planned(tmp_path: Path, labels: list[int] | None) -> None:
    draw(tmp_path, labels=labels)
    plan = plan_of(tmp_path, json.loads((tmp_path / "manifest.json").read_text()))
    tensors = load_file(plan.path(0))
    assert sum(value.nbytes for value in tensors.values()) == plan.size(0) * plan.sample_bytes


def test_a_complete_shard_is_not_written_again(out: Path) -> None:
    plan = plan_of(out, json.loads((out / "manifest.json").read_text()))
    before = inodes(out)
    assert Filling(plan, 3, flow()).write().samples == SHARD
    assert inodes(out) == before


def test_a_disk_that_fails_at_the_very_end_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file is in its place, and its name is not on the disk yet."""

    def fsync(file: int) -> None:
        if stat.S_ISDIR(os.fstat(file).st_mode):
            raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(OSError, match=r"cannot write .*new \(Input/output error\): see to that"):
        write_atomically(tmp_path / "new", b"data")
    assert [path.name for path in tmp_path.iterdir()] == ["new"]


def test_the_forger_s_unchanged_shard_counts(out: Path) -> None:
    """The broken twin of the forgeries: without a change, the forger's file counts."""
    forge(out / "shard-00003.safetensors", nothing)
    assert fs.inspect_dataset(out).complete


def test_a_shard_with_other_labels_is_unsound(tmp_path: Path) -> None:
    draw(tmp_path, labels=[3, 1])
    forge(tmp_path / "shard-00003.safetensors", lambda tensors: tensors["labels"].fill_(1))
    assert fs.inspect_dataset(tmp_path).unsound == {
        "shard-00003.safetensors": "its labels are not those of its samples"
    }


def test_a_shard_removed_or_changed_since_the_inspection_is_named(out: Path) -> None:
    dataset = fs.inspect_dataset(out)
    (out / "shard-00001.safetensors").unlink()
    with pytest.raises(ValueError, match=r"shard-00001.safetensors is gone: run the same command again"):
        list(dataset.samples())
    one_changed = out / "shard-00000.safetensors"
    one_changed.write_bytes(one_changed.read_bytes()[:-1])
    with pytest.raises(ValueError, match=r"shard-00000.safetensors does not count any more, it is torn"):
        list(dataset.samples())


# ------------------------------------------------------------------ numbers


@pytest.mark.parametrize(
    ("how", "sentence"),
    [
        ({"count": 10**12}, "are 1000000000 files, and a folder takes 1000000: give a larger shard"),
        (
            {"count": 10**12, "shard": 10**9},
            r"a shard of 1000000000 samples would take .* memory.*: give a smaller",
        ),
        ({"count": 10**9, "shard": 10**9}, "a shard of 1000000000 samples would take"),
        ({"count": 10**30, "shard": 10**30}, "count is 1|a shard of"),
        ({"count": 10**11, "shard": 10**6}, r"100000000000 samples would take .* are free at .*: make room"),
        ({"count": 10**8, "slots": 10**12, "window": 10**12}, "give fewer slots or a smaller window"),
    ],
)
def test_numbers_too_large_for_this_machine_are_refused_before_the_work(
    tmp_path: Path, how: dict[str, int], sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("foresample.sizes.machine_memory", lambda device="cpu": 2**33)
    monkeypatch.setattr("shutil.disk_usage", lambda path: shutil._ntuple_diskusage(2**40, 0, 2**40))
    monkeypatch.setattr(fs.Engine, "draw", lambda *_: pytest.fail("began"))
    with pytest.raises((ValueError, OSError), match=sentence):
        fs.generate(flow(), **{"window": 4, **how}, out=tmp_path)  # type: ignore[arg-type]
    assert not list(tmp_path.glob("shard-*"))


def test_a_window_longer_than_the_chain_draws_the_same_samples_and_is_saved_as_given(tmp_path: Path) -> None:
    """With the noise of every slot as wide as the window, this one would take 16 GB."""
    far, near = (
        fs.generate(flow(), 20, out=tmp_path / str(window), window=window, shard=10) for window in (10**7, 15)
    )
    assert all(torch.equal(a, b) for a, b in zip(far.samples(), near.samples(), strict=True))
    assert far.manifest["settings"]["window"] == 10**7
    assert far.manifest["costs"] == near.manifest["costs"]
    assert fs.Engine(flow(), window=WINDOW, slots=1).speculation.window == WINDOW
