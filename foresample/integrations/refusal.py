"""What an accelerated pipeline raises when it cannot be exact."""

from __future__ import annotations

REMEDY = "call foresample.restore(pipe) first"


class Refused(RuntimeError):
    """The pipeline does something that the chain does not contain, so its distribution would change."""
