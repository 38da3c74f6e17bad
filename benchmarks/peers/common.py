"""Counting, observing and returning a run, shared by all peers.

Costs are counted by wrapping the target, the same way for every peer: a batched `predict` is one call for each
sample that has a state in it, and one evaluation per state. So a peer cannot forget a call.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Self

import torch
from torch import Tensor

from foresample.backends import normal
from foresample.contracts import (
    Target,
    at_least_one,
    earlier_predictions,
    expand,
    extra_shape,
    predict,
    require_target,
    start_states,
)
from foresample.core import noise as streams
from foresample.core.coupling import log_ratio
from foresample.faults import NO_FAULT, note_state, raise_faults


@dataclass(frozen=True)
class PeerRun:
    """Samples and the cost of each."""

    samples: Tensor
    """[count, *shape]"""
    calls: Tensor
    """[count]: sequential target calls."""
    evaluations: Tensor
    """[count]: target states evaluated."""


@dataclass(frozen=True)
class Committed:
    """The states that one round committed, as observers get them."""

    sample: Tensor
    """[R]: index of the sample in the run."""
    step: Tensor
    """[R]: the first transition committed."""
    committed: Tensor
    """[R]: the number of transitions committed, at least 1."""
    states: Tensor
    """[R, J, *shape]: states[r, j] is x_{step + 1 + j}, for j < committed[r]."""


Observer = Callable[[Committed], None]


@dataclass(frozen=True)
class Rows:
    """Unfinished samples."""

    sample: Tensor
    """[R]: index of the sample in the run."""
    seed: Tensor
    """[R]"""
    round: Tensor
    """[R]: rounds done."""
    step: Tensor
    """[R]: transitions committed."""
    x: Tensor
    """[R, *shape]: the last committed state."""
    guess: Tensor
    """[R, *shape]: the prediction to draft with."""
    has_guess: Tensor
    """[R]: whether the row has a prediction yet."""

    def select(self, index: Tensor) -> Self:
        """Some of the rows."""
        return type(self)(*(getattr(self, field.name)[index] for field in fields(self)))


class Counted:
    """A target that counts, for each sample, its calls and its states evaluated."""

    def __init__(self, target: Target, count: int) -> None:
        require_target(target)
        if earlier_predictions(target) or extra_shape(target) is not None:
            raise ValueError(
                "the peers take one-step targets without extra noise; foresample.sample takes all others, too"
            )
        self.target, self.std, self.shape = target, target.std, target.shape
        self.mean = target.mean
        self.calls = torch.zeros(at_least_one("count", count), dtype=torch.int64, device=target.std.device)
        self.evaluations = torch.zeros_like(self.calls)

    def predict(self, x: Tensor, step: Tensor, row: Tensor) -> Tensor:
        """One batched call."""
        self.calls[row] += 1  # duplicates write the same number: one call, however many states
        self.evaluations.index_add_(0, row, torch.ones_like(row))
        return predict(self.target, x, step, row)

    def begin(self, seed: int) -> Rows:
        """All samples at their start, the same as in `foresample.sequential`."""
        key = streams.seeds_of(seed, len(self.calls)).to(self.std.device)
        zero = torch.zeros_like(key)
        unit = normal(key, self.shape, self.std.dtype, stream=streams.START, step=zero, draw=zero)
        row = torch.arange(len(key), device=key.device)
        x = start_states(self.target, unit, row)
        return Rows(row, key, zero, zero, x, torch.zeros_like(x), zero > 0)

    def finish(self, samples: Tensor) -> PeerRun:
        """The run's result, checked."""
        fault = note_state(torch.full_like(self.calls, NO_FAULT), samples, len(self.std))
        raise_faults(fault, torch.arange(len(samples)))
        return PeerRun(samples, self.calls, self.evaluations)


def room(std: Tensor) -> Tensor:
    """[N]: transitions that can be drafted from each step on, up to a deterministic one or the chain's last.

    That transition is taken exactly: the call that verifies the drafts before it gives its prediction.
    """
    step = torch.arange(len(std), device=std.device)
    stop = torch.where(std == 0, step, len(std) - 1).flip(0).cummin(0).values.flip(0)
    return stop - step


def mismatch(draft_mean: Tensor, target_mean: Tensor, std: Tensor, lead: int) -> tuple[Tensor, Tensor]:
    """δ, float64, and the unit direction e from the draft's mean to the target's.

    The first `lead` dimensions number transitions, and `std` has only these dimensions; e is 0 where δ is 0.
    """
    gap = target_mean - draft_mean
    size = torch.linalg.vector_norm(gap.flatten(lead), dim=lead, dtype=torch.float64)
    direction = gap / expand(torch.where(size > 0, size, 1.0).to(gap.dtype), gap)
    return torch.where(size > 0, size / torch.where(std > 0, std, 1.0).double(), 0.0), direction


def along(direction: Tensor, noise: Tensor, lead: int) -> Tensor:
    """s = e · z, float64."""
    return (direction * noise).flatten(lead).sum(lead, dtype=torch.float64)


def ratio(delta: Tensor, s: Tensor) -> Tensor:
    """target/draft at coordinate s: exp(δ s − δ²/2)."""
    return log_ratio(delta, s).exp()
