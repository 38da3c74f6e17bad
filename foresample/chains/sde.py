"""Reverse-time SDEs (Song et al. 2021) from a score network, on any grid of times.

Forward, dx = f(t) x dt + g(t) dw, so that x_t = α(t) x0 + σ(t) ξ. In reverse, Euler–Maruyama from t to t − Δ is

    x' = (1 − f Δ) x + (1 + η²)/2 g² Δ score + η g √Δ z,

where η = 1 is the reverse SDE and η → 0 its probability flow, with the same marginals. The last step adds its noise,
or adds none, or is followed by the denoised estimate (x + σ² score)/α at the last time: one more network call.

`reverse_sde_chain` has the grid of score_sde: N times linspace(1, end, N) and steps of 1/N, which are not the
differences of these times, so a grid of times alone does not describe it. Besides Euler–Maruyama it knows

    reverse diffusion     the forward chain's own discretisation, turned around:
                          VP  x' = (2 − √(1 − β)) x + β score + √β z,       β = β(t)/N at the step's index
                          VE  x' = x + (σ_i² − σ_{i−1}²) score + √(σ_i² − σ_{i−1}²) z
                          sub-VP has none of its own: Euler–Maruyama
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, Protocol, get_args

import torch
from torch import Tensor

from foresample.chains.chain import Chain, Kind, Levels, denoising_chain

OfTime = Callable[[Tensor], Tensor | float]
"""A function of times [N], float64."""
Last = Literal["noisy", "noiseless", "denoised"]
"""The last step of a reverse SDE; see the module."""


class Process(Protocol):
    """A forward SDE with linear drift; its methods are functions of times t, [N], float64."""

    @property
    def start_scale(self) -> float:
        """Std of the Gaussian at t = 1."""

    def levels(self, t: Tensor) -> Levels:
        """The noise levels α and σ."""

    def drift(self, t: Tensor) -> Tensor:
        """f, the factor of the state in the drift."""

    def diffusion(self, t: Tensor) -> Tensor:
        """g, the factor of the noise."""

    def discrete(self, t: Tensor, steps: int) -> tuple[Tensor, Tensor]:
        """(A, G) of the reverse-diffusion predictor: x' = A x + G² score + G z."""


@dataclass(frozen=True)
class VP:
    """Variance preserving: β(t) rises from beta_min to beta_max."""

    beta_min: float = 0.1
    beta_max: float = 20.0
    start_scale: float = 1.0

    def levels(self, t: Tensor) -> Levels:
        alpha = torch.exp(-0.25 * t**2 * (self.beta_max - self.beta_min) - 0.5 * t * self.beta_min)
        return Levels(alpha, (1 - alpha**2).sqrt())

    def drift(self, t: Tensor) -> Tensor:
        return -0.5 * self._beta(t)

    def diffusion(self, t: Tensor) -> Tensor:
        return self._beta(t).sqrt()

    def discrete(self, t: Tensor, steps: int) -> tuple[Tensor, Tensor]:
        betas = torch.linspace(self.beta_min / steps, self.beta_max / steps, steps, dtype=torch.float64)
        beta = betas[_index(t, steps)]
        return 2 - (1 - beta).sqrt(), beta.sqrt()

    def _beta(self, t: Tensor) -> Tensor:
        return self.beta_min + t * (self.beta_max - self.beta_min)


@dataclass(frozen=True)
class SubVP(VP):
    """Sub-VP: the drift of VP and less noise."""

    def levels(self, t: Tensor) -> Levels:
        alpha = super().levels(t).alpha
        return Levels(alpha, 1 - alpha**2, norm=(alpha**2 + (1 - alpha**2) ** 2).sqrt())

    def diffusion(self, t: Tensor) -> Tensor:
        discount = 1 - torch.exp(-2 * self.beta_min * t - (self.beta_max - self.beta_min) * t**2)
        return (self._beta(t) * discount).sqrt()

    def discrete(self, t: Tensor, steps: int) -> tuple[Tensor, Tensor]:
        return 1 - self.drift(t) / steps, self.diffusion(t) / math.sqrt(steps)


@dataclass(frozen=True)
class VE:
    """Variance exploding: σ(t) rises from sigma_min to sigma_max, even in its logarithm."""

    sigma_min: float = 0.01
    sigma_max: float = 50.0

    @property
    def start_scale(self) -> float:
        return self.sigma_max

    def levels(self, t: Tensor) -> Levels:
        return Levels.exploding(self._sigma(t))

    def drift(self, t: Tensor) -> Tensor:
        return torch.zeros_like(t)

    def diffusion(self, t: Tensor) -> Tensor:
        return self._sigma(t) * math.sqrt(2 * math.log(self.sigma_max / self.sigma_min))

    def discrete(self, t: Tensor, steps: int) -> tuple[Tensor, Tensor]:
        grid = self._sigma(torch.linspace(0, 1, steps, dtype=torch.float64))
        index = _index(t, steps)
        below = torch.where(index > 0, grid[index - 1], 0.0)
        return torch.ones_like(t), (grid[index] ** 2 - below**2).sqrt()

    def _sigma(self, t: Tensor) -> Tensor:
        return self.sigma_min * (self.sigma_max / self.sigma_min) ** t


def sde_chain(
    times: Tensor | Sequence[float],
    drift: OfTime,
    diffusion: OfTime,
    *,
    levels: Callable[[Tensor], Levels | tuple[Tensor, Tensor]] | None = None,
    eta: float = 1.0,
    last: Last = "noisy",
    predicts: Kind = "score",
    reuse: Kind = "x0",
) -> Chain:
    """Euler–Maruyama of a reverse-time SDE on this grid of times.

    Args:
        times: [N + 1], falling from noise to data, for N transitions; the network gets the first N.
        drift: f(t), for a forward drift f(t)·x; a function of times [N].
        diffusion: g(t), a function of times [N].
        levels: (α(t), σ(t)) with x_t = α x0 + σ ξ, a function of times. By default they are integrated from `drift` and
            `diffusion`, starting at t = 0 with σ = 0: then their accuracy affects drafters, but not the chain.
        eta: η > 0, how much noise the chain adds.
        last: the last step: "noisy", "noiseless", or "denoised" (one transition more; needs `levels`).
        predicts: the quantity that the network returns: "score", or "eps" (= −σ score), "x0", "v". All except the
            score need `levels`.
        reuse: the quantity that drafters reuse.
    """
    t = torch.as_tensor(times, dtype=torch.float64).cpu()
    if t.ndim != 1 or len(t) < 2 or not (t.diff() < 0).all() or not torch.isfinite(t).all():
        raise ValueError("times must fall strictly from noise to data, at least two of them; flip them?")
    if last not in get_args(Last):
        raise ValueError(f"last must be 'noisy', 'noiseless' or 'denoised', not {last!r}")
    if levels is None and (last == "denoised" or predicts != "score"):
        what = "last='denoised'" if last == "denoised" else f"predicts={predicts!r}"
        raise ValueError(
            f"{what} needs the noise levels themselves: give levels, a function t -> (alpha, sigma)"
        )
    if not eta > 0:
        raise ValueError(f"eta must be positive, not {eta}: without noise there is nothing to speculate on")
    here, size = t[:-1], -t.diff()
    noise = _of_time(diffusion, here, "diffusion") * size.sqrt()
    if not (noise if last == "denoised" else noise[:-1]).gt(0).any():
        raise ValueError(
            "diffusion is 0 at all times but perhaps the last, so there is nothing to speculate on: use more times"
        )
    state, std = 1 - _of_time(drift, here, "drift") * size, eta * noise
    if last == "noiseless":
        std[-1] = 0
    visited = here if last != "denoised" else t
    known = _integrated(drift, diffusion, visited) if levels is None else levels(visited)
    if not isinstance(known, Levels):
        numbers = (torch.as_tensor(one, dtype=torch.float64).expand(len(visited)) for one in known)
        known = levels_of(*numbers)
    if not ((known.alpha > 0) & (known.sigma > 0)).all():
        raise ValueError("levels must be above 0 at all times: end the grid before sigma is 0")
    pull = (1 + eta**2) / 2 * noise**2
    if last == "denoised":
        alpha, sigma = known.alpha[-1:], known.sigma[-1:]
        state, pull = torch.cat([state, 1 / alpha]), torch.cat([pull, sigma**2 / alpha])
        std = torch.cat([std, std.new_zeros(1)])
    return score_chain(visited, known, state, pull, std, predicts, reuse)


def reverse_sde_chain(
    process: Process,
    steps: int,
    *,
    predictor: Literal["euler_maruyama", "reverse_diffusion"] = "euler_maruyama",
    end: float = 1e-3,
    denoise: bool = True,
    predicts: Kind = "score",
    reuse: Kind = "x0",
) -> Chain:
    """The reverse-time SDE on score_sde's grid, without a corrector; `sde_chain` takes a grid of your own.

    Args:
        process: the forward SDE: `VP(…)`, `VE(…)` or `SubVP(…)`.
        steps: N; the network gets times that fall from 1 to `end`.
        predictor: "euler_maruyama" or "reverse_diffusion".
        end: the last time.
        denoise: whether the last step adds no noise.
        predicts: the quantity that the network returns: "score", or "eps" (= −σ score), "x0", "v".
        reuse: the quantity that drafters reuse.
    """
    if predictor not in ("euler_maruyama", "reverse_diffusion"):
        raise ValueError(f"predictor must be 'euler_maruyama' or 'reverse_diffusion', not {predictor!r}")
    if steps < 2 or not 0 < end < 1:
        raise ValueError(
            f"a reverse SDE needs at least 2 steps and an end within (0, 1), not {steps} and {end}"
        )
    t = torch.linspace(1, end, steps, dtype=torch.float64)
    if predictor == "euler_maruyama":
        state, noise = 1 - process.drift(t) / steps, process.diffusion(t) / math.sqrt(steps)
    else:
        state, noise = process.discrete(t, steps)
    std = noise.clone()
    if denoise:
        std[-1] = 0
    chain = score_chain(t, process.levels(t), state, noise**2, std, predicts, reuse)
    return replace(chain, start_scale=process.start_scale)


def _index(t: Tensor, steps: int) -> Tensor:
    """The step of the forward chain that ends at t, as score_sde rounds it."""
    return (t * (steps - 1)).long()


def score_chain(
    time: Tensor,
    levels: Levels,
    state: Tensor,
    pull: Tensor,
    std: Tensor,
    predicts: Kind = "score",
    reuse: Kind = "x0",
) -> Chain:
    """The chain with steps x' = state·x + pull·score + std·z."""
    c, d = levels.kind("score")
    return denoising_chain(
        levels,
        state_weight=state + pull * c,
        x0_weight=pull * d,
        std=std,
        predicts=predicts,
        reuse=reuse,
        time=time,
    )


def _integrated(drift: OfTime, diffusion: OfTime, t: Tensor) -> Levels:
    """α = exp ∫ f and σ² = α² ∫ g²/α² from 0 to each time, by the trapezoidal rule."""
    s = t.unsqueeze(1) * torch.linspace(0, 1, 257, dtype=torch.float64)
    f, g = (_of_time(of, s.flatten(), "drift and diffusion").view_as(s) for of in (drift, diffusion))
    log_alpha = torch.cumulative_trapezoid(f, s)
    log_alpha = torch.cat([torch.zeros_like(log_alpha[:, :1]), log_alpha], dim=1)
    sigma = log_alpha[:, -1].exp() * torch.trapezoid((g * (-log_alpha).exp()) ** 2, s).sqrt()
    if not (torch.isfinite(sigma) & (sigma > 0)).all():
        raise ValueError(
            "the noise levels cannot be integrated from time 0: give levels, a function t -> (alpha, sigma)"
        )
    return levels_of(log_alpha[:, -1].exp(), sigma)


def levels_of(alpha: Tensor, sigma: Tensor) -> Levels:
    """The levels x = α x0 + σ ξ of any α and σ."""
    return Levels(alpha, sigma, norm=(alpha**2 + sigma**2).sqrt())


def _of_time(of: OfTime, t: Tensor, name: str) -> Tensor:
    """A number for each time."""
    value = torch.as_tensor(of(t), dtype=torch.float64)
    if value.numel() not in (1, len(t)):
        raise ValueError(
            f"{name} must be a function of times that returns a number for each, [{len(t)}], not shape "
            f"{tuple(value.shape)}: give f of f(t)·x, and for another drift make a target with from_step"
        )
    return value.flatten().expand(len(t))
