"""Shards: the files of a dataset, with a fixed number of samples each; each can be verified on its own.

Shard k holds samples k·n … (k + 1)·n − 1. The seed of sample i is a function of the run's seed and i, so a shard does
not depend on which worker draws it, when, or beside which others. A file appears whole or not at all (temporary file,
fsync, rename), and contains a checksum of its content, a digest of its settings and the fingerprint of its target. So
the files alone determine which samples are missing.

In a file, one row per sample, by rising index:

    samples                           [n, *shape], in the chain's dtype
    index, seeds, calls, evaluations  [n]
    labels                            [n], if the samples have any

A sample that broke (NaN) is left out of its shard and listed as a failure; the next run draws it again.

A file counts only if its checksum is right, its indices, seeds, labels, shapes and types are those of the plan, and no
sample is NaN. Links, folders and pipes in its place are refused.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
from torch import Tensor

from foresample.core.noise import seeds_of
from foresample.datasets.fingerprint import Fingerprint, difference
from foresample.datasets.folder import Claim
from foresample.engine.slots import Finished
from foresample.faults import NO_FAULT
from foresample.schema import AtLeastOne, Count, Rule, Some, Unfit, open_plain, parse_json, read_object
from foresample.sizes import state_bytes
from foresample.text import printable

Length = Annotated[int, Rule("a whole number from 1 to 2⁵³", lambda value: 1 <= value <= 2**53)]
Shape = Annotated[list[Length], Rule("a shape of at most 2⁵³ numbers", lambda shape: math.prod(shape) <= 2**53)]
Seed = Annotated[int, Rule("a whole number from 0 to 2⁶³ − 1", lambda value: 0 <= value < 2**63)]
Label = Annotated[int, Rule("a number of 64 bits", lambda value: -(2**63) <= value < 2**63)]
_DTYPES = "float16", "bfloat16", "float32", "float64"
Dtype = Annotated[str, Rule(f"one of {', '.join(_DTYPES)}", lambda value: value in _DTYPES)]


@dataclass(frozen=True, kw_only=True)
class DatasetSettings:
    """Settings that every dataset has; a manifest has more, which depend on its target."""

    count: Length
    shard: Length
    """Samples of a shard."""
    seed: Seed
    labels: Some[Label] | None = None
    """Taken in turn: sample i has labels[i % len(labels)]."""
    shape: Shape
    dtype: Dtype
    steps: AtLeastOne
    window: Count
    """Transitions drafted in a round; 0: the samples are drawn sequentially."""
    method: str
    model: str | None = None
    target: str | None = None


@dataclass(frozen=True, kw_only=True)
class Plan(DatasetSettings):
    """Contents of a dataset, shard by shard, and its folder."""

    out: Path
    digest: str
    """Digest of all settings in the manifest, which determine the samples."""
    fingerprint: Fingerprint | None
    """Fingerprint of the target; earlier versions kept none."""
    claim: Claim | None = None
    """The right to write into the folder, for those who draw."""

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

    def labels_of(self, index: Tensor) -> Tensor | None:
        return None if self.labels is None else torch.tensor(self.labels)[index % len(self.labels)]

    def path(self, number: int) -> Path:
        return self.out / shard_name(number)

    @property
    def sample_bytes(self) -> int:
        """Bytes of a sample in its file: its state and the numbers beside it."""
        return state_bytes(self.shape, getattr(torch, self.dtype)) + 8 * (4 if self.labels is None else 5)


def shard_name(number: int) -> str:
    return f"shard-{number:05d}.safetensors"


def shard_number(name: str) -> int | None:
    """The shard with this file name, None if it is not a shard's."""
    found = re.fullmatch(r"shard-(\d{5,18})\.safetensors", name, re.ASCII)
    return int(found[1]) if found and shard_name(int(found[1])) == name else None


@dataclass(frozen=True)
class Failure:
    """A sample that broke, and the step where NaN or infinity was first seen; N if that is the finished sample."""

    index: Count
    seed: Count
    step: Count
    error: str


@dataclass(frozen=True)
class Entry:
    """Contents of a shard's file without the samples; `in_order` counts those before the first that is missing."""

    number: int
    samples: int
    in_order: int
    calls: int
    evaluations: int
    failures: tuple[Failure, ...]
    sha256: str


@dataclass(frozen=True)
class Shard:
    """A shard's file, read and verified."""

    entry: Entry
    done: Finished


class Unsound(ValueError):
    """The reason why a shard's file does not count, as half a sentence."""


@dataclass(frozen=True)
class _Metadata:
    """Metadata of a shard's file; `settings` is their digest."""

    number: Count
    settings: str
    failures: list[Failure]
    sha256: str
    fingerprint: Fingerprint | None = None


def write_shard(plan: Plan, number: int, done: Finished, failures: tuple[Failure, ...]) -> Entry:
    """Write these samples, in order, as the shard's file."""
    from safetensors.torch import save

    tensors = {
        "samples": done.x,
        "index": done.index,
        "seeds": plan.seeds(number)[done.index - number * plan.shard],
        "calls": done.calls,
        "evaluations": done.evaluations,
    }
    labels = plan.labels_of(done.index)
    if labels is not None:
        tensors["labels"] = labels
    tensors = {name: value.cpu().contiguous() for name, value in tensors.items()}
    about = {
        "number": number,
        "settings": plan.digest,
        "fingerprint": plan.fingerprint,
        "failures": [asdict(f) for f in failures],
    }
    sha256 = _checksum(about, tensors)
    # A single key, because the order of several would change the file's bytes.
    metadata = {"foresample": json.dumps({**about, "sha256": sha256}, sort_keys=True)}
    assert plan.claim is not None
    plan.claim.write(shard_name(number), save(tensors, metadata))
    return _entry(plan, number, done, failures, sha256)


def read_shard(plan: Plan, number: int) -> Shard | None:
    """Read and verify this shard's file; None if there is none, `Unsound` if it does not count."""
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError:
        raise ImportError(
            "datasets need safetensors, which is not installed: pip install safetensors"
        ) from None
    path = plan.path(number)
    try:
        os.close(open_plain(path, follow=False))
        with safe_open(path, "pt") as file:
            about = parse_json((file.metadata() or {}).get("foresample", "null"))
            found = read_object(_Metadata, about)
            kinds = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
            if found.settings == plan.digest:  # before tensors of unknown size are read
                _require_kinds(plan, number, {n: (k.get_dtype(), k.get_shape()) for n, k in kinds.items()})
            tensors = {name: file.get_tensor(name) for name in kinds}
        del about["sha256"]
        if found.sha256 != _checksum(about, tensors):
            raise Unsound("its checksum is wrong")
    except FileNotFoundError:
        return None
    except OSError as error:
        raise OSError(
            f"{printable(path)} cannot be read ({printable(error.strerror or error)}): move it away and run the same "
            "command again"
        ) from None
    except (SafetensorError, Unfit, RecursionError, RuntimeError, TypeError) as error:
        raise Unsound(f"it is torn or corrupt ({printable(error)})") from None
    other = None
    if found.settings != plan.digest:
        other = "with other settings: give the same ones, among them the same window (0: sequential), or"
    elif plan.fingerprint is not None and (change := difference(found.fingerprint or {}, plan.fingerprint)):
        other = f"from another target ({change}):"
    if other:
        raise ValueError(f"{printable(path)} is sound, but was drawn {other} choose another folder")
    _require_planned(plan, number, found, tensors)
    index = tensors["index"]
    fault = torch.full_like(index, NO_FAULT)
    done = Finished(index, tensors["samples"], tensors["calls"], tensors["evaluations"], fault)
    return Shard(_entry(plan, number, done, tuple(found.failures), found.sha256), done)


def _require_kinds(plan: Plan, number: int, kinds: dict[str, tuple[str, list[int]]]) -> None:
    """Refuse tensors with other names, types or shapes than the plan's."""
    count = kinds.get("index", ("", [0]))[1]
    numbers = ["index", "seeds", "calls", "evaluations", *(["labels"] if plan.labels is not None else [])]
    dtype = (
        str(plan.dtype).removeprefix("torch.").upper().replace("FLOAT", "F")
    )  # as safetensors writes it: BF16
    wanted = dict.fromkeys(numbers, ("I64", count)) | {"samples": (dtype, [*count, *plan.shape])}
    for name in sorted({*wanted, *kinds}):
        if kinds.get(name) != wanted.get(name):
            found, right = (
                f"{k[0]} {list(k[1])}" if k else "nothing" for k in (kinds.get(name), wanted.get(name))
            )
            raise Unsound(f"its {printable(name)} are {found}, not {right}")
    if len(count) != 1 or count[0] > plan.size(number):
        raise Unsound(f"it has {count} samples, and {plan.size(number)} belong there")


def _require_planned(plan: Plan, number: int, about: _Metadata, tensors: dict[str, Tensor]) -> None:
    """Refuse contents other than the plan's: a right checksum only proves that the file has not changed."""
    if about.number != number:
        raise Unsound(f"it is shard {about.number}")
    index, first, size = tensors["index"], number * plan.shard, plan.size(number)
    if ((index < first) | (index >= first + size)).any() or (index.diff() <= 0).any():
        raise Unsound(f"its indices are not some of {first} … {first + size - 1} in order")
    seeds, labels = plan.seeds(number), plan.labels_of(index)
    if not torch.equal(tensors["seeds"], seeds[index - first]):
        raise Unsound("its seeds are not those of its samples")
    if labels is not None and not torch.equal(tensors["labels"], labels):
        raise Unsound("its labels are not those of its samples")
    if not torch.isfinite(tensors["samples"]).all():
        raise Unsound("some of its samples are NaN or infinite")
    costs = torch.cat([tensors["calls"], tensors["evaluations"]])
    if ((costs < 1) | (costs > 2**40)).any():  # more is an error, and could overflow sums
        raise Unsound("its samples have cost nothing, or too much")
    there = set(index.tolist())
    for failure in about.failures:
        place = failure.index - first
        if not 0 <= place < size or failure.index in there or failure.seed != int(seeds[place]):
            raise Unsound(f"sample {failure.index}, which it says broke, is not missing in it")


def _entry(plan: Plan, number: int, done: Finished, failures: tuple[Failure, ...], sha256: str) -> Entry:
    # Indices rise, so once one is not in its place, no later one is.
    in_order = int((done.index == number * plan.shard + torch.arange(len(done.index))).sum())
    costs = int(done.calls.sum()), int(done.evaluations.sum())
    return Entry(number, len(done.index), in_order, *costs, failures, sha256)


def _checksum(about: dict[str, Any], tensors: dict[str, Tensor]) -> str:
    """SHA-256 of everything in a file."""
    sha256 = hashlib.sha256(json.dumps(about, sort_keys=True).encode())
    for name, value in sorted(tensors.items()):
        sha256.update(f"{name} {value.dtype} {list(value.shape)}".encode())
        sha256.update(value.view(torch.uint8).numpy().data)
    return sha256.hexdigest()
