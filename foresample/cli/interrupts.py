"""Ctrl-C. While modules are imported it ends the process at once, since an import may swallow or print an exception.

Once a command works, the first Ctrl-C raises KeyboardInterrupt, so that what is finished is saved; a second one ends
the process at once.
"""

from __future__ import annotations

import os
import signal


def leave(*_: object) -> None:
    """End the process at once, with status 130 and without a traceback."""
    os.write(2, b"interrupted\n")
    os._exit(130)


def interrupt(*_: object) -> None:
    """Raise KeyboardInterrupt; the next Ctrl-C ends the process at once."""
    signal.signal(signal.SIGINT, leave)
    raise KeyboardInterrupt


def expect() -> None:
    """From now on a command works. Only a process that `foresample.__main__` started is concerned."""
    if signal.getsignal(signal.SIGINT) is leave:
        signal.signal(signal.SIGINT, interrupt)
