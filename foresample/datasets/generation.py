"""Datasets: many samples drawn into a folder, by one process or many, with none lost and none drawn twice.

    shard-00000.safetensors …   the samples (`shards`)
    manifest.json               settings, fingerprint, versions, costs, failures, distribution check; written atomically
    .lock, .owner               the run under way (`folder`)

Sample i depends on the run's seed, on i and on the settings, so a dataset is the same whatever the number of
workers, slots and restarts. The same call on the same folder **resumes**: every shard is verified, and samples that are
missing, torn or corrupt are drawn. Other settings are refused, and so is another target, by its fingerprint. Everything
is checked before the manifest is written, and a manifest without any shard is simply replaced.

How many rounds a sample needs depends on the sample, so those finished first are a biased selection. A run that is
asked to stop begins no more samples and finishes those under way: they are the next in order, and fair. A run that ends
with an error keeps its finished samples, and a killed one its finished shards; an incomplete dataset returns only the
samples before the first missing one.

A sample that breaks (NaN) is drawn once more at the end; if it breaks again, the rest is kept and the manifest
lists it by index, seed and step. The next run tries again.

`workers` draws the shards in this process; `cluster` has many workers do so on Ray.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import asdict, fields, replace
from datetime import UTC, datetime
from operator import index
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any, Unpack

from torch import Tensor

from foresample.checks.samples import can_fail, fewest_sequential
from foresample.contracts import Target, at_least_one, seed_number
from foresample.datasets.dataset import Dataset, require_room, shards_there, survey
from foresample.datasets.folder import claim_folder
from foresample.datasets.manifest import (
    Status,
    begun_manifest,
    plan_of,
    renewed,
    require_same,
)
from foresample.datasets.shards import DatasetSettings, Plan, shard_name
from foresample.datasets.workers import Factory, LocalWorker, Progress, Stop
from foresample.provenance import provenance
from foresample.settings import RunKeywords, Settings, Window
from foresample.sizes import require_disk, require_memory
from foresample.text import printable

if TYPE_CHECKING:
    from foresample.datasets.cluster import Cluster

MOST_SHARDS = 10**6
"""Most files in a folder: with more, file systems and manifests get slow."""
SLOTS = 64
"""Samples under way at a time in each worker, by default."""
_OURS = {f.name for f in fields(DatasetSettings)} - {"model", "target"} | {"std"}
"""Settings that `generate` sets itself."""


class DatasetKeywords(RunKeywords, total=False):
    """Settings of a dataset's run: those of every run (`foresample.settings`), and where it runs.

    `window` is "auto" by default: the faster sampler draws the dataset. The manifest keeps the result of that
    measurement, and resumed runs use it. A window of 0 draws sequentially. `slots` counts the samples under way in each
    worker.
    """

    ray: str | None
    """Run one worker per GPU on Ray: "auto" (a running cluster, or else one on this machine) or a cluster's address.
    Needs the extra foresample[ray] and a function that makes the target."""
    cpus: int | None
    """On Ray, run one worker for every this many CPUs, instead of one per GPU."""


def generate(
    target: Target | Factory,
    count: int,
    *,
    out: str | Path,
    shard: int = 1000,
    seed: int = 0,
    labels: Sequence[int] | Tensor | None = None,
    about: Mapping[str, Any] | None = None,
    law: int = 0,
    progress: Callable[[Status], None] | None = None,
    stop: Stop | None = None,
    **settings: Unpack[DatasetKeywords],
) -> Dataset:
    """Draw a dataset into a folder, or resume one; see the module.

    Args:
        target: the chain to sample, or a function without arguments that makes it.
        count: samples in the dataset.
        out: the folder; on a cluster, one that all machines share.
        shard: samples in each file.
        seed: the run's seed, from which each sample's is derived.
        labels: saved with the samples and taken in turn: sample i has labels[i % len(labels)]. The target itself
            finds a sample's label by its index.
        about: all other facts that determine the samples (a model's name, a checksum of its weights): kept in the
            manifest, and compared when a run is resumed.
        law: compare the finished dataset with this many sequential samples (`samples_law`); numbers with which the test
            cannot fail are refused. An incomplete dataset is not compared: its samples are a biased selection.
        progress: called as samples are finished.
        stop: called before samples are begun. Once it returns True, no more samples are begun, those under way are
            finished, and the dataset so far is returned: a fair sample, unless an earlier run was killed
            (`Dataset.fair`). Not available on Ray.
        **settings: see `DatasetKeywords`; a `window` of "auto" and 64 `slots` by default.
    """
    count, shard = at_least_one("count", count), at_least_one("shard", shard)
    ray, cpus = settings.get("ray"), settings.get("cpus")
    given, window = _settings_of(settings, count)
    _require_power(law, count)
    files = -(-count // shard)
    if files > MOST_SHARDS:
        raise ValueError(
            f"{count} samples in shards of {shard} are {files} files, and a folder takes {MOST_SHARDS}: "
            "give a larger shard, or ask for fewer samples"
        )
    if stop is not None and ray is not None:
        raise ValueError(
            "on Ray workers begin shards in no fixed order, so none can be stopped fairly: leave out stop"
        )
    folder = Path(out) if ray is None else Path(out).resolve()
    asked = {"count": count, "shard": shard, "seed": seed_number(seed), "labels": _labels(labels)}
    own = _own_settings(about)
    with claim_folder(folder) as claim, _workers(target, given, ray, cpus, folder) as workers:
        begun, kept = begun_manifest(folder), None
        if window == "auto" and begun is not None:
            window = begun["settings"]["window"]  # 0 if it was begun sequentially
            kept = f"{f'Window {window}' if window else 'Sequential sampling'} is kept: this dataset was begun with it"

        def say(what: str) -> None:
            if progress is not None:
                progress(Status(count, 1, 0, 0, doing=what))

        found = workers.describe(window, count, say)
        drawn = {**asked, **found.settings, **own}
        if begun is None:
            new = {"settings": drawn, "fingerprint": found.fingerprint, "choice": found.choice}
            manifest: dict[str, Any] = {"kind": "dataset", **new, "runs": []}
        else:
            require_same(folder, begun, drawn, found.fingerprint)
            # Marks that were NaN or infinite when the dataset was begun are added.
            manifest = {**begun, "fingerprint": {**found.fingerprint, **begun["fingerprint"]}}
        plan = replace(plan_of(folder, manifest), claim=claim)
        require_room(plan)
        require_memory(law * plan.sample_bytes, f"{law} sequential samples", "give a smaller --law")
        run = _Run(plan, manifest, progress, kept or found.choice or "")
        missing = count - run.found
        more = "make room, choose another folder, or ask for fewer samples"
        require_disk(missing * plan.sample_bytes, folder, f"{missing} samples", more)
        run.begin()
        try:
            for _ in range(2):  # broken samples are tried twice
                if todo := run.unfinished():
                    for news in workers.draw(plan, todo, stop):
                        run.note(news)
            checked = asdict(workers.law(plan, law)) if law and not run.unfinished() else None
        except BaseException:
            with suppress(OSError):  # the shards suffice without a final manifest
                run.close()
            raise
        claim.require()  # reports a lost folder before missing files
        run.close(whole=True, law=checked)
        claim.require()
        run.require_files()
    return Dataset(folder, run.manifest)


def _settings_of(keywords: Mapping[str, Any], count: int) -> tuple[Settings, Window]:
    """The settings of every worker, and the window, which is 0 for a dataset drawn sequentially."""
    given = {"window": "auto", **{k: v for k, v in keywords.items() if k not in ("ray", "cpus")}}
    sequential = type(given["window"]) is int and given["window"] == 0
    settings = Settings.of({**given, "window": "auto"} if sequential else given)
    return replace(settings, slots=min(settings.slots or SLOTS, count)), 0 if sequential else settings.window


def _require_power(law: int, count: int) -> None:
    """Refuse numbers of samples of which no difference could be found."""
    if law and not can_fail(at_least_one("law", law), count):
        fewest = fewest_sequential(count)
        raise ValueError(
            f"a comparison of {count} samples with {law} sequential {'ones' if law > 1 else 'one'} cannot fail, "
            f"however different they are: {'leave --law out' if fewest is None else f'give --law {fewest} or more'}"
        )


def _labels(labels: Sequence[int] | Tensor | None) -> list[int] | None:
    if labels is None:
        return None
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
    if taken := sorted(_OURS & own.keys()):
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


def _workers(
    target: Target | Factory, settings: Settings, ray: str | None, cpus: int | None, folder: Path
) -> AbstractContextManager[LocalWorker | Cluster]:
    if ray is None:
        if cpus is not None:
            raise ValueError("cpus applies to workers on Ray only: give ray='auto' as well, or leave cpus out")
        return nullcontext(LocalWorker(target, settings))
    if isinstance(target, Target) or not callable(target):
        raise TypeError(
            "on Ray every worker makes its own target: pass a function that does, not the target itself"
        )
    from foresample.datasets.cluster import cluster

    return cluster(ray, target, settings, None if cpus is None else at_least_one("cpus", cpus), folder)


class _Run:
    """A run under way, with its shards and its manifest."""

    def __init__(
        self, plan: Plan, manifest: dict[str, Any], progress: Callable[[Status], None] | None, choice: str
    ) -> None:
        self.plan, self.progress, self.choice = plan, progress, choice
        self.entries, _ = survey(plan, shards_there(plan))
        self.found, _ = self.written = self._totals()
        self.open: dict[int, tuple[int, int]] = {}
        self.clock = perf_counter()
        unknown = dict.fromkeys(("drawn", "seconds", "peak_mib"))
        started = datetime.now(UTC).isoformat(timespec="seconds")
        self.this = {**provenance(), "started": started, "found": self.found, **unknown}
        self.manifest = {**renewed(manifest, plan, self.entries), "runs": [*manifest["runs"], self.this]}

    def begin(self) -> None:
        """Write the manifest; everything is checked by now."""
        self._write()
        self._tell()

    def unfinished(self) -> list[int]:
        """Shards that lack samples."""
        sizes = {number: entry.samples for number, entry in self.entries.items()}
        return [n for n in range(self.plan.shards) if sizes.get(n, 0) < self.plan.size(n)]

    def note(self, news: Progress) -> None:
        """Take in a worker's progress."""
        if news.written:
            self.entries |= {entry.number: entry for entry in news.written}
            self.written = self._totals()
        self.open[news.worker] = news.samples, news.calls
        self._tell()

    def close(self, *, whole: bool = False, law: dict[str, Any] | None = None) -> None:
        """Write the final manifest. `whole`: every sample that was begun is finished.

        Samples are begun in order, so if all earlier ones were fair, all are fair now.
        """
        import resource  # imported here, because Windows has none

        open_ones = {*shards_there(self.plan)} & {*self.unfinished()}
        self.entries |= survey(self.plan, sorted(open_ones))[0]  # those written when drawing stopped
        samples, _ = self._totals()
        most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # peak memory: bytes on macOS, else KiB
        peak = most / (2**20 if sys.platform == "darwin" else 2**10)
        self.this |= {"drawn": samples - self.found, "seconds": perf_counter() - self.clock, "peak_mib": peak}
        was_fair = self.manifest["fair"] == self.found
        self.manifest = renewed(self.manifest, self.plan, self.entries)
        if whole and was_fair and self.manifest["in_order"] == samples:
            self.manifest["fair"] = samples
        if law is not None:
            self.manifest["law"] = law
        self._write()

    def require_files(self) -> None:
        """Refuse to finish if files of the dataset have disappeared."""
        if gone := sorted({*self.entries} - {*shards_there(self.plan)}):
            raise FileNotFoundError(
                f"{len(gone)} of the files of {printable(self.plan.out)} have gone since they were written "
                f"({shard_name(gone[0])} first): run the same command again to have them drawn"
            )

    def _totals(self) -> tuple[int, int]:
        """Samples written, and their calls."""
        entries = self.entries.values()
        return sum(entry.samples for entry in entries), sum(entry.calls for entry in entries)

    def _write(self) -> None:
        assert self.plan.claim is not None
        self.plan.claim.write("manifest.json", (json.dumps(self.manifest, indent=2) + "\n").encode())

    def _tell(self) -> None:
        if self.progress is not None:
            samples, calls = (sum(counts) for counts in zip(self.written, *self.open.values(), strict=True))
            steps = self.manifest["settings"]["steps"]
            self.progress(Status(self.plan.count, steps, samples, calls, choice=self.choice))
