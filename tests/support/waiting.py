"""Waiting for other processes: on a condition, never on the clock."""

from __future__ import annotations

import time
from collections.abc import Callable

GUARD = 1200.0
"""Seconds after which a wait fails because something hangs. No result of a test depends on how long anything takes."""


def wait_for(condition: Callable[[], object], what: str) -> None:
    """Come back when it holds."""
    until = time.monotonic() + GUARD
    while not condition():
        if time.monotonic() > until:
            raise TimeoutError(f"waited {GUARD:g} s for {what}")
        time.sleep(0.01)
