"""A process that draws a dataset, to be disturbed: `python -m tests.dataset OUT '{"slots": 4}'`.

Exit status as the command line's: 0, 2 with a sentence on stderr, 3 if samples broke, 130 if interrupted.
"""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import foresample as fs
from foresample.targets import ChainTarget
from tests.chains import flow

COUNT, WINDOW, SHARD = 300, 6, 40
BREAKS, AT_STEP = 107, 9
"""The sample that breaks, if any shall, and where."""


@dataclass(frozen=True)
class Make:
    """The closed-form flow, with a network that takes its time, or breaks."""

    pause: float = 0.0
    """Seconds of a call."""
    breaks_while: Path | None = None
    """One sample is NaN as long as this file exists."""
    pids: Path | None = None
    """Folder in which a process that makes the target leaves its number."""

    def __call__(self) -> ChainTarget:
        if self.pids is not None:
            (self.pids / str(os.getpid())).touch()
        base = flow()

        def network(x: Tensor, step: Tensor, row: Tensor) -> Tensor:
            time.sleep(self.pause)
            prediction = base.network(x, step, row)
            if self.breaks_while is not None and self.breaks_while.exists():
                prediction[(row == BREAKS) & (step == AT_STEP)] = torch.nan
            return prediction

        return replace(base, network=network)


def draw(out: Path, make: Make = Make(), **how: Any) -> fs.Dataset:  # noqa: B008
    return fs.generate(make, COUNT, out=out, window=WINDOW, **{"shard": SHARD, "slots": 16, "seed": 5, **how})


if __name__ == "__main__":
    settings = json.loads(sys.argv[2])
    paths = {name: Path(settings.pop(name)) for name in ("breaks_while", "pids") if name in settings}
    make = Make(settings.pop("pause", 0.0), **paths)
    try:
        dataset = draw(Path(sys.argv[1]), make, **settings)
    except KeyboardInterrupt:
        sys.exit(130)
    except (OSError, ValueError, RuntimeError) as error:
        print(error, file=sys.stderr)
        sys.exit(2)
    sys.exit(3 if dataset.failures else 0)
