"""Result files: JSON objects that say what they are (`kind`), where they come from, and what was found.

Every command writes its findings through `make_result` and `write_result`; the page, the tables and the plots read
them through `read_results`, as values of the types below. Files are read with suspicion: what does not fit is refused
in one sentence with the file, the place in it and a remedy.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from foresample.checks.findings import Finding
from foresample.core.report import without_nan
from foresample.datasets.manifest import Costs as Costs  # for the kinds that others add
from foresample.datasets.manifest import Manifest
from foresample.engine.tuning import Tuning
from foresample.provenance import Origin, provenance
from foresample.schema import (
    AtLeastOne,
    Count,
    NotNegative,
    Positive,
    Some,
    Unfit,
    parse_json,
    read_object,
    read_plain,
)
from foresample.schema import Rule as Rule

LABELS = {
    "reflection-head": "reflection, head",
    "reflection-nearest": "reflection, nearest",
    "per-step-parent-fresh": "per step, parent, fresh noise",
    "block-parent-fresh": "block, parent, fresh noise",
    "replay-per-step": "replay without secant, per step",
    "replay-block": "replay without secant",
    "default": "default",
}
"""Methods as people read them; files, tables and plots know them by their keys."""


def label(method: str) -> str:
    """A method as people read it; one that is not known here by its key."""
    return LABELS.get(method, method)


# ------------------------------------------------------------------ writing


def make_result(kind: str, settings: Mapping[str, Any], **content: Any) -> dict[str, Any]:
    """A result of this kind: its origin, what it was made with, and what was found."""
    return {"kind": kind, **provenance(), "settings": dict(settings), **content}


def result_json(result: Mapping[str, Any]) -> str:
    """A result as text."""
    return json.dumps(without_nan(dict(result)), indent=2, allow_nan=False)


def write_result(path: Path, result: Mapping[str, Any]) -> None:
    """Save a result."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(result_json(result) + "\n", encoding="utf-8")


# ------------------------------------------------------------------ the kinds


@dataclass(frozen=True, kw_only=True)
class Result(Origin):
    """What all result files have; each kind adds what was found."""

    name: str
    """Path inside the folder that was read, without its ending."""
    path: Path

    @property
    def origins(self) -> Sequence[Origin]:
        """The runs it comes from."""
        return [self]


@dataclass(frozen=True, kw_only=True)
class RunFigures:
    """A run's `Report`; what was never measured is None."""

    steps: AtLeastOne
    count: AtLeastOne
    window: Count
    calls_mean: Positive
    calls_error: NotNegative | None
    evaluations_mean: Positive
    speedup: Positive
    speedup_error: NotNegative | None
    accepted_mean: NotNegative | None
    accepted_lengths: list[Count]
    mismatch: list[NotNegative | None]
    seconds: Positive
    target_seconds: NotNegative


@dataclass(frozen=True, kw_only=True)
class SequentialFigures:
    """The sequential sampler beside it: measured, or its seconds estimated from a few calls."""

    calls_mean: Positive
    seconds: Positive | None = None
    seconds_estimated: Positive | None = None


@dataclass(frozen=True, kw_only=True)
class SampleResult(Result):
    """Of `foresample sample`."""

    settings: dict[str, Any]
    speculative: RunFigures
    sequential: SequentialFigures


@dataclass(frozen=True, kw_only=True)
class BenchRow:
    """One method at one window."""

    method: str
    window: AtLeastOne
    speedup: Positive
    speedup_error: NotNegative
    calls: Positive
    evaluations: Positive
    accepted: NotNegative
    seconds: NotNegative


@dataclass(frozen=True, kw_only=True)
class BenchSettings:
    """What was measured."""

    target: str
    steps: AtLeastOne
    samples: AtLeastOne
    dim: int | None = None
    churn: float | None = None
    reuse: str | None = None
    seed: int | None = None


@dataclass(frozen=True, kw_only=True)
class BenchResult(Result):
    """Of `foresample bench`."""

    settings: BenchSettings
    rows: Some[BenchRow]


@dataclass(frozen=True, kw_only=True)
class TuneResult(Tuning, Result):
    """Of `foresample tune`."""

    settings: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class FrontierResult(Result):
    """Of `foresample tune` for several numbers of slots."""

    settings: dict[str, Any]
    tunings: Some[Tuning]


@dataclass(frozen=True, kw_only=True)
class CheckResult(Result):
    """Of `foresample check`."""

    settings: dict[str, Any] = field(default_factory=dict)
    level: Positive
    findings: Some[Finding]


@dataclass(frozen=True, kw_only=True)
class DatasetResult(Manifest, Result):
    """The manifest of `foresample generate`."""

    @property
    def origins(self) -> Sequence[Origin]:
        return self.runs


KINDS: dict[str, type[Result]] = {
    "sample": SampleResult,
    "bench": BenchResult,
    "tune": TuneResult,
    "frontier": FrontierResult,
    "check": CheckResult,
    "dataset": DatasetResult,
}
"""What commands write. `benchmarks.results` adds the kinds of this repository's evidence."""


# ------------------------------------------------------------------ reading


class ResultError(ValueError):
    """A result file or folder that cannot be shown."""


R = TypeVar("R", bound=Result)


@dataclass(frozen=True)
class Results:
    """The results of a folder and those below it, by name, numbers in it by their value."""

    folder: Path
    found: list[Result]
    foreign: list[str]
    """JSON files that are no results of a known kind."""

    def of(self, kind: type[R]) -> list[R]:
        """Those of one kind."""
        return [result for result in self.found if isinstance(result, kind)]


def read_results(folder: Path, kinds: Mapping[str, type[Result]] = KINDS) -> Results:
    """Every JSON file under the folder; one of a known kind that does not fit it is refused."""
    if not folder.is_dir():
        raise ResultError(f"no folder of results at {folder}; name one that a command has written to")
    found, foreign = [], []
    for path in sorted(folder.rglob("*.json")):
        name = path.relative_to(folder).with_suffix("").as_posix()
        result = read_result(path, kinds, name)
        if result is None:
            foreign.append(f"{name}.json")
        else:
            found.append(result)
    if not found:
        told = (
            f"none of the {len(foreign)} JSON files in {folder} is a result"
            if foreign
            else f"no result files in {folder}"
        )
        raise ResultError(f"{told}; make one, for instance with 'foresample sample --out {folder}'")
    return Results(folder, sorted(found, key=lambda result: _words(result.name)), foreign)


def read_result(
    path: Path, kinds: Mapping[str, type[Result]] = KINDS, name: str | None = None
) -> Result | None:
    """One file; None if it is no result of these kinds."""
    try:
        text = read_plain(path).decode(errors="replace")
    except OSError as error:
        raise _refusal(path, f"cannot be read ({error.strerror})") from None
    try:
        data = parse_json(text)
    except Unfit as unfit:
        begins = re.match(r'\s*{\s*"kind"\s*:\s*(?:"([^"]*)")?', text)
        if begins is None or (begins[1] or "") not in {"", *kinds}:  # nor does it begin like one
            return None
        raise _refusal(path, str(unfit)) from None
    kind = data.get("kind") if isinstance(data, dict) else None
    if not isinstance(kind, str) or kind not in kinds:
        return None
    return parse_result(kinds[kind], data, path, name)


def parse_result(kind: type[R], data: Mapping[str, Any], path: Path, name: str | None = None) -> R:
    """A file's object as a result of this kind."""
    try:
        return read_object(kind, data, given={"name": name or path.stem, "path": path})
    except Unfit as unfit:
        raise _refusal(path, str(unfit)) from None


def _refusal(path: Path, what: str) -> ResultError:
    return ResultError(f"{path}: {what}; write it again with its command, or take it out of the folder")


def _words(name: str) -> list[tuple[int, str]]:
    """Words and numbers in turn."""
    return [(int(part), "") if part.isdecimal() else (0, part) for part in re.split(r"(\d+)", name)]
