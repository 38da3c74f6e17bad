"""Which window is fastest for this target, on this machine, for so many samples at a time?

A wider window saves calls and makes each of them dearer. How many it saves is a matter of the target (the
acceptance profile), how much dearer they get one of the machine (the latency curve): flat while a call leaves
the device idle, proportional once it is full. Both are measured, window by window; with N steps, a round of
τ(L) seconds and C(L) calls a sample, against a sequential transition of τ(0) seconds, the gain on the clock is

    gain(L) = N τ(0) / (C(L) τ(L)).

Where no window gains, sampling sequentially is the advice. A tuning can be kept in a file and given to `sample` as its
window: then it costs nothing.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter

import torch
from torch import Tensor

from foresample.contracts import (
    Drafter,
    Target,
    at_least_one,
    drafter_for,
    predict,
    require_target,
    resolve_window,
)
from foresample.core.baseline import Sequential
from foresample.core.noise import extra_noise, seeds_of
from foresample.core.report import Run
from foresample.core.round import Padded
from foresample.drafters import Replay
from foresample.engine.engine import Engine
from foresample.kernels.graphs import capture
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

WINDOWS = (2, 4, 8, 16, 32, 64)
"""Tried first; then those between the best and its neighbours."""
_SEED = 2**62  # of the samples drawn for measuring, away from those a user draws


@dataclass(frozen=True)
class Trial:
    """One window, measured."""

    window: int
    states: int
    """In a call: slots × (window + 1)."""
    call_seconds: float
    """The target alone, on that many states."""
    round_seconds: Positive
    """A round, with everything."""
    calls: float
    """Of a sample, on average."""
    gain: Positive
    """On the clock against the sequential sampler, as predicted from these."""
    calls_p95: Positive | None = None
    """Of 95 in 100 samples, at most."""


@dataclass(frozen=True)
class Tuning:
    """What was measured and what follows."""

    steps: AtLeastOne
    slots: AtLeastOne
    step_seconds: Positive
    """A transition of the sequential sampler, all slots at once."""
    trials: Some[Trial]
    window: AtLeastOne | None
    """The fastest; None if the sequential sampler is."""
    achieved: NotNegative | None
    """Gain of the best window, measured afterwards on other samples; None where none was predicted."""

    def __post_init__(self) -> None:
        if self.window is not None and self.achieved is None:
            raise Unfit("achieved is None, and there is a window that is said to gain")

    @property
    def predicted(self) -> float:
        """Gain of the best window."""
        return max(trial.gain for trial in self.trials)

    @property
    def gain(self) -> float:
        """Gain of the best window: as measured, or as predicted where that is 1 or less."""
        return self.predicted if self.achieved is None else self.achieved

    @property
    def advice(self) -> str:
        """One sentence."""
        at = f"{self.slots} sample{'s' if self.slots > 1 else ''} at a time"
        if self.window is None:
            return f"Sample sequentially: with {at} no window gains (the best comes to {self.gain:.2f}×)"
        gains = f"{self.predicted:.2f}× predicted, {self.achieved:.2f}× achieved"
        return f"With {at}, take window {self.window}: {gains}"

    def to_json(self) -> str:
        return json.dumps({**asdict(self), "predicted": self.predicted}, indent=2)

    def save(self, path: str | Path) -> None:
        """Keep it for other runs on this machine; `sample(…, window=Tuning.load(path))` then measures nothing."""
        Path(path).write_text(self.to_json() + "\n", encoding="utf-8")

    @staticmethod
    def load(path: str | Path) -> Tuning:
        """Read what `save` or `foresample tune --out` wrote."""
        try:
            return read_object(Tuning, parse_json(read_plain(Path(path)).decode("utf-8")))
        except (Unfit, UnicodeDecodeError) as error:
            raise ValueError(f"{path} holds no tuning ({error}): measure again with foresample.tune") from None

    def window_for(self, steps: int, slots: int) -> int | None:
        """The window, for runs of the kind that was measured; refused for others."""
        if (steps, slots) != (self.steps, self.slots):
            raise ValueError(
                f"this tuning is of {self.steps} steps with {self.slots} samples at a time, not of {steps} with "
                f"{slots}: measure again with foresample.tune"
            )
        return self.window


def tune(
    target: Target,
    *,
    slots: int = 1,
    windows: Sequence[int] | None = None,
    samples: int | None = None,
    drafter: Drafter | None = None,
    block: int | None = None,
    recycle: bool = True,
    graph: bool = False,
    look: bool = True,
    progress: Callable[[str], None] | None = None,
) -> Tuning:
    """Measure the windows and pick one.

    The samples drawn for that are rows 0 … slots − 1 of the target, over and over: no others than a run has that keeps
    `slots` samples under way.

    Args:
        target: the chain.
        slots: samples under way at a time; 1 asks for the latency of a single sample.
        windows: those to try; widening stops where the gain has clearly fallen. By default powers of two, and then
            those between the best of them and its neighbours.
        samples: drawn for each window; two a slot by default.
        drafter: as for `sample`.
        block: as for `sample`.
        recycle: as for `sample`.
        graph: as for `sample`; the sequential sampler is then captured, too.
        look: as for `sample`; once, for the first window.
        progress: called with what is being measured.
    """
    require_target(target)
    slots = at_least_one("slots", slots)
    drafter = drafter_for(Replay() if drafter is None else drafter, target)
    steps = len(target.std)
    say = progress or (lambda what: None)
    say("sequential")
    plain = Sequential(target, slots, graph=graph)
    plain.sample(seeds_of(_SEED, slots))  # compilers and caches

    def sequential_seconds() -> float:
        return _seconds(lambda: plain.sample(seeds_of(_SEED, slots)), target)

    step_seconds = sequential_seconds() / steps
    trials: list[Trial] = []
    engines: dict[int, Engine] = {}

    def pilots(engine: Engine, seed: int, count: int) -> Run:
        return engine.sample_rows(torch.arange(count) % slots, seeds_of(seed, count))

    def attempt(window: int) -> Trial:
        say(f"window {window}")
        engine = Engine(
            target,
            window=window,
            slots=slots,
            drafter=drafter,
            block=block,
            recycle=recycle,
            graph=graph,
            look=look and not engines,
        )
        pilots(engine, _SEED, slots)
        engine.look = None  # no part of what is measured
        started = _now(target)
        run = pilots(engine, _SEED + 1, samples or 2 * slots)
        seconds, report = _now(target) - started, run.report
        rounds = report.rounds / (report.occupancy * report.slots)  # of all slots at once
        # Fixed slots cost the same when they wait; in a long run they do not.
        sample_seconds = (
            seconds * (report.occupancy if isinstance(engine.how.layout, Padded) else 1.0) / report.count
        )
        gain = steps * step_seconds / slots / sample_seconds
        states = slots * (window + 1)
        alone = call_seconds(target, states, graph=graph)
        engines[window] = engine
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
    best = max(trials, key=lambda trial: trial.gain)
    if best.gain <= 1:
        return Tuning(steps, slots, step_seconds, trials, None, None)
    say(f"window {best.window} and sequential once more")
    count = 4 * slots
    seconds = _seconds(lambda: pilots(engines[best.window], _SEED + 2, count), target)
    achieved = sequential_seconds() * count / slots / seconds
    return Tuning(steps, slots, step_seconds, trials, best.window if achieved > 1 else None, achieved)


def _neighbours(windows: list[int], window: int) -> list[int]:
    place = windows.index(window)
    return windows[max(0, place - 1) : place] + windows[place + 1 : place + 2]


def call_seconds(target: Target, states: int, *, graph: bool = False, repeats: int = 5) -> float:
    """One call of the target alone on that many states: the latency curve."""
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
    """The clock, when all that was queued is done."""
    if target.std.is_cuda:
        torch.cuda.synchronize(target.std.device)
    return perf_counter()
