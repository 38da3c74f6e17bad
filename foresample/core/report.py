"""Reports of a run: the commits of its rounds, for observers, and its costs at the end."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from time import perf_counter

import torch
from torch import Tensor

from foresample.contracts import Wrapper
from foresample.text import without_nan


@dataclass(frozen=True)
class Commit:
    """The transitions that one round committed, for observers of a run."""

    sample: Tensor
    """[R]: index of the sample in the run."""
    step: Tensor
    """[R]: the first transition committed."""
    committed: Tensor
    """[R]: transitions committed, at least 1; 0 for a slot with nothing to do."""
    path: Tensor
    """[R, W+1, *shape]: the round's first state and its drafts."""
    x: Tensor
    """[R, *shape]: the last state committed."""
    mismatch: Tensor
    """[R, W]: at the drafted transitions step … step + W − 1, 0 where none was examined."""
    drafted: Tensor
    """[R]: transitions drafted and examined (`verify.Verdict.length`)."""

    @property
    def states(self) -> Tensor:
        """[R, W+1, *shape]: states[r, j] is x_{step + 1 + j}, for j < committed[r]."""
        states = torch.cat([self.path[:, 1:], self.x.unsqueeze(1)], dim=1)
        states[torch.arange(len(self.x), device=self.x.device), self.committed - 1] = self.x
        return states


Observer = Callable[[Commit], None]


@dataclass
class Evidence:
    """Checks that a run made of its target as it went, and assumptions that no check covers."""

    asked_again: int = 0  # states of earlier calls that were evaluated a second time
    largest_change: float = 0.0  # largest difference between two such answers, relative to their size
    steps_replayed: int = 0  # steps of the original sampling loop that the chain reproduced to rounding
    trusted: list[str] = field(default_factory=list)  # assumptions, a phrase each

    def __str__(self) -> str:
        parts = []
        if self.asked_again:
            parts.append(
                f"{self.asked_again} states evaluated twice (largest change {self.largest_change:.1g})"
            )
        if self.steps_replayed:
            parts.append(f"{self.steps_replayed} steps replayed")
        if self.trusted:
            parts.append(f"trusted: {', '.join(self.trusted)}")
        return "; ".join(parts)


@dataclass
class Report:
    """Costs and statistics of a run: totals over its samples, unless a field says otherwise."""

    method: str
    steps: int
    """Transitions of the chain, N."""
    count: int
    """Samples."""
    window: int
    rounds: int = 0
    """Rounds, summed over samples: each is one call."""
    evaluations: int = 0
    drafted: int = 0
    accepted: int = 0
    accepted_lengths: list[int] = field(default_factory=list)
    """Number of rounds that kept 0, 1, … drafts."""
    mismatch: list[float] = field(default_factory=list)
    """Mean mismatch δ at each step, NaN where it was never examined."""
    calls_mean: float = math.nan
    calls_error: float = math.nan
    """Mean calls of a sample, and its standard error."""
    evaluations_mean: float = math.nan
    calls_per_step: int = 1
    """Network calls in a call of the target: 2 for second-order steps, in both samplers."""
    speedup: float = math.nan
    look_calls: int = 0
    """Calls on a few states that checked that the target's answers depend on the state alone (`core.look`). Not among
    the calls above."""
    slots: int = 0
    """Samples under way at a time, at most."""
    occupancy: float = math.nan
    """Rounds of samples over rounds of slots; 1 if no slot ever waited."""
    evidence: Evidence = field(default_factory=Evidence)
    preparation_seconds: float = 0.0
    """Time spent before and besides `seconds` on work that later runs need not repeat: building the engine, measuring
    windows, compiling, capturing."""
    seconds: float = 0.0
    target_seconds: float = 0.0
    """Time inside the target's `predict`; on a GPU that is the time to launch it."""

    @property
    def accepted_mean(self) -> float:
        """Drafts kept in a round, on average."""
        return self.accepted / self.rounds if self.rounds else math.nan

    @property
    def speedup_error(self) -> float:
        """Standard error of the speed-up, to first order."""
        return self.speedup * self.calls_error / self.calls_mean

    def to_json(self) -> str:
        """All fields as JSON; a figure that was never measured is null."""
        values = asdict(self) | {"accepted_mean": self.accepted_mean, "speedup_error": self.speedup_error}
        return json.dumps(without_nan(values), indent=2)

    def __str__(self) -> str:
        def with_error(mean: float, error: float) -> str:  # one sample has no standard error
            return f"{mean:.2f}" if math.isnan(error) else f"{mean:.2f} ± {error:.2f}"

        if not self.count:
            return "nothing has been drawn yet"
        calls, each = with_error(self.calls_mean, self.calls_error), self.calls_per_step
        if each > 1:
            calls += f", each {each} network calls ({each * self.calls_mean:.2f})"
        lines = {
            "method": self.method,
            "samples × steps": f"{self.count} × {self.steps}",
            "window, slots": f"{self.window}, {self.slots}",
            "calls a sample": calls,
            "evaluations a sample": f"{self.evaluations_mean:.1f}",
            "speed-up in calls": with_error(self.speedup, self.speedup_error),
            "drafts kept a round": f"{self.accepted_mean:.2f} of {self.drafted / max(1, self.rounds):.2f}",
            "seconds": f"{self.seconds:.2f} ({self.target_seconds:.2f} in the target)",
        }
        if self.preparation_seconds >= 0.005:
            lines["seconds to prepare"] = f"{self.preparation_seconds:.2f}, before and beside those"
        if self.look_calls:
            lines["calls that check the target"] = f"{self.look_calls}, on a few states each"
        if str(self.evidence):
            lines["evidence"] = str(self.evidence)
        width = max(map(len, lines))
        return "\n".join(f"{name:<{width}}  {value}" for name, value in lines.items())


@dataclass(frozen=True)
class Run:
    """Samples and what they cost."""

    samples: Tensor
    """[count, *shape]"""
    calls: Tensor
    """[count]: sequential target calls made for each sample; each is `report.calls_per_step` network calls."""
    evaluations: Tensor
    """[count]: target states evaluated for each sample."""
    report: Report

    @property
    def speedup(self) -> float:
        """Transitions of the chain over mean calls, everything counted."""
        return self.report.speedup


Count = Callable[[Commit, Tensor, Tensor, Tensor], None]
"""`count`, or a backend's version of it."""


def count(commit: Commit, lengths: Tensor, drafted: Tensor, mismatch: Tensor) -> None:
    """Add one round to the counters of a tally, in place."""
    active = commit.committed > 0
    lengths.index_add_(0, (commit.committed - 1).clamp(min=0), active.long())
    drafted += (active * commit.drafted).sum()
    position = torch.arange(commit.mismatch.shape[1], device=active.device)
    inside = (position < commit.drafted.unsqueeze(1)) & active.unsqueeze(1)
    step = (commit.step.unsqueeze(1) + position).clamp(max=mismatch.shape[1] - 1).flatten()
    mismatch[0].index_add_(0, step, torch.where(inside, commit.mismatch, 0.0).flatten().double())
    mismatch[1].index_add_(0, step, inside.flatten().double())


class Tally:
    """Counts rounds as they go, on their own device and without reading back; O(N + window) numbers."""

    def __init__(self, window: int, steps: int, device: torch.device, count: Count = count) -> None:
        self._count = count
        self._all = torch.zeros(window + 2 + 2 * steps, dtype=torch.int64, device=device)  # read at once
        self.drafted, self.lengths, self.mismatch = _counters(self._all, steps)

    def clear(self) -> None:
        self._all.zero_()

    def count(self, commit: Commit) -> None:
        self._count(commit, self.lengths, self.drafted, self.mismatch)

    def close(self, report: Report, samples: Tensor, calls: Tensor, evaluations: Tensor) -> Run:
        """The finished run: its report, and the costs of each sample."""
        costs = torch.stack([calls, evaluations])
        made, evaluated = costs.tolist()
        report.rounds, report.evaluations = sum(made), sum(evaluated)
        drafted, lengths, mismatch = _counters(self._all.cpu(), report.steps)
        report.drafted, report.accepted_lengths = int(drafted), lengths.tolist()
        report.mismatch = (mismatch[0] / mismatch[1]).tolist()
        report.accepted = sum(i * n for i, n in enumerate(report.accepted_lengths))
        report.calls_mean = report.rounds / report.count
        if report.count > 1:
            report.calls_error = float(calls.double().std()) / math.sqrt(report.count)
        report.evaluations_mean = report.evaluations / report.count
        report.speedup = report.steps / report.calls_mean
        calls, evaluations = costs.to(samples.device, non_blocking=True).unbind()
        return Run(samples, calls, evaluations, report)


def _counters(counters: Tensor, steps: int) -> tuple[Tensor, Tensor, Tensor]:
    """Views of a tally: the number of drafts, []; the rounds that kept 0, 1, … of them, [window + 1]; and at each step
    the sum of mismatches and their number, [2, N], in float64."""
    whole, sums = counters[: -2 * steps], counters[-2 * steps :]
    return whole[0], whole[1:], sums.view(torch.float64).view(2, steps)


class TimedTarget(Wrapper):
    """A target that measures the time of its predictions."""

    seconds = 0.0

    def predict(self, x: Tensor, step: Tensor, row: Tensor, **extra: Tensor) -> Tensor:
        started = perf_counter()
        prediction = super().predict(x, step, row, **extra)
        self.seconds += perf_counter() - started
        return prediction


def on_the_clock(ratio: float) -> str:
    """A ratio of times in words: the other sampler's time over ours."""
    if f"{ratio:.2f}" == "1.00":
        return "as fast"
    return f"{ratio:.2f}× faster" if ratio > 1 else f"{1 / ratio:.2f}× slower"
