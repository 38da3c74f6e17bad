"""`sample` and `stream`: the two ways to draw samples."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Literal

from torch import Tensor

from foresample.contracts import Drafter, Target, require_target, resolve_slots
from foresample.core.baseline import sequential
from foresample.core.noise import resolve_seeds
from foresample.core.report import Observer, Run
from foresample.engine.engine import Engine, Sample
from foresample.engine.tuning import tune


def sample(
    target: Target,
    count: int | None = None,
    *,
    window: int | Literal["auto"],
    seed: int = 0,
    seeds: Sequence[int] | Tensor | None = None,
    slots: int | None = None,
    drafter: Drafter | None = None,
    block: int | None = None,
    recycle: bool = True,
    graph: bool = False,
    observe: Observer | None = None,
) -> Run:
    """Draw samples whose law is exactly that of `sequential`, with far fewer sequential calls.

    A sample depends on its seed and the settings, not on its batch-mates.

    Args:
        target: the chain to sample.
        count: number of samples; may be left out when `seeds` are given.
        window: transitions drafted in a round, L; a call evaluates at most L + 1 states of each sample. "auto"
            measures which one is fastest here (`tune`), and samples sequentially if none is.
        seed: the run's seed, from which each sample's is derived.
        seeds: one seed per sample instead.
        slots: samples under way at a time; all by default.
        drafter: where guesses come from; `Replay()` by default.
        block: transitions verified as one block; the whole window by default. 1 is the per-step test.
        recycle: turn rejected noise back into fresh noise; False draws fresh noise instead.
        graph: replay rounds as one CUDA graph; see `Engine`, which also keeps it for the next run.
        observe: called after every round with what it committed.
    """
    require_target(target)
    key = resolve_seeds(count, seed, seeds)
    slots = resolve_slots(slots, len(key))
    how: dict[str, Any] = {"drafter": drafter, "block": block, "recycle": recycle, "graph": graph}
    how["slots"] = slots
    if window == "auto":
        tuning = tune(target, **how)
        if tuning.window is None:
            return sequential(target, seeds=key, slots=slots, graph=graph, observe=observe)
        window = tuning.window
    return Engine(target, window=window, **how).sample(key, observe)


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
) -> Iterator[Sample]:
    """The same samples one by one as they are done. Memory is O(slots × window × state), whatever the count."""
    key = resolve_seeds(count, seed, seeds)
    engine = Engine(
        target, window=window, slots=slots, drafter=drafter, block=block, recycle=recycle, graph=graph
    )
    return engine.stream(key)
