"""Result files: JSON objects that say what they are (`kind`), where they come from, and what was found.

They are written with `foresample.provenance`; the page, the tables and the plots read them through `read_results`, as
values of the types below and of `benchmarks.results`. Every file is checked: one that does not fit its kind is refused
in one sentence with the file, the place in it and a remedy.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, TypeVar, dataclass_transform

from foresample.checks.findings import Finding
from foresample.datasets.manifest import Manifest
from foresample.engine.tuning import Tuning
from foresample.provenance import Origin
from foresample.schema import (
    AtLeastOne,
    NotNegative,
    Positive,
    Some,
    Unfit,
    parse_json,
    read_object,
    read_plain,
)

# ------------------------------------------------------------------ the kinds that commands write


@dataclass_transform(frozen_default=True, kw_only_default=True)
class Record:
    """An object of a result file; every subclass is a frozen dataclass with keyword arguments."""

    def __init_subclass__(cls) -> None:
        dataclass(frozen=True, kw_only=True)(cls)


class Result(Record, Origin):
    """The fields of all result files; each kind adds its findings."""

    kind: ClassVar[str]
    name: str
    """Path inside the folder that was read, without its ending."""
    path: Path

    def __init_subclass__(cls, kind: str) -> None:
        super().__init_subclass__()
        cls.kind, KINDS[kind] = kind, cls

    @property
    def origins(self) -> Sequence[Origin]:
        """The runs it comes from."""
        return [self]


KINDS: dict[str, type[Result]] = {}
"""The results by the kind that their files name."""


class BenchRow(Record):
    """One method at one window."""

    method: str
    window: AtLeastOne
    speedup: Positive
    speedup_error: NotNegative
    calls: Positive
    evaluations: Positive
    accepted: NotNegative


class BenchSettings(Record):
    """The chain and the samples of the mixture benchmark."""

    target: str
    steps: AtLeastOne
    samples: AtLeastOne
    dim: int | None = None
    churn: float | None = None
    reuse: str | None = None
    seed: int | None = None


class BenchResult(Result, kind="bench"):
    """Findings of `python -m benchmarks.mixture`."""

    settings: BenchSettings
    rows: Some[BenchRow]


class FrontierResult(Result, kind="frontier"):
    """Findings of `foresample tune` for several numbers of slots."""

    settings: dict[str, Any]
    tunings: Some[Tuning]


class CheckResult(Result, kind="check"):
    """Findings of `foresample check`."""

    settings: dict[str, Any] = field(default_factory=dict)
    level: Positive
    findings: Some[Finding]


class DatasetResult(Manifest, Result, kind="dataset"):
    """The manifest of `foresample generate`."""

    @property
    def origins(self) -> Sequence[Origin]:
        return self.runs


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
        """The results of one kind."""
        return [result for result in self.found if isinstance(result, kind)]


def read_results(folder: Path) -> Results:
    """Every JSON file under the folder; one of a known kind that does not fit it is refused."""
    if not folder.is_dir():
        raise ResultError(f"no folder of results at {folder}; name one that a command has written to")
    found, foreign = [], []
    for path in sorted(folder.rglob("*.json")):
        name = path.relative_to(folder).with_suffix("").as_posix()
        result = read_result(path, name)
        if result is None:
            foreign.append(f"{name}.json")
        else:
            found.append(result)
    if not found:
        problem = (
            f"none of the {len(foreign)} JSON files in {folder} is a result"
            if foreign
            else f"no result files in {folder}"
        )
        raise ResultError(f"{problem}; write one with a script of benchmarks/")
    return Results(folder, sorted(found, key=lambda result: _words(result.name)), foreign)


def read_result(path: Path, name: str | None = None) -> Result | None:
    """Read one file; None if it is not a result of a known kind."""
    try:
        text = read_plain(path).decode(errors="replace")
    except OSError as error:
        raise _refusal(path, f"cannot be read ({error.strerror})") from None
    try:
        data = parse_json(text)
    except Unfit as unfit:
        begins = re.match(r'\s*{\s*"kind"\s*:\s*(?:"([^"]*)")?', text)
        if begins is None or (begins[1] or "") not in {"", *KINDS}:  # nor does it begin like one
            return None
        raise _refusal(path, str(unfit)) from None
    kind = data.get("kind") if isinstance(data, dict) else None
    if not isinstance(kind, str) or kind not in KINDS:
        return None
    return parse_result(KINDS[kind], data, path, name)


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
