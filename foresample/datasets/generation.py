"""Datasets: many samples into a folder, by one process or many, with nothing lost and nothing drawn twice.

    shard-00000.safetensors …   the samples (`shards`)
    manifest.json               settings, fingerprint, versions, costs, what broke, the law check; written atomically
    .lock, .owner               the run under way (`folder`)

Sample i depends on the run's seed, on i and on the settings, so a dataset is the same whatever the number of
workers, slots and restarts. The same call on the same folder **resumes**: every shard is verified; what those
lack that are torn, corrupt or short of samples is drawn, the others are kept. Other settings are refused, and so is
another target, by its fingerprint. Everything is checked before the manifest is written, and a manifest without any
shard binds nobody.

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
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import asdict, dataclass, field, fields, replace
from datetime import UTC, datetime
from functools import cache
from operator import index
from pathlib import Path
from time import perf_counter
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from foresample.contracts import Target, at_least_one, require_target, seed_number
from foresample.core.noise import seeds_of
from foresample.core.round import can_draft
from foresample.datasets.fingerprint import Fingerprint, difference, fingerprint, joined
from foresample.datasets.folder import claim_folder
from foresample.datasets.manifest import (
    DatasetSettings,
    Status,
    fair_still,
    law_that_holds,
    plan_of,
    read_manifest,
    summary,
)
from foresample.datasets.shards import (
    Draws,
    Entry,
    Failure,
    Plan,
    Progress,
    Shard,
    Unsound,
    draw_shards,
    read_shard,
    shard_name,
    shard_number,
)
from foresample.engine import Engine
from foresample.engine.sequential import SequentialDraws
from foresample.engine.tuning import Tuning, measure
from foresample.provenance import provenance
from foresample.selftest import SamplesLaw, samples_law
from foresample.settings import Settings
from foresample.sizes import require_disk, require_memory, round_bytes, state_bytes
from foresample.text import printable

MOST_SHARDS = 10**6
"""Files of a folder: beyond that file systems and manifests get slow."""
Factory = Callable[[], Target]
"""Makes the target where it is needed; it can be pickled, so that a worker can do so."""
Stop = Callable[[], bool]
"""Asked before samples are begun: shall no more be?"""
Window = int | Literal["auto"] | Tuning
_OURS = {f.name for f in fields(DatasetSettings)} - {"model", "target"} | {"std"}
"""Settings that `generate` sets itself."""


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
                f"{printable(self.out)} is not complete: of its {self.manifest['costs']['samples']} samples only the "
                f"first {self.in_order} are handed out, and of these the first {self.fair} are known to be fair; the "
                "others are there because they were done in time, a biased selection: run the same command again to "
                "complete it, or ask for samples(everything=True)",
                stacklevel=2,
            )
        return self._parts(everything)

    def _parts(self, everything: bool) -> Iterator[Tensor]:
        plan = plan_of(self.out, self.manifest["settings"], self.manifest.get("fingerprint"))
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


@dataclass(frozen=True)
class Description:
    """What a target is and how it is drawn, found before anything is written."""

    settings: dict[str, Any]
    fingerprint: Fingerprint
    choice: str | None
    """Why this window, if it was measured."""


class Workers(Protocol):
    """Those who draw: this process, or workers on Ray."""

    def describe(self, window: Window, count: int, say: Callable[[str], None]) -> Description:
        """Describe the target; "auto" measures the window here, and `say` is called with what is measured."""

    def draw(self, plan: Plan, numbers: Iterable[int], stop: Stop | None) -> Iterator[Progress]:
        """Draw these shards, or as much of them as is begun before `stop`."""

    def law(self, plan: Plan, sequential: int) -> SamplesLaw:
        """Compare the whole dataset with so many sequential samples; refused while any sample is missing."""


class LocalWorker:
    """One process with one target: all there is in a plain run, and each worker of a cluster."""

    def __init__(self, target: Target | Factory, how: Mapping[str, Any]) -> None:
        """`how`: slots, and the options of `Engine` beside the window."""
        made = target if isinstance(target, Target) or not callable(target) else target()
        require_target(made)
        self.target, self.how, self.slots = made, how, how["slots"]
        self.fingerprint = cache(lambda count: fingerprint(made, count))
        self._draws = cache(self._made)

    def describe(self, window: Window, count: int, say: Callable[[str], None]) -> Description:
        std, choice = self.target.std, None
        if not isinstance(window, int):
            window, choice = self._choose(window, say)
        method = self._draws(window).method
        settings = {
            "shape": list(self.target.shape),
            "steps": len(std),
            "dtype": str(std.dtype).removeprefix("torch."),
            "std": hashlib.sha256(std.cpu().view(torch.uint8).numpy().data).hexdigest()[:16],
            "method": re.sub(r" at 0x[0-9a-f]+", "", method),
            "window": window,  # as asked for: the engine cuts it to the chain
        }
        return Description(settings, self.fingerprint(count), choice)

    def draw(
        self, plan: Plan, numbers: Iterable[int], stop: Stop | None = None, worker: int = 0
    ) -> Iterator[Progress]:
        self._require_target_of(plan)
        return draw_shards(self._draws(plan.window), plan, iter(numbers), worker, stop)

    def law(self, plan: Plan, sequential: int) -> SamplesLaw:
        self._require_target_of(plan)
        seeds = seeds_of(plan.seed, sequential, plan.count)  # those behind the dataset's
        return samples_law(self.target, _whole(plan), seeds, self.slots)

    def _choose(self, window: Literal["auto"] | Tuning, say: Callable[[str], None]) -> tuple[int, str]:
        """The fastest window, 0 if the sequential sampler is faster, and why."""
        if window == "auto":
            if not can_draft(self.target):
                return 0, "Sample sequentially: this chain has no transition that can be drafted"
            self._require_memory(1)
            window = measure(self.target, Settings.of(self.how), progress=say)
        return window.window_for(len(self.target.std), self.slots) or 0, window.advice

    def _made(self, window: int) -> Draws:
        self._require_memory(min(window, max(1, len(self.target.std) - 1)))
        if not window:
            options = {name: self.how[name] for name in ("graph", "look") if name in self.how}
            return SequentialDraws(self.target, self.slots, **options)
        return Engine(self.target, window=window, **self.how)

    def _require_memory(self, window: int) -> None:
        std = self.target.std
        require_memory(
            round_bytes(self.slots, window, state_bytes(self.target.shape, std.dtype)),
            f"{self.slots} samples under way at a time, each with a window of {window},",
            "give fewer slots or a smaller window",
            std.device,
        )

    def _require_target_of(self, plan: Plan) -> None:
        """Refuse to draw for a dataset of another target: workers make their own."""
        if plan.fingerprint is None:
            return
        if other := difference(plan.fingerprint, self.fingerprint(plan.count)):
            raise ValueError(
                f"a worker made another target than the dataset's ({other}): give all machines the same code and files"
            )


def generate(
    target: Target | Factory,
    count: int,
    *,
    out: str | Path,
    window: Window = "auto",
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
        window: transitions drafted in a round. "auto" measures which window is fastest here (`tune`) and draws
            sequentially if none is faster; so does a tuning that was made before, without measuring. The manifest keeps
            the answer, and a run that goes on keeps to it.
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
        **engine: drafter, block, recycle, graph, look: as for `Engine`.
    """
    count, shard = at_least_one("count", count), at_least_one("shard", shard)
    slots = min(at_least_one("slots", slots), count)
    if window != "auto" and not isinstance(window, Tuning):
        window = at_least_one("window", window)
    files = -(-count // shard)
    if files > MOST_SHARDS:
        raise ValueError(
            f"{count} samples in shards of {shard} are {files} files, and a folder takes {MOST_SHARDS}: "
            "give a larger shard, or ask for fewer samples"
        )
    folder, how = Path(out), {"slots": slots, **engine}
    if stop is not None and ray is not None:
        raise ValueError(
            "on Ray workers begin shards in no fixed order, so none can be stopped fairly: leave out stop"
        )
    turns, own = None if labels is None else _labels(labels), _own_settings(about)
    with claim_folder(folder) as claim, _workers(target, how, ray, cpus, folder) as workers:
        begun = _begun(folder)
        kept = None
        if window == "auto" and begun is not None:
            window = begun["settings"]["window"]  # 0 if it was begun sequentially
            kept = f"{f'Window {window}' if window else 'Sequential sampling'} is kept: this dataset was begun with it"

        def say(what: str) -> None:
            if progress is not None:
                progress(Status(count, 1, 0, 0, doing=what))

        found = workers.describe(window, count, say)
        settings = {
            "count": count,
            "shard": shard,
            "seed": seed_number(seed),
            "labels": turns,
            **found.settings,
            **own,
        }
        manifest = _open_manifest(folder, begun, settings, found)
        plan = replace(plan_of(folder, settings, manifest["fingerprint"]), claim=claim)
        _require_room(plan)
        run = _Run(plan, manifest, progress, stop, kept or found.choice or "")
        missing = count - run.found
        more = "make room, choose another folder, or ask for fewer samples"
        require_disk(missing * plan.sample_bytes, folder, f"{missing} samples", more)
        run.begin()
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
        run.require_all_there()
    return Dataset(folder, run.manifest)


def inspect_dataset(out: str | Path) -> Dataset:
    """What a folder holds, every shard verified. Writes nothing; a run may be under way."""
    folder = Path(out)
    manifest = read_manifest(folder)
    if manifest is None:
        raise FileNotFoundError(
            f"{printable(folder)} holds no manifest.json: not a folder of foresample generate"
        )
    plan = plan_of(folder, manifest["settings"], manifest.get("fingerprint"))
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
            f"{printable(plan.path(number))} does not count any more, {error}: run the same command again to have it "
            "drawn"
        ) from None
    if shard is None:
        raise ValueError(f"{printable(plan.path(number))} is gone: run the same command again to have it drawn")
    return shard


def _whole(plan: Plan) -> Iterator[Tensor]:
    """All samples of the plan; the law is a matter of all of them, or of a prefix, never of a selection."""
    for number in range(plan.shards):
        shard = _sound(plan, number)
        if shard.entry.samples < plan.size(number):
            missing = number * plan.shard + shard.entry.in_order
            raise ValueError(
                f"sample {missing} is missing in {printable(plan.out)}, and without it the others are a biased "
                "selection, whose law is not checked: run the same command again to complete the dataset"
            )
        yield shard.done.x


def _require_room(plan: Plan) -> None:
    """Refuse shards that cannot be held; one at a time is."""
    size = plan.size(0)
    require_memory(size * plan.sample_bytes, f"a shard of {size} samples", "give a smaller shard")


def _labels(labels: Sequence[int] | Tensor) -> list[int]:
    try:
        turns = [index(label) for label in labels]
    except TypeError as error:
        raise TypeError(f"labels are whole numbers, one for each sample in turn ({error})") from None
    if not turns:
        raise ValueError("labels is empty: give one or more, which are taken in turn, or leave it out")
    return turns


def _own_settings(about: Mapping[str, Any] | None) -> dict[str, Any]:
    """The caller's own settings, as a manifest keeps them."""
    own = dict(about or {})
    taken = sorted(_OURS & own.keys())
    if taken:
        raise ValueError(
            f"about must not have {', '.join(taken)}, which generate sets itself: choose another name"
        )
    for name in ("model", "target"):
        if not isinstance(own.get(name), str | None):
            raise TypeError(f"about's {name} must be a string, not {type(own[name]).__name__}")
    try:
        return json.loads(json.dumps(own, allow_nan=False))
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"about cannot be kept as JSON ({error}): give strings, finite numbers, lists and dictionaries"
        ) from None


# ---------------------------------------------------------------- the folder


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


def _begun(folder: Path) -> dict[str, Any] | None:
    """The manifest of the dataset begun in a folder; one without any shard binds nobody."""
    manifest = read_manifest(folder)
    with os.scandir(folder) as found:
        return manifest if any(shard_number(entry.name) is not None for entry in found) else None


def _open_manifest(
    folder: Path, begun: dict[str, Any] | None, settings: dict[str, Any], found: Description
) -> dict[str, Any]:
    """The folder's manifest, if its settings and its target are ours; a new one if there is none."""
    if begun is None:
        new = {"settings": settings, "fingerprint": found.fingerprint, "choice": found.choice}
        return {"kind": "dataset", **new, "runs": []}
    theirs, ours, name = _flat(begun["settings"]), _flat(settings), printable(folder)
    names = [n for n in {**theirs, **ours} if theirs.get(n) != ours.get(n)]
    if names:
        told = ", ".join(
            f"{printable(n):.50} {theirs.get(n)!r:.100} there and {ours.get(n)!r:.100} here" for n in names[:5]
        )
        raise ValueError(
            f"{name} holds a dataset with other settings ({told}): give the same ones to go on with it, "
            "or choose another folder"
        )
    if begun.get("fingerprint") is None:
        raise ValueError(
            f"{name} holds a dataset of an earlier version, which kept no fingerprint of its target, so another target "
            "would not be noticed: choose another folder"
        )
    if other := difference(begun["fingerprint"], found.fingerprint):
        raise ValueError(
            f"{name} holds samples of another target ({other}): its code or its files have changed since then; "
            "restore them to go on with this dataset, or choose another folder"
        )
    return {**begun, "fingerprint": joined(begun["fingerprint"], found.fingerprint)}


def _flat(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings with those of an object by their own names, as scheduler.prediction_type."""
    parts = [
        {f"{name}.{key}": part for key, part in value.items()} if isinstance(value, dict) else {name: value}
        for name, value in settings.items()
    ]
    return {name: value for part in parts for name, value in part.items()}


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
        choice: str,
    ) -> None:
        self.plan, self.progress, self.stop, self.choice = plan, progress, stop, choice
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

    def begin(self) -> None:
        """Write the manifest; everything is checked by now."""
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

    def require_all_there(self) -> None:
        """Refuse to call a dataset drawn whose folder or files are gone."""
        assert self.plan.claim is not None
        self.plan.claim.require()
        gone = sorted({*self.entries} - {*_there(self.plan)})
        if gone:
            raise FileNotFoundError(
                f"{len(gone)} of the files of {printable(self.plan.out)} have gone since they were written "
                f"({shard_name(gone[0])} first): run the same command again to have them drawn"
            )

    def _totals(self) -> tuple[int, int]:
        """Samples written, and their calls."""
        entries = self.entries.values()
        return sum(entry.samples for entry in entries), sum(entry.calls for entry in entries)

    def _write(self) -> None:
        self.manifest |= summary(self.manifest["settings"], self.plan, self.entries)
        data = json.dumps(self.manifest, indent=2) + "\n"
        assert self.plan.claim is not None
        self.plan.claim.write("manifest.json", data.encode())

    def _tell(self) -> None:
        if self.progress is not None:
            parts = [self.written, *self.open.values()]
            samples, calls = sum(s for s, _ in parts), sum(c for _, c in parts)
            steps = self.manifest["settings"]["steps"]
            self.progress(Status(self.plan.count, steps, samples, calls, choice=self.choice))
