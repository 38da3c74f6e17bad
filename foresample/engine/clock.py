"""Times two samplers in turns, and compares the times.

Both samplers are warm and never run at once, so neither time includes a compiler, cold caches or the other sampler.
A temporary slowdown of the machine affects both.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import fmean, median
from time import perf_counter

from foresample.core.report import Report
from foresample.text import duration

_TAIL = 0.015  # probability that the ratio is above (or below) its interval; twice that if a tie is timed again


@dataclass
class Times:
    """Times of one sampler turn by turn: seconds in all, seconds inside the network, and network calls."""

    seconds: list[float] = field(default_factory=list)
    network: list[float] = field(default_factory=list)
    calls: list[float] = field(default_factory=list)

    def add(self, seconds: float, network: float, calls: float) -> None:
        self.seconds.append(seconds)
        self.network.append(network)
        self.calls.append(calls)

    @property
    def medians(self) -> tuple[str, str, str]:
        """Median durations, in all and inside the network, and the mean number of calls."""
        return duration(median(self.seconds)), duration(median(self.network)), f"{fmean(self.calls):.3g}"


@dataclass(frozen=True)
class Comparison:
    """Times of the sequential sampler and of the speculative one, turn by turn."""

    plain: Times = field(default_factory=Times)
    ours: Times = field(default_factory=Times)

    @property
    def ratio(self) -> float:
        """Median time of the sequential sampler over that of the speculative one."""
        return median(self.plain.seconds) / median(self.ours.seconds)

    @property
    def interval(self) -> tuple[float, float]:
        """The interval of the ratio, from the ratios of the turns."""
        return ratio_interval([p / o for p, o in zip(self.plain.seconds, self.ours.seconds, strict=True)])

    @property
    def tie(self) -> bool:
        """Whether the turns leave open which sampler is faster."""
        low, high = self.interval
        return low <= 1 <= high or f"{self.ratio:.2f}" == "1.00"

    @property
    def verdict(self) -> str:
        """A few words: how much faster or slower the speculative sampler is, or a tie."""
        if self.tie:
            return "a tie"
        return f"{self.ratio:.2f}× faster" if self.ratio > 1 else f"{1 / self.ratio:.2f}× slower"

    @property
    def detail(self) -> str:
        """The interval of a tie; where the time went if the speculative sampler is slower; otherwise nothing."""
        if self.tie:
            low, high = self.interval
            return f"the ratio is between {low:.2f} and {high:.2f}"
        if self.ratio > 1:
            return ""
        network = f"the network took {self.ours.medians[1]} instead of {self.plain.medians[1]}"
        rest = [
            duration(max(0.0, median(s - n for s, n in zip(t.seconds, t.network, strict=True))))
            for t in (self.ours, self.plain)
        ]
        return f"{network}, everything else {rest[0]} instead of {rest[1]}"


def time_in_turns(
    plain: Callable[[], Report],
    ours: Callable[[], Report],
    *,
    turns: int,
    at_least: int | None = None,
    seconds: float = math.inf,
    found: Comparison | None = None,
) -> Comparison:
    """Time two warm samplers in turns, with the order alternating.

    Args:
        plain: one run of the sequential sampler.
        ours: one run of the speculative sampler.
        turns: runs of each.
        at_least: runs of each, however long they take; all turns by default.
        seconds: after this time no turn begins.
        found: earlier turns of the same samplers, to which these are added.
    """
    found, began = found or Comparison(), perf_counter()
    for turn in range(turns):
        if turn >= (turns if at_least is None else at_least) and perf_counter() - began > seconds:
            break
        sides = [(plain, found.plain), (ours, found.ours)]
        for run, times in sides if turn % 2 == 0 else reversed(sides):
            report = run()
            times.add(report.seconds, report.target_seconds, report.calls_mean * report.calls_per_step)
    return found


def ratio_interval(ratios: Sequence[float]) -> tuple[float, float]:
    """The interval that holds the middle of the ratios' distribution with probability 97 % or more.

    It is that of Wilcoxon's signed-rank test on the logarithms: order statistics of the means of all pairs. Fewer than
    six ratios cannot reach that probability: their interval is the smallest and the largest.
    """
    logs, ways = [math.log(ratio) for ratio in ratios], [1]
    for rank in range(1, len(logs) + 1):  # ways[s]: subsets of the ranks so far whose sum is s
        ways = [a + b for a, b in zip(ways + [0] * rank, [0] * rank + ways, strict=True)]
    outside = 0
    while sum(ways[: outside + 1]) <= _TAIL * 2 ** len(logs):
        outside += 1
    means = sorted((a + b) / 2 for i, a in enumerate(logs) for b in logs[i:])
    first = max(0, outside - 1)
    return math.exp(means[first]), math.exp(means[len(means) - 1 - first])
