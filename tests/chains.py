"""Small chains on which law tests have power: dimension 1 and 2, few steps, float64."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

import foresample as fs
from foresample.targets import AffineTarget


def mixture(dim: int = 2) -> fs.GaussianMixture:
    """Wide components, so that predictions bend."""
    generator = torch.Generator().manual_seed(5)
    means = 4 * torch.rand(4, dim, generator=generator, dtype=torch.float64) - 2
    stds = 0.3 + 0.5 * torch.rand(4, generator=generator, dtype=torch.float64)
    return fs.GaussianMixture(means, stds, torch.full((4,), 0.25, dtype=torch.float64))


def flow(reuse: str = "v") -> AffineTarget:
    return mixture().flow(16, 1.0, reuse=reuse)


def ddpm() -> AffineTarget:
    return mixture().vp(torch.linspace(0.02, 0.98, 14, dtype=torch.float64))


def ddim() -> AffineTarget:
    return mixture().vp(torch.linspace(0.02, 0.98, 14, dtype=torch.float64), eta=0.6, reuse="eps")


def langevin() -> AffineTarget:
    return mixture().langevin(14, 0.05)


def interrupted() -> AffineTarget:
    """Deterministic steps at the start, in the middle (one, then two in a row) and at the end."""
    base = mixture().langevin(15, 0.08)
    std = base.std.clone()
    std[[0, 5, 9, 10, 14]] = 0
    return AffineTarget(base.shape, std, base.state_weight, base.prediction_weight, base.network)


def wells() -> AffineTarget:
    """Coupled double wells, U = Σ (x² − 1)² + …: the force grows so fast that far drafts run away."""

    def force(x: Tensor, step: Tensor, row: Tensor) -> Tensor:
        return -4 * x * (x * x - 1) + x.roll(1, 1) - x

    return fs.targets.langevin(force, (2,), step_size=0.02, steps=16, dtype=torch.float64)


def strays() -> AffineTarget:
    """The wells with a network that breaks where drafts stray and the chain does not go."""
    base = wells()

    def network(x: Tensor, step: Tensor, row: Tensor) -> Tensor:
        return torch.where(x.abs().amax(1, keepdim=True) > 6, torch.nan, base.network(x, step, row))

    return replace(base, network=network)


def multistep() -> AffineTarget:
    """A chain whose mean also needs the prediction of the step before."""
    base = ddpm()
    previous = -0.3 * base.prediction_weight
    previous[0] = 0
    return AffineTarget(
        base.shape,
        base.std,
        base.state_weight,
        base.prediction_weight - previous,
        base.network,
        previous_weight=previous,
    )


def single_precision() -> AffineTarget:
    """The flow with a float32 chain around a float64 network."""
    base = flow("x0")
    std, state, prediction = (v.float() for v in (base.std, base.state_weight, base.prediction_weight))
    network = lambda x, step, row: base.network(x.double(), step, row).float()  # noqa: E731
    return AffineTarget(base.shape, std, state, prediction, network)


CHAINS = {
    "flow": flow,
    "ddpm": ddpm,
    "ddim": ddim,
    "langevin": langevin,
    "wells": wells,
    "interrupted": interrupted,
    "multistep": multistep,
    "single precision": single_precision,
}


def worse(target: AffineTarget) -> AffineTarget:
    """A cheaper network that is a little wrong everywhere, to draft with."""
    return AffineTarget(
        target.shape,
        target.std,
        target.state_weight,
        target.prediction_weight,
        lambda x, step, row: 0.9 * target.predict(x, step, row) + 0.15,
        previous_weight=target.previous_weight,
    )


def constant_drift(dim: int = 1, steps: int = 7, drift: float = 1.0) -> AffineTarget:
    """x + drift + z along the first axis: with `Zero` as drafter, a constant mismatch at every step."""
    direction = torch.zeros(dim, dtype=torch.float64)
    direction[0] = drift
    one = torch.ones(steps, dtype=torch.float64)
    return AffineTarget(torch.Size([dim]), one, one, one, lambda x, step, row: direction.expand_as(x).clone())


@dataclass(frozen=True)
class Zero:
    """Guesses 0, always."""

    def begin(self, rows: int, window: int, like: Tensor) -> fs.Memory:
        return {"ready": torch.ones(rows, dtype=torch.bool)}

    def reach(self, memory: fs.Memory, window: int) -> Tensor:
        return memory["ready"] * window

    def guess(
        self, memory: fs.Memory, x: Tensor, position: int, step: Tensor, row: Tensor, before: fs.Before | None
    ) -> Tensor:
        return torch.zeros_like(x)

    def learn(self, memory: fs.Memory, path: fs.Path, committed: Tensor) -> fs.Memory:
        return memory
