"""Files that anyone may have written: `python -m tests.fuzz --minutes 60`.

Sound folders (datasets, a model, result files) are damaged at random, in their bytes, values and kinds of file, and
given to their readers. A reader accepts a folder or refuses it in one sentence: no traceback, no hang, no file touched
outside the folder, and no file written by a mere reader. Datasets are also resumed with other targets, which are
refused, and with the same target under other rounding, which is accepted. `tests/test_fuzz.py` does a little of this in
every run of the suite.

Last run by hand: 63 minutes, 38 970 cases. No traceback, no hang, no file touched; three messages of unbounded length,
which repeated the contents of a damaged folder in full, were mended.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save
from torch import Tensor

import foresample as fs
from benchmarks import report
from benchmarks.results import read
from foresample import pretrained
from foresample.contracts import Wrapper
from foresample.datasets.shards import _checksum
from foresample.engine.tuning import Trial
from foresample.targets import ChainTarget
from tests.support.saved import FILES
from tests.support.saved import save as save_results
from tests.support.tiny_model import save_tiny_model

SECONDS = 60
"""Seconds after which a case counts as hanging; usually it takes a fraction of one."""


class Hangs(BaseException):
    """No reader catches it by accident."""


# ------------------------------------------------------------------ damage

_values = st.one_of(
    st.none(),
    st.booleans(),
    st.sampled_from([0, -1, 1, 2, 7, 2**31, 2**53, 2**63, 2**64, 10**12, 10**30, -(10**30), 10**400]),
    st.integers(-20, 20),
    st.floats(),
    st.text(max_size=8),
    st.sampled_from(
        [[], {}, [[]], [None], {"a": 1}, "float32", "../../x", "\x00", "x" * 5000, "shard-00000.safetensors"]
    ),
    st.recursive(st.integers(0, 3), lambda inside: st.lists(inside, min_size=1, max_size=2), max_leaves=60),
)
_places = st.lists(st.integers(0, 40), min_size=1, max_size=6)
_edits = st.lists(st.tuples(_places, st.sampled_from(["set", "drop", "add"]), _values), min_size=1, max_size=3)


def edited(document: Any, edits: list[tuple[list[int], str, Any]]) -> Any:
    """The document with other values at some places."""
    document = json.loads(json.dumps(document))
    for place, what, some in edits:
        value = json.loads(json.dumps(some))  # a list of its own
        inside, parent, key = document, cast(Any, None), cast(Any, None)
        for number in place:
            if not isinstance(inside, (dict, list)) or not inside:
                break
            parent, key = (
                inside,
                (sorted(inside)[number % len(inside)] if isinstance(inside, dict) else number % len(inside)),
            )
            inside = parent[key]
        if parent is None:
            return value
        if what == "drop":
            del parent[key]
        elif what == "add" and isinstance(parent, list):
            parent.insert(key, value)
        else:
            parent[key] = value
    return document


_cuts = st.tuples(st.floats(0, 1), st.integers(0, 60), st.binary(max_size=40))
_bytes = st.lists(_cuts, min_size=1, max_size=4)


def spoiled(data: bytes, cuts: list[tuple[float, int, bytes]]) -> bytes:
    """Bytes replaced, inserted and cut out."""
    for where, length, new in cuts:
        at = int(where * len(data))
        data = data[:at] + new + data[at + length :]
    return data


_things = st.sampled_from(
    ["gone", "empty", "folder", "pipe", "link", "dangling", "loop", "hard link", "socket", "huge"]
)


def put(thing: str, path: Path, treasure: Path) -> None:
    """Something else in a file's place."""
    path.unlink(missing_ok=True)
    if thing == "empty":
        path.touch()
    elif thing == "folder":
        path.mkdir()
    elif thing == "pipe":
        os.mkfifo(path)
    elif thing == "link":
        path.symlink_to(treasure)
    elif thing == "dangling":
        path.symlink_to(treasure.with_name("nowhere"))
    elif thing == "loop":
        path.symlink_to(path)
    elif thing == "hard link":
        path.hardlink_to(treasure)
    elif thing == "socket":
        os.mknod(path, 0o600 | 0o140000)
    elif thing == "huge":
        with path.open("wb") as file:
            file.truncate(2**36)


# ------------------------------------------------------------------ what must hold


def state(folder: Path) -> dict[str, tuple[int, int, int]]:
    """Every file's size, inode and time."""
    found = {}
    for path in [folder, *folder.rglob("*")]:
        told = path.lstat()
        found[str(path)] = (told.st_size if not path.is_dir() else 0, told.st_ino, told.st_mtime_ns)
    return found


@contextmanager
def guarded(inside: Path, outside: Path, *, writes: bool) -> Iterator[None]:
    """The reader accepts the file or refuses it in one sentence, in time, and changes no other file."""

    def hangs(*_: object) -> None:
        raise Hangs(f"no answer in {SECONDS} s")

    before = state(outside), state(inside)
    signal.signal(signal.SIGALRM, hangs)
    signal.alarm(SECONDS)
    try:
        yield
    except (ValueError, OSError) as error:
        refusal = str(error)
    else:
        refusal = "none"
    finally:
        signal.alarm(0)
    assert len(refusal.splitlines()) == 1, refusal
    assert "Traceback" not in refusal
    assert len(refusal) < 1500, refusal
    assert state(outside) == before[0], "a file outside the folder was touched"
    if not writes:
        assert state(inside) == before[1], "a reader has written"


class Ground:
    """Sound folders, made once, and a place for damaged copies."""

    def __init__(self, root: Path) -> None:
        self.outside, self.sound, self.copies = (root / name for name in ("outside", "sound", "copies"))
        for folder in (self.outside, self.sound, self.copies):
            folder.mkdir(parents=True)
        self.treasure = self.outside / "treasure"
        self.treasure.write_text("gold")
        self.target = conditioned(fs.GaussianMixture.of_draft_trees(2).flow(5, 1.0))
        self.draw(self.sound / "dataset", law=25)
        none = fs.Tuning(5, 2, 1e-3, [Trial(2, 6, 1e-3, 1e-3, 9.0, 0.4)], None, None)
        self.draw(self.sound / "sequential", window=none)
        save_tiny_model(self.sound / "model")
        save_results(self.sound / "results", FILES)

    def draw(self, out: Path, law: int = 0, target: fs.Target | None = None, window: Any = 3) -> fs.Dataset:
        how: dict[str, Any] = {"slots": 2, "shard": 2, "labels": [1, 4], "law": law, "about": {"model": "m"}}
        return fs.generate(target or self.target, 5, out=out, window=window, **how)

    @contextmanager
    def copy(self, name: str) -> Iterator[Path]:
        folder = Path(tempfile.mkdtemp(dir=self.copies)) / name
        shutil.copytree(self.sound / name, folder)
        try:
            yield folder
        finally:
            shutil.rmtree(folder.parent)


def conditioned(base: ChainTarget) -> ChainTarget:
    """The chain with an observation of each of five samples, and no other."""
    table = torch.linspace(-1, 1, 5, dtype=torch.float64)
    return replace(base, network=lambda x, time, row: base.network(x, time, row) + table[row].unsqueeze(1))


class Moved(Wrapper):
    """A target with other means, or other starts."""

    def __init__(self, target: fs.Target, part: str, size: float) -> None:
        super().__init__(target)
        self.chain, self.part, self.size = None, part, size

    def start(self, noise: Tensor, row: Tensor) -> Tensor:
        return super().start(noise, row) + self.size * (self.part == "start")

    def mean(self, x: Tensor, prediction: Tensor, step: Tensor, *previous: Tensor, **extra: Tensor) -> Tensor:
        return super().mean(x, prediction, step, *previous, **extra) + self.size * (self.part == "mean")


def changed(base: ChainTarget, part: str, size: float) -> fs.Target:
    """A target changed by this much, or the same with other rounding."""

    def network(x: Tensor, time: Tensor, row: Tensor) -> Tensor:
        prediction = base.network(x, time, row)
        if part == "rounding":
            return prediction * (1 + size * 1e-5)
        return prediction + size * ((part == "network") + (part == "conditions") * (row == 1).unsqueeze(1))

    return Moved(replace(base, network=network), part, size)


Property = Callable[[], None]


def _file(data: st.DataObject, folder: Path, ground: Ground, names: list[str]) -> None:
    """Damage one or two files of a folder."""
    for _ in range(data.draw(st.integers(1, 2))):
        path = folder / data.draw(st.sampled_from(names))
        how = data.draw(st.sampled_from(["values", "values", "values", "bytes", "thing"]))
        if how == "thing" or not path.is_file():
            if path.is_dir():
                continue
            put(data.draw(_things), path, ground.treasure)
        elif path.stat().st_size > 2**30:  # damaged before, by what is huge
            continue
        elif how == "bytes" or path.suffix == ".safetensors":
            path.write_bytes(spoiled(path.read_bytes(), data.draw(_bytes)))
        else:
            try:
                document = json.loads(path.read_text())
            except ValueError:
                continue
            path.write_text(json.dumps(edited(document, data.draw(_edits))))


def _numbers_of(dtype: torch.dtype) -> st.SearchStrategy[Any]:
    if dtype.is_floating_point:
        return st.floats(width=cast(Any, torch.finfo(dtype).bits))
    return st.booleans() if dtype == torch.bool else st.integers(torch.iinfo(dtype).min, torch.iinfo(dtype).max)


def _shard(data: st.DataObject, path: Path) -> None:
    """Another content with the right checksum, or another header."""
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    if data.draw(st.booleans()):
        header = edited(json.loads(raw[8 : 8 + length]), data.draw(_edits))
        text = json.dumps(header).encode()
        path.write_bytes(len(text).to_bytes(8, "little") + text + raw[8 + length :])
        return
    tensors = load_file(path)
    about = json.loads(json.loads(raw[8 : 8 + length])["__metadata__"]["foresample"])
    for _ in range(data.draw(st.integers(0, 2))):
        name = data.draw(st.sampled_from(sorted(tensors)))
        value = tensors[name]
        change = data.draw(st.sampled_from(["fill", "cut", "repeat", "cast", "shape", "rename", "drop"]))
        if change == "fill" and len(value):
            value[data.draw(st.integers(0, len(value) - 1)) :] = data.draw(_numbers_of(value.dtype))
        elif change == "cut":
            tensors[name] = value[: data.draw(st.integers(0, len(value)))]
        elif change == "repeat":
            tensors[name] = value.repeat(2, *[1] * (value.ndim - 1))
        elif change == "cast":
            tensors[name] = value.to(
                data.draw(st.sampled_from([torch.int32, torch.float32, torch.uint8, torch.bool]))
            )
        elif change == "shape":
            tensors[name] = value.unsqueeze(data.draw(st.integers(0, value.ndim)))
        else:
            tensors.pop(name)
            if change == "rename":
                tensors[data.draw(st.text(max_size=5))] = value
        if not tensors:
            return
    tensors = {name: value.contiguous() for name, value in tensors.items()}
    if data.draw(st.booleans()):
        about = edited(about, data.draw(_edits))
    if isinstance(about, dict):
        about.pop("sha256", None)
        try:
            about["sha256"] = _checksum(about, tensors)
        except RuntimeError:  # a tensor of no dimension
            return
    path.write_bytes(save(tensors, {"foresample": json.dumps(about, sort_keys=True)}))


def properties(ground: Ground) -> dict[str, Property]:
    """The files to read, each with its damage."""
    shards = [f"shard-0000{i}.safetensors" for i in range(3)]

    @given(st.data())
    def dataset(data: st.DataObject) -> None:
        with ground.copy("dataset") as folder:
            if data.draw(st.booleans()):
                _shard(data, folder / data.draw(st.sampled_from(shards)))
            else:
                _file(
                    data,
                    folder,
                    ground,
                    ["manifest.json", *shards, ".lock", ".owner", f".manifest.json.{'0' * 32}.tmp"],
                )
            with guarded(folder, ground.outside, writes=False):
                found = fs.inspect_dataset(folder)
                list(found.samples(everything=True))
            with guarded(folder, ground.outside, writes=True):
                drawn = ground.draw(folder)
                assert drawn.complete
                assert fs.inspect_dataset(folder).complete

    @given(st.data())
    def resumed(data: st.DataObject) -> None:
        """Samples of a shard drawn by another run: the same, or refused without a trace."""
        part = data.draw(st.sampled_from(["none", "network", "conditions", "mean", "start", "rounding"]))
        size = data.draw(st.floats(0.05, 3.0))
        window = data.draw(st.sampled_from(["auto", 3]))
        name = data.draw(st.sampled_from(["dataset", "sequential"]))
        with ground.copy(name) as folder:
            if data.draw(st.booleans()):
                (folder / data.draw(st.sampled_from(shards))).unlink()
            before = {path.name: path.read_bytes() for path in folder.glob("shard-*")}
            refusal = ""
            try:
                drawn = ground.draw(folder, target=changed(ground.target, part, size), window=window)
            except ValueError as error:
                refusal = str(error)
            if refusal:
                assert len(refusal.splitlines()) == 1, refusal
                assert "there and" in refusal, refusal
                assert part not in ("none", "rounding") or (name, window) == ("sequential", 3)
                assert {path.name: path.read_bytes() for path in folder.glob("shard-*")} == before
            else:
                assert part in ("none", "rounding"), f"{part} changed by {size}, and nobody noticed"
                assert drawn.complete
                sound = fs.inspect_dataset(ground.sound / name)
                for one, other in zip(drawn.samples(), sound.samples(), strict=True):
                    torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-3)

    @given(st.data())
    def model(data: st.DataObject) -> None:
        with ground.copy("model") as folder:
            # Numbers of a config are diffusers' to judge.
            names = ["model_index.json", "labels.json", "unet/diffusion_pytorch_model.safetensors"]
            _file(data, folder, ground, names)
            with guarded(folder, ground.outside, writes=False):
                loaded = pretrained.load(folder)
                target = loaded.target(3)
                x = target.start(torch.zeros(2, *target.shape), torch.arange(2))
                with torch.no_grad():
                    target.predict(x, torch.tensor([0, 2]), torch.tensor([0, 1]))
            with guarded(folder, ground.outside, writes=False):
                recipe = pretrained.Recipe(folder, 3)
                recipe.labels(), recipe.about()

    @given(st.data())
    def results(data: st.DataObject) -> None:
        with ground.copy("results") as folder:
            _file(data, folder, ground, list(FILES))
            with guarded(folder, ground.outside, writes=False):
                read(folder)
            with guarded(folder, ground.outside, writes=False):
                report.build(folder, folder)

    return {"dataset": dataset, "resumed": resumed, "model": model, "results": results}


def fuzz(ground: Ground, cases: int, number: int = 0) -> None:
    """Run `cases` cases of each kind, with seeds from this number."""
    for name, one in properties(ground).items():
        some = settings(
            max_examples=cases if name != "model" else max(1, cases // 4),
            deadline=None,
            database=None,
            derandomize=False,
            phases=[Phase.generate, Phase.shrink],
            suppress_health_check=list(HealthCheck),
        )
        seed(number)(some(one))()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--seed", type=int, default=0)
    told = parser.parse_args()
    until, number, cases = time.monotonic() + 60 * told.minutes, told.seed, 0
    with tempfile.TemporaryDirectory() as root:
        ground = Ground(Path(root) / "ground")
        while time.monotonic() < until:
            fuzz(ground, 40, number)
            number, cases = number + 1, cases + 40 + 40 + 10 + 40
            print(f"{cases} cases, seeds {told.seed} … {number - 1}", flush=True)


if __name__ == "__main__":
    main()
