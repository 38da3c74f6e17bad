"""A pipeline's own loop, run where no window is faster, and its report."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from time import perf_counter
from typing import Any

from torch import Tensor

from foresample.core.report import Report
from foresample.integrations.untouched import untouched_report


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
        """`copies`: rows of the latents for an image."""
        return untouched_report(self.turn, self.rows // copies, self.seconds)
