"""`sample` and `stream`: the two ways to draw samples."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from foresample.contracts import Drafter, Target, at_least_one, require_target, resolve_slots, seed_number
from foresample.core.baseline import sequential
from foresample.core.noise import resolve_seeds, seeds_of
from foresample.core.report import Observer, Run
from foresample.engine.engine import Engine, Sample
from foresample.engine.tuning import Tuning, tune


def sample(
    target: Target,
    count: int | None = None,
    *,
    window: int | Literal["auto"] | Tuning,
    seed: int = 0,
    seeds: Sequence[int] | Tensor | None = None,
    slots: int | None = None,
    drafter: Drafter | None = None,
    block: int | None = None,
    recycle: bool = True,
    graph: bool = False,
    look: bool = True,
    observe: Observer | None = None,
) -> Run:
    """Draw samples whose law is exactly that of `sequential`, with far fewer sequential calls.

    A sample depends on its seed and the settings, not on its batch-mates.

    Args:
        target: the chain to sample.
        count: number of samples; may be left out when `seeds` are given.
        window: transitions drafted in a round, L; a call evaluates at most L + 1 states of each sample. "auto"
            measures which one is fastest here (`tune`), and samples sequentially if none is; so does a tuning that was
            made before, without measuring.
        seed: the run's seed, from which each sample's is derived.
        seeds: one seed per sample instead.
        slots: samples under way at a time; all by default.
        drafter: where guesses come from; `Replay()` by default.
        block: transitions verified as one block; the whole window by default. 1 is the per-step test.
        recycle: turn rejected noise back into fresh noise; False draws fresh noise instead.
        graph: replay rounds as one CUDA graph; see `Engine`, which also keeps it for the next run.
        look: refuse a target whose answer at a state depends on more than that state, with a few more calls on two
            states; see `Engine`.
        observe: called after every round with what it committed.
    """
    require_target(target)
    key = resolve_seeds(count, seed, seeds)
    slots = resolve_slots(slots, len(key))
    how: dict[str, Any] = {"drafter": drafter, "block": block, "recycle": recycle, "graph": graph}
    how["slots"] = slots
    if window == "auto":
        window = tune(target, look=look, **how)
    if isinstance(window, Tuning):
        found = window.window_for(len(target.std), slots)
        if found is None:
            return sequential(target, seeds=key, slots=slots, graph=graph, observe=observe)
        window = found
    return Engine(target, window=window, look=look, **how).sample(key, observe)


_PART = 1024  # seeds of a stream made at a time


def stream(
    target: Target,
    count: int | None = None,
    *,
    window: int,
    slots: int,
    seed: int = 0,
    seeds: Sequence[int] | Tensor | None = None,
    drafter: Drafter | None = None,
    block: int | None = None,
    recycle: bool = True,
    graph: bool = False,
    look: bool = True,
    ordered: bool = True,
) -> Iterator[Sample]:
    """The same samples one by one, in order: the first k of them are a fair sample, for any k said beforehand.

    A sample that is done before its turn is held; memory is O(slots × window × state), whatever the count, and nobody
    waits: see `Engine.stream`, also for `ordered=False`, whose first samples are **not** a fair sample. The other
    arguments are those of `sample`.
    """
    if isinstance(window, str | Tuning):
        raise ValueError(
            "stream takes a number as its window: pass the one that foresample.tune found, if it found one that gains"
        )
    engine = Engine(
        target,
        window=window,
        slots=slots,
        drafter=drafter,
        block=block,
        recycle=recycle,
        graph=graph,
        look=look,
    )
    if seeds is not None or count is None:
        return engine.stream(resolve_seeds(count, seed, seeds), ordered=ordered)
    count, seed = at_least_one("count", count), seed_number(seed)
    parts = (
        (torch.arange(first, last), seeds_of(seed, last - first, first))
        for first in range(0, count, _PART)
        for last in [min(first + _PART, count)]
    )
    return engine.stream_parts(parts, ordered=ordered)
