"""A pipeline's own loop, run where no window is faster, and its report."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from time import perf_counter
from typing import Any

from torch import Tensor

from foresample.core.report import Report


class Untouched:
    """Stands where a `Session` does, lets everything pass and counts the steps."""

    def __init__(self) -> None:
        self.turn = 0
        self.rows = 0
        self.started, self.seconds = perf_counter(), 0.0

    def turns(self, timesteps: Tensor) -> Iterator[Tensor]:
        self.started = perf_counter()
        yield from timesteps.unbind()
        self.seconds = perf_counter() - self.started

    def step(self, original: Callable[..., Any], bound: dict[str, Any]) -> Any:
        """The scheduler's own step."""
        self.turn += 1
        self.rows = len(bound["sample"])
        return original(**bound)

    def report(self, copies: int) -> Report:
        """Every step is a call; `copies`: rows of the latents for an image.

        Nothing had to be checked, and nothing is taken on trust: the evidence is empty.
        """
        count, steps = self.rows // copies, self.turn
        return Report(
            "sequential, because no window was faster",
            steps,
            count,
            window=0,
            rounds=count * steps,
            evaluations=count * steps,
            accepted_lengths=[count * steps],
            mismatch=[math.nan] * steps,
            calls_mean=float(steps),
            calls_error=0.0 if count > 1 else math.nan,
            evaluations_mean=float(steps),
            speedup=1.0,
            slots=count,
            occupancy=1.0,
            seconds=self.seconds,
            target_seconds=self.seconds,
        )
