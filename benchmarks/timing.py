"""One way to time samplers against each other.

Every side is warmed, then the sides take turns: each turn runs every side once, in an order that reverses from turn to
turn, so that a machine that slows down slows both. A side's time is its median over the turns; a ratio is the
baseline's median over the side's. The error of a ratio comes from resampling whole turns (a paired bootstrap), so what
both sides of a turn share cancels. A quick side can run several times in each turn. Turns are added until every ratio's
error is below `error` of the ratio, or until `most` turns or `seconds` are used up; `Ratio.settled` says which of the
two it was.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from time import perf_counter

import torch

from foresample.schema import AtLeastOne, NotNegative, Positive

ERROR = 0.02
"""Largest relative standard error of a ratio that counts as settled."""
_RESAMPLES = 400


@dataclass(frozen=True, kw_only=True)
class Ratio:
    """The ratio of the baseline's median time to a side's."""

    ratio: Positive
    """Above 1 the side is faster."""
    error: NotNegative
    """Standard error of `ratio`."""
    turns: AtLeastOne
    settled: bool
    """True if the error fell below the bound before the turns ran out."""

    def __str__(self) -> str:
        late = "" if self.settled else f", error still above {ERROR:.0%}"
        return f"{self.ratio:.2f} ± {self.error:.2f} ({self.turns} turns{late})"


@dataclass(frozen=True)
class Timing:
    """Seconds of every run of every side, turn after turn; the first side is the baseline.

    The side with the fewest runs ran once in each turn, the others once or more often.
    """

    seconds: Mapping[str, list[float]]
    bound: float = ERROR

    @property
    def baseline(self) -> str:
        return next(iter(self.seconds))

    @property
    def turns(self) -> int:
        return min(len(seconds) for seconds in self.seconds.values())

    def median(self, side: str) -> float:
        """Median seconds of one run of a side."""
        return float(_median(self._of(side)))

    def median_error(self, side: str) -> float:
        """Standard error of a side's median."""
        return float(_median(self._resampled(side)).std())

    def quantile(self, side: str, q: float) -> float:
        """A quantile of the seconds of a side, 0.99 for the slow tail."""
        return float(self._of(side).quantile(q))

    def ratio(self, side: str, baseline: str | None = None) -> Ratio:
        """The ratio of the baseline's median time to the side's; another side can be the baseline."""
        base = self.baseline if baseline is None else baseline
        error = float((_median(self._resampled(base)) / _median(self._resampled(side))).std())
        ratio = float(_median(self._of(base)) / _median(self._of(side)))
        return Ratio(ratio=ratio, error=error, turns=self.turns, settled=error <= self.bound * ratio)

    @property
    def settled(self) -> bool:
        """True if every ratio's error is below the bound."""
        return all(self.ratio(side).settled for side in list(self.seconds)[1:])

    def _of(self, side: str) -> torch.Tensor:
        return torch.tensor(self.seconds[side], dtype=torch.float64)

    def _resampled(self, side: str) -> torch.Tensor:
        """Seconds of a side in turns drawn with replacement, one row a resample; the same turns for every side."""
        generator = torch.Generator().manual_seed(0)
        drawn = torch.randint(self.turns, (_RESAMPLES, self.turns), generator=generator)
        return self._of(side).view(self.turns, -1)[drawn].flatten(1)


def take_turns(
    sides: Mapping[str, Callable[[int], object]],
    *,
    warm: int = 1,
    least: int = 8,
    most: int = 100,
    seconds: float = float("inf"),
    error: float = ERROR,
    repeats: Mapping[str, int] | None = None,
    clock: Callable[[], float] = perf_counter,
) -> Timing:
    """Time every side, the baseline first in `sides`, in turns.

    A side is called with the number of its turn, so that it can draw another sample in every turn and all sides draw
    the same one. Warm-up calls get the numbers −1, −2, …, so no reported sample was drawn before. A side of `repeats`
    runs as many times in each turn, each timed by itself, and is called with the number of its run.
    """
    often = {side: (repeats or {}).get(side, 1) for side in sides}
    if sides and min(often.values()) != 1:
        raise ValueError(f"repeats={repeats}: one side at least has to run once in each turn")
    if least < 2:
        raise ValueError(f"least={least}: an error needs two turns at least")
    if most < least:
        raise ValueError(f"most={most} is below least={least}")
    for number in range(1, warm + 1):
        for run in sides.values():
            run(-number)
    _wait()
    taken: dict[str, list[float]] = {side: [] for side in sides}
    began, due = clock(), least
    for turn in range(most):
        for side in list(sides) if turn % 2 == 0 else list(sides)[::-1]:
            for number in range(turn * often[side], (turn + 1) * often[side]):
                started = clock()
                sides[side](number)
                _wait()
                taken[side].append(clock() - started)
        done = turn + 1
        if done < least:
            continue
        if (
            done == due
        ):  # checked rarely: stopping at the first small error would favour errors that are too small
            if Timing(taken, error).settled:
                break
            due = done + max(2, done // 4)
        if clock() - began > seconds:
            break
    return Timing(taken, error)


def _median(values: torch.Tensor) -> torch.Tensor:
    """The median along the last axis; of an even number, the mean of the middle two."""
    return values.quantile(0.5, dim=-1)


def _wait() -> None:
    """Wait until a GPU that is in use has finished its work."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
