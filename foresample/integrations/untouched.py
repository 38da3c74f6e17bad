"""The choice between a window and the library's own loop, which runs with a report where no window is faster."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from time import perf_counter
from typing import Any

import torch

from foresample.contracts import Target
from foresample.core.report import Report
from foresample.engine.engine import chosen_window
from foresample.settings import Settings


class NothingGains(Exception):
    """No window is faster than the loop itself."""

    def __init__(self, steps: int, count: int) -> None:
        super().__init__(steps, count)
        self.steps, self.count = steps, count

    def run(self, loop: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[Any, Report]:
        """The result of the loop, and its report."""
        started = perf_counter()
        result = loop(*args, **kwargs)
        return result, untouched_report(self.steps, self.count, perf_counter() - started)


def undisturbed_window(target: Target, settings: Settings) -> int | None:
    """`chosen_window`, with torch's random state restored after its measurements."""
    put_back = kept_random_state()
    window = chosen_window(target, settings)
    put_back()
    return window


def untouched_report(steps: int, count: int, seconds: float) -> Report:
    """The report of a loop that drew `count` samples itself: every step is a call.

    Its evidence is empty: nothing had to be checked or trusted.
    """
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
        seconds=seconds,
        target_seconds=seconds,
    )


def kept_random_state(generator: torch.Generator | None = None) -> Callable[[], object]:
    """A function that restores the present random state: the generator's, or torch's own."""
    if generator is not None:
        return partial(generator.set_state, generator.get_state())
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    state = torch.get_rng_state()

    def put_back() -> None:
        torch.set_rng_state(state)
        torch.cuda.set_rng_state_all(cuda)

    return put_back
