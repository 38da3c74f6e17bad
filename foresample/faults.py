"""NaN and infinity: noted inside a round, raised when the engine collects finished samples.

Raising inside a round would mean waiting for the device. Instead each row carries a code, [R] int64:

    NO_FAULT             every value used so far was finite
    k ≥ 0                the network returned NaN or infinity at step k
    BROKEN_STATE − k     the state at step k was NaN or infinite already; k = N for the sample itself

Only this file and the kernels (which import the two constants) know the encoding.
"""

from __future__ import annotations

import torch
from torch import Tensor

from foresample.text import printable

NO_FAULT = -1
BROKEN_STATE = -2


def broken(values: Tensor) -> Tensor:
    """[R, W]: whether any value of [R, W, *shape] is NaN or infinite."""
    return ~torch.isfinite(values.flatten(2)).all(2)


def note_fault(fault: Tensor, network: Tensor, state: Tensor, step: Tensor, used: Tensor) -> Tensor:
    """The codes after a round: the first broken value that a transition used, unless one was noted before.

    `network` and `state` mark broken outputs and broken states; all arguments but the codes are [R, W].
    """
    wrong = (network | state) & used
    first = wrong.int().argmax(1, keepdim=True)
    code = torch.where(state, BROKEN_STATE - step, step).gather(1, first).squeeze(1)
    return torch.where((fault == NO_FAULT) & wrong.any(1), code, fault)


def note_state(fault: Tensor, x: Tensor, step: Tensor | int) -> Tensor:
    """The codes of rows that have reached states x, [R, *shape], of these steps."""
    wrong = broken(x.unsqueeze(1)).squeeze(1)
    return torch.where((fault == NO_FAULT) & wrong, BROKEN_STATE - step, fault)


def fault_step(fault: int) -> int:
    """The step in a code."""
    return fault if fault > NO_FAULT else BROKEN_STATE - fault


def fault_error(fault: int, sample: int, hint: str = "") -> FloatingPointError:
    """The error for a code; `hint` is the target's `fault_hint`."""
    where = f"at step {fault_step(fault)} of sample {sample}"
    if fault < NO_FAULT:
        return FloatingPointError(f"the state {where} is NaN or infinite: check target.mean and target.std")
    return FloatingPointError(
        f"the network returned NaN or infinity {where}; check its input there (steps that are too large diverge), or "
        f"run it in a wider dtype{hint}"
    )


def raise_faults(fault: Tensor, sample: Tensor, target: object = None) -> None:
    """Raise the first fault of these samples of a target, if there is one."""
    for index, code in enumerate(fault.tolist()):
        if code != NO_FAULT:
            raise fault_error(code, int(sample[index]), getattr(target, "fault_hint", ""))


def first_line(error: Exception) -> str:
    """The first line of another library's error; its type if it has no text."""
    return printable((str(error).strip().splitlines() or [type(error).__name__])[0])
