"""Times of two samplers that ran in turns, and what they say."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import comb
from statistics import fmean, median

_TAIL = 0.025  # probability that the true median lies above, or below, the interval


@dataclass
class Times:
    """Seconds that one sampler took turn by turn, those of them inside the network, and its network calls."""

    seconds: list[float] = field(default_factory=list)
    network: list[float] = field(default_factory=list)
    calls: list[int] = field(default_factory=list)

    def add(self, seconds: float, network: float, calls: int) -> None:
        self.seconds.append(seconds)
        self.network.append(network)
        self.calls.append(calls)

    @property
    def medians(self) -> tuple[str, str, str]:
        """Durations in all and inside the network, and the mean number of calls."""
        return duration(median(self.seconds)), duration(median(self.network)), f"{fmean(self.calls):.3g}"


def median_interval(values: Sequence[float]) -> tuple[float, float]:
    """The order statistics between which the true median lies with probability 95% or more.

    Fewer than six values cannot tell that much: theirs are the smallest and the largest.
    """
    count, outside, below = len(values), 0, 1.0
    while below / 2**count <= _TAIL:
        outside += 1
        below += comb(count, outside)
    first = max(0, outside - 1)
    ordered = sorted(values)
    return ordered[first], ordered[count - 1 - first]


def verdict(plain: Times, ours: Times) -> str:
    """Which sampler is sooner, in words; a tie within the measured error; where the time went if ours is slower."""
    ratio = median(plain.seconds) / median(ours.seconds)
    low, high = median_interval([p / o for p, o in zip(plain.seconds, ours.seconds, strict=True)])
    if low <= 1 <= high or f"{ratio:.2f}" == "1.00":
        return f"a tie on this machine (the ratio is between {low:.2f} and {high:.2f}), the same distribution"
    if low > 1:
        return f"{ratio:.2f}× sooner on this machine, the same distribution"
    network = f"the network took {ours.medians[1]} instead of {plain.medians[1]}"
    rest = [median(s - n for s, n in zip(t.seconds, t.network, strict=True)) for t in (ours, plain)]
    overhead = f"everything else {duration(rest[0])} instead of {duration(rest[1])}"
    return f"{1 / ratio:.2f}× slower on this machine ({network}, {overhead}), the same distribution"


def duration(seconds: float) -> str:
    """A time with three digits, in the unit that suits it."""
    unit, size = ("s", 1.0) if seconds >= 0.9995 else ("ms", 1e-3) if seconds >= 0.9995e-3 else ("µs", 1e-6)
    value = seconds / size
    return f"{value:.0f} {unit}" if value >= 99.95 else f"{value:.3g} {unit}"
