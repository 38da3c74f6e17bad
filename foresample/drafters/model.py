"""A second, smaller network drafts."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from foresample.contracts import DrafterMemory, DraftPath, PreviousDraft, Target, predict


@dataclass(frozen=True)
class DraftModel:
    """Guess with another target's `predict`, which must return the same quantity on the same grid of steps.

    Drafting a window costs one call of the small network per transition, one after the other; these are
    not among the calls a run reports, which are the target's.
    """

    target: Target

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
        return predict(self.target, x, step, row)

    def learn(self, memory: DrafterMemory, path: DraftPath, committed: Tensor) -> DrafterMemory:
        return memory
