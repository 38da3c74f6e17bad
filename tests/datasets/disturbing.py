"""Processes that draw a dataset, started to be disturbed, and what must be in the folder afterwards."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from tests.datasets.process import COUNT, SHARD
from tests.support.waiting import GUARD, wait_for

ROOT = Path(__file__).parents[2]
SHARDS = -(-COUNT // SHARD)
# Ray's workers are as polite as can be, and on a busy machine would starve.
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "RAY_worker_niceness": "0"}

Start = Callable[..., "Process"]


def command(out: Path, **settings: object) -> list[str]:
    return [sys.executable, "-m", "tests.datasets.process", str(out), json.dumps(settings, default=str)]


def run(
    out: Path, settings: dict[str, object] | None = None, **options: Any
) -> subprocess.CompletedProcess[str]:
    """Start a process without a gate."""
    return subprocess.run(
        command(out, **settings or {}),
        cwd=ROOT,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=GUARD,
        **options,
    )


class Process:
    """A process that a test stops, kills or holds at a gate."""

    def __init__(self, log: Path, out: Path, **settings: object) -> None:
        self.log = log
        with log.open("w") as errors:
            self.popen = subprocess.Popen(command(out, **settings), cwd=ROOT, env=ENVIRONMENT, stderr=errors)

    @property
    def pid(self) -> int:
        return self.popen.pid

    def wait_until(self, condition: Callable[[], object], what: str) -> None:
        """Wait for a condition while the process lives; fail if it ends."""

        def held_or_dead() -> bool:
            assert self.popen.poll() is None, f"it ended before {what}: {self.log.read_text()}"
            return bool(condition())

        wait_for(held_or_dead, what)

    def signal(self, number: int) -> None:
        self.popen.send_signal(number)

    def ended(self) -> int:
        """Wait for the process to end, and return its exit status."""
        return self.popen.wait(timeout=GUARD)


def shards(out: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(out.glob("shard-*.safetensors"))}


def inodes(out: Path) -> dict[str, int]:
    """A file that was written again has another."""
    return {path.name: path.stat().st_ino for path in out.glob("shard-*.safetensors")}


def assert_identical(out: Path, undisturbed: Path) -> None:
    """The same bytes, nothing twice, nothing missing, nothing left over."""
    assert shards(out) == shards(undisturbed)
    index = torch.cat([load_file(path)["index"] for path in sorted(out.glob("shard-*"))])
    assert torch.equal(index, torch.arange(COUNT))
    assert not list(out.glob(".*.tmp"))
    manifest = json.loads((out / "manifest.json").read_text())
    assert manifest["costs"] == json.loads((undisturbed / "manifest.json").read_text())["costs"]
    assert manifest["failures"] == []


def descendants(pid: int, title: str) -> list[int]:
    """Processes of this title that this one has started, or those it has started."""
    parents, found = {}, []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parents[int(entry.name)] = int((entry / "stat").read_text().rsplit(")", 1)[1].split()[1])
                if (entry / "cmdline").read_text().startswith(title):
                    found.append(int(entry.name))
            except (FileNotFoundError, ProcessLookupError):
                continue

    def descends(one: int) -> bool:
        return one == pid or (one in parents and descends(parents[one]))

    return [one for one in found if descends(one)]


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False
