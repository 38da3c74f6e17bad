"""Replay: shadow the last path, step by step, with the predictions already paid for there.

After a rejection the next window covers steps that the rejected path has visited, and with its noise recycled
the new path runs close to it. So each step reuses the prediction *evaluated at that very step* of the old
path; beyond its horizon, the last one. A round then works as one sweep of a Picard iteration whose
convergence test is the exact acceptance test.

With the secant the guess follows the new path's distance to the old one, to first order along it:

    guess_k = prediction_k + g_k (x_k − old_k),    g_k = ⟨Δprediction, Δx⟩ / ⟨Δx, Δx⟩,

the differences being those of the last two paths at step k (g_k = 0 until two have visited it).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from foresample.contracts import Memory, Path


@dataclass(frozen=True)
class Replay:
    """Reuse per step. Adapted: the guess at a step uses states and predictions of that step and before."""

    secant: bool = True

    def begin(self, rows: int, window: int, like: Tensor) -> Memory:
        path = like.new_zeros((rows, window + 1, *like.shape))
        memory = {
            "predictions": path,
            "visited": torch.zeros(rows, dtype=torch.int64, device=like.device),
            "ready": torch.zeros(rows, dtype=torch.bool, device=like.device),
        }
        if self.secant:
            memory["states"] = path
            memory["gain"] = like.new_zeros((rows, window + 1))
        return memory

    def reach(self, memory: Memory, window: int) -> Tensor:
        return memory["ready"] * window

    def guess(self, memory: Memory, x: Tensor, position: int, step: Tensor, row: Tensor) -> Tensor:
        prediction = memory["predictions"][:, position]
        if not self.secant:
            return prediction
        gain = _expand(memory["gain"][:, position], x)
        return prediction + gain * (x - memory["states"][:, position])

    def learn(self, memory: Memory, path: Path, committed: Tensor) -> Memory:
        rows, width = memory["predictions"].shape[:2]
        position = torch.arange(width, device=committed.device) + committed.unsqueeze(1)
        visited = (path.length + 1 - committed).clamp(min=0)
        # Positions beyond the horizon repeat the last one: the last known prediction.
        shift = (
            torch.arange(rows, device=committed.device).unsqueeze(1),
            torch.minimum(position, path.length.unsqueeze(1)),
        )
        after = {
            "predictions": path.predictions[shift],
            "visited": visited,
            "ready": torch.ones_like(memory["ready"]),
        }
        if self.secant:
            after["states"] = path.states[shift]
            known = torch.arange(width, device=committed.device) < visited.unsqueeze(1)
            after["gain"] = torch.where(known, self._gain(memory, path)[shift], 0.0)
        return after

    @staticmethod
    def _gain(memory: Memory, path: Path) -> Tensor:
        """g at each position of the path: how predictions moved with states between the last two paths."""
        width = path.states.shape[1]
        old = {name: memory[name][:, :width] for name in ("states", "predictions", "gain")}
        dx = (path.states - old["states"]).flatten(2)
        dp = (path.predictions - old["predictions"]).flatten(2)
        square, size = (dx * dx).sum(2), (path.states * path.states).flatten(2).sum(2)
        # Two paths that agree to rounding say nothing of the slope: what an earlier pair said stands.
        telling = square > torch.finfo(square.dtype).eps * size
        telling &= torch.arange(width, device=square.device) < memory["visited"].unsqueeze(1)
        return torch.where(telling, (dp * dx).sum(2) / torch.where(telling, square, 1.0), old["gain"])


def _expand(scalar: Tensor, like: Tensor) -> Tensor:
    return scalar.view(-1, *(1,) * (like.ndim - 1))
