"""Reverse-time SDEs (Song et al. 2021) from a score network: VP, VE and sub-VP, discretised in two ways.

Forward, dx = f(t) x dt + g(t) dw, so that x_t = α(t) x0 + σ(t) ξ. In reverse, from t = 1 to `end` in N steps:

    Euler–Maruyama        x' = (1 − f/N) x + (g²/N) score + (g/√N) z
    reverse diffusion     the forward chain's own discretisation, turned around:
                          VP  x' = (2 − √(1 − β)) x + β score + √β z,       β = β(t)/N at the step's index
                          VE  x' = x + (σ_i² − σ_{i−1}²) score + √(σ_i² − σ_{i−1}²) z
                          sub-VP has none of its own: Euler–Maruyama

The times are t = linspace(1, end, N) and a step's size is 1/N, as in score_sde; the last step adds no noise
unless told to.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

from foresample.chains.chain import Chain, Kind, Levels, denoising_chain


class Process(Protocol):
    """A forward SDE with linear drift; all functions of times t, [N], float64."""

    @property
    def start_scale(self) -> float:
        """Std of the Gaussian at t = 1."""

    def levels(self, t: Tensor) -> Levels:
        """α and σ."""

    def drift(self, t: Tensor) -> Tensor:
        """f"""

    def diffusion(self, t: Tensor) -> Tensor:
        """g"""

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
        sigma = self._sigma(t)
        return Levels(torch.ones_like(t), sigma, norm=(1 + sigma**2).sqrt())

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
    """The reverse-time SDE (Song et al. 2021), sampled as score_sde does without a corrector.

    Args:
        process: the forward SDE: `VP(…)`, `VE(…)` or `SubVP(…)`.
        steps: N; the network is told times that fall from 1 to `end`.
        predictor: "euler_maruyama" or "reverse_diffusion".
        end: the last time.
        denoise: whether the last step adds no noise.
        predicts: what the network returns: "score", or "eps" (= −σ(t) score), "x0", "v".
        reuse: what drafters reuse.
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
    levels = process.levels(t)
    c, d = levels.kind("score")
    std = noise.clone()
    if denoise:
        std[-1] = 0
    return denoising_chain(
        levels,
        state_weight=state + noise**2 * c,
        x0_weight=noise**2 * d,
        std=std,
        predicts=predicts,
        reuse=reuse,
        time=t,
        start_scale=process.start_scale,
    )


def _index(t: Tensor, steps: int) -> Tensor:
    """The step of the forward chain that ends at t, as score_sde rounds it."""
    return (t * (steps - 1)).long()
