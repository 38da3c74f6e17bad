"""A chain as data: the coefficients of its transitions, one set for each step.

    x_{k+1} = state_weight·x_k + prediction_weight·p_k + previous_weight·p_{k−1} + older_weight·p_{k−2}
              + extra_weight·ξ_k + std·z_k

with p the *prediction*, the quantity a drafter reuses at nearby states, and ξ extra noise (`contracts.Target`). The
network gets `time` and scale·x and returns its output; from it

    x0 or p = from_state·x + from_output·output
    p       = to_state·x + to_x0·limit(x0)          where the denoised estimate is limited, else p is made at once

`limit` clips or thresholds the denoised estimate. One sampler, DDIM that does not use its clipped output, takes its
direction from the estimate before it is limited: there p is the unlimited x0, and the mean is not affine in it,

    mean = state_weight·x + prediction_weight·limit(p) + unlimited_weight·p.

**A learned variance** v(x), the second half of the network's channels, lies between two levels in its logarithm: with f
the output there, log v = low_variance + (f + 1)/2·(high_variance − low_variance). The chain's std is the part of it
that is certain, and what is above is extra noise: x' = … + √(v(x) − std²) ξ + std·z has exactly the variance v(x). In
order that the mean stays affine, extra_weight is the typical √(v − std²), and the difference to it is put into the
prediction, p + (√(v(x) − std²) − extra_weight) ξ/prediction_weight. Where v(x) < std² that is NaN, hence a fault.

**Second-order steps** evaluate the network twice: at x, which gives the denoised estimate D, and at an inner state

    y = inner_weight·x + (1 − inner_weight)·D + inner_extra·ξ,      with inner_time as its time, which gives D₂.

The prediction is the *effective* estimate D + second_weight·(D₂ − D), the one with which the first-order formula above
gives the second-order mean. Heun, midpoint, 2S and the two-stage SDE steps are all of this form, since each moves
along straight lines between x and an estimate; where a step is of first order, second_weight is 0.

The coefficients of a sampler are derived once, in terms of x0 (`denoising_chain`). What the network predicts and
what is reused is a matter of one table: with x = α x0 + σ ξ, each kind of prediction is c·x + d·x0,

    x0                          c = 0          d = 1
    eps = ξ                     c = 1/σ        d = −α/σ
    v   = (α ξ − σ x0)/norm     c = α/(σ norm) d = −norm/σ     norm² = α² + σ², 1 if variance is preserved
    v   = ξ − x0  (flow)        c = 1/σ        d = −1/σ        (α + σ = 1)
    score = −ξ/σ                c = −1/σ²      d = α/σ²
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from foresample.contracts import chain_mean, expand

Kind = Literal["x0", "eps", "v", "score"]
"""The quantity that a network returns or that drafters reuse: denoised state, noise, velocity or score."""
Limit = Callable[[Tensor], Tensor]
"""A function that limits denoised estimates, [B, *shape] -> [B, *shape], row by row."""


@dataclass(frozen=True)
class Chain:
    """Coefficients [N] of a chain, see the module; those that are None have no part in it.

    `start_scale` is the std of the Gaussian the chain starts from, and `start_added` that of the noise added to given
    start states (chains of churned states). `levels` says what the states are where they are noised data; `predicts`
    and `reuse` name what the network returns and what drafters reuse.
    """

    std: Tensor
    state_weight: Tensor
    prediction_weight: Tensor
    previous_weight: Tensor | None = None
    older_weight: Tensor | None = None
    unlimited_weight: Tensor | None = None
    extra_weight: Tensor | None = None
    time: Tensor | None = None
    scale: Tensor | None = None
    from_state: Tensor | None = None
    from_output: Tensor | None = None
    to_state: Tensor | None = None
    to_x0: Tensor | None = None
    limit: Limit | None = None
    low_variance: Tensor | None = None
    high_variance: Tensor | None = None
    second_weight: Tensor | None = None
    inner_weight: Tensor | None = None
    inner_extra: Tensor | None = None
    inner_time: Tensor | None = None
    start_scale: float = 1.0
    start_added: float = 0.0
    levels: Levels | None = None
    predicts: str = "prediction"
    reuse: str = "prediction"

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if (
                name not in ("limit", "start_scale", "start_added", "levels", "predicts", "reuse")
                and value is not None
                and (not isinstance(value, Tensor) or value.ndim != 1 or value.shape != self.std.shape)
            ):
                raise ValueError(
                    f"a chain's {name} has shape {list(getattr(value, 'shape', ()))} and type {type(value).__name__}: "
                    "give every coefficient as a tensor with one number for each step"
                )

    @property
    def multistep(self) -> int:
        """The number of earlier predictions that the mean needs."""
        return 2 if self.older_weight is not None else int(self.previous_weight is not None)

    @property
    def affine(self) -> bool:
        """Whether the mean is affine in state, prediction and earlier prediction, as kernels need it."""
        return self.unlimited_weight is None and self.older_weight is None and self.extra_weight is None

    def to(self, device: torch.device | str, dtype: torch.dtype) -> Chain:
        """The same chain on a device; times keep their dtype, for the network to judge."""
        return self._mapped(lambda name, v: v.to(device) if name.endswith("time") else v.to(device, dtype))

    def since(self, start: int) -> Chain:
        """The same chain from a later step on."""
        left = self._mapped(lambda name, value: value[start:])
        return replace(left, levels=None if self.levels is None else self.levels.since(start))

    def _mapped(self, change: Callable[[str, Tensor], Tensor]) -> Chain:
        """The chain with each of its coefficients changed."""
        values: dict[str, Any] = {f.name: getattr(self, f.name) for f in fields(self)}
        changed: dict[str, Any] = {n: change(n, v) for n, v in values.items() if isinstance(v, Tensor)}
        return replace(self, **changed)

    def predict(self, x: Tensor, output: Tensor, step: Tensor, extra: Tensor | None = None) -> Tensor:
        """The prediction at states x, [B, *shape], from the network's output there."""
        learned = self.low_variance is not None and extra is not None
        if learned and output.shape[1] != 2 * x.shape[1]:
            raise ValueError(
                f"the network returns {output.shape[1]} channels for states of {x.shape[1]}, but a learned "
                "variance comes in as many again: use a fixed variance (variance_type='fixed_small') with it"
            )
        value = output.chunk(2, dim=1)[0] if learned else output
        if self.from_state is not None and self.from_output is not None:
            value = per_row(self.from_state, step, x) * x + per_row(self.from_output, step, x) * value.to(
                x.dtype
            )
        if self.limit is not None and self.unlimited_weight is None:
            value = self.limit(value)
        if self.to_state is not None and self.to_x0 is not None:
            value = per_row(self.to_state, step, x) * x + per_row(self.to_x0, step, x) * value
        if extra is None or self.low_variance is None:
            return value
        assert self.extra_weight is not None
        std, typical, weight = (
            per_row(v, step, x) for v in (self.std, self.extra_weight, self.prediction_weight)
        )
        excess = (self.variance(output, step) - std**2).sqrt()
        return torch.where(std == 0, value, value + (excess - typical) * extra / weight)

    def variance(self, output: Tensor, step: Tensor) -> Tensor:
        """The variance a network with 2C channels has learned, [B, C, …]."""
        assert self.low_variance is not None
        assert self.high_variance is not None
        _, fraction = output.to(self.std.dtype).chunk(2, dim=1)
        low, high = (per_row(v, step, fraction) for v in (self.low_variance, self.high_variance))
        return torch.exp(low + (fraction + 1) / 2 * (high - low))

    def inner(self, x: Tensor, estimate: Tensor, step: Tensor, extra: Tensor | None) -> Tensor:
        """The state at which a second-order step evaluates the network again."""
        assert self.inner_weight is not None
        weight = per_row(self.inner_weight, step, x)
        inner = weight * x + (1 - weight) * estimate
        if self.inner_extra is None or extra is None:
            return inner
        return inner + per_row(self.inner_extra, step, x) * extra

    def effective(self, estimate: Tensor, second: Tensor, step: Tensor) -> Tensor:
        """The prediction of a second-order step."""
        assert self.second_weight is not None
        weight = per_row(self.second_weight, step, estimate)
        return torch.where(weight == 0, estimate, estimate + weight * (second - estimate))

    @chain_mean
    def mean(
        self,
        x: Tensor,
        prediction: Tensor,
        step: Tensor,
        previous: Tensor | None = None,
        extra: Tensor | None = None,
    ) -> Tensor:
        """The transition's mean at (x, step), given predictions and the extra noise, if there is any."""
        limited = prediction if self.limit is None or self.unlimited_weight is None else self.limit(prediction)
        mean = per_row(self.state_weight, step, x) * x + per_row(self.prediction_weight, step, x) * limited
        one, two = (previous, None) if self.older_weight is None or previous is None else previous.unbind(1)
        more = (
            (self.unlimited_weight, prediction),
            (self.previous_weight, one),
            (self.older_weight, two),
            (self.extra_weight, extra),
        )
        for weight, value in more:
            if weight is not None and value is not None:
                mean = mean + per_row(weight, step, x) * value
        return mean


@dataclass(frozen=True)
class Levels:
    """The noise levels a denoising chain visits: x = alpha·x0 + sigma·ξ at each step, all [N], float64.

    `flow` says that v means ξ − x0 (flow matching); `norm` is √(α² + σ²) for v where variance is not preserved.
    """

    alpha: Tensor
    sigma: Tensor
    flow: bool = False
    norm: Tensor | float = 1.0

    @classmethod
    def exploding(cls, sigma: Tensor) -> Levels:
        """x = x0 + σ ξ."""
        return cls(torch.ones_like(sigma), sigma, norm=(1 + sigma**2).sqrt())

    def since(self, start: int) -> Levels:
        """The same from a later step on."""
        norm = self.norm[start:] if isinstance(self.norm, Tensor) else self.norm
        return replace(self, alpha=self.alpha[start:], sigma=self.sigma[start:], norm=norm)

    def kind(self, name: str) -> tuple[Tensor, Tensor]:
        """(c, d) with which a quantity is c·x + d·x0: the table of the module."""
        if name == "x0":
            return torch.zeros_like(self.alpha), torch.ones_like(self.alpha)
        if name == "eps":
            return 1 / self.sigma, -self.alpha / self.sigma
        if name == "v":
            return (1 if self.flow else self.alpha) / (self.sigma * self.norm), -self.norm / self.sigma
        if name == "score":
            return -1 / self.sigma**2, self.alpha / self.sigma**2
        raise ValueError(f"a prediction is one of {', '.join(get_args(Kind))}, not {name!r}")


def denoising_chain(
    levels: Levels,
    *,
    state_weight: Tensor,
    x0_weight: Tensor,
    std: Tensor,
    predicts: Kind,
    reuse: Kind,
    time: Tensor,
    limit: Limit | None = None,
    **more: Any,
) -> Chain:
    """The chain with mean state_weight·x + x0_weight·x0 (+ …), its network predicting one kind and reusing another.

    `more` are fields of `Chain`. Weights of earlier and of unlimited estimates are those of x0 and need `reuse="x0"`.
    """
    c, d = levels.kind(reuse)
    c_in, d_in = levels.kind(predicts)
    if (d == 0).any() or (d_in == 0).any():
        raise ValueError(
            "eps does not determine x0 at pure noise (alpha = 0): start the grid below it, or use v"
        )
    if len(time) != len(std):
        raise ValueError(f"time has {len(time)} values for {len(std)} steps: give one per step")
    if reuse != "x0" and any(more.get(name) is not None for name in ("previous_weight", "unlimited_weight")):
        raise ValueError(f"this sampler's mean is made of denoised estimates: reuse x0, not {reuse}")
    given: dict[str, Any] = {
        "time": time,
        "limit": limit,
        "levels": levels,
        "predicts": predicts,
        "reuse": reuse,
    }
    chain = Chain(std, state_weight - x0_weight * c / d, x0_weight / d, **given, **more)
    if limit is not None:
        chain = replace(chain, from_state=-c_in / d_in, from_output=1 / d_in)
        return chain if reuse == "x0" else replace(chain, to_state=c, to_x0=d)
    if predicts == reuse:
        return chain
    # reuse = c x + d x0 with x0 = (output − c_in x)/d_in.
    return replace(chain, from_state=c - d * c_in / d_in, from_output=d / d_in)


@dataclass(frozen=True)
class Clip:
    """Clamps denoised estimates to ±bound."""

    bound: float

    def __post_init__(self) -> None:
        if not self.bound > 0:
            raise ValueError(f"clip must be positive, not {self.bound}")

    def __call__(self, x0: Tensor) -> Tensor:
        return x0.clamp(-self.bound, self.bound)


def per_row(values: Tensor, step: Tensor, like: Tensor) -> Tensor:
    """values[step], shaped to multiply states."""
    return expand(values[step], like)
