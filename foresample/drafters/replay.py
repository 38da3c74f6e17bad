"""Replay: shadow the last path, step by step, with the predictions already paid for there.

After a rejection the next window covers steps that the rejected path has visited, and with its noise recycled
the new path runs close to it. So each step reuses the prediction *evaluated at that very step* of the old
path; beyond its horizon, the last one. A round then works as one sweep of a Picard iteration whose
convergence test is the exact acceptance test.

The secant makes the guess follow the new path to first order, with two measured slopes and no further call:

    within the horizon   guess_k = prediction_k + g_k (x_k − old_k)
    beyond it            guess_k = guess_{k−1} + κ · std_{k−1} z_{k−1}

The slope g_k = ⟨Δprediction, Δx⟩ / ⟨Δx, Δx⟩ is that of the last two paths at step k, or, where only one has
been, at the nearest step before. The response κ is how predictions along the last path moved with its noise,
summed over that path: a denoised estimate is a martingale along the chain, so noise is all that moves it.

Sweeps may diverge far out, where a step's error grows with every step before it. There the old path only
misleads, so the horizon ends before it (`_horizon`).
"""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass, field, replace
from types import FunctionType
from typing import NamedTuple, TypeGuard

import torch
from torch import Tensor

from foresample.contracts import DrafterMemory, DraftPath, PreviousDraft, Target, expand
from foresample.drafters.prior import Prior, answer

DIVERGED = 6.0
"""A sweep moved a prediction so many times as far as the prediction is from the window's first: it diverges."""


class ReplayMemory(NamedTuple):
    """Tensors by name that `Replay` with its secant keeps for each row; backends read them."""

    predictions: Tensor  # [R, W+1, *shape]: of the last path, from the next step on; then the last one repeated
    states: Tensor  # [R, W+1, *shape]: at which they were evaluated
    slope: Tensor  # [R, W+1]: g
    response: Tensor  # [R]: κ
    visited: Tensor  # [R]: how many positions the last path has been at
    horizon: Tensor  # [R]: positions at which to guess from the path; the same, but for a prior
    ready: Tensor  # [R]: whether there is a path to draft from

    @staticmethod
    def of(memory: DrafterMemory) -> ReplayMemory:
        return ReplayMemory(**memory)


@dataclass(frozen=True)
class Replay:
    """Reuse per step. Adapted: the guess at a step uses states and predictions of that step and before; κ is of
    the whole old path, and used behind its end only; a prior is of other samples.

    Args:
        secant: follow the new path to first order.
        prior: what to draft the first window from, which is a bare call otherwise; needs the secant.
    """

    secant: bool = True
    prior: Prior | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        if self.prior is not None and not isinstance(self.prior, Prior):
            raise TypeError(
                f"prior must be a foresample.Prior, not {type(self.prior).__name__}: fit one with "
                "foresample.fit_prior, or read one with foresample.Prior.load"
            )
        if self.prior is not None and not self.secant:
            raise ValueError("a prior needs the secant: leave secant=False out")

    def __str__(self) -> str:
        """The settings that samples depend on, for reports and manifests."""
        return repr(self) if self.prior is None else f"Replay(secant={self.secant}, prior={self.prior})"

    def for_target(self, target: Target) -> Replay:
        """A copy with its prior on the target's device; refused if that is of another chain."""
        if self.prior is None:
            return self
        self.prior.require_fits(target)
        same = copy(self)
        object.__setattr__(same, "prior", self.prior.to(target.std.device, target.std.dtype))
        return same

    def begin(self, rows: int, window: int, like: Tensor) -> DrafterMemory:
        path = (rows, window + 1, *like.shape)
        memory = {
            "predictions": like.new_zeros(path),
            "visited": torch.zeros(rows, dtype=torch.int64, device=like.device),
            "ready": torch.zeros(rows, dtype=torch.bool, device=like.device),
        }
        if self.secant:
            memory["states"] = like.new_zeros(path)
            memory["slope"] = like.new_zeros((rows, window + 1))
            memory["response"] = like.new_zeros(rows)
            memory["horizon"] = torch.zeros_like(memory["visited"])
        return memory

    def prime(self, memory: DrafterMemory, row: Tensor) -> DrafterMemory:
        """The memory of rows that have seen nothing, with the prior's paths as if they were old ones.

        They are not counted as visited: slopes are measured between two paths of the same sample only.
        """
        if self.prior is None:
            return memory
        states, predictions, slope = self.prior.paths(row, memory["predictions"].shape[1])
        return {
            **memory,
            "states": states.to(memory["states"]),
            "predictions": predictions.to(memory["predictions"]),
            "slope": slope.to(memory["slope"]).expand_as(memory["slope"]).contiguous(),
            "ready": torch.ones_like(memory["ready"]),
            "horizon": torch.full_like(memory["horizon"], min(self.prior.steps, states.shape[1])),
        }

    def reach(self, memory: DrafterMemory, window: int) -> Tensor:
        return memory["ready"] * window

    def guess(
        self,
        memory: DrafterMemory,
        x: Tensor,
        position: int,
        step: Tensor,
        row: Tensor,
        before: PreviousDraft | None,
    ) -> Tensor:
        prediction = memory["predictions"][:, position]
        if not self.secant:
            return prediction
        jacobian = None if self.prior is None else self.prior.jacobian
        apart = x - memory["states"][:, position]
        within = prediction + expand(memory["slope"][:, position], x) * apart
        if jacobian is not None:
            within = within + answer(jacobian, step, apart)
        if before is None:
            return within
        if jacobian is None:
            beyond = before.guess + expand(memory["response"], x) * before.innovation
        else:
            beyond = before.guess + answer(jacobian, step, before.innovation)
        return torch.where(expand(position < memory["horizon"], x), within, beyond)

    def learn(self, memory: DrafterMemory, path: DraftPath, committed: Tensor) -> DrafterMemory:
        rows, width = memory["predictions"].shape[:2]
        position = torch.arange(width, device=committed.device)
        moved = path.predictions - memory["predictions"][:, : path.predictions.shape[1]]
        path = replace(path, length=_horizon(memory, path, moved, committed))
        visited = (path.length + 1 - committed).clamp(min=0)
        # Positions beyond the horizon repeat the last one: the last known prediction.
        source = torch.minimum(position + committed.unsqueeze(1), path.length.unsqueeze(1))
        shift = torch.arange(rows, device=committed.device).unsqueeze(1), source
        after = {
            "predictions": path.predictions[shift],
            "visited": visited,
            "ready": torch.ones_like(memory["ready"]),
        }
        if self.secant:
            after["states"] = path.states[shift]
            after["horizon"] = visited
            known = position < visited.unsqueeze(1)
            after["slope"] = torch.where(known, self._slope(memory, path, moved)[shift], 0.0)
            after["response"] = _response(path)
        return after

    def _slope(self, memory: DrafterMemory, path: DraftPath, moved: Tensor) -> Tensor:
        """g at each position of the path, [R, W+1]: how predictions moved with states since the path before it.

        With a prior's Jacobian, it is the slope of what that leaves unexplained.
        """
        width = path.states.shape[1]
        position = torch.arange(width, device=moved.device)
        apart = path.states - memory["states"][:, :width]
        if self.prior is not None and self.prior.jacobian is not None:
            step = (path.step.unsqueeze(1) + position).clamp(max=len(self.prior.jacobian) - 1)
            moved = moved - answer(self.prior.jacobian, step.flatten(), apart.flatten(0, 1)).view_as(moved)
        dx, dp = apart.flatten(2), moved.flatten(2)
        square, size = (dx * dx).sum(2), (path.states * path.states).flatten(2).sum(2)
        # Two paths that agree to rounding say nothing of the slope.
        telling = (square > torch.finfo(square.dtype).eps * size) & (position < memory["visited"].unsqueeze(1))
        slope = (dp * dx).sum(2) / torch.where(telling, square, 1.0)
        nearest = torch.where(telling, position, -1).cummax(1).values  # telling position at or before each
        return torch.where(nearest >= 0, slope.gather(1, nearest.clamp(min=0)), memory["slope"][:, :width])


_METHODS = {
    name: value for name, value in vars(Replay).items() if isinstance(value, FunctionType) and name[:2] != "__"
}


def is_replay(drafter: object) -> TypeGuard[Replay]:
    """Whether a drafter has all methods of `Replay`, so that a kernel may take its place."""
    kind, own = type(drafter), getattr(drafter, "__dict__", {})
    return isinstance(drafter, Replay) and all(
        getattr(kind, name) is method and name not in own for name, method in _METHODS.items()
    )


def _horizon(memory: DrafterMemory, path: DraftPath, moved: Tensor, committed: Tensor) -> Tensor:
    """[R]: the path's length, cut before the first position at which sweeps diverge.

    A sweep moved the prediction there from the last path's to this one's. Replay's next error is about as much
    if the sweeps do not converge, and that of a prediction kept for the whole window is its distance from the
    window's first. What has been committed, and the state that comes next, are beyond doubt.
    """
    width = path.predictions.shape[1]
    position = torch.arange(width, device=committed.device)
    swept, away = (
        torch.linalg.vector_norm(difference.flatten(2), dim=2, dtype=torch.float64)
        for difference in (moved, path.predictions - path.predictions[:, :1])
    )
    seen_twice = (position > committed.unsqueeze(1)) & (position < memory["visited"].unsqueeze(1))
    diverges = seen_twice & (swept > DIVERGED * away)
    return torch.minimum(path.length, torch.where(diverges, position, width).amin(1) - 1)


def _response(path: DraftPath) -> Tensor:
    """κ, [R]: Σ ⟨Δprediction, innovation⟩ / Σ ⟨innovation, innovation⟩ along the path; 0 without drafts."""
    innovation = path.innovations.flatten(2)
    change = path.predictions.diff(dim=1).flatten(2)
    position = torch.arange(innovation.shape[1], device=innovation.device)
    drafted = position < path.length.unsqueeze(1)
    product, square = (
        torch.where(drafted, (other * innovation).sum(2), 0.0).sum(1) for other in (change, innovation)
    )
    return product / torch.where(square > 0, square, 1.0)
