"""Saved results, read with suspicion: what is wrong is said with the file's name and a remedy."""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, NoReturn


class ResultError(ValueError):
    """A result file or folder that cannot be shown."""


@dataclass(frozen=True)
class Result:
    """One saved result."""

    name: str
    """Path inside the results folder without its ending, as in 'earlier/cifar10-calls-w50-gain-only'."""
    path: Path
    data: dict[str, Any]

    def fail(self, what: str) -> NoReturn:
        """Refuse the file."""
        raise ResultError(f"{self.path}: {what}; write it again with its command, or take it out of the folder")

    def field(self, key: str, kind: type | tuple[type, ...]) -> Any:
        """A field that must be there, and of this kind."""
        if key not in self.data:
            self.fail(f"the field {key!r} is missing")
        if not isinstance(self.data[key], kind):
            self.fail(f"the field {key!r} is {self.data[key]!r}")
        return self.data[key]

    def rows(
        self,
        *,
        text: tuple[str, ...] = (),
        numbers: tuple[str, ...] = (),
        positive: tuple[str, ...] = (),
        key: str = "rows",
    ) -> list[dict[str, Any]]:
        """Objects, at least one, that all have these fields: strings, finite numbers, and positive ones."""
        rows = self.field(key, list)
        if not rows:
            self.fail(f"the field {key!r} is empty")
        for i, row in enumerate(rows):
            for name in (*text, *numbers, *positive):
                if not isinstance(row, dict) or name not in row:
                    self.fail(f"{name!r} is missing in {key}[{i}]")
                fits = isinstance(row[name], str) if name in text else is_number(row[name])
                if not fits or (name in positive and row[name] <= 0):
                    self.fail(f"{name!r} in {key}[{i}] is {row[name]!r}")
        return rows

    @property
    def settings(self) -> dict[str, Any]:
        """What the run was made with, if it says so."""
        settings = self.data.get("settings")
        return settings if isinstance(settings, dict) else {}


@dataclass(frozen=True)
class Results:
    """All results of a folder, by name; `earlier/` and other subfolders come with theirs in front."""

    folder: Path
    found: dict[str, Result]

    def get(self, name: str) -> Result | None:
        """The result of this name, if it is there."""
        return self.found.get(name)

    def matching(self, pattern: str) -> list[Result]:
        """Results of the folder itself whose names match, by the alphabet, numbers by their value."""
        names = [name for name in self.found if "/" not in name and fnmatch(name, pattern)]
        return [self.found[name] for name in sorted(names, key=_parts)]


def read_results(folder: Path) -> Results:
    """Every JSON file under the folder; one that is broken is refused."""
    if not folder.is_dir():
        raise ResultError(f"no folder of results at {folder}; name one with --results")
    paths = sorted(folder.rglob("*.json"))
    if not paths:
        raise ResultError(
            f"no result files (*.json) in {folder}; make one with 'foresample bench mixture --out DIR'"
        )
    return Results(folder, {r.name: r for r in (_read(path, folder) for path in paths)})


def _read(path: Path, folder: Path) -> Result:
    name = path.relative_to(folder).with_suffix("").as_posix()
    try:
        data = json.loads(path.read_text(encoding="utf-8"), parse_constant=_refuse_constant)
    except (OSError, ValueError) as error:
        raise ResultError(
            f"{path} cannot be read as JSON ({error}); write it again, or take it out of the folder"
        ) from None
    if not isinstance(data, dict):
        raise ResultError(f"{path} holds no JSON object; write it again, or take it out of the folder")
    return Result(name, path, data)


def _parts(name: str) -> list[tuple[int, str]]:
    """Words and numbers in turn."""
    return [(int(part), "") if part.isdigit() else (0, part) for part in re.split(r"(\d+)", name)]


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON number")


def is_number(value: object) -> bool:
    """A finite number, and no truth value."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
