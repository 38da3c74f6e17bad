"""Golden comparison: does the package still draw the same samples, bit for bit, at the same cost?

    python -m tests.golden record FILE      draw every case and write its digest
    python -m tests.golden compare FILE     draw again; list every case that differs and exit with 1 if any does

A case records the SHA-256 of its samples' bytes with the calls and evaluations, or the sentence of a refusal. Every
case is drawn with both backends of the CPU, each in a process of its own with one thread. The cases use public names
and helpers of the tests only, so that the file runs before and after a change of the package's inside. A recording
holds for one machine and one set of installed versions.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from tests import golden_cases, golden_served
from tests.golden_cases import Draw, Record

BACKENDS = {"numba": "", "plain": "1"}
"""Each backend and its value of FORESAMPLE_PLAIN."""

GROUPS: dict[str, Callable[[], Iterator[tuple[str, Draw]]]] = {
    "chains": golden_cases.chains,
    "targets": golden_cases.targets,
    "ways": golden_cases.ways,
    "samplers": golden_cases.samplers,
    "pipelines": golden_served.pipelines,
    "policies": golden_served.policies,
    "packages": golden_served.packages,
}


def record_of(draw: Draw) -> Record:
    """The record of one case; a refusal is one, too."""
    torch.manual_seed(0)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return draw()
    except Exception as error:
        return {"refused": f"{type(error).__name__}: {error}"}


def draw_here(backend: str, pattern: str) -> dict[str, Record]:
    """Every case whose name matches, in this process."""
    torch.set_num_threads(1)
    found = {}
    for group in GROUPS.values():
        for name, draw in group():
            if re.search(pattern, f"{backend}/{name}"):
                found[f"{backend}/{name}"] = record_of(draw)
    return found


def draw_all(pattern: str) -> dict[str, Record]:
    """Every case whose name matches, each backend in a process of its own."""
    found: dict[str, Record] = {}
    for backend, plain in BACKENDS.items():
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "records.json"
            environment = os.environ | {
                "OMP_NUM_THREADS": "1",
                "PYTHONPATH": os.getcwd(),
                "FORESAMPLE_PLAIN": plain,
            }
            command = [sys.executable, "-m", "tests.golden", backend, str(out), "--only", pattern]
            subprocess.run(command, env=environment, check=True)
            found |= json.loads(out.read_text())
    return found


def differences(before: dict[str, Record], after: dict[str, Record], *, reworded: bool = False) -> list[str]:
    """One line for each case that differs; `reworded` allows a refusal to have another sentence."""
    lines = []
    for name in sorted(before.keys() | after.keys()):
        old, new = before.get(name), after.get(name)
        if old is None or new is None:
            lines.append(f"{name}: {'not recorded before' if old is None else 'vanished'}")
            continue
        parts = [part for part in sorted(old.keys() | new.keys()) if old.get(part) != new.get(part)]
        if parts == ["refused"] and reworded and "refused" in old and "refused" in new:
            continue
        if parts:
            shown = "; ".join(f"{part} {old.get(part)} -> {new.get(part)}" for part in parts)
            lines.append(f"{name}: {shown}")
    return lines


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=["record", "compare", *BACKENDS])
    parser.add_argument("file", type=Path)
    parser.add_argument(
        "--only", default="", metavar="PATTERN", help="a regular expression the cases' names match"
    )
    parser.add_argument("--reworded", action="store_true", help="let a refusal have another sentence")
    given = parser.parse_args(arguments)
    if given.command in BACKENDS:
        given.file.write_text(json.dumps(draw_here(given.command, given.only)))
        return 0
    found = draw_all(given.only)
    if given.command == "record":
        given.file.write_text(json.dumps(found, indent=0, sort_keys=True))
        print(f"{len(found)} cases recorded, {sum('refused' in r for r in found.values())} of them refusals")
        return 0
    recorded = json.loads(given.file.read_text())
    before = {name: record for name, record in recorded.items() if re.search(given.only, name)}
    lines = differences(before, found, reworded=given.reworded)
    print("\n".join([*lines, f"{len(found)} cases drawn, {len(lines)} differ"]))
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main())
