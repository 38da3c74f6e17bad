"""Datasets: many samples into a folder, by one process or many, with nothing lost and nothing drawn twice.

    shard-00000.safetensors …   the samples (`shards`)
    manifest.json               settings, versions, costs, what broke, the law check; written atomically
    .lock                       held by the run under way; the kernel lets go of it when the process dies

Sample i depends on the run's seed, on i and on the settings, so a dataset is the same whatever the number of
workers, slots and restarts. The same call on the same folder **resumes**: every shard is verified; what those
lack that are torn, corrupt or short of samples is drawn, the others are kept. Other settings are refused.

How many rounds a sample needs depends on the sample, so those finished first are a biased selection. A run that is to
stop begins no more samples and finishes those under way: they are the next in order, and fair. A run that is cut keeps
what is finished; of an unfinished dataset only the samples before the first that is missing are handed out.

A sample that breaks (NaN) is drawn once more at the end; if it breaks again, the rest is kept and the manifest
lists it by index, seed and step. The next run tries again.

Shards are drawn by `shards.draw_shards`, here in this process; `cluster` has it run by many workers on Ray.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import socket
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from time import perf_counter
from typing import Any, Protocol

import torch
from torch import Tensor

from foresample.contracts import Target, at_least_one, require_target, seed_number
from foresample.core.noise import seeds_of
from foresample.datasets.manifest import (
    Status,
    fair_still,
    law_that_holds,
    plan_of,
    read_manifest,
    summary,
)
from foresample.datasets.shards import (
    Entry,
    Failure,
    Plan,
    Progress,
    Shard,
    Unsound,
    draw_shards,
    read_shard,
    remove_left_overs,
    shard_number,
    write_atomically,
)
from foresample.engine import Engine
from foresample.provenance import provenance
from foresample.schema import open_plain
from foresample.selftest import SamplesLaw, samples_law
from foresample.sizes import require_disk, require_memory, round_bytes, state_bytes

MOST_SHARDS = 10**6
"""Files of a folder: beyond that file systems and manifests get slow."""
Factory = Callable[[], Target]
"""Makes the target where it is needed; it can be pickled, so that a worker can do so."""
Stop = Callable[[], bool]
"""Asked before samples are begun: shall no more be?"""


@dataclass(frozen=True)
class Dataset:
    """A folder of samples, and what its manifest says."""

    out: Path
    manifest: dict[str, Any]
    unsound: dict[str, str] = field(default_factory=dict)
    """Shards that do not count, and why; as found by `inspect_dataset`."""

    @property
    def complete(self) -> bool:
        return self.manifest["costs"]["samples"] == self.manifest["settings"]["count"]

    @property
    def in_order(self) -> int:
        """Samples before the first that is missing."""
        return self.manifest["in_order"]

    @property
    def fair(self) -> int:
        """Number of samples, from the first on, each of which was decided on before it was drawn.

        All of them, if the dataset is complete or was stopped by `stop`; else the last few of `in_order` are there
        because they were done in time. In a complete dataset, whose number was fixed beforehand, they are independent
        samples of the right distribution. If the number was decided on the way, by `stop`, being taken says nothing
        about a sample, but the number may depend on the samples before it: sums over the samples have the right
        expectation, and means are biased by a term of order 1/number (docs/theory.md, "Finishing first is not fair").
        """
        return self.manifest["fair"]

    def samples(self, *, everything: bool = False) -> Iterator[Tensor]:
        """[n, *shape], shard by shard, by rising index.

        Of a dataset that is not complete, only those before the first that is missing, the first `fair` of which have
        the right law. The others are there because they needed few rounds, or because they did not break, which makes
        them a **biased** selection; `everything` hands them out all the same.
        """
        if not everything and self.fair < self.manifest["costs"]["samples"]:
            warnings.warn(
                f"{self.out} is not complete: of its {self.manifest['costs']['samples']} samples only the first "
                f"{self.in_order} are handed out, and of these the first {self.fair} are known to be fair; the others "
                "are there because they were done in time, a biased selection: run the same command again to "
                "complete it, or ask for samples(everything=True)",
                stacklevel=2,
            )
        return self._parts(everything)

    def _parts(self, everything: bool) -> Iterator[Tensor]:
        plan = plan_of(self.out, self.manifest["settings"])
        left = None if everything else self.in_order
        for file in self.manifest["shards"]:
            if left == 0:
                return
            number = shard_number(file["file"])
            assert number is not None
            x = _sound(plan, number).done.x[:left]
            left = None if left is None else left - len(x)
            yield x

    @property
    def failures(self) -> list[Failure]:
        """Samples that broke."""
        return [Failure(**failure) for failure in self.manifest["failures"]]

    @property
    def law(self) -> SamplesLaw | None:
        """The law check, if one was asked for and the dataset is complete."""
        law = self.manifest["law"]
        return None if law is None else SamplesLaw(**law)


class Workers(Protocol):
    """Those who draw: this process, or workers on Ray."""

    def describe(self) -> dict[str, Any]:
        """What the target and the engine are, for the settings."""

    def draw(self, plan: Plan, numbers: Iterable[int], stop: Stop | None) -> Iterator[Progress]:
        """Draw these shards, or as much of them as is begun before `stop`."""

    def law(self, plan: Plan, sequential: int) -> SamplesLaw:
        """Compare the whole dataset with so many sequential samples; refused while any sample is missing."""


class LocalWorker:
    """One process with one engine: all there is in a plain run, and each worker of a cluster."""

    def __init__(self, target: Target | Factory, engine: Mapping[str, Any]) -> None:
        made = target if isinstance(target, Target) or not callable(target) else target()
        require_target(made)
        self.engine = Engine(made, **engine)
        slots, window, std = self.engine.slots, self.engine.how.window, made.std
        require_memory(
            round_bytes(slots, window, state_bytes(made.shape, std.dtype)),
            f"{slots} samples under way at a time, each with a window of {window},",
            "give fewer slots or a smaller window",
            std.device,
        )

    def describe(self) -> dict[str, Any]:
        std = self.engine.target.std
        return {
            "shape": list(self.engine.target.shape),
            "steps": len(std),
            "dtype": str(std.dtype).removeprefix("torch."),
            "std": hashlib.sha256(std.cpu().view(torch.uint8).numpy().data).hexdigest()[:16],
            "method": re.sub(r" at 0x[0-9a-f]+", "", self.engine.method),
        }

    def draw(
        self, plan: Plan, numbers: Iterable[int], stop: Stop | None = None, worker: int = 0
    ) -> Iterator[Progress]:
        return draw_shards(self.engine, plan, iter(numbers), worker, stop)

    def law(self, plan: Plan, sequential: int) -> SamplesLaw:
        seeds = seeds_of(plan.seed, sequential, plan.count)  # those behind the dataset's
        return samples_law(self.engine.target, _whole(plan), seeds, self.engine.slots)


def generate(
    target: Target | Factory,
    count: int,
    *,
    out: str | Path,
    window: int,
    slots: int = 64,
    shard: int = 1000,
    seed: int = 0,
    labels: Sequence[int] | Tensor | None = None,
    about: Mapping[str, Any] | None = None,
    law: int = 0,
    ray: str | None = None,
    cpus: int | None = None,
    progress: Callable[[Status], None] | None = None,
    stop: Stop | None = None,
    **engine: Any,
) -> Dataset:
    """Draw a dataset into a folder, or go on with one; see the module.

    Args:
        target: the chain to sample, or a function without arguments that makes it.
        count: samples of the dataset.
        out: the folder; on a cluster, one that all machines share.
        window: transitions drafted in a round.
        slots: samples under way at a time, in each worker.
        shard: samples of a file.
        seed: the run's seed, from which each sample's is derived.
        labels: written beside the samples and taken in turn: sample i has labels[i % len(labels)]. The target
            looks its own up by the sample's index.
        about: whatever else decides what is drawn (a model's name, a checksum of its weights): kept in the
            manifest, and compared when a run is resumed.
        law: compare the finished dataset with this many sequential samples (`samples_law`); one that lacks samples
            is not compared, for those that are there are a biased selection.
        ray: "auto" (a running cluster, or else one on this machine) or a cluster's address: run one worker per
            GPU there. Needs the extra foresample[ray] and a function that makes the target.
        cpus: on Ray, one worker per so many CPUs instead.
        progress: called as samples are finished.
        stop: asked before samples are begun. Once it says yes, no more are, those under way are finished, and the
            dataset so far is returned: a fair sample, unless an earlier run was cut (`Dataset.fair`). Not on Ray.
        **engine: drafter, block, recycle, graph: as for `Engine`.
    """
    count, shard = at_least_one("count", count), at_least_one("shard", shard)
    window, slots = at_least_one("window", window), at_least_one("slots", slots)
    files = -(-count // shard)
    if files > MOST_SHARDS:
        raise ValueError(
            f"{count} samples in shards of {shard} are {files} files, and a folder takes {MOST_SHARDS}: "
            "give a larger shard, or ask for fewer samples"
        )
    folder, how = Path(out), {"window": window, "slots": min(slots, count), **engine}
    if stop is not None and ray is not None:
        raise ValueError(
            "on Ray workers begin shards in no fixed order, so none can be stopped fairly: leave out stop"
        )
    turns = None if labels is None else tuple(int(label) for label in labels)
    if turns is not None and not turns:
        raise ValueError("labels is empty: give one or more, which are taken in turn, or leave it out")
    with _locked(folder), _workers(target, how, ray, cpus, folder) as workers:
        settings = {
            "count": count,
            "shard": shard,
            "seed": seed_number(seed),
            "labels": None if turns is None else list(turns),
            **workers.describe(),
            "window": window,  # as asked for: the engine cuts it to the chain
            **(about or {}),
        }
        settings = json.loads(json.dumps(settings))
        manifest = _open_manifest(folder, settings)
        plan = plan_of(folder, settings)
        _require_room(plan)
        run = _Run(plan, manifest, progress, stop)
        missing = count - run.found
        more = "make room, choose another folder, or ask for fewer samples"
        require_disk(missing * plan.sample_bytes, folder, f"{missing} samples", more)
        try:
            for _ in range(2):  # what breaks is tried twice
                if todo := run.unfinished():
                    for news in workers.draw(plan, todo, run.stop):
                        run.note(news)
            if law and not run.unfinished():
                run.manifest["law"] = asdict(workers.law(plan, min(law, count)))
        except BaseException:
            with suppress(OSError):  # without the last word of the manifest, the shards still say it all
                run.close()
            raise
        run.close(whole=True)
    return Dataset(folder, run.manifest)


def inspect_dataset(out: str | Path) -> Dataset:
    """What a folder holds, every shard verified. Writes nothing; a run may be under way."""
    folder = Path(out)
    manifest = read_manifest(folder)
    if manifest is None:
        raise FileNotFoundError(f"{folder} holds no manifest.json: not a folder of foresample generate")
    plan = plan_of(folder, manifest["settings"])
    _require_room(plan)
    entries, unsound = _survey(plan, _there(plan))
    now = summary(manifest["settings"], plan, entries)
    now |= {"fair": fair_still(manifest, plan, now), "law": law_that_holds(manifest, plan, now)}
    return Dataset(folder, {**manifest, **now}, unsound)


def _sound(plan: Plan, number: int) -> Shard:
    """A shard that was there before."""
    try:
        shard = read_shard(plan, number)
    except Unsound as error:
        raise ValueError(
            f"{plan.path(number)} does not count any more, {error}: run the same command again to have it drawn"
        ) from None
    if shard is None:
        raise ValueError(f"{plan.path(number)} is gone: run the same command again to have it drawn")
    return shard


def _whole(plan: Plan) -> Iterator[Tensor]:
    """All samples of the plan; the law is a matter of all of them, or of a prefix, never of a selection."""
    for number in range(plan.shards):
        shard = _sound(plan, number)
        if shard.entry.samples < plan.size(number):
            missing = number * plan.shard + shard.entry.in_order
            raise ValueError(
                f"sample {missing} is missing in {plan.out}, and without it the others are a biased selection, "
                "whose law is not checked: run the same command again to complete the dataset"
            )
        yield shard.done.x


def _require_room(plan: Plan) -> None:
    """Refuse shards that cannot be held; one at a time is."""
    size = plan.size(0)
    require_memory(size * plan.sample_bytes, f"a shard of {size} samples", "give a smaller shard")


# ---------------------------------------------------------------- the folder


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """The folder is there, can be written, and is ours as long as this process lives."""
    import fcntl  # where there is none, only datasets are missed

    path = folder / ".lock"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OSError(f"cannot write to {folder} ({error.strerror}): choose another folder") from None
    try:
        lock = os.fdopen(open_plain(path, os.O_RDWR | os.O_CREAT, follow=False), "r+b")
    except OSError as error:
        raise OSError(f"cannot write {path} ({error.strerror}): choose another folder") from None
    with lock:
        other = lock.read(200).decode(errors="replace").strip()
        if os.fstat(lock.fileno()).st_nlink > 1 or not re.match(
            r"process \d|$", other
        ):  # nothing is lost by asking
            raise OSError(f"{path} was not written by foresample: choose another folder")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise BlockingIOError(
                f"another run ({other}) is writing to {folder}: wait for it, or choose another folder"
            ) from None
        with suppress(OSError):  # who we are is a courtesy
            os.ftruncate(lock.fileno(), 0)
            os.pwrite(lock.fileno(), f"process {os.getpid()} on {socket.gethostname()}".encode(), 0)
        remove_left_overs(folder)
        try:
            yield
        finally:
            with suppress(OSError):  # of workers that were killed as they wrote
                remove_left_overs(folder)


def _workers(
    target: Target | Factory, how: Mapping[str, Any], ray: str | None, cpus: int | None, folder: Path
) -> AbstractContextManager[Workers]:
    if ray is None:
        if cpus is not None:
            raise ValueError("cpus is a matter of Ray's workers: give ray='auto' as well, or leave it out")
        return _alone(target, how)
    if isinstance(target, Target) or not callable(target):
        raise TypeError(
            "on Ray every worker makes its own target: pass a function that does, not the target itself"
        )
    from foresample.datasets.cluster import cluster

    return cluster(ray, target, how, None if cpus is None else at_least_one("cpus", cpus), folder)


@contextmanager
def _alone(target: Target | Factory, how: Mapping[str, Any]) -> Iterator[LocalWorker]:
    yield LocalWorker(target, how)


def _there(plan: Plan) -> list[int]:
    """Shards of the plan that have a file: however many there are to be, those are looked at."""
    with os.scandir(plan.out) as found:
        numbers = [shard_number(entry.name) for entry in found]
    return sorted(number for number in numbers if number is not None and number < plan.shards)


def _survey(plan: Plan, numbers: Iterable[int]) -> tuple[dict[int, Entry], dict[str, str]]:
    """Those of these shards that are there and sound, and why others do not count."""
    entries, unsound = dict[int, Entry](), dict[str, str]()
    for number in numbers:  # one at a time in memory
        try:
            shard = read_shard(plan, number)
        except Unsound as error:
            unsound[plan.path(number).name] = str(error)
        else:
            if shard is not None:
                entries[number] = shard.entry
    return entries, unsound


# ---------------------------------------------------------------- the manifest


def _open_manifest(folder: Path, settings: dict[str, Any]) -> dict[str, Any]:
    """The folder's manifest, if its settings are ours; a new one if there is none."""
    manifest = read_manifest(folder)
    if manifest is None:
        return {"kind": "dataset", "settings": settings, "runs": []}
    theirs = manifest["settings"]
    names = [n for n in {**theirs, **settings} if theirs.get(n) != settings.get(n)]
    if names:
        told = ", ".join(
            f"{n:.50} {theirs.get(n)!r:.100} there and {settings.get(n)!r:.100} here" for n in names[:5]
        )
        raise ValueError(
            f"{folder} holds a dataset with other settings ({told}): give the same ones to go on with it, "
            "or choose another folder"
        )
    return manifest


def _peak_mib() -> float:
    """The most memory this process has held."""
    import resource

    unit = 2**20 if sys.platform == "darwin" else 2**10
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit


class _Run:
    """A run under way: which shards there are, and what the manifest says of it."""

    def __init__(
        self,
        plan: Plan,
        manifest: dict[str, Any],
        progress: Callable[[Status], None] | None,
        stop: Stop | None,
    ) -> None:
        self.plan, self.progress, self.stop = plan, progress, stop
        self.entries, _ = _survey(plan, _there(plan))
        self.found, _ = self.written = self._totals()
        self.open: dict[int, tuple[int, int]] = {}
        self.clock = perf_counter()
        self.this = {
            **provenance(),
            "started": datetime.now(UTC).isoformat(timespec="seconds"),
            "found": self.found,
            "drawn": None,
            "seconds": None,
            "peak_mib": None,
        }
        now = summary(manifest["settings"], plan, self.entries)
        told = {"law": law_that_holds(manifest, plan, now), "fair": fair_still(manifest, plan, now)}
        self.manifest = {**manifest, **told, "runs": [*manifest["runs"], self.this]}
        self._write()
        self._tell()

    def unfinished(self) -> list[int]:
        """Shards that lack samples."""
        sizes = {number: entry.samples for number, entry in self.entries.items()}
        return [n for n in range(self.plan.shards) if sizes.get(n, 0) < self.plan.size(n)]

    def note(self, news: Progress) -> None:
        """What a worker says."""
        if news.written:
            self.entries |= {entry.number: entry for entry in news.written}
            self.written = self._totals()
        self.open[news.worker] = news.samples, news.calls
        self._tell()

    def close(self, *, whole: bool = False) -> None:
        """The last word. `whole`: every sample that was begun is finished.

        Those begun are the next in order, so if all found were fair, all there are now are.
        """
        open_ones = {*_there(self.plan)} & {*self.unfinished()}
        self.entries |= _survey(self.plan, sorted(open_ones))[0]  # those written when drawing stopped
        drawn, seconds = self._totals()[0] - self.found, perf_counter() - self.clock
        self.this |= {"drawn": drawn, "seconds": seconds, "peak_mib": _peak_mib()}
        now = summary(self.manifest["settings"], self.plan, self.entries)
        if whole and self.manifest["fair"] == self.found and now["in_order"] == now["costs"]["samples"]:
            self.manifest["fair"] = now["in_order"]
        self.manifest["fair"] = fair_still(self.manifest, self.plan, now)
        self._write()

    def _totals(self) -> tuple[int, int]:
        """Samples written, and their calls."""
        entries = self.entries.values()
        return sum(entry.samples for entry in entries), sum(entry.calls for entry in entries)

    def _write(self) -> None:
        self.manifest |= summary(self.manifest["settings"], self.plan, self.entries)
        data = json.dumps(self.manifest, indent=2) + "\n"
        write_atomically(self.plan.out / "manifest.json", data.encode())

    def _tell(self) -> None:
        if self.progress is not None:
            parts = [self.written, *self.open.values()]
            samples, calls = sum(s for s, _ in parts), sum(c for _, c in parts)
            self.progress(Status(self.plan.count, self.manifest["settings"]["steps"], samples, calls))
