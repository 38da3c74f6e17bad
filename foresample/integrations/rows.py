"""The free look at a pipeline's networks: is the answer for a row a function of that row alone?

The first drafted call of a configuration holds one state more, the first of all, which was evaluated alone before:
that costs no call. Where the two answers differ it may be rounding, since libraries take other algorithms for calls of
other sizes. Only then the state is asked for twice more, among different mates in calls of one size, at most four rows.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from foresample.core.look import DIFFERS, Cause, Difference, change

MATES = ((3.0, 0), (-2.0, -1))
"""Two kinds of mates: what their states are multiplied with, before 1 is added, and the step they are told."""


def dependence(
    ask: Callable[[int], Tensor], shift: Callable[[Tensor, Tensor], tuple[int, float | None]]
) -> Difference | None:
    """What else than its own row an answer depends on; None if nothing: two calls.

    Args:
        ask: the answer for one state among mates of the first kind or the second, in calls of one size.
        shift: two answers → a step, and how far its mean moves from one to the other, in std of that step.
    """
    there, elsewhere = ask(0), ask(1)
    if change(there, elsewhere) <= DIFFERS:
        return None
    cause: Cause = "mixes"
    again = ask(0)
    if not change(there, again) <= DIFFERS:
        elsewhere, one = again, _seeded(ask)
        ask(1)  # something else for it to remember
        cause = "random" if change(one, _seeded(ask)) <= DIFFERS else "state"
    return Difference(cause, change(there, elsewhere), *shift(there, elsewhere))


def _seeded(ask: Callable[[int], Tensor]) -> Tensor:
    devices = list(range(torch.cuda.device_count())) if torch.cuda.is_initialized() else []
    with torch.random.fork_rng(devices):
        torch.manual_seed(0)
        return ask(0)
