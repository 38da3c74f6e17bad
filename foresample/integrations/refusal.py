"""Errors of an accelerated pipeline that cannot be exact."""

from __future__ import annotations

REMEDY = "call foresample.restore(pipe) first"


class Refused(RuntimeError):
    """The pipeline does something that the chain does not contain, so its distribution would change."""


class Changed(Refused):
    """The loop does something else at this step than before; a loop drawn in parts may begin a new part here."""

    def __init__(self, sentence: str, turn: int) -> None:
        super().__init__(f"{sentence}; {REMEDY}")
        self.turn = turn


def require(holds: bool, sentence: str) -> None:
    """Refuse the pipeline with this sentence and the remedy unless the condition holds."""
    if not holds:
        raise Refused(f"{sentence}; {REMEDY}")
