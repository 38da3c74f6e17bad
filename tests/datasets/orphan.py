"""A worker of a run in a process of its own, which outlives its driver: `python -m tests.datasets.orphan PLAN`."""

from __future__ import annotations

import pickle
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from foresample.datasets.cluster import Worker
from foresample.datasets.shards import Plan
from foresample.datasets.workers import LocalWorker, Progress
from foresample.settings import Settings


class Driver(LocalWorker):
    """Has another process draw, as a driver on Ray does, and waits for it."""

    make: Any = None

    def draw(self, plan: Plan, numbers: Iterable[int], stop: Any = None, worker: int = 0) -> Iterator[Progress]:
        path = plan.out.with_name("plan.pickle")
        path.write_bytes(pickle.dumps((self.make, plan, list(numbers))))
        subprocess.run([sys.executable, "-m", "tests.datasets.orphan", str(path)])
        yield Progress(0, 0, 0, ())


if __name__ == "__main__":
    make, plan, numbers = pickle.loads(Path(sys.argv[1]).read_bytes())
    try:
        for _ in Worker(make, Settings(slots=8), plan.out).local.draw(plan, iter(numbers)):
            pass
    except OSError as error:
        print(error, file=sys.stderr)
        sys.exit(2)
