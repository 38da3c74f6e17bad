"""Transitions that are affine in state and prediction, which is all the classical ones:

    x_{k+1} = state_weight_k · x_k + prediction_weight_k · prediction_k(x_k) + std_k z_k

(multistep ones add previous_weight_k · prediction_{k−1}(x_{k−1})).

The formulas of a sampler are derived once for x0; `reuse` re-expresses them in the quantity a drafter shall
reuse, and `predicts` says what the network returns. With x = α x0 + σ ξ, each kind is c·x + d·x0:

    x0                       c = 0      d = 1
    eps = ξ                  c = 1/σ    d = −α/σ
    v   = α ξ − σ x0  (VP)   c = α/σ    d = −1/σ       (α² + σ² = 1)
    v   = ξ − x0  (flow)     c = 1/σ    d = −1/σ       (α + σ = 1)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from foresample.contracts import expand

Kind = Literal["x0", "eps", "v"]
Denoiser = Callable[[Tensor, Tensor, Tensor], Tensor]
"""denoiser(x, time, row): states [B, *shape], their times [B] and sample indices [B] -> [B, *shape]."""


@dataclass(frozen=True)
class AffineTarget:
    """A target whose mean is affine in state and prediction, weights being [N]; see `foresample.Target`."""

    shape: torch.Size
    std: Tensor
    state_weight: Tensor
    prediction_weight: Tensor
    network: Callable[[Tensor, Tensor, Tensor], Tensor]
    """network(x, step, row): the prediction."""
    start_scale: float = 1.0
    previous_weight: Tensor | None = None

    @property
    def multistep(self) -> bool:
        return self.previous_weight is not None

    def start(self, noise: Tensor) -> Tensor:
        return self.start_scale * noise

    def predict(self, x: Tensor, step: Tensor, row: Tensor) -> Tensor:
        return self.network(x, step, row)

    def mean(self, x: Tensor, prediction: Tensor, step: Tensor, previous: Tensor | None = None) -> Tensor:
        mean = per_row(self.state_weight, step, x) * x + per_row(self.prediction_weight, step, x) * prediction
        if self.previous_weight is None or previous is None:
            return mean
        return mean + per_row(self.previous_weight, step, x) * previous


@dataclass(frozen=True)
class Grid:
    """The noise levels a denoising chain visits: x = alpha·x0 + sigma·ξ at each step, all [N], float64."""

    alpha: Tensor
    sigma: Tensor
    time: Tensor
    """What the network is told of the step: a timestep, a noise level."""
    flow: bool
    """Whether v means ξ − x0 (flow matching) or α ξ − σ x0 (variance preserving)."""

    def kind(self, name: Kind) -> tuple[Tensor, Tensor]:
        """(c, d) with which a quantity is c·x + d·x0."""
        if name not in get_args(Kind):
            raise ValueError(f"a prediction is one of {', '.join(get_args(Kind))}, not {name!r}")
        if name == "x0":
            return torch.zeros_like(self.alpha), torch.ones_like(self.alpha)
        if name == "eps":
            return 1 / self.sigma, -self.alpha / self.sigma
        return (1 if self.flow else self.alpha) / self.sigma, -1 / self.sigma


def denoising_target(
    denoiser: Denoiser,
    grid: Grid,
    *,
    shape: torch.Size,
    state_weight: Tensor,
    x0_weight: Tensor,
    std: Tensor,
    predicts: Kind,
    reuse: Kind,
    clip: float | None = None,
    start_scale: float = 1.0,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> AffineTarget:
    """The target with mean state_weight·x + x0_weight·x0, whose network predicts one kind and reuses another.

    With `clip`, the denoised estimate is clamped to ±clip before anything else is made of it.
    """
    c, d = grid.kind(reuse)
    c_in, d_in = grid.kind(predicts)
    if (d == 0).any() or (d_in == 0).any():
        raise ValueError("eps says nothing of x0 at pure noise (alpha = 0): start the grid below it, or use v")
    if len(grid.time) != len(std):
        raise ValueError(f"time has {len(grid.time)} values for {len(std)} steps: give one per step")
    if clip is not None and not clip > 0:
        raise ValueError(f"clip must be positive, not {clip}")
    # reuse = c x + d x0 with x0 = (out − c_in x)/d_in, so reuse = from_x · x + from_out · out.
    from_out, from_x = d / d_in, c - d * c_in / d_in
    coefficients = (
        state_weight - x0_weight * c / d,
        x0_weight / d,
        from_x,
        from_out,
        -c_in / d_in,
        1 / d_in,
        c,
        d,
    )
    on_device = tuple(v.to(device=device, dtype=dtype) for v in coefficients)
    state_weight, prediction_weight, from_x, from_out, x0_from_x, x0_from_out, c, d = on_device
    time = grid.time.to(device)

    def network(x: Tensor, step: Tensor, row: Tensor) -> Tensor:
        out = denoiser(x, time[step], row).to(x.dtype)
        if clip is not None:
            x0 = per_row(x0_from_x, step, x) * x + per_row(x0_from_out, step, x) * out
            return per_row(c, step, x) * x + per_row(d, step, x) * x0.clamp(-clip, clip)
        return out if predicts == reuse else per_row(from_x, step, x) * x + per_row(from_out, step, x) * out

    return AffineTarget(
        torch.Size(shape),
        std.to(device=device, dtype=dtype),
        state_weight,
        prediction_weight,
        network,
        start_scale,
    )


def per_row(values: Tensor, step: Tensor, like: Tensor) -> Tensor:
    """values[step], shaped to multiply states."""
    return expand(values[step], like)
