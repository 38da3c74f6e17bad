"""Shards: a dataset in files of a fixed number of samples each, every one of which proves itself.

Shard k holds samples k·n … (k + 1)·n − 1. Sample i has the seed of (run seed, i), so a shard is the same
whoever draws it, when, and beside which others. A file appears whole or not at all (temporary file, fsync,
rename), and carries a checksum over everything in it and a digest of the settings it was drawn with. So the
files alone say what is done: whoever finds a folder, after whatever happened, knows what to keep and what to
draw.

In a file, one row per sample, by rising index:

    samples       [n, *shape], in the chain's dtype
    index, seeds  [n]
    labels        [n], if the samples have any
    calls, evaluations  [n]: what each sample cost

A sample that broke (NaN) is left out of its shard, which says so; drawing the shard again draws what it lacks.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch
from torch import Tensor

from foresample.contracts import Target
from foresample.core.noise import seeds_of
from foresample.engine import Engine
from foresample.engine.slots import Finished
from foresample.faults import NO_FAULT, end_error, fault_error, fault_step

_WRITING = 2  # full shards that may wait for the disk before drawing does


@dataclass(frozen=True)
class Plan:
    """What goes where."""

    out: Path
    count: int
    shard: int
    """Samples of a shard."""
    seed: int
    labels: tuple[int, ...] | None
    """Taken in turn: sample i has labels[i % len(labels)]."""
    digest: str
    """Of all settings that decide what is drawn."""

    @property
    def shards(self) -> int:
        return -(-self.count // self.shard)

    def size(self, number: int) -> int:
        return min(self.shard, self.count - number * self.shard)

    def index(self, number: int) -> Tensor:
        first = number * self.shard
        return torch.arange(first, first + self.size(number))

    def seeds(self, number: int) -> Tensor:
        return seeds_of(self.seed, self.size(number), number * self.shard)

    def path(self, number: int) -> Path:
        return self.out / f"shard-{number:05d}.safetensors"


@dataclass(frozen=True)
class Failure:
    """A sample that broke."""

    index: int
    seed: int
    step: int
    """Where NaN or infinity was first seen; N if that is the finished sample."""
    error: str


@dataclass(frozen=True)
class Entry:
    """What a shard's file holds, without the samples."""

    number: int
    samples: int
    calls: int
    evaluations: int
    failures: tuple[Failure, ...]
    sha256: str


@dataclass(frozen=True)
class Shard:
    """A shard's file, read and verified."""

    entry: Entry
    done: Finished
    digest: str
    """Of the settings it was drawn with."""


@dataclass(frozen=True)
class Progress:
    """How far a worker is."""

    worker: int
    samples: int
    calls: int
    """Of those samples: finished, but in shards that are not written yet."""
    written: tuple[Entry, ...]
    """Shards written since the last word."""


# ---------------------------------------------------------------- files


def write_atomically(path: Path, data: bytes) -> None:
    """The file is there whole, or as it was before, even if the machine stops meanwhile."""
    temporary = path.with_name(f".{path.name}.{uuid4().hex}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
    except BaseException as error:
        temporary.unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise OSError(
                f"cannot write {path} ({error.strerror}): see to that and run the same command again; "
                "what was written before is kept"
            ) from None
        raise


def write_shard(plan: Plan, number: int, done: Finished, failures: tuple[Failure, ...]) -> Entry:
    """These samples, in order, as the shard's file."""
    tensors = {
        "samples": done.x,
        "index": done.index,
        "seeds": plan.seeds(number)[done.index - number * plan.shard],
        "calls": done.calls,
        "evaluations": done.evaluations,
    }
    if plan.labels is not None:
        tensors["labels"] = torch.tensor(plan.labels)[done.index % len(plan.labels)]
    tensors = {name: value.cpu().contiguous() for name, value in tensors.items()}
    about = {"number": number, "settings": plan.digest, "failures": [asdict(f) for f in failures]}
    sha256 = _checksum(about, tensors)
    # One key: the file's bytes would depend on the order of several.
    metadata = {"foresample": json.dumps({**about, "sha256": sha256}, sort_keys=True)}
    write_atomically(plan.path(number), _safetensors().save(tensors, metadata))
    return _entry(number, done, failures, sha256)


def read_shard(path: Path) -> Shard | None:
    """The shard in this file; None if there is none, or one that is torn or corrupt."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, "pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            about = json.loads(file.metadata()["foresample"])
        sha256 = about.pop("sha256")
        if sha256 != _checksum(about, tensors):
            return None
    except (SafetensorError, OSError, KeyError, TypeError, ValueError):
        return None
    index = tensors["index"]
    costs = tensors["calls"], tensors["evaluations"]
    done = Finished(index, tensors["samples"], *costs, torch.full_like(index, NO_FAULT))
    failures = tuple(Failure(**f) for f in about["failures"])
    return Shard(_entry(about["number"], done, failures, sha256), done, about["settings"])


def read_planned(plan: Plan, number: int) -> Shard | None:
    """What this shard of the plan has so far."""
    shard = read_shard(plan.path(number))
    if shard is None or shard.entry.number != number:
        return None
    if shard.digest != plan.digest:
        raise ValueError(
            f"{plan.path(number)} is sound, but was drawn with other settings: choose another folder"
        )
    return shard


def _entry(number: int, done: Finished, failures: tuple[Failure, ...], sha256: str) -> Entry:
    costs = int(done.calls.sum()), int(done.evaluations.sum())
    return Entry(number, len(done.index), *costs, failures, sha256)


def _checksum(about: dict[str, Any], tensors: dict[str, Tensor]) -> str:
    """SHA-256 of everything in a file."""
    sha256 = hashlib.sha256(json.dumps(about, sort_keys=True).encode())
    for name, value in sorted(tensors.items()):
        sha256.update(f"{name} {value.dtype} {list(value.shape)}".encode())
        sha256.update(value.view(torch.uint8).numpy().data)
    return sha256.hexdigest()


def _safetensors() -> Any:
    try:
        import safetensors.torch
    except ImportError:
        raise ImportError("datasets are written as safetensors: pip install 'foresample[models]'") from None
    return safetensors.torch


# ---------------------------------------------------------------- drawing


class _Filling:
    """A shard under way: what its file had, and what has come since, each in its place."""

    def __init__(self, plan: Plan, number: int, target: Target) -> None:
        self.plan, self.number, self.steps = plan, number, len(target.std)
        self.index, self.seeds, size = plan.index(number), plan.seeds(number), plan.size(number)
        self.x = torch.empty((size, *target.shape), dtype=target.std.dtype)
        self.calls_of, self.evaluations_of = (torch.zeros(size, dtype=torch.int64) for _ in range(2))
        self.has = torch.zeros(size, dtype=torch.bool)
        kept = read_planned(plan, number)
        self.file = None if kept is None else kept.entry
        if kept is not None:
            self._put(kept.done)
        self.waiting = self.index[~self.has], self.seeds[~self.has]
        self.left = len(self.waiting[0])
        self.samples, self.calls = 0, 0
        self.failures: list[Failure] = []

    def _put(self, done: Finished) -> None:
        place = done.index - self.index[0]
        self.x[place], self.calls_of[place], self.evaluations_of[place] = done.x, done.calls, done.evaluations
        self.has[place] = True

    def add(self, done: Finished) -> None:
        """Samples of this shard, finished or broken."""
        self.left -= len(done.index)
        good = torch.isfinite(done.x.flatten(1)).all(1) & (done.fault == NO_FAULT)
        self.failures += [self._failure(done, i) for i in (~good).nonzero().flatten().tolist()]
        done = _only(done, good)
        self._put(done)
        self.samples += len(done.index)
        self.calls += int(done.calls.sum())

    def _failure(self, done: Finished, i: int) -> Failure:
        index, fault = int(done.index[i]), int(done.fault[i])
        seed = int(self.seeds[index - self.index[0]])
        if fault == NO_FAULT:
            return Failure(index, seed, self.steps, str(end_error(index)))
        return Failure(index, seed, fault_step(fault), str(fault_error(fault, index)))

    def write(self) -> Entry:
        """All there is of it, as its file; a file that has it all already stays."""
        if self.file is not None and not self.samples and not self.failures:
            return self.file
        self.failures.sort(key=lambda failure: failure.index)
        fault = torch.full_like(self.index, NO_FAULT)
        done = Finished(self.index, self.x, self.calls_of, self.evaluations_of, fault)
        return write_shard(self.plan, self.number, _only(done, self.has), tuple(self.failures))


def draw_shards(engine: Engine, plan: Plan, numbers: Iterator[int], worker: int = 0) -> Iterator[Progress]:
    """Draw what these shards lack and write each as soon as it is full, while the next are drawn.

    The next number is asked for when a slot is free for it: slots do not run empty between shards. If drawing
    stops early, by whatever is not the death of the process, finished samples of unfinished shards are written
    too.
    """
    under_way: dict[int, _Filling] = {}
    writing: dict[int, Future[Entry]] = {}

    def parts() -> Iterator[tuple[Tensor, Tensor]]:
        for number in numbers:
            shard = under_way[number] = _Filling(plan, number, engine.target)
            yield shard.waiting

    def progress(most: int) -> Progress:
        """Full shards go to the writer; those written leave, and at most so many stay with it."""
        for number, shard in under_way.items():
            if not shard.left and number not in writing:
                writing[number] = writer.submit(shard.write)
        waited = list(writing)[: max(0, len(writing) - most)]
        gone = [number for number, entry in writing.items() if number in waited or entry.done()]
        written = tuple(writing[number].result() for number in gone)
        for number in gone:
            del under_way[number], writing[number]
        samples, calls = (sum(getattr(s, n) for s in under_way.values()) for n in ("samples", "calls"))
        return Progress(worker, samples, calls, written)

    with ThreadPoolExecutor(1, thread_name_prefix="shards") as writer:
        try:
            for done in engine.draw(parts()):
                done = Finished(*(value.cpu() for value in vars(done).values()))
                number = done.index // plan.shard
                for n in set(number.tolist()):
                    under_way[n].add(_only(done, number == n))
                yield progress(_WRITING)
            yield progress(0)
        except BaseException:
            for n, shard in under_way.items():
                if shard.samples and n not in writing:
                    with suppress(OSError):  # the disk may be what is wrong
                        shard.write()
            raise


def _only(done: Finished, which: Tensor) -> Finished:
    return done if which.all() else Finished(*(value[which] for value in vars(done).values()))
