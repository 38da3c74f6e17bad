"""A drafter that uses a second, smaller network."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from foresample.contracts import DrafterMemory, DraftPath, PreviousDraft, Target, predict, require_target


@dataclass(frozen=True)
class DraftModel:
    """Guess with another target's `predict`, which must return the same quantity on the same grid of steps.

    Drafting a window costs one call of the small network per transition, one after the other. Reports count the
    target's calls only.
    """

    target: Target

    def for_target(self, target: Target) -> DraftModel:
        """This drafter; refused if its states have another shape or dtype, or its chain another number of steps."""
        require_target(self.target)
        mine, theirs = ((tuple(t.shape), len(t.std), t.std.dtype) for t in (self.target, target))
        if mine != theirs:
            raise ValueError(
                f"the draft model's states are of shape {mine[0]} in {mine[1]} steps and {mine[2]}, the target's of "
                f"{theirs[0]} in {theirs[1]} and {theirs[2]}: make both for one chain"
            )
        return self

    def begin(self, rows: int, window: int, like: Tensor) -> DrafterMemory:
        return {"ready": torch.ones(rows, dtype=torch.bool, device=like.device)}

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
        return predict(self.target, x.clone(), step, row)  # because predict may write into x

    def learn(self, memory: DrafterMemory, path: DraftPath, committed: Tensor) -> DrafterMemory:
        return memory
