"""Measures which window is fastest for a target, on this machine, for a number of samples at a time.

A wider window needs fewer calls, but each takes longer. The target decides how many calls it saves (the acceptance
profile), the machine how much longer they take (the latency curve): no longer while the device has idle capacity, and
in proportion to the states once it is full. Both are measured for each window. With N steps, C(L) calls a sample,
rounds of τ(L) seconds and sequential transitions of τ(0) seconds, the speed-up in time is

    gain(L) = N τ(0) / (C(L) τ(L)).

If no window gains, the advice is to sample sequentially. A tuning can be saved, and passed to `sample` as its window
later, which then measures nothing.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Unpack, overload

import torch
from torch import Tensor

from foresample.backends import extra_noise
from foresample.backends.graphs import capture
from foresample.baseline import Sequential
from foresample.contracts import Target, at_least_one, predict, require_target, resolve_window
from foresample.core.noise import seeds_of
from foresample.core.report import Run
from foresample.core.round import Padded
from foresample.engine.engine import Engine
from foresample.schema import (
    AtLeastOne,
    NotNegative,
    Positive,
    Some,
    Unfit,
    parse_json,
    read_object,
    read_plain,
)
from foresample.settings import Settings, TuneKeywords
from foresample.text import duration

WINDOWS = (2, 4, 8, 16, 32, 64)
"""Windows tried first; windows between the best and its neighbours follow."""
_PERCENTILE_SAMPLES = 20  # fewest samples for a 95th percentile
_TURNS = 3  # final measurements of the best window, each beside the sequential sampler
_SEED = 2**62  # of the samples drawn to measure, far from the seeds that users choose


@dataclass(frozen=True)
class Trial:
    """One window, measured."""

    window: int
    states: int  # states in a call: slots × (window + 1)
    call_seconds: float  # time of the target alone, on that many states
    round_seconds: Positive  # time of a whole round
    calls: float  # mean calls of a sample
    gain: Positive  # predicted speed-up in time over the sequential sampler
    calls_p95: Positive | None = None  # calls that 95 in 100 samples need at most


@dataclass(frozen=True)
class Tuning:
    """The windows measured for one number of slots, and the best of them."""

    steps: AtLeastOne
    slots: AtLeastOne
    step_seconds: Positive
    """Time of one transition of the sequential sampler, for all slots at once."""
    trials: Some[Trial]
    window: AtLeastOne | None
    """The fastest window; None if the sequential sampler is faster."""
    achieved: NotNegative | None
    """Gain of the best window, measured afterwards on other samples; None where no gain was predicted."""
    turns: list[Positive] = field(default_factory=list)
    """The gain in each turn of that measurement, which runs both samplers; `achieved` is the median."""

    def __post_init__(self) -> None:
        if self.window is not None and self.achieved is None:
            raise Unfit("window is given, but achieved is null: a window needs a measured gain")

    @property
    def predicted(self) -> float:
        """Predicted gain of the best window."""
        return self.best.gain

    @property
    def best(self) -> Trial:
        """The window with the highest predicted gain."""
        return max(self.trials, key=lambda trial: trial.gain)

    @property
    def _at_a_time(self) -> str:
        return f"{self.slots} sample{'s' if self.slots > 1 else ''} at a time"

    @property
    def advice(self) -> str:
        """A sentence with the window to take, or the reason to sample sequentially."""
        at = self._at_a_time
        gains = f"{self.predicted:.2f}× predicted"
        if self.achieved is not None:
            gains += f", {self.achieved:.2f}× achieved"
        if self.window is not None:
            return f"With {at}, take window {self.window}: {gains}"
        best, low, high = self.best, min(self.turns, default=0.0), max(self.turns, default=0.0)
        if low <= 1 < high:
            tie = f"window {best.window} is a tie ({gains}, between {low:.2f}× and {high:.2f}× in turns)"
            return f"Sample sequentially: with {at} {tie}"
        network, rest = best.call_seconds, max(0.0, best.round_seconds - best.call_seconds)
        return (
            f"Sample sequentially: with {at} no window gains (the best is {best.window}: {gains}; of its round the "
            f"network takes {duration(network)} and the rest {duration(rest)}, a sequential step takes "
            f"{duration(self.step_seconds)})"
        )

    def to_json(self) -> str:
        return json.dumps({**asdict(self), "predicted": self.predicted}, indent=2)

    def save(self, path: str | Path) -> None:
        """Save the tuning for other runs on this machine, as in `sample(…, window=Tuning.load(path))`."""
        Path(path).write_text(self.to_json() + "\n", encoding="utf-8")

    @staticmethod
    def load(path: str | Path) -> Tuning:
        """The tuning in a file written by `save` or `foresample tune --out`."""
        remedy = "measure again with foresample.tune"
        try:
            found = parse_json(read_plain(Path(path)).decode("utf-8"))
            if isinstance(found, dict) and "tunings" in found:
                raise ValueError(
                    f"{path} holds tunings for several numbers of slots, and a window is of one: {remedy} for that one"
                )
            return read_object(Tuning, found)
        except (Unfit, UnicodeDecodeError) as error:
            raise ValueError(f"{path} holds no tuning ({error}): {remedy}") from None

    def window_for(self, steps: int, slots: int) -> int | None:
        """The window, for runs with the steps and slots that were measured; others are refused."""
        if (steps, slots) != (self.steps, self.slots):
            same = f"draw {self.slots} at a time (slots={self.slots}, --slots {self.slots}), or "
            raise ValueError(
                f"this tuning is of {self.steps} steps with {self._at_a_time}, not of {steps} steps with {slots}: "
                f"{same if steps == self.steps else ''}measure again with foresample.tune"
            )
        return self.window


@dataclass(frozen=True)
class Point:
    """A number of slots and a window, with its throughput and latency."""

    slots: int
    window: int | None  # None: sequential
    samples_per_second: float
    p95_seconds: float  # time within which 95 in 100 samples finish

    def __str__(self) -> str:
        sampler = "sequentially" if self.window is None else f"with window {self.window}"
        return (
            f"{self.slots} at a time, {sampler}: {self.samples_per_second:.4g} samples a second, "
            f"95 in 100 within {1e3 * self.p95_seconds:.4g} ms"
        )


@dataclass(frozen=True)
class Frontier:
    """Tunings for several numbers of slots: throughput against latency.

    The more samples are under way, the better the device is used and the longer each sample takes. Speculation lowers
    latency while the device has room for its drafts, and lowers throughput once it is full, so neither sampler is
    better everywhere:

        sequential     slots / (N τ(0)) samples a second,       each after N τ(0) seconds
        window L       gain(L) times as many,                   95 in 100 of them within C₉₅(L) τ(L)

    A deadline chooses *settings* here, before any sample is drawn. Dropping samples that come late would choose
    *samples*, and change their distribution (docs/theory.md, "Finishing first is not fair").
    """

    tunings: Some[Tuning]

    @property
    def points(self) -> list[Point]:
        """All points: for each number of slots the sequential sampler and every window.

        The gain of the window with the highest prediction was measured once more, and tends to be lower then. Gains of
        the other windows are corrected by the same factor.
        """
        found: list[Point] = []
        for tuning in self.tunings:
            seconds = tuning.steps * tuning.step_seconds
            throughput = tuning.slots / seconds
            found.append(Point(tuning.slots, None, throughput, seconds))
            if tuning.achieved is not None:
                throughput *= tuning.achieved / tuning.predicted
            for t in tuning.trials:
                if t.calls_p95 is not None:
                    p95_seconds = t.calls_p95 * t.round_seconds
                    found.append(Point(tuning.slots, t.window, t.gain * throughput, p95_seconds))
        return found

    def best(self, within: float | None = None) -> Point:
        """The point with the highest throughput, of those at which 95 in 100 samples finish `within` these seconds.

        Where a tuning recommends the sequential sampler, its windows are left out.
        """
        gains = {tuning.slots for tuning in self.tunings if tuning.window is not None}
        points = [p for p in self.points if p.window is None or p.slots in gains]
        in_time = [p for p in points if within is None or p.p95_seconds <= within]
        if within is not None and not in_time:
            soonest = min(points, key=lambda p: p.p95_seconds)
            raise ValueError(
                f"no way to sample is within {duration(within)} here; allow more time: the fastest is {soonest}"
            )
        return max(in_time, key=lambda p: p.samples_per_second)


class _MeasureKeywords(TuneKeywords, total=False):
    windows: Sequence[int] | None
    samples: int | None
    progress: Callable[[str], None] | None


@overload
def tune(target: Target, *, slots: int = 1, **settings: Unpack[_MeasureKeywords]) -> Tuning: ...
@overload
def tune(target: Target, *, slots: Sequence[int], **settings: Unpack[_MeasureKeywords]) -> Frontier: ...
def tune(
    target: Target,
    *,
    slots: int | Sequence[int] = 1,
    windows: Sequence[int] | None = None,
    samples: int | None = None,
    progress: Callable[[str], None] | None = None,
    **settings: Unpack[TuneKeywords],
) -> Tuning | Frontier:
    """Measure windows and choose the fastest; for several numbers of slots, measure throughput against latency.

    The samples drawn to measure are rows 0 … slots − 1 of the target, repeatedly.

    Args:
        target: the chain.
        slots: samples under way at a time; 1 measures the latency of a single sample. Several numbers return a
            `Frontier` with a tuning for each.
        windows: windows to try, in rising order until the gain has clearly fallen. By default powers of two, then the
            windows between the best of them and its neighbours.
        samples: samples drawn for each window; two a slot by default, and at least 20 for a frontier.
        progress: called with a description of each measurement.
        **settings: `foresample.settings`: drafter, block, recycle; graph (which captures the sequential sampler, too),
            look (once, for the first window).
    """
    base = Settings.of(settings, without=("window", "slots"))
    samples = None if samples is None else at_least_one("samples", samples)
    for name, numbers in (("windows", windows), ("slots", [slots] if isinstance(slots, int) else slots)):
        if numbers is not None and (not isinstance(numbers, Sequence) or not numbers):
            raise ValueError(f"{name} must be one or more numbers in a list, not {numbers!r}")
    if not isinstance(slots, Sequence):
        return measure(target, replace(base, slots=at_least_one("slots", slots)), windows, samples, progress)
    say, found = progress or (lambda text: None), list[Tuning]()
    for count in sorted({at_least_one("slots", count) for count in slots}):
        now = replace(base, slots=count, look=base.look and not found)
        drawn = samples or max(_PERCENTILE_SAMPLES, 2 * count)
        say(f"{count} samples at a time")
        found.append(measure(target, now, windows, drawn, say))
    return Frontier(found)


def measure(
    target: Target,
    settings: Settings,
    windows: Sequence[int] | None = None,
    samples: int | None = None,
    progress: Callable[[str], None] | None = None,
) -> Tuning:
    """`tune` for one number of slots, with the settings as one value."""
    require_target(target)
    settings = replace(settings, window=1).for_target(target)  # the windows are measured
    slots, steps, graph = settings.slots or 1, len(target.std), settings.graph
    say = progress or (lambda text: None)
    say("sequential")
    plain, warm_up = Sequential(target, slots, graph=graph), seeds_of(_SEED, slots)
    plain.sample(warm_up)  # a warm-up

    sequential: list[float] = []  # seconds of every run

    def sequential_seconds() -> float:
        sequential.append(_seconds(lambda: plain.sample(warm_up), target))
        return sequential[-1]

    trials: list[Trial] = []
    engines: dict[int, Engine] = {}

    def draw(engine: Engine, seed: int, count: int) -> Run:
        return engine.sample(seeds_of(seed, count), rows=torch.arange(count) % slots)

    def timed(engine: Engine, seed: int, count: int) -> tuple[Run, float, float]:
        """A run right after a sequential one, its seconds and its gain."""
        beside, started = sequential_seconds(), _now(target)
        run = draw(engine, seed, count)
        seconds = _now(target) - started
        # Idle fixed slots cost as much as busy ones; in a long run none is idle.
        busy = run.report.occupancy if isinstance(engine.speculation.layout, Padded) else 1.0
        return run, seconds, beside / slots / (seconds * busy / count)

    def attempt(window: int) -> Trial:
        say(f"window {window}")
        engine = Engine(target, replace(settings, window=window, look=settings.look and not engines))
        engine.prepare()
        draw(engine, _SEED, slots)
        engine.look = None  # not part of what is measured
        run, seconds, gain = timed(engine, _SEED + 1, samples or 2 * slots)
        report = run.report
        rounds = report.rounds / (report.occupancy * report.slots)  # of all slots at once
        states, engines[window] = slots * (window + 1), engine
        alone = call_seconds(target, states, graph=graph)
        p95 = float(run.calls.double().quantile(0.95, interpolation="higher"))
        trials.append(Trial(window, states, alone, seconds / rounds, report.calls_mean, gain, p95))
        return trials[-1]

    for window in sorted({resolve_window(w, steps) for w in windows or WINDOWS}):
        if attempt(window).gain < 0.7 * max(trial.gain for trial in trials):
            break
    if windows is None:
        tried, peak = [trial.window for trial in trials], max(trials, key=lambda trial: trial.gain).window
        for window in sorted({(peak + other) // 2 for other in _neighbours(tried, peak)} - set(tried)):
            attempt(window)
        trials.sort(key=lambda trial: trial.window)
    best, turns = max(trials, key=lambda trial: trial.gain), list[float]()
    if best.gain > 1:
        say(f"window {best.window} and sequential in turns")
        turns = [timed(engines[best.window], _SEED + 2 + turn, 2 * slots)[2] for turn in range(_TURNS)]
    fastest = best.window if turns and min(turns) > 1 else None
    achieved = median(turns) if turns else None
    return Tuning(steps, slots, median(sequential) / steps, trials, fastest, achieved, turns)


def _neighbours(windows: list[int], window: int) -> list[int]:
    place = windows.index(window)
    return windows[max(0, place - 1) : place] + windows[place + 1 : place + 2]


def call_seconds(target: Target, states: int, *, graph: bool = False, repeats: int = 5) -> float:
    """Seconds of one call of the target on this many states: a point of the latency curve."""
    std = target.std
    x = torch.randn((states, *target.shape), dtype=std.dtype, device=std.device)
    row = torch.zeros(states, dtype=torch.int64, device=std.device)
    step = torch.arange(states, device=std.device) % len(std)

    def call() -> Tensor:
        with torch.no_grad():
            return predict(target, x.clone(), step, row, extra_noise(target, row, step))

    work = capture(call, std.device).replay if graph else call
    work()
    return min(_seconds(work, target) for _ in range(repeats))


def _seconds(work: Callable[[], object], target: Target) -> float:
    started = _now(target)
    work()
    return _now(target) - started


def _now(target: Target) -> float:
    """The time, once all work queued on the device is done."""
    if target.std.is_cuda:
        torch.cuda.synchronize(target.std.device)
    return perf_counter()
