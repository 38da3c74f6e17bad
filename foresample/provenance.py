"""Result files: JSON objects with their kind, origin (command, commit, versions, machine) and settings."""

from __future__ import annotations

import json
import os
import platform
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

from foresample.text import without_nan

__version__ = "0.1.0"


@dataclass(frozen=True, kw_only=True)
class Machine:
    """The machine on which a result was made."""

    cpu: str | None = None
    threads: int | None = None
    gpu: str | None = None


@dataclass(frozen=True, kw_only=True)
class Origin:
    """The origin of a result; None for what it does not state (`provenance`)."""

    command: str | None = None
    commit: str | None = None
    commit_note: str | None = None
    """A note on a commit that was named by hand."""
    versions: dict[str, str] = field(default_factory=dict)
    machine: Machine = field(default_factory=Machine)


def install(*packages: str) -> str:
    """The command that installs packages of the extras, in the versions that this package accepts.

    It names the packages, not an extra: that also works where foresample itself came from a checkout or a wheel.
    """
    versions: dict[str, str] = {}
    with suppress(metadata.PackageNotFoundError):
        for line in metadata.requires("foresample") or []:
            if found := re.match(r"([\w.-]+)([^;\[]*?)\s*;", line):
                versions[found[1]] = found[2].strip()
    return f"pip install {' '.join(shlex.quote(name + versions.get(name, '')) for name in packages)}"


def make_result(kind: str, settings: Mapping[str, Any], **content: Any) -> dict[str, Any]:
    """A result of this kind, with its origin."""
    return {"kind": kind, **provenance(), "settings": dict(settings), **content}


def result_json(result: Mapping[str, Any]) -> str:
    """A result as JSON text."""
    return json.dumps(without_nan(dict(result)), indent=2, allow_nan=False)


def write_result(path: Path, result: Mapping[str, Any]) -> None:
    """Save a result as a JSON file; its folder is made if needed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(result_json(result) + "\n", encoding="utf-8")


def provenance() -> dict[str, Any]:
    """The origin of a result, to be saved with it.

    The commit is that of the checkout that holds this file, None outside a checkout. It ends in `-dirty` if tracked
    files differ, except results and pictures, which runs write themselves. GIT_COMMIT in the environment overrides it.
    """
    import torch  # here, so that the version can be read without torch

    return {
        "command": _command(),
        "commit": os.environ.get("GIT_COMMIT") or _commit(),
        "versions": {
            "foresample": __version__,
            "python": platform.python_version(),
            "torch": torch.__version__,
        },
        "machine": {
            "cpu": platform.processor() or platform.machine(),
            "threads": torch.get_num_threads(),
            "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        },
    }


def _command() -> str:
    """The command as it can be typed again, without the place of its output."""
    typed, kept = iter(sys.argv[1:]), [Path(sys.argv[0]).name]
    for argument in typed:
        if argument == "--out":
            next(typed, None)
        elif not argument.startswith("--out="):
            kept.append(argument)
    return shlex.join(kept)


def _commit() -> str | None:
    def git(*arguments: str) -> str:
        done = subprocess.run(["git", *arguments], capture_output=True, text=True, cwd=Path(__file__).parent)
        return done.stdout.strip()

    try:
        if not git("ls-files", Path(__file__).name):  # another repository around an installed package
            return None
        written = (f":(top,exclude){folder}" for folder in ("benchmarks/results", "docs/pictures"))
        changed = git("status", "--porcelain", "-uno", ":/", *written)
        return git("describe", "--always") + ("-dirty" if changed else "")
    except OSError:  # no git here
        return None
