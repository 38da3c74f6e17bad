"""Chains whose states obey a constraint: a centre of mass at 0, known coordinates, sizes that differ by sample.

Let c be an affine projection of states, c(c(x)) = c(x), such as the subtraction of the mean or the overwriting of
known coordinates, and P its linear part. The constrained chain draws its noise within the constraint,

    x_{k+1} = mean_k(x_k, p_k) + std_k P z_k,      x_k = c(x_k),      p_k = P network(x_k),

which is not a chain with isotropic noise. The one here draws all of the noise,

    y_{k+1} = mean_k(y_k, p_k) + std_k z_k,        p_k = P network(c(y_k)),

and x = c(y): since the mean weights state and prediction by numbers, c(y) takes the same steps as x whatever the other
coordinates of y do. They drift unseen, and as their prediction is 0 in draft and target they cost no call.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from foresample.contracts import Target, Wrapper, affine_chain, at_least_one, calls_per_step, require_target
from foresample.targets.chained import of_sample
from foresample.targets.frequencies import FrequencyTarget

Constrain = Callable[[Tensor, Tensor], Tensor]
"""constrain(x, row): states [B, *shape] and sample indices [B] -> the states that obey the constraint."""


def constrained(target: Target, constrain: Constrain) -> ConstrainedTarget:
    """The chain whose states obey a constraint; its network sees no others. See the module.

    Args:
        target: the chain without the constraint, with a mean a·x + b·prediction, a and b numbers for each step.
        constrain: c(x, row), an affine projection of each state.
    """
    require_target(target)
    if affine_chain(target) is None:
        raise ValueError(
            f"the mean of {type(target).__name__} is not known to be affine in state and prediction, as constraints "
            "require: put the constraint into predict and mean of your own target"
        )
    if calls_per_step(target) > 1:
        raise ValueError(
            f"{type(target).__name__} calls its network twice in a step, the second time at a state without the "
            "constraint: use a chain of one call a step, such as from_edm(…, steps='euler')"
        )
    require_plain_states(target, "constrain", "put all constraints into one constrain(x, row)")
    generator = torch.Generator().manual_seed(0)
    x, y = (10 * torch.randn((1, *target.shape), generator=generator).to(target.std) for _ in range(2))
    row = torch.zeros(1, dtype=torch.int64, device=x.device)
    once = constrain(x, row)
    again, both, none = constrain(once, row), constrain(x + y, row), constrain(0 * x, row)
    pairs = (again, once), (both + none, once + constrain(y, row))
    if not all(torch.allclose(one, two, rtol=1e-4, atol=1e-3) for one, two in pairs):
        raise ValueError(
            "constrain must be an affine projection: constrain(constrain(x)) = constrain(x), "
            "and constrain(x + y) + constrain(0) = constrain(x) + constrain(y)"
        )
    return ConstrainedTarget(target, constrain)


def require_plain_states(target: Target, verb: str, remedy: str) -> None:
    """Refuse a target whose states are constrained, with this remedy, or in another basis, at any depth."""
    inner: Target | None = target
    while inner is not None:
        if isinstance(inner, ConstrainedTarget):
            raise ValueError(f"this target is constrained already: {remedy}")
        if isinstance(inner, FrequencyTarget):
            raise ValueError(
                f"states are frequencies here: {verb} the target inside it, then use in_frequencies"
            )
        inner = getattr(inner, "target", None)


def centred(target: Target, mask: Tensor | None = None, *, coordinates: int | None = None) -> ConstrainedTarget:
    """A chain of points [points, coordinates] with their centre at 0, as molecules' are (EDM, GeoLDM).

    Args:
        target: the chain without the constraint.
        mask: [points] or, if sizes differ by sample, [count, points]: 1 for existing points, all by default.
            Other points are 0 and do not count for the centre; the network looks the mask up by `row` itself.
        coordinates: leading coordinates that are centred, 3 where features of the atoms follow; all by default.
    """
    here = torch.ones(target.shape[0]) if mask is None else mask
    every = (here != 0).to(target.std).unsqueeze(-1)
    if len(target.shape) != 2 or every.shape[-2] != target.shape[0] or not every.sum(-2).all():
        raise ValueError(
            f"centred takes states [points, coordinates] and a mask for each point, at least one of them 1, not states "
            f"{tuple(target.shape)} and a mask {tuple(here.shape)}"
        )
    count = target.shape[1] if coordinates is None else at_least_one("coordinates", coordinates)
    moved = torch.arange(target.shape[1], device=every.device) < count

    def centre(x: Tensor, row: Tensor) -> Tensor:
        present = of_sample("mask", every, row) if every.ndim == 3 else every
        x = x * present
        return x - (x.sum(1, keepdim=True) / present.sum(-2, keepdim=True)) * present * moved

    return constrained(target, centre)


def fixed(target: Target, values: Tensor, known: Tensor) -> ConstrainedTarget:
    """A chain whose known coordinates are overwritten before each network call, as in inpainting and robot plans.

    Args:
        target: the chain without known coordinates.
        values: the known values, [*shape] or, for each sample its own, [count, *shape]; other elements do not matter.
        known: nonzero for known elements, [*shape] or [count, *shape].
    """
    shape = target.shape
    for name, value in (("values", values), ("known", known)):
        if value.shape[-len(shape) :] != shape or value.ndim > len(shape) + 1:
            raise ValueError(
                f"{name} must have shape {tuple(shape)} or (count, …) of it, not {tuple(value.shape)}"
            )
    tables = ("known", (known != 0).to(target.std.device)), ("values", values.to(target.std))

    def overwrite(x: Tensor, row: Tensor) -> Tensor:
        now, value = (v[None] if v.ndim == len(shape) else of_sample(n, v, row) for n, v in tables)
        return torch.where(now, value, x)

    return constrained(target, overwrite)


class ConstrainedTarget(Wrapper):
    """A chain with a constraint, see the module; `constrained` makes its samples obey the constraint."""

    def __init__(self, target: Target, constrain: Constrain) -> None:
        super().__init__(target)
        self.constrain = constrain

    def predict(self, x: Tensor, step: Tensor, row: Tensor, **extra: Tensor) -> Tensor:
        prediction = super().predict(self.constrain(x, row), step, row, **extra)
        return self.constrain(prediction, row) - self.constrain(torch.zeros_like(x), row)

    def constrained(self, samples: Tensor, row: Tensor | None = None) -> Tensor:
        """Samples of this target, [n, *shape], with the constraint; `row` are their indices, 0 … n − 1 by default."""
        return self.constrain(
            samples, torch.arange(len(samples), device=samples.device) if row is None else row
        )
