"""Fewer steps of a variance-preserving denoiser: the ancestral chain itself, or a solver of its ODE. Lossy.

`ddpm` walks the ancestral chain of the shorter schedule. The others solve the probability-flow ODE: with
x = α x0 + σ ξ, α² = ᾱ, σ² = 1 − ᾱ and D the denoised estimate at x, a step to the next level (α', σ') is

    ddim       x' = α' D + (σ'/σ)(x − α D)                                       (Song, Meng, Ermon 2021, η = 0)
    dpmpp_2m   x' = (σ'/σ) x − α' (e^{−h} − 1) D̃,   h = ln(α'/σ') − ln(α/σ)      (Lu et al. 2022, multistep)
               D̃ = D + (D − D_before)/(2 r),   r = h_before/h;   D̃ = D on the first and the last step

and the last step goes to ᾱ = 1, x' = D̃ = D. One call and one evaluation a step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from benchmarks.peers.common import Committed, Counted, Observer, PeerRun
from benchmarks.peers.picard import walk
from foresample.contracts import Target
from foresample.pretrained import Pretrained
from foresample.targets.mixture import GaussianMixture


@dataclass(frozen=True)
class Schedule:
    """A variance-preserving chain that predicts x0, with its noise levels."""

    target: Target
    """Its predictions are x0 (reuse="x0"), its transitions those of the ancestral chain."""
    alpha_bar: Tensor
    """[N], float64: ᾱ at the states visited, rising from noise to data."""

    @classmethod
    def of_mixture(cls, mixture: GaussianMixture, alpha_bar: Tensor | Sequence[float]) -> Schedule:
        """The closed-form denoiser on this grid."""
        grid = torch.as_tensor(alpha_bar, dtype=torch.float64)
        return cls(mixture.vp(grid), grid)

    @classmethod
    def of_pretrained(
        cls, model: Pretrained, steps: int, labels: Sequence[int] | Tensor | None = None
    ) -> Schedule:
        """A trained model on `steps` timesteps that end at the noisiest one ("trailing"), which few steps need.

        Its denoised estimate is clipped as the model's own scheduler says.
        """
        scheduler = trailing(model.scheduler, steps)
        return cls.of_scheduler(
            scheduler, replace(model, scheduler=scheduler).target(steps, labels, reuse="x0")
        )

    @classmethod
    def of_scheduler(cls, scheduler: Any, target: Target) -> Schedule:
        """A diffusers scheduler with its timesteps set, and its target with x0 reused."""
        return cls(target, scheduler.alphas_cumprod[scheduler.timesteps].double())


def trailing(scheduler: Any, steps: int) -> Any:
    """A scheduler like this one, with `steps` timesteps that end at the noisiest."""
    made = type(scheduler).from_config(scheduler.config, timestep_spacing="trailing")
    made.set_timesteps(steps)
    return made


def ddpm(schedule: Schedule, count: int, *, seed: int, observe: Observer | None = None) -> PeerRun:
    """Ancestral sampling (Ho, Jain, Abbeel 2020) on the shorter schedule."""
    target = schedule.target
    counted = Counted(target, count)
    with torch.no_grad():
        rows = counted.begin(seed)
        x = rows.x
        for k in range(len(target.std)):
            at = torch.full_like(rows.step, k)
            x = walk(target, x, counted.predict(x, at, rows.sample), at, rows.seed)
            if observe is not None:
                observe(Committed(rows.sample, at, torch.ones_like(at), x.unsqueeze(1)))
    return counted.finish(x)


def ddim(schedule: Schedule, count: int, *, seed: int, observe: Observer | None = None) -> PeerRun:
    """DDIM with η = 0."""

    def step(x: Tensor, x0: Tensor, before: Tensor | None, k: int, level: _Levels) -> Tensor:
        a, b = level.alpha[k], level.alpha[k + 1]
        return b * x0 + level.sigma[k + 1] / level.sigma[k] * (x - a * x0)

    return _walk(schedule, count, seed, step, observe)


def dpmpp_2m(schedule: Schedule, count: int, *, seed: int, observe: Observer | None = None) -> PeerRun:
    """DPM-Solver++ 2M."""

    def step(x: Tensor, x0: Tensor, before: Tensor | None, k: int, level: _Levels) -> Tensor:
        last = k == len(level.alpha) - 2
        h = level.log_snr[k + 1] - level.log_snr[k]
        if before is not None and not last:
            r = (level.log_snr[k] - level.log_snr[k - 1]) / h
            x0 = x0 + (x0 - before) / (2 * r)
        return level.sigma[k + 1] / level.sigma[k] * x - level.alpha[k + 1] * torch.expm1(-h) * x0

    return _walk(schedule, count, seed, step, observe)


@dataclass(frozen=True)
class _Levels:
    """α, σ and ln(α/σ), [N + 1], float64; the last is ᾱ = 1."""

    alpha: Tensor
    sigma: Tensor
    log_snr: Tensor


def _walk(
    schedule: Schedule,
    count: int,
    seed: int,
    step: Callable[[Tensor, Tensor, Tensor | None, int, _Levels], Tensor],
    observe: Observer | None,
) -> PeerRun:
    target = schedule.target
    counted = Counted(target, count)
    grid = torch.cat([schedule.alpha_bar.double().cpu(), torch.ones(1, dtype=torch.float64)])
    alpha, sigma = grid.sqrt(), (1 - grid).sqrt()
    level = _Levels(alpha, sigma, (alpha / sigma).log())
    with torch.no_grad():
        rows = counted.begin(seed)
        x, before = rows.x, None
        for k in range(len(schedule.alpha_bar)):
            at = torch.full_like(rows.step, k)
            x0 = counted.predict(x, at, rows.sample)
            x, before = step(x, x0, before, k, level), x0
            if observe is not None:
                observe(Committed(rows.sample, at, torch.ones_like(at), x.unsqueeze(1)))
    return counted.finish(x)
