"""Result files: JSON objects that say what they are (`kind`), where they come from, and what was found.

Every command writes its findings through `make_result` and `write_result`; the page, the tables and the plots read
them through `read_results`, as values of the types below. Files are read with suspicion: what does not fit is refused
in one sentence with the file, the place in it and a remedy.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from functools import cache
from pathlib import Path
from reprlib import repr as shortened
from types import UnionType
from typing import Annotated, Any, NamedTuple, TypeVar, Union, get_args, get_origin, get_type_hints

from foresample.core.report import without_nan
from foresample.datasets.shards import Failure
from foresample.engine.tuning import Trial, Tuning
from foresample.provenance import provenance
from foresample.selftest import Finding, SamplesLaw

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


# ------------------------------------------------------------------ the schema


class Rule(NamedTuple):
    """What a value must be beyond its type."""

    name: str
    holds: Callable[[Any], bool]


MOST = 1e100
"""So that ratios and products of what was read are finite as well."""
T = TypeVar("T")
Positive = Annotated[float, Rule("a positive number", lambda value: value > 1 / MOST)]
NotNegative = Annotated[float, Rule("a number from 0 on", lambda value: value >= 0)]
Count = Annotated[int, Rule("a whole number from 0 on", lambda value: value >= 0)]
AtLeastOne = Annotated[int, Rule("a whole number from 1 on", lambda value: value >= 1)]
Some = Annotated[list[T], Rule("a list with something in it", bool)]


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Where it ran."""

    cpu: str | None = None
    threads: int | None = None
    gpu: str | None = None


@dataclass(frozen=True, kw_only=True)
class Origin:
    """Where a result comes from, as far as it says so (`provenance`)."""

    command: str | None = None
    commit: str | None = None
    commit_note: str | None = None
    """Of a commit that was named by hand."""
    versions: dict[str, str] = field(default_factory=dict)
    machine: Machine = field(default_factory=Machine)


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
class TuneResult(Result):
    """Of `foresample tune`."""

    settings: dict[str, Any]
    steps: AtLeastOne
    slots: AtLeastOne
    step_seconds: Positive
    trials: Some[Trial]
    window: Count | None
    achieved: NotNegative | None

    @property
    def tuning(self) -> Tuning:
        """With its advice."""
        return Tuning(self.steps, self.slots, self.step_seconds, self.trials, self.window, self.achieved)


@dataclass(frozen=True, kw_only=True)
class CheckResult(Result):
    """Of `foresample check`."""

    settings: dict[str, Any] = field(default_factory=dict)
    level: Positive
    findings: Some[Finding]


@dataclass(frozen=True, kw_only=True)
class DatasetSettings:
    """What a dataset holds; a manifest says more, according to its target."""

    count: AtLeastOne
    shard: AtLeastOne
    seed: int
    shape: list[Count]
    dtype: str
    steps: AtLeastOne
    window: Count
    method: str
    model: str | None = None
    target: str | None = None


@dataclass(frozen=True, kw_only=True)
class Costs:
    """Of a dataset's samples."""

    samples: Count
    calls_mean: NotNegative
    evaluations_mean: NotNegative
    accepted_mean: float
    speedup: NotNegative


@dataclass(frozen=True, kw_only=True)
class DatasetRun(Origin):
    """One run that worked on a dataset; what it could not say before it was killed is None."""

    started: str
    found: Count
    drawn: Count | None
    seconds: NotNegative | None
    peak_mib: NotNegative | None


@dataclass(frozen=True, kw_only=True)
class Shard:
    """One file of a dataset."""

    file: str
    samples: Count
    sha256: str


@dataclass(frozen=True, kw_only=True)
class DatasetResult(Result):
    """The manifest of `foresample generate`."""

    settings: DatasetSettings
    costs: Costs
    shards: list[Shard]
    failures: list[Failure]
    law: SamplesLaw | None
    runs: Some[DatasetRun]

    @property
    def origins(self) -> Sequence[Origin]:
        return self.runs


KINDS: dict[str, type[Result]] = {
    "sample": SampleResult,
    "bench": BenchResult,
    "tune": TuneResult,
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
    constants: list[str] = []
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise _refusal(path, f"cannot be read ({error.strerror})") from None
    try:
        data = json.loads(text, parse_constant=constants.append)
    except (ValueError, RecursionError) as error:
        if not re.match(r'\s*{\s*"kind"', text):  # nor does it begin like one
            return None
        raise _refusal(path, f"cannot be read as JSON ({error})") from None
    kind = data.get("kind") if isinstance(data, dict) else None
    if not isinstance(kind, str) or kind not in kinds:
        return None
    if constants:
        raise _refusal(path, f"{constants[0]} is no JSON number")
    return parse_result(kinds[kind], data, path, name)


def parse_result(kind: type[R], data: Mapping[str, Any], path: Path, name: str | None = None) -> R:
    """A file's object as a result of this kind."""
    try:
        return _object(kind, data, "", {"name": name or path.stem, "path": path})
    except _Unfit as unfit:
        raise _refusal(path, str(unfit)) from None


def _refusal(path: Path, what: str) -> ResultError:
    return ResultError(f"{path}: {what}; write it again with its command, or take it out of the folder")


class _Unfit(Exception):
    """What is wrong with a value, and where it stands."""


_SCALARS: dict[Any, tuple[str, Callable[[Any], bool]]] = {  # to Python, true is a number as well
    str: ("a text", lambda value: type(value) is str),
    bool: ("true or false", lambda value: type(value) is bool),
    int: ("a whole number", lambda value: type(value) is int and abs(value) <= MOST),
    float: ("a finite number", lambda value: type(value) in (int, float) and abs(value) <= MOST),
}


def _value(kind: Any, value: Any, where: str) -> Any:
    """A JSON value as one of this type."""
    origin, parts = get_origin(kind), get_args(kind)
    if kind is Any:
        return value
    if origin is Annotated:
        found = _value(parts[0], value, where)
        return _fitting(parts[1].holds(found), found, where, parts[1].name)
    if origin in (Union, UnionType):  # X | None
        return None if value is None else _value(parts[0], value, where)
    if origin is list:
        _fitting(isinstance(value, list), value, where, "a list")
        return [_value(parts[0], part, f"{where}[{i}]") for i, part in enumerate(value)]
    if origin is dict:
        _fitting(isinstance(value, dict), value, where, "an object")
        return {key: _value(parts[1], part, f"{where}.{key}") for key, part in value.items()}
    if is_dataclass(kind):
        _fitting(isinstance(value, dict), value, where, "an object")
        return _object(kind, value, f"{where}.")
    name, fits = _SCALARS[kind]
    return _fitting(fits(value), value, where, name)


def _fitting(fits: bool, value: Any, where: str, name: str) -> Any:
    if not fits:
        raise _Unfit(f"{where} is {shortened(value)}, not {name}")
    return value


def _object(kind: Any, data: Mapping[str, Any], where: str, given: Mapping[str, Any] | None = None) -> Any:
    """A JSON object as a dataclass; what it has beyond that is left."""
    values = dict(given or {})
    for one in fields(kind):
        if one.name in values:
            continue
        if one.name in data:
            values[one.name] = _value(_types(kind)[one.name], data[one.name], where + one.name)
        elif one.default is MISSING and one.default_factory is MISSING:
            raise _Unfit(f"{where}{one.name} is missing")
    return kind(**values)


@cache
def _types(kind: type) -> dict[str, Any]:
    return get_type_hints(kind, include_extras=True)


def _words(name: str) -> list[tuple[int, str]]:
    """Words and numbers in turn."""
    return [(int(part), "") if part.isdecimal() else (0, part) for part in re.split(r"(\d+)", name)]
