"""A stand-in for a GPU that captures rounds: recorded work is replayed by calling it here, on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch


class Recorded:
    """A graph that runs its work when it is replayed."""

    def __init__(self, work: Callable[[], object]) -> None:
        self.replay = work


class Device:
    """A stand-in for a GPU that notes the width of each piece of work; None starts samples."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.warmed, self.recorded = list[int | None](), list[int | None]()
        monkeypatch.setattr("foresample.engine.slots.warm_up", self.warm_up)
        monkeypatch.setattr("foresample.engine.slots.record", self.record)
        monkeypatch.setattr("torch.cuda.synchronize", lambda device: None)
        monkeypatch.setattr("foresample.engine.engine.require_cuda", lambda target: None)

    def warm_up(self, work: Callable[[], object], device: torch.device) -> None:
        self.warmed.append(width(work))
        work()

    def record(self, work: Callable[[], object], device: torch.device) -> Recorded:
        self.recorded.append(width(work))
        return Recorded(work)


def width(work: Any) -> int | None:
    return work.args[0] if isinstance(work, partial) else None
