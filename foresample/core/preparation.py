"""Seconds that torch.compile spends compiling while samples are drawn, which reports count separately."""

from __future__ import annotations

import sys
from time import perf_counter


class _CompileClock:
    """Runs while torch.compile compiles anything in this process."""

    def __init__(self) -> None:
        self.seconds, self._began = 0.0, 0.0

    def read(self) -> float:
        callback = sys.modules.get("torch._dynamo.callback")  # imported by torch.compile only
        if (
            callback is not None and self._start not in callback.callback_handler.start_callbacks
        ):  # a reset removes callbacks
            callback.on_compile_start(self._start)
            callback.on_compile_end(self._stop)
        return self.seconds

    def _start(self, *_: object) -> None:
        self._began = perf_counter()

    def _stop(self, *_: object) -> None:
        self.seconds += perf_counter() - self._began


_CLOCK = _CompileClock()


def compile_seconds() -> float:
    """Seconds spent compiling since the first call of this function; only differences mean anything."""
    return _CLOCK.read()
