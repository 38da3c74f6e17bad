"""Seconds that torch.compile spends compiling while samples are drawn, so that reports can count them apart."""

from __future__ import annotations

import sys
from time import perf_counter


class _CompileClock:
    """Runs while torch.compile compiles anything in this process."""

    def __init__(self) -> None:
        self.seconds, self._began = 0.0, 0.0

    def read(self) -> float:
        callback = sys.modules.get(
            "torch._dynamo.callback"
        )  # torch.compile imports it, and nobody else should have to
        if (
            callback is not None and self._start not in callback.callback_handler.start_callbacks
        ):  # resets drop them
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
