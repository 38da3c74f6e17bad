"""Small chains on which law tests have power (dimension 1 and 2, few steps, float64), and drafters for them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

import foresample as fs
from foresample.chains import Chain, Kind
from foresample.targets import ChainTarget


class HalfMean(ChainTarget):
    """A chain's target with a mean of its own."""

    def mean(
        self,
        x: Tensor,
        prediction: Tensor,
        step: Tensor,
        previous: Tensor | None = None,
        extra: Tensor | None = None,
    ) -> Tensor:
        return 0.5 * super().mean(x, prediction, step, previous, extra)


def mixture(dim: int = 2) -> fs.GaussianMixture:
    """Wide components, so that predictions bend."""
    generator = torch.Generator().manual_seed(5)
    means = 4 * torch.rand(4, dim, generator=generator, dtype=torch.float64) - 2
    stds = 0.3 + 0.5 * torch.rand(4, generator=generator, dtype=torch.float64)
    return fs.GaussianMixture(means, stds, torch.full((4,), 0.25, dtype=torch.float64))


def flow(reuse: Kind = "v") -> ChainTarget:
    return mixture().flow(16, 1.0, reuse=reuse)


def ddpm() -> ChainTarget:
    return mixture().vp(torch.linspace(0.02, 0.98, 14, dtype=torch.float64))


def ddim() -> ChainTarget:
    return mixture().vp(torch.linspace(0.02, 0.98, 14, dtype=torch.float64), eta=0.6, reuse="eps")


def langevin() -> ChainTarget:
    return mixture().langevin(14, 0.05)


def interrupted() -> ChainTarget:
    """Deterministic steps at the start, in the middle (one, then two in a row) and at the end."""
    base = mixture().langevin(15, 0.08)
    std = base.std.clone()
    std[[0, 5, 9, 10, 14]] = 0
    return replace(base, chain=replace(base.chain, std=std))


def wells() -> ChainTarget:
    """Coupled double wells, U = Σ (x² − 1)² + …: the force grows so fast that far drafts run away."""

    def force(x: Tensor, step: Tensor, row: Tensor) -> Tensor:
        return -4 * x * (x * x - 1) + x.roll(1, 1) - x

    return fs.targets.langevin(force, (2,), step_size=0.02, steps=16, dtype=torch.float64)


def strays() -> ChainTarget:
    """The wells with a network that breaks where drafts stray and the chain does not go."""
    base = wells()

    def network(x: Tensor, step: Tensor, row: Tensor) -> Tensor:
        return torch.where(x.abs().amax(1, keepdim=True) > 6, torch.nan, base.network(x, step, row))

    return replace(base, network=network)


def multistep() -> ChainTarget:
    """A chain whose mean also needs the prediction of the step before."""
    base = ddpm()
    weight = base.chain.prediction_weight
    previous = -0.3 * weight
    previous[0] = 0
    return replace(
        base, chain=replace(base.chain, prediction_weight=weight - previous, previous_weight=previous)
    )


def single_precision() -> ChainTarget:
    """The flow with a float32 chain around a float64 network."""
    base = flow("x0")
    network = lambda x, time, row: base.network(x.double(), time, row).float()  # noqa: E731
    return replace(base, chain=base.chain.to("cpu", torch.float32), network=network)


def third_order() -> ChainTarget:
    """A chain whose mean also needs the predictions of the two steps before."""
    base = multistep()
    chain = base.chain
    older = 0.2 * chain.prediction_weight
    older[:2] = 0
    weight = chain.prediction_weight - older
    return replace(base, chain=replace(chain, prediction_weight=weight, older_weight=older))


def two_noises() -> ChainTarget:
    """DPM++ SDE: the inner noise of a step is extra noise, which its outer noise depends on; two networks a step."""
    sigmas = fs.chains.karras_sigmas(12, 0.1, 8.0)
    denoise = lambda x, sigma, row: mixture().denoise(x, torch.ones_like(sigma), sigma)  # noqa: E731
    chain = fs.chains.dpmpp_sde_chain(sigmas)
    return fs.targets.from_chain(denoise, chain, (2,), dtype=torch.float64)


def turn(x: Tensor, angle: Tensor) -> Tensor:
    sine, cosine = angle.sin(), angle.cos()
    return torch.cat([cosine * x[:, :1] - sine * x[:, 1:], sine * x[:, :1] + cosine * x[:, 1:]], 1)


@dataclass(frozen=True)
class Turned:
    """A chain whose predictions and means take extra noise of another shape: by default, the angle of a rotation."""

    base: ChainTarget
    extra: torch.Size = torch.Size([1])  # noqa: RUF009
    by: Callable[[Tensor, Tensor], Tensor] = turn

    @property
    def shape(self) -> torch.Size:
        return self.base.shape

    @property
    def std(self) -> Tensor:
        return self.base.std

    def start(self, noise: Tensor, row: Tensor) -> Tensor:
        return self.base.start(noise, row)

    def predict(self, x: Tensor, step: Tensor, row: Tensor, extra: Tensor) -> Tensor:
        return self.base.predict(self.by(x, extra), step, row)

    def mean(self, x: Tensor, prediction: Tensor, step: Tensor, extra: Tensor) -> Tensor:
        return self.base.mean(self.by(x, extra), prediction, step)


def turned() -> Any:  # not a Target to a type checker, since it demands its extra noise
    return Turned(ddpm())


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


NOISIER: dict[str, Callable[[], Any]] = {"third order": third_order, "two noises": two_noises, "turned": turned}
"""Chains with more than one prediction or one noise a step."""


def worse(target: ChainTarget) -> ChainTarget:
    """A cheaper network that is a little wrong everywhere, to draft with."""

    class Worse(ChainTarget):
        def predict(self, x: Tensor, step: Tensor, row: Tensor, extra: Tensor | None = None) -> Tensor:
            return 0.9 * target.predict(x, step, row) + 0.15

    return Worse(target.chain, target.shape, target.network)


DRAFTERS: dict[str, Callable[[ChainTarget], fs.Drafter]] = {
    "head": lambda target: fs.Frozen("head"),
    "parent": lambda target: fs.Frozen("parent"),
    "nearest": lambda target: fs.Frozen("nearest"),
    "replay": lambda target: fs.Replay(secant=False),
    "secant": lambda target: fs.Replay(),
    "warm": lambda target: fs.Replay(prior=fs.fit_prior(target, window=6, pilots=40)),
    "model": lambda target: fs.DraftModel(worse(target)),
}


def constant_drift(dim: int = 1, steps: int = 7, drift: float = 1.0) -> ChainTarget:
    """x + drift + z along the first axis: with `Zero` as drafter, a constant mismatch at every step."""
    direction = torch.zeros(dim, dtype=torch.float64)
    direction[0] = drift
    one = torch.ones(steps, dtype=torch.float64)
    network = lambda x, step, row: direction.expand_as(x).clone()  # noqa: E731
    return ChainTarget(Chain(one, one, one), torch.Size([dim]), network)


@dataclass(frozen=True)
class Zero:
    """Guesses 0, always, or another number."""

    value: float = 0.0

    def begin(self, rows: int, window: int, like: Tensor) -> fs.drafters.DrafterMemory:
        return {"ready": torch.ones(rows, dtype=torch.bool)}

    def reach(self, memory: fs.drafters.DrafterMemory, window: int) -> Tensor:
        return memory["ready"] * window

    def guess(
        self,
        memory: fs.drafters.DrafterMemory,
        x: Tensor,
        position: int,
        step: Tensor,
        row: Tensor,
        before: fs.drafters.PreviousDraft | None,
    ) -> Tensor:
        return torch.full_like(x, self.value)

    def learn(
        self, memory: fs.drafters.DrafterMemory, path: fs.drafters.DraftPath, committed: Tensor
    ) -> fs.drafters.DrafterMemory:
        return memory


class LooksAhead(fs.Replay):
    """Replays the prediction of the *next* step of the old path, which knows this step's noise: not adapted."""

    def guess(
        self,
        memory: fs.drafters.DrafterMemory,
        x: Tensor,
        position: int,
        step: Tensor,
        row: Tensor,
        before: fs.drafters.PreviousDraft | None,
    ) -> Tensor:
        last = memory["predictions"].shape[1] - 1
        return memory["predictions"][:, min(position + 1, last)]
