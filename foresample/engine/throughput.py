"""How many samples at a time, and by which sampler: throughput against latency.

The more samples are under way, the better a device is used and the longer each of them takes. Speculation shortens
the wait while the device has room for its drafts, and costs throughput once it is full. So neither sampler is the
better one; `frontier` measures both for several numbers of slots, and `pick` takes the highest throughput whose
samples come in time:

    sequential     slots / (N τ(0)) samples a second,       each after N τ(0) seconds
    window L       gain(L) as many,                         95 in 100 of them within C₉₅(L) τ(L)

A deadline on single samples chooses *settings* here, before any sample is drawn. To drop samples that come late would
choose *samples*, and change their law (docs/theory.md, "Finishing first is not fair").
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from foresample.contracts import Target, at_least_one
from foresample.engine.tuning import Tuning, tune

SLOTS = (1, 4, 16, 64, 256)
_SAMPLES = 20  # of each setting, at least: for a percentile


@dataclass(frozen=True)
class Point:
    """One way to sample, measured."""

    slots: int
    window: int | None
    """None: sequentially."""
    samples_per_second: float
    p95_seconds: float
    """From a sample's beginning to its end, of 95 in 100 samples at most."""

    def __str__(self) -> str:
        how = "sequentially" if self.window is None else f"with window {self.window}"
        return (
            f"{self.slots} at a time, {how}: {self.samples_per_second:.4g} samples a second, "
            f"95 in 100 within {1e3 * self.p95_seconds:.4g} ms"
        )


def frontier(
    target: Target,
    *,
    slots: Sequence[int] = SLOTS,
    progress: Callable[[str], None] | None = None,
    **how: Any,
) -> list[Tuning]:
    """A tuning for each number of slots; `how` is as for `tune`."""
    say = progress or (lambda what: None)
    found: list[Tuning] = []
    for count in sorted({at_least_one("slots", count) for count in slots}):
        found.append(
            tune(
                target,
                slots=count,
                samples=max(_SAMPLES, 2 * count),
                progress=lambda what, count=count: say(f"{count} at a time, {what}"),  # type: ignore[misc]
                **{**how, "look": how.get("look", True) and not found},
            )
        )
    return found


def points(tunings: Iterable[Tuning]) -> list[Point]:
    """Every way to sample that was measured."""
    found: list[Point] = []
    for tuning in tunings:
        seconds = tuning.steps * tuning.step_seconds
        throughput = tuning.slots / seconds
        found.append(Point(tuning.slots, None, throughput, seconds))
        found += [
            Point(tuning.slots, t.window, t.gain * throughput, t.calls_p95 * t.round_seconds)
            for t in tuning.trials
            if t.calls_p95 is not None
        ]
    return found


def pick(tunings: Iterable[Tuning], within: float | None = None) -> Point:
    """The most samples a second, of the ways whose samples come `within` so many seconds, 95 in 100 of them."""
    measured = points(tunings)
    in_time = [p for p in measured if within is None or p.p95_seconds <= within]
    if not in_time:
        soonest = min(measured, key=lambda p: p.p95_seconds)
        raise ValueError(f"no way to sample is within {within} s here; the soonest is {soonest}")
    return max(in_time, key=lambda p: p.samples_per_second)
