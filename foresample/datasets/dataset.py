"""Reads a folder of samples; every shard is verified before it counts."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from foresample.checks.samples import SamplesLaw
from foresample.datasets.manifest import plan_of, read_manifest, renewed
from foresample.datasets.shards import Entry, Failure, Plan, Shard, Unsound, read_shard, shard_number
from foresample.sizes import require_memory
from foresample.text import printable


@dataclass(frozen=True)
class Dataset:
    """A folder of samples and its manifest."""

    out: Path
    manifest: dict[str, Any]
    unsound: dict[str, str] = field(default_factory=dict)
    """Shards that do not count, with the reasons; filled by `inspect_dataset`."""

    @property
    def complete(self) -> bool:
        return self.manifest["costs"]["samples"] == self.manifest["settings"]["count"]

    @property
    def in_order(self) -> int:
        """Number of samples before the first missing one."""
        return self.manifest["in_order"]

    @property
    def fair(self) -> int:
        """Number of samples, from the first on, that were chosen before they were drawn.

        These are all samples if the dataset is complete or was stopped by `stop`; otherwise the last few of `in_order`
        are only there because they finished in time. In a complete dataset, whose size was fixed beforehand, samples
        are independent and have the right distribution. With `stop` the size may depend on earlier samples, though the
        choice of a sample does not depend on its own value: sums over the samples have the right expectation, and
        means are biased by a term of order 1/size (docs/theory.md, "Finishing first is not fair").
        """
        return self.manifest["fair"]

    def samples(self, *, everything: bool = False) -> Iterator[Tensor]:
        """The samples, [n, *shape] for each shard, by rising index.

        An incomplete dataset returns only the samples before the first missing one, and only the first `fair` of these
        have the right distribution. The others are there because they needed few rounds or did not break, a **biased**
        selection; `everything` returns all samples regardless.
        """
        if not everything and self.fair < self.manifest["costs"]["samples"]:
            warnings.warn(
                f"{printable(self.out)} is not complete: of its {self.manifest['costs']['samples']} samples only the "
                f"first {self.in_order} are handed out, and of these the first {self.fair} are known to be fair; the "
                "others are there because they were done in time, a biased selection: run the same command again to "
                "complete it, or ask for samples(everything=True)",
                stacklevel=2,
            )
        return self._parts(self.manifest["costs"]["samples"] if everything else self.in_order)

    def _parts(self, left: int) -> Iterator[Tensor]:
        plan = plan_of(self.out, self.manifest)
        for file in self.manifest["shards"]:
            if left > 0 and (number := shard_number(file["file"])) is not None:
                x = read_sound(plan, number).done.x[:left]
                left -= len(x)
                yield x

    @property
    def failures(self) -> list[Failure]:
        """Samples that broke."""
        return [Failure(**failure) for failure in self.manifest["failures"]]

    @property
    def law(self) -> SamplesLaw | None:
        """The distribution check, if one was requested and the dataset is complete."""
        law = self.manifest["law"]
        return None if law is None else SamplesLaw(**law)


def inspect_dataset(out: str | Path) -> Dataset:
    """Read a folder and verify every shard. Nothing is written, so a run may be under way."""
    folder = Path(out)
    manifest = read_manifest(folder)
    if manifest is None and any(folder.glob("shard-*.safetensors")):
        raise FileNotFoundError(
            f"{printable(folder)} has shards, but no manifest.json: run the command that drew them again, with the "
            "same settings and the same window (0: sequential), to have it rebuilt"
        )
    if manifest is None:
        raise FileNotFoundError(
            f"{printable(folder)} holds no manifest.json: not a folder of foresample generate"
        )
    plan = plan_of(folder, manifest)
    require_room(plan)
    entries, unsound = survey(plan, shards_there(plan))
    return Dataset(folder, renewed(manifest, plan, entries), unsound)


def read_sound(plan: Plan, number: int) -> Shard:
    """A shard that was verified before; refused if its file has changed or is gone."""
    try:
        shard = read_shard(plan, number)
    except Unsound as error:
        why = f"does not count any more, {error}"
    else:
        if shard is not None:
            return shard
        why = "is gone"
    raise ValueError(f"{printable(plan.path(number))} {why}: run the same command again to have it drawn")


def require_room(plan: Plan) -> None:
    """Refuse shards too large for memory, which holds one at a time."""
    size = plan.size(0)
    require_memory(size * plan.sample_bytes, f"a shard of {size} samples", "give a smaller shard")


def shards_there(plan: Plan) -> list[int]:
    """Numbers of the plan's shards that have a file."""
    with os.scandir(plan.out) as found:
        numbers = [shard_number(entry.name) for entry in found]
    return sorted(number for number in numbers if number is not None and number < plan.shards)


def survey(plan: Plan, numbers: Iterable[int]) -> tuple[dict[int, Entry], dict[str, str]]:
    """Read these shards: the entries of sound ones, and the reasons why other files do not count."""
    entries, unsound = dict[int, Entry](), dict[str, str]()
    for number in numbers:  # one at a time in memory
        try:
            if (shard := read_shard(plan, number)) is not None:
                entries[number] = shard.entry
        except Unsound as error:
            unsound[plan.path(number).name] = str(error)
    return entries, unsound
