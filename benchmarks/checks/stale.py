"""Results of a GPU, and the files of the sampler that have changed since the commit they were made at."""

from __future__ import annotations

import subprocess

from benchmarks.result_files import Result
from benchmarks.results import RESULTS, read

ROOMS = ("backends", "core", "engine", "drafters")
"""Where a change can move what a GPU measures or tests."""
SHOWN = 3


def table() -> str:
    """One line a result: its commit, and what has changed since."""
    rows = [("GPU result", "commit", f"changed since in {', '.join(ROOMS)}")]
    for result in read().found:
        if result.machine.gpu is not None:
            rows.append((result.name, result.commit or "none", changed(result)))
    widths = [max(len(row[i]) for row in rows) for i in range(2)]
    return "\n".join(f"{name:{widths[0]}}  {commit:{widths[1]}}  {what}" for name, commit, what in rows)


def changed(result: Result) -> str:
    """The files, counted, and the first of them."""
    if result.commit is None:
        return "unknown: it names no commit"
    folders = [f"foresample/{room}" for room in ROOMS]
    told = subprocess.run(
        ["git", "diff", "--name-only", result.commit.removesuffix("-dirty"), "--", *folders],
        capture_output=True,
        text=True,
        cwd=RESULTS.parent.parent,
    )
    if told.returncode:
        return "unknown: its commit is not in this clone"
    files = [file.removeprefix("foresample/") for file in told.stdout.split()]
    more = f" and {len(files) - SHOWN} more" if len(files) > SHOWN else ""
    return f"{len(files)}: {', '.join(files[:SHOWN])}{more}" if files else "nothing"
