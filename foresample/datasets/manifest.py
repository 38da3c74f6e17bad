"""The manifest of a dataset: its schema, and which parts of it are trusted.

Most of it is a summary that is recomputed from the verified shards. Only its settings, fingerprint, runs and the result
of the distribution test are read from it, and that result only while the shards are the tested ones.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from foresample.checks.samples import SamplesLaw
from foresample.datasets.fingerprint import Fingerprint, difference
from foresample.datasets.shards import DatasetSettings, Entry, Failure, Plan, shard_name, shard_number
from foresample.provenance import Origin
from foresample.schema import Count, NotNegative, Some, Unfit, parse_json, read_object, read_plain
from foresample.text import printable


@dataclass(frozen=True, kw_only=True)
class Costs:
    """Costs of a dataset's samples."""

    samples: Count
    calls_mean: NotNegative
    evaluations_mean: NotNegative
    accepted_mean: float
    speedup: NotNegative


@dataclass(frozen=True, kw_only=True)
class DatasetRun(Origin):
    """One run that worked on a dataset; fields that a killed run could not write are None."""

    started: str
    found: Count
    drawn: Count | None
    seconds: NotNegative | None
    peak_mib: NotNegative | None


@dataclass(frozen=True, kw_only=True)
class ShardFile:
    """One file of a dataset."""

    file: str
    samples: Count
    sha256: str


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """The schema of manifest.json. Earlier versions kept no fingerprint of the target, and did not count `in_order`."""

    settings: DatasetSettings
    fingerprint: Fingerprint | None = None
    choice: str | None = None
    """Why this window was chosen, if it was measured."""
    costs: Costs
    in_order: Count | None = None
    """Number of samples before the first missing one."""
    fair: Count = 0
    """Number of samples, from the first on, that were chosen before they were drawn."""
    shards: list[ShardFile]
    failures: list[Failure]
    law: SamplesLaw | None
    runs: Some[DatasetRun]


@dataclass(frozen=True)
class Status:
    """Progress of a run: its finished samples and their calls."""

    count: int
    steps: int
    samples: int
    calls: int
    doing: str = ""
    """Measurement under way, before any sample is begun."""
    choice: str = ""
    """Choice of the window, and the reason."""

    @property
    def calls_mean(self) -> float:
        return self.calls / max(1, self.samples)

    @property
    def accepted_mean(self) -> float:
        """Drafts kept in a round: a round commits them and one transition more."""
        return self.steps * self.samples / self.calls - 1 if self.calls else 0.0


def read_manifest(folder: Path) -> dict[str, Any] | None:
    """The folder's manifest, None if it has none."""
    path = folder / "manifest.json"
    try:
        manifest = parse_json(read_plain(path, follow=False).decode())
        read_object(Manifest, manifest)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise OSError(
            f"{printable(path)} cannot be read ({error.strerror}): move it away, or choose another folder"
        ) from None
    except (Unfit, UnicodeDecodeError) as error:
        raise ValueError(
            f"{printable(path)} is corrupt ({printable(error)}): move it away and run again; the shards are verified "
            "by themselves"
        ) from None
    return {"kind": "dataset", **manifest}


def begun_manifest(folder: Path) -> dict[str, Any] | None:
    """The manifest of the dataset begun in a folder; None if the folder has no shard yet."""
    manifest = read_manifest(folder)
    with os.scandir(folder) as found:
        return manifest if any(shard_number(entry.name) is not None for entry in found) else None


def require_same(
    folder: Path, begun: dict[str, Any], settings: dict[str, Any], fingerprint: Fingerprint
) -> None:
    """Refuse to go on with a dataset of other settings or of another target."""
    theirs, ours, name = _flat(begun["settings"]), _flat(settings), printable(folder)
    names = [n for n in {**theirs, **ours} if theirs.get(n) != ours.get(n)]
    if names:
        shown = ", ".join(
            f"{printable(n):.50} {theirs.get(n)!r:.100} there and {ours.get(n)!r:.100} here" for n in names[:5]
        )
        raise ValueError(
            f"{name} holds a dataset with other settings ({shown}): give the same ones to go on with it, "
            "or choose another folder"
        )
    if begun.get("fingerprint") is None:
        raise ValueError(
            f"{name} holds a dataset of an earlier version, which kept no fingerprint of its target, so another target "
            "would not be noticed: choose another folder"
        )
    if other := difference(begun["fingerprint"], fingerprint):
        raise ValueError(
            f"{name} holds samples of another target ({other}): its code or its files have changed since then; "
            "restore them to go on with this dataset, or choose another folder"
        )


def _flat(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings with those of an object by their own names, as scheduler.prediction_type."""
    flat: dict[str, Any] = {}
    for name, value in settings.items():
        flat |= (
            {f"{name}.{key}": part for key, part in value.items()} if isinstance(value, dict) else {name: value}
        )
    return flat


def plan_of(folder: Path, manifest: Mapping[str, Any]) -> Plan:
    """The plan of the dataset with this manifest, which needs settings and fingerprint only."""
    digest = hashlib.sha256(json.dumps(manifest["settings"], sort_keys=True).encode()).hexdigest()
    # Passed separately, so that names in the caller's `about` cannot replace these.
    given = {"out": folder, "digest": digest, "fingerprint": manifest.get("fingerprint"), "claim": None}
    return read_object(Plan, manifest["settings"], given=given)


def renewed(manifest: Mapping[str, Any], plan: Plan, entries: Mapping[int, Entry]) -> dict[str, Any]:
    """The manifest with the contents and costs of these shards; other entries stay if they are still valid."""
    samples, calls, evaluations = (
        sum(getattr(entry, name) for entry in entries.values()) for name in ("samples", "calls", "evaluations")
    )
    steps, in_order = manifest["settings"]["steps"], _samples_in_order(plan, entries)
    status = Status(plan.count, steps, samples, calls)
    shards = [
        {"file": shard_name(n), "samples": entries[n].samples, "sha256": entries[n].sha256}
        for n in sorted(entries)
    ]
    checked = samples == plan.count and shards == manifest.get("shards")
    return {
        **manifest,
        "in_order": in_order,
        "fair": in_order if in_order == plan.count else min(manifest.get("fair", 0), in_order),
        "shards": shards,
        "failures": [asdict(f) for n in sorted(entries) for f in entries[n].failures],
        "law": manifest.get("law") if checked else None,
        "costs": {
            "samples": samples,
            "calls": calls,
            "evaluations": evaluations,
            "calls_mean": status.calls_mean,
            "evaluations_mean": evaluations / max(1, samples),
            "accepted_mean": status.accepted_mean,
            "speedup": steps * samples / max(1, calls),
        },
    }


def _samples_in_order(plan: Plan, entries: Mapping[int, Entry]) -> int:
    """Number of samples before the first missing one."""
    number = 0
    while number in entries and entries[number].in_order == plan.size(number):
        number += 1
    # The last shard may be smaller than the others.
    return min(plan.count, number * plan.shard + (entries[number].in_order if number in entries else 0))
