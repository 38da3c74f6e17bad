"""The error of an accelerated pipeline that cannot be exact."""

from __future__ import annotations

REMEDY = "call foresample.restore(pipe) first"


class Refused(RuntimeError):
    """The pipeline does something that the chain does not contain, so its distribution would change."""


def require(holds: bool, sentence: str) -> None:
    """Refuse the pipeline with this sentence and the remedy unless the condition holds."""
    if not holds:
        raise Refused(f"{sentence}; {REMEDY}")
