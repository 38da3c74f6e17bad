"""The choice of a round: a backend's own for the targets and settings it serves, else that of `core.round`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

from foresample.backends import backend_of
from foresample.contracts import Target
from foresample.core import round as plain
from foresample.core.report import Commit
from foresample.core.round import Rows, Speculation


class Round(NamedTuple):
    """The two halves of a round."""

    propose: Callable[[Target, Rows, Speculation], Any]
    settle: Callable[[Target, Rows, Any, Tensor, Speculation], tuple[Rows, Commit]]


def round_for(target: Target, speculation: Speculation) -> Round:
    """The fastest round that draws the same samples as the plain one."""
    backend = backend_of(target)
    if backend.name == "Triton":
        from foresample.backends.triton import round as fused

        if fused.serves(target, speculation):
            return Round(fused.propose, fused.settle)
    elif backend.name == "Numba":
        from foresample.backends.numba import round as compiled

        if compiled.serves(target, speculation):
            compiled.prepare(target.std.dtype)
            return Round(compiled.propose, compiled.settle)
    return Round(plain.propose, plain.settle)
