"""Handles Ctrl-C. During imports it ends the process at once, since an import may swallow or print an exception.

Once a command runs, the first Ctrl-C raises KeyboardInterrupt, so that finished samples are saved; a second one ends
the process at once. So does the first one during a later import or while Numba compiles: LLVM's callbacks swallow it.
"""

from __future__ import annotations

import os
import signal
from types import FrameType

_SWALLOW = ("importlib.", "numba.", "llvmlite.")  # modules through which no exception may pass


def leave(*_: object) -> None:
    """End the process at once, with status 130 and without a traceback."""
    os.write(2, b"interrupted\n")
    os._exit(130)


def interrupt(_: int = 0, frame: FrameType | None = None) -> None:
    """Raise KeyboardInterrupt; the next Ctrl-C ends the process at once."""
    while frame is not None:
        if str(frame.f_globals.get("__name__")).startswith(_SWALLOW):
            leave()
        frame = frame.f_back
    signal.signal(signal.SIGINT, leave)
    raise KeyboardInterrupt


def expect() -> None:
    """Make Ctrl-C raise KeyboardInterrupt from now on, in a process that `foresample.__main__` started."""
    if signal.getsignal(signal.SIGINT) is leave:
        signal.signal(signal.SIGINT, interrupt)
