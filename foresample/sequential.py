"""The plain sampler: the baseline every figure is measured against, and the oracle of the law."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import perf_counter

import torch
from torch import Tensor

from foresample import noise as streams
from foresample.contracts import (
    Target,
    predict,
    require_finite,
    require_target,
    start_states,
    transition_mean,
)
from foresample.report import Report, Run, Tally
from foresample.speculate import Commit, Timed, resolve_seeds


def sequential(
    target: Target,
    count: int | None = None,
    *,
    seed: int = 0,
    seeds: Sequence[int] | Tensor | None = None,
    observe: Callable[[Commit], None] | None = None,
) -> Run:
    """Draw samples one step after the other: N calls each. Arguments as for `sample`."""
    require_target(target)
    key = resolve_seeds(count, seed, seeds).to(target.std.device)
    row, zero = torch.arange(len(key), device=key.device), torch.zeros_like(key)
    tally = Tally(Report("sequential", len(target.std), len(key), 0), key.device)
    dtype, started, timed = target.std.dtype, perf_counter(), Timed(target)
    with torch.no_grad():
        noise = streams.normal(key, target.shape, dtype, stream=streams.START, step=zero, draw=zero)
        x = start_states(target, noise)
        previous = torch.zeros_like(x)
        for k, std in enumerate(target.std):
            step = torch.full_like(key, k)
            prediction = predict(timed, x.clone(), step, row)
            mean = transition_mean(target, x, prediction, step, previous)
            previous = prediction
            x = mean + std * streams.normal(key, target.shape, dtype, step=step, draw=zero)
            tally.round(row, zero + 1, zero, zero)
            if observe is not None:
                observe(Commit(row, step, zero + 1, x.unsqueeze(1), std.new_zeros(len(key), 0), zero))
    require_finite(x)
    return tally.close(x, perf_counter() - started, timed.seconds)
