"""One prediction for the whole window: the frozen drift, and the Free Drafter.

head      the prediction at the window's first state, for one extra call (De Bortoli et al. 2025). Once it
          is known, the first transition is exact and is taken; the window is drafted from there.
parent    the prediction at the last accepted state, which costs no call (Soen et al. 2026)
nearest   the prediction at the rejected draft of the step where the next window starts (same paper)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from foresample.contracts import DrafterMemory, DraftPath, PreviousDraft

Source = Literal["head", "parent", "nearest"]


@dataclass(frozen=True)
class Frozen:
    """Reuses one prediction at every position. Adapted: it belongs to the window's first step or an earlier one."""

    source: Source = "nearest"

    def __post_init__(self) -> None:
        if self.source not in get_args(Source):
            raise ValueError(f"Frozen takes one of {', '.join(get_args(Source))}, not {self.source!r}")

    def begin(self, rows: int, window: int, like: Tensor) -> DrafterMemory:
        return {
            "prediction": like.new_zeros((rows, *like.shape)),
            "ready": torch.zeros(rows, dtype=torch.bool, device=like.device),
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
        return memory["prediction"]

    def learn(self, memory: DrafterMemory, path: DraftPath, committed: Tensor) -> DrafterMemory:
        accepted_whole = committed == path.length + 1
        position = committed if self.source == "nearest" else committed - 1
        position = torch.minimum(position, path.length)
        rows = torch.arange(len(position), device=position.device)
        ready = accepted_whole if self.source == "head" else torch.ones_like(accepted_whole)
        return {"prediction": path.predictions[rows, position], "ready": ready}
