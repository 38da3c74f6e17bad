"""The committed result files: read, loaded and saved here; `benchmarks.kinds` has their fields.

Every script of this folder writes its file with `save`; tables, plots and the page read it with `load` or `read`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import Any, TypeVar

import benchmarks.kinds  # noqa: F401 - makes all kinds known
from benchmarks.result_files import Result, ResultError, Results, read_result, read_results
from foresample.provenance import make_result, write_result

RESULTS = Path(__file__).parent / "results"

R = TypeVar("R", bound=Result)


def read(folder: Path = RESULTS) -> Results:
    """All results of the folder and those below it."""
    return read_results(folder)


def load(kind: type[R], name: str, folder: Path = RESULTS) -> R:
    """One of them, which must be of this kind."""
    path = folder / f"{name}.json"
    result = read_result(path, name)
    if not isinstance(result, kind):
        raise ResultError(f"{path} is no result of the kind {kind.__name__}")
    return result


def save(path: Path, kind: str, settings: Any, **content: Any) -> None:
    """Write a result; dataclasses as objects."""
    write_result(path, make_result(kind, _plain(settings), **_plain(content)))


def _plain(value: Any) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        return asdict(value)
    if isinstance(value, Mapping):
        return {key: _plain(part) for key, part in value.items()}
    return [_plain(part) for part in value] if isinstance(value, list) else value
