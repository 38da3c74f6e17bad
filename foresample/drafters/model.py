"""A second, smaller network drafts."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from foresample.contracts import Before, Memory, Path, Target, predict


@dataclass(frozen=True)
class Model:
    """Guess with another target's `predict`, which must return the same quantity on the same grid of steps.

    Drafting a window costs one call of the small network per transition, one after the other; these are
    not among the calls a run reports, which are the target's.
    """

    draft: Target

    def begin(self, rows: int, window: int, like: Tensor) -> Memory:
        return {"ready": torch.ones(rows, dtype=torch.bool, device=like.device)}

    def reach(self, memory: Memory, window: int) -> Tensor:
        return memory["ready"] * window

    def guess(
        self, memory: Memory, x: Tensor, position: int, step: Tensor, row: Tensor, before: Before | None
    ) -> Tensor:
        return predict(self.draft, x, step, row)

    def learn(self, memory: Memory, path: Path, committed: Tensor) -> Memory:
        return memory
