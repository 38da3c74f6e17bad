"""Replay: reuse the predictions of the last path, step by step.

After a rejection the next window covers steps that the rejected path has visited, and with its noise recycled
the new path runs close to it. So each step reuses the prediction *evaluated at that same step* of the old
path; steps beyond its horizon reuse the last prediction. A round then works as one sweep of a Picard iteration whose
convergence test is the exact acceptance test.

With the secant a guess follows the new path to first order, by two measured slopes and no additional call:

    within the horizon   guess_k = prediction_k + g_k (x_k − old_k)
    beyond it            guess_k = guess_{k−1} + κ · std_{k−1} z_{k−1}

The slope g_k = ⟨Δprediction, Δx⟩ / ⟨Δx, Δx⟩ compares the last two paths at step k, or at the nearest earlier step
that both visited. The response κ is the slope of prediction changes on noise, summed over the last path: a denoised
estimate is a martingale along the chain, so only noise moves it.

Far along a window sweeps may diverge, because errors of all earlier steps add up. The old path is misleading there, so
the horizon ends before the first such step (`_horizon`).
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
"""Sweeps diverge at a step where one moves a prediction by this many times its distance from the window's first."""


class ReplayMemory(NamedTuple):
    """Tensors by name that `Replay` with its secant keeps for each row; backends read them."""

    predictions: Tensor  # [R, W+1, *shape]: of the last path from the next step on, then its last one repeated
    states: Tensor  # [R, W+1, *shape]: where they were evaluated
    slope: Tensor  # [R, W+1]: g
    response: Tensor  # [R]: κ
    visited: Tensor  # [R]: positions that the last path visited
    horizon: Tensor  # [R]: positions that guesses take from the path; `visited` unless the path is a prior's
    ready: Tensor  # [R]: whether there is a path to draft from

    @staticmethod
    def of(memory: DrafterMemory) -> ReplayMemory:
        return ReplayMemory(**memory)


@dataclass(frozen=True)
class Replay:
    """Reuses the last path step by step. Adapted: a guess uses states and predictions of its own and earlier steps.
    κ uses the whole old path, but only guesses behind that path use κ. A prior comes from other samples.

    Args:
        secant: follow the new path to first order.
        prior: paths to draft the first window from; needs the secant. Without one the first call evaluates one state.
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
        """A copy with its prior on the target's device; a prior of another chain is refused."""
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
        """The memory of new rows, with the prior's paths in the place of an old path.

        They do not count as visited, because slopes are measured between two paths of the same sample only.
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
        # Positions beyond the horizon repeat the last known prediction.
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
        """g at each position of the path, [R, W+1]: the slope of predictions in states, from the path before.

        With a prior's Jacobian it is the slope of the changes that the Jacobian does not explain.
        """
        width = path.states.shape[1]
        position = torch.arange(width, device=moved.device)
        apart = path.states - memory["states"][:, :width]
        if self.prior is not None and self.prior.jacobian is not None:
            step = (path.step.unsqueeze(1) + position).clamp(max=len(self.prior.jacobian) - 1)
            moved = moved - answer(self.prior.jacobian, step.flatten(), apart.flatten(0, 1)).view_as(moved)
        dx, dp = apart.flatten(2), moved.flatten(2)
        square, size = (dx * dx).sum(2), (path.states * path.states).flatten(2).sum(2)
        # Two paths that agree to rounding do not determine a slope.
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

    `moved` is the change of the prediction in the last sweep, about Replay's next error if the sweeps do not converge.
    It is compared with the error of keeping the window's first prediction: the distance between the two. Committed
    positions and the one after them are never cut.
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
