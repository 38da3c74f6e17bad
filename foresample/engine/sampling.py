"""`sample` and `stream`: the two ways to draw samples."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Unpack

import torch
from torch import Tensor

from foresample.contracts import Target, at_least_one, require_target, seed_number
from foresample.core.noise import resolve_seeds, seeds_of
from foresample.core.report import Observer, Run
from foresample.engine.engine import Engine, Sample
from foresample.settings import RunKeywords, Settings


def sample(
    target: Target,
    count: int | None = None,
    *,
    seed: int = 0,
    seeds: Sequence[int] | Tensor | None = None,
    observe: Observer | None = None,
    **settings: Unpack[RunKeywords],
) -> Run:
    """Draw samples whose distribution is exactly that of `sequential`, with far fewer sequential calls.

    A sample depends on its seed and the settings, not on its batch-mates.

    Args:
        target: the chain to sample.
        count: number of samples; may be left out when `seeds` are given.
        seed: the run's seed, from which each sample's is derived.
        seeds: one seed per sample instead.
        observe: called after every round with what it committed.
        **settings: `foresample.settings`: window (16), drafter, block, recycle; slots (all samples), graph, look.
    """
    require_target(target)
    key = resolve_seeds(count, seed, seeds)
    return Engine(target, Settings.of(settings).for_count(len(key))).sample(key, observe)


_PART = 1024  # seeds of a stream made at a time


def stream(
    target: Target,
    count: int | None = None,
    *,
    seed: int = 0,
    seeds: Sequence[int] | Tensor | None = None,
    **settings: Unpack[RunKeywords],
) -> Iterator[Sample]:
    """Draw the same samples one by one, in order: the first k are a fair sample, for any k fixed beforehand.

    A sample that finishes before its turn is held. Memory is O(slots × window × state), whatever the count, so give
    `slots`; the arguments are those of `sample`.
    """
    require_target(target)
    how = Settings.of(settings)
    if seeds is not None or count is None:
        key = resolve_seeds(count, seed, seeds)
        return Engine(target, how.for_count(len(key))).stream(key)
    count, seed = at_least_one("count", count), seed_number(seed)
    parts = (
        (torch.arange(first, last), seeds_of(seed, last - first, first))
        for first in range(0, count, _PART)
        for last in [min(first + _PART, count)]
    )
    return Engine(target, how.for_count(count)).stream(parts)
