"""A process that draws a dataset, to be disturbed: `python -m tests.datasets.process OUT '{"slots": 4}'`.

Exit status as the command line's: 0, 2 with a sentence on stderr, 3 if samples broke, 130 if interrupted.

Whoever disturbs it says where it is to be held: its network stops at a gate before a chosen sample, and goes on when
the gate is opened, however long that takes.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import foresample as fs
from foresample.targets import ChainTarget
from tests.support.small_chains import flow
from tests.support.waiting import wait_for

COUNT, WINDOW, SHARD = 300, 6, 40
BREAKS, AT_STEP = 107, 9
"""The sample that breaks, if any shall, and where."""


@dataclass(frozen=True)
class Gate:
    """Holds processes: a folder in which those that wait leave their number, and a file that keeps it closed."""

    folder: Path

    @property
    def _closed(self) -> Path:
        return self.folder / "closed"

    def close(self) -> None:
        self.folder.mkdir()
        self._closed.touch()

    def open(self) -> None:
        self._closed.unlink()

    def hold(self) -> None:
        """Wait here until it is open."""
        if self._closed.exists():
            (self.folder / str(os.getpid())).touch()
            wait_for(lambda: not self._closed.exists(), "the gate to be opened")

    def waiting(self) -> set[int]:
        """The processes that came here while it was closed."""
        return {int(path.name) for path in self.folder.iterdir() if path != self._closed}


@dataclass(frozen=True)
class Make:
    """The closed-form flow, with a network that is held at a gate, or breaks."""

    breaks_while: Path | None = None
    """One sample is NaN as long as this file exists."""
    gate: Path | None = None
    """Folder of a gate."""
    held_from: int = 0
    """The first sample that does not pass it."""
    drifts: Path | None = None
    """The first process that makes this file has another target than all others."""

    def __call__(self) -> ChainTarget:
        base, drift = flow(), 0.0
        if self.drifts is not None:
            try:
                self.drifts.touch(exist_ok=False)
            except FileExistsError:
                drift = 9.0
        assert base.chain.time is not None
        breaks_at = base.chain.time[AT_STEP]

        def network(x: Tensor, time: Tensor, row: Tensor) -> Tensor:
            # The fingerprint asks for samples of any number, in calls on four states, before any is drawn.
            fingerprinted = self.held_from > 0 and len(row) <= 4
            if self.gate is not None and (row >= self.held_from).any() and not fingerprinted:
                Gate(self.gate).hold()
            prediction = base.network(x, time, row) + drift
            if self.breaks_while is not None and self.breaks_while.exists():
                prediction[(row == BREAKS) & (time == breaks_at)] = torch.nan
            return prediction

        return replace(base, network=network)


def draw(out: Path, make: Callable[[], fs.Target] = Make(), **how: Any) -> fs.Dataset:  # noqa: B008
    return fs.generate(
        make, COUNT, out=out, **{"window": WINDOW, "shard": SHARD, "slots": 16, "seed": 5, **how}
    )


if __name__ == "__main__":
    settings = json.loads(sys.argv[2])
    paths = {name: Path(settings.pop(name)) for name in ("breaks_while", "gate", "drifts") if name in settings}
    make = Make(held_from=settings.pop("held_from", 0), **paths)
    if settings.pop("orphans", False):
        from foresample.datasets import generation
        from tests.datasets.orphan import Driver

        Driver.make = import_module("tests.datasets.process").Make(**vars(make))
        generation.LocalWorker = Driver  # type: ignore[misc]
    if workers := settings.pop("workers", 0):  # else as many as the machine has CPUs
        import ray

        ray.init("local", num_cpus=workers, logging_level="ERROR", log_to_driver=False, include_dashboard=False)
    try:
        dataset = draw(Path(sys.argv[1]), make, **settings)
    except KeyboardInterrupt:
        sys.exit(130)
    except (OSError, ValueError, RuntimeError) as error:
        print(error, file=sys.stderr)
        sys.exit(2)
    sys.exit(3 if dataset.failures else 0)
