"""Priors: paths of other samples, to draft the first window of a new sample from.

Without a prior a chain begins with a call on one state, because nothing is known about its sample yet. At high noise
predictions hardly differ between samples, so a path of *other* samples is a good draft of the first window: their
mean, or the last plan of a robot. Any draft keeps samples exact as long as it does not depend on noise not used yet
(docs/theory.md, "Starting warm"). The **noise** of the other samples must never be reused: the new sample's conditions
may depend on it.

`jacobian` is the average Jacobian of the prediction, J_k: a matrix or its diagonal for each step, fitted once. If
given, it replaces `Replay`'s scalar slopes within the horizon and beyond it, in every window.
"""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass, fields
from pathlib import Path

import torch
from torch import Tensor

from foresample.contracts import Target, bands
from foresample.schema import open_plain
from foresample.text import printable

_REMEDY = "give the file that Prior.save wrote, or fit a prior again with foresample.fit_prior"


@dataclass(frozen=True, eq=False)
class Prior:
    """Paths of other samples through steps 0 … K−1, and the slopes of predictions around them."""

    states: Tensor
    """[P, K, *shape]: sample i drafts from path i % P."""
    predictions: Tensor
    """[P, K, *shape]"""
    slope: Tensor | None = None
    """[K]: slope of the prediction in the state around these paths; 0 if None."""
    jacobian: Tensor | None = None
    """[N, d, d]: J_k, for states of d elements; or its diagonal, [N, 1, d]."""

    def __post_init__(self) -> None:
        for name, value in self._tensors().items():
            if not isinstance(value, Tensor) or not value.is_floating_point():
                raise TypeError(f"a prior's {name} must be a tensor of floating-point numbers")
        states, predictions = tuple(self.states.shape), tuple(self.predictions.shape)
        if states != predictions or len(states) < 3:
            raise ValueError(
                f"a prior's states and predictions are [paths, steps, *shape] both, not {states} and {predictions}"
            )
        if 0 in states:
            raise ValueError(
                f"a prior needs at least one path and one step, but its states have shape {states}"
            )
        steps, size = self.steps, self.states.shape[2:].numel()
        if self.slope is not None and self.slope.shape != (steps,):
            raise ValueError(
                f"a prior's slope is one number for each step of its paths, [{steps}], not {list(self.slope.shape)}"
            )
        found = None if self.jacobian is None else tuple(self.jacobian.shape)
        if found is not None and (found[1:] not in ((size, size), (1, size)) or found[0] < steps):
            raise ValueError(
                f"a prior's jacobian is a matrix or its diagonal for each step of the chain, [N, {size}, {size}] or "
                f"[N, 1, {size}] with N of at least {steps}, the steps of its paths, not {list(found)}"
            )

    def require_fits(self, target: Target) -> None:
        """Refuse a prior of another chain."""
        if self.states.shape[2:] != target.shape:
            raise ValueError(
                f"this prior is for states of shape {tuple(self.states.shape[2:])}, but the target's states have shape "
                f"{tuple(target.shape)}: fit one for this target with foresample.fit_prior"
            )
        size, banded = target.shape.numel(), bands(target) is not None
        needed = (len(target.std), 1 if banded else size, size)
        found = None if self.jacobian is None else tuple(self.jacobian.shape)
        if found != needed and (banded or found is not None):
            raise ValueError(
                f"this prior's jacobian is {found}, this target needs {needed}: fit one for this number of steps, and "
                "in this basis (foresample.targets.in_frequencies), with foresample.fit_prior"
            )

    @property
    def steps(self) -> int:
        """Steps the paths go through, K."""
        return self.states.shape[1]

    def paths(self, row: Tensor, width: int) -> tuple[Tensor, Tensor, Tensor]:
        """States and predictions of the paths of these samples, [R, width, *shape], and slopes, [width].

        Beyond the end of a path its last state is repeated.
        """
        position = torch.arange(width, device=self.states.device).clamp(max=self.steps - 1)
        which = (row.to(self.states.device) % len(self.states)).unsqueeze(1)
        slope = self.states.new_zeros(self.steps) if self.slope is None else self.slope
        return self.states[which, position], self.predictions[which, position], slope[position]

    def to(self, device: torch.device | str, dtype: torch.dtype) -> Prior:
        """The same prior on a device, in a dtype."""
        return Prior(**{name: value.to(device, dtype) for name, value in self._tensors().items()})

    def save(self, path: str | Path) -> None:
        """Save the prior as safetensors."""
        from safetensors.torch import save_file

        save_file({name: value.cpu().contiguous() for name, value in self._tensors().items()}, path)

    @staticmethod
    def load(path: str | Path) -> Prior:
        """The prior in a file written by `save`."""
        return Prior.of(read_tensors(path), path)

    @staticmethod
    def of(tensors: dict[str, Tensor], path: str | Path) -> Prior:
        """The prior in the tensors of the file at `path`."""
        if not {"states", "predictions"} <= tensors.keys() <= {f.name for f in fields(Prior)}:
            found = printable(", ".join(sorted(tensors)) or "nothing")
            raise ValueError(f"{printable(path)} holds no prior, but {found:.200}: {_REMEDY}")
        try:
            return Prior(**tensors)
        except (TypeError, ValueError) as error:
            raise ValueError(f"{printable(path)} holds no prior ({error}): {_REMEDY}") from None

    def __repr__(self) -> str:
        """A short text with a hash of the values, because samples depend on them."""
        digest = hashlib.sha256()
        for value in self._tensors().values():
            digest.update(value.detach().cpu().contiguous().view(torch.uint8).numpy().data)
        return f"Prior({len(self.states)} × {self.states.shape[1]} steps, {digest.hexdigest()[:12]})"

    def _tensors(self) -> dict[str, Tensor]:
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        return {name: value for name, value in values.items() if value is not None}


def read_tensors(path: str | Path) -> dict[str, Tensor]:
    """The tensors of a prior's file, or an error that names the remedy."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        os.close(open_plain(Path(path)))  # of a folder, safetensors says "No such device"
        return load_file(path)
    except OSError as error:
        why = error.strerror or error
        raise type(error)(f"{printable(path)} cannot be read ({printable(why)}): {_REMEDY}") from None
    except SafetensorError as error:
        raise ValueError(f"{printable(path)} is no safetensors file ({printable(error)}): {_REMEDY}") from None


def is_diagonal(jacobian: Tensor) -> bool:
    """Whether the Jacobian holds diagonals only, [N, 1, d]."""
    return jacobian.shape[1] == 1


def answer(jacobian: Tensor, step: Tensor, change: Tensor) -> Tensor:
    """J_k · change, [R, *shape], for steps k, [R]."""
    at, flat = jacobian[step], change.flatten(1)
    product = at.squeeze(1) * flat if is_diagonal(jacobian) else torch.einsum("rij,rj->ri", at, flat)
    return product.view_as(change)
