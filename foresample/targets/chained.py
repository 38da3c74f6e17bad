"""A target is a chain and a network.

`ChainTarget` joins the two; the functions make one of a denoiser for each family of chains. Each takes
denoiser(x, time, row): states [B, *shape], what the chain tells the network of their steps [B], and the index of the
sample each state belongs to [B], to look up its class or prompt; it returns a tensor [B, *shape], which is never
broadcast.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from foresample.chains import (
    Chain,
    Kind,
    edm_chain,
    flow_chain,
    langevin_chain,
    reverse_sde_chain,
    scheduler_chain,
    vp_chain,
)
from foresample.chains.chain import per_row
from foresample.chains.sde import Process
from foresample.contracts import UnknownRow, chain_mean

Denoiser = Callable[[Tensor, Tensor, Tensor], Tensor]
"""denoiser(x, time, row): states [B, *shape], their times [B] and sample indices [B] -> [B, *shape]."""


@dataclass(frozen=True)
class ChainTarget:
    """A chain walked with a network; see `foresample.Target`."""

    chain: Chain
    """On the device and in the dtype it is to run in (`Chain.to`)."""
    shape: torch.Size
    network: Denoiser
    """network(scale·x, time, row) -> what the chain says it predicts."""
    start_states: Tensor | None = None
    """[count, *shape]: the state each sample starts from, instead of noise."""

    @property
    def std(self) -> Tensor:
        return self.chain.std

    @property
    def multistep(self) -> int:
        return self.chain.multistep

    @property
    def extra(self) -> torch.Size | None:
        return None if self.chain.extra_weight is None else self.shape

    @property
    def fault_hint(self) -> str:
        """What else to look at where a prediction is NaN."""
        if self.chain.low_variance is None:
            return ""
        return (
            "; if its output is finite, its variance lies below what the chain takes for certain there: use a fixed "
            "variance, or give a smaller learned_base to foresample.targets.vp"
        )

    @property
    def calls_per_step(self) -> int:
        return 1 if self.chain.second_weight is None else 2

    def start(self, noise: Tensor, row: Tensor) -> Tensor:
        if self.start_states is None:
            return self.chain.start_scale * noise
        known = len(self.start_states)
        if not (row.is_cuda and torch.cuda.is_current_stream_capturing()) and int(row.max()) >= known:
            raise UnknownRow(
                f"sample {int(row.max())} has no start: start holds {known} states, for samples 0 to {known - 1}; "
                "give one for each sample"
            )
        return self.start_states[row] + self.chain.start_added * noise

    def predict(self, x: Tensor, step: Tensor, row: Tensor, extra: Tensor | None = None) -> Tensor:
        chain = self.chain
        prediction = chain.predict(x, self.output(x, step, row), step, extra)
        if chain.inner_time is None:
            return prediction
        inner = chain.inner(x, prediction, step, extra)
        second = self.network(inner, chain.inner_time[step], row)
        _require_output(second, x, chain)
        return chain.effective(prediction, second, step)

    def output(self, x: Tensor, step: Tensor, row: Tensor) -> Tensor:
        """What the network returns at these states; with a learned variance, twice their channels."""
        chain = self.chain
        # The network may write into what it is shown; the chain goes on with x.
        seen = x.clone() if chain.scale is None else per_row(chain.scale, step, x) * x
        output = self.network(seen, step if chain.time is None else chain.time[step], row)
        _require_output(output, x, chain)
        return output

    @chain_mean
    def mean(
        self,
        x: Tensor,
        prediction: Tensor,
        step: Tensor,
        previous: Tensor | None = None,
        extra: Tensor | None = None,
    ) -> Tensor:
        return self.chain.mean(x, prediction, step, previous, extra)


def vp(
    denoiser: Denoiser,
    alpha_bar: Tensor | Sequence[float],
    shape: Sequence[int],
    *,
    time: Tensor | None = None,
    eta: float = 1.0,
    predicts: Kind = "eps",
    reuse: Kind = "x0",
    clip: float | None = None,
    learned_base: float | None = None,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> ChainTarget:
    """DDPM (eta = 1) or DDIM sampling with a denoiser.

    Args:
        denoiser: denoiser(x, time, row) -> what `predicts` names.
        alpha_bar: ᾱ at the states the chain visits, [N], rising from noise to data; the last transition
            goes to ᾱ = 1 and is deterministic.
        shape: of one state.
        time: what the network is told of each step, [N]; ᾱ itself by default. Integers stay integers.
        eta: noise of the chain, 0 < eta ≤ 1.
        predicts: what the network returns: "x0", "eps" or "v" (= α ξ − σ x0).
        reuse: what drafters reuse.
        clip: clamp the denoised estimate to ±clip.
        learned_base: for a network with a learned variance ("learned_range": it returns 2C channels, the second half
            of which says where between β̃ and β the variance is, −1 … 1): what of it is certain (`vp.learned_range`),
            0.9 say. It stops with a sentence where that is undercut; `foresample.check` says how near it comes.
        dtype: the chain's, and that of times which are no integers.
        device: the chain's.
    """
    chain = vp_chain(
        alpha_bar,
        time=time,
        eta=eta,
        predicts=predicts,
        reuse=reuse,
        clip=clip,
        learned_base=learned_base,
    )
    return from_chain(denoiser, chain, shape, dtype=dtype, device=device)


def flow(
    denoiser: Denoiser,
    sigmas: Tensor | Sequence[float],
    shape: Sequence[int],
    *,
    churn: float,
    time: Tensor | None = None,
    predicts: Kind = "v",
    reuse: Kind = "v",
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> ChainTarget:
    """Stochastic flow matching with a velocity network (or any other denoiser).

    Args:
        denoiser: denoiser(x, time, row) -> what `predicts` names.
        sigmas: noise levels of the states the chain visits, [N], falling within (0, 1]; the last transition
            goes to 0.
        shape: of one state.
        churn: ε, how much noise the chain adds.
        time: what the network is told of each step, [N]; σ itself by default. Integers stay integers.
        predicts: what the network returns: "x0", "eps" or "v" (= ξ − x0).
        reuse: what drafters reuse.
        dtype: the chain's, and that of times which are no integers.
        device: the chain's.
    """
    chain = flow_chain(sigmas, churn=churn, time=time, predicts=predicts, reuse=reuse)
    return from_chain(denoiser, chain, shape, dtype=dtype, device=device)


def from_edm(
    denoiser: Denoiser,
    sigmas: Tensor | Sequence[float],
    shape: Sequence[int],
    *,
    churn: float,
    s_min: float = 0.0,
    s_max: float = math.inf,
    s_noise: float = 1.0,
    steps: Literal["euler", "heun", "midpoint"] = "euler",
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> ChainTarget:
    """EDM's stochastic sampler, as a chain on the churned states.

    A plain model(x, sigma) is wrapped as `lambda x, sigma, row: model(x, sigma)`, one that also takes classes
    as `lambda x, sigma, row: model(x, sigma, labels[row])`. The prediction drafters reuse is what the model
    returns, the denoised x0.

    Args:
        denoiser: denoiser(x, sigma, row) -> denoised x0: states [B, *shape], their noise levels [B] (of the
            churned state) and sample indices [B].
        sigmas: the schedule's noise levels, [N], falling; the final 0 may be given or left out.
        shape: of one state.
        churn: S_churn; a step's level is raised by γ = min(churn/N, √2 − 1).
        s_min: levels below are not churned.
        s_max: levels above are not churned.
        s_noise: scales the noise added.
        steps: "euler", one network call a step; "heun" (the paper's) or "midpoint", two.
        dtype: the chain's, and that of times which are no integers.
        device: the chain's.
    """
    chain = edm_chain(sigmas, churn=churn, s_min=s_min, s_max=s_max, s_noise=s_noise, steps=steps)
    return from_chain(denoiser, chain, shape, dtype=dtype, device=device)


def reverse_sde(
    network: Denoiser,
    process: Process,
    steps: int,
    shape: Sequence[int],
    *,
    predictor: Literal["euler_maruyama", "reverse_diffusion"] = "euler_maruyama",
    end: float = 1e-3,
    denoise: bool = True,
    predicts: Kind = "score",
    reuse: Kind = "x0",
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> ChainTarget:
    """The reverse-time SDE of a score model (Song et al. 2021), sampled as score_sde does without a corrector.

    Args:
        network: network(x, t, row) -> what `predicts` names; t falls from 1 to `end`.
        process: the forward SDE: `chains.VP(…)`, `chains.VE(…)` or `chains.SubVP(…)`.
        steps: N.
        shape: of one state.
        predictor: "euler_maruyama" or "reverse_diffusion".
        end: the last time.
        denoise: whether the last step adds no noise.
        predicts: what the network returns: "score", or "eps" (= −σ(t) score), "x0", "v".
        reuse: what drafters reuse.
        dtype: the chain's, and that of times which are no integers.
        device: the chain's.
    """
    chain = reverse_sde_chain(
        process, steps, predictor=predictor, end=end, denoise=denoise, predicts=predicts, reuse=reuse
    )
    return from_chain(network, chain, shape, dtype=dtype, device=device)


def from_chain(
    denoiser: Denoiser,
    chain: Chain,
    shape: Sequence[int],
    *,
    start: Tensor | None = None,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> ChainTarget:
    """Any chain of `foresample.chains` walked with a network, for example

        chain = fs.chains.dpmpp_3m_sde_chain(sigmas)
        target = fs.targets.from_chain(lambda x, sigma, row: model(x, sigma), chain, (3, 64, 64))

    Args:
        denoiser: denoiser(x, time, row) -> what the chain says it predicts (`chain.predicts`).
        chain: its coefficients.
        shape: of one state.
        start: the state each sample starts from, [count, *shape], instead of noise.
        dtype: the chain's, and that of times which are no integers.
        device: the chain's.
    """
    times = {name: getattr(chain, name) for name in ("time", "inner_time")}
    real = {name: t.to(dtype) for name, t in times.items() if t is not None and t.is_floating_point()}
    walked = replace(chain, **real).to(device, dtype)
    start = None if start is None else start.to(device, dtype)
    return ChainTarget(walked, torch.Size(shape), _cast(denoiser), start)


def langevin(
    score: Denoiser,
    shape: Sequence[int],
    *,
    step_size: float | Tensor,
    steps: int | None = None,
    start_scale: float = 1.0,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> ChainTarget:
    """A Langevin chain; its prediction is the score.

    Args:
        score: score(x, step, row) -> ∇ log density, [B, *shape].
        shape: of one state.
        step_size: h, one number or one per step, [N].
        steps: N, with a single step size.
        start_scale: std of the Gaussian the chain starts from.
        dtype: the chain's.
        device: the chain's.
    """
    chain = langevin_chain(step_size, steps, start_scale=start_scale)
    return from_chain(score, chain, shape, dtype=dtype, device=device)


def from_scheduler(
    scheduler: Any,
    denoiser: Denoiser,
    shape: Sequence[int],
    *,
    eta: float = 1.0,
    reuse: Kind = "x0",
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> ChainTarget:
    """A diffusers scheduler's sampler around your own network: the law of its own `step`, loop and all.

    For example, for a U-Net that predicts noise:

        scheduler = DDPMScheduler(clip_sample=True)
        scheduler.set_timesteps(100)
        target = targets.from_scheduler(scheduler, lambda x, t, row: unet(x, t).sample, (3, 32, 32))

    The chain starts at N(0, init_noise_sigma²), as pipelines do. A scheduler without an exact coupling is refused
    with a sentence.

    Args:
        scheduler: a stochastic scheduler of diffusers, after `set_timesteps`.
        denoiser: denoiser(x, time, row) -> what the scheduler's `prediction_type` names; x is scaled as
            `scale_model_input` scales it, time is the scheduler's timestep, one a state.
        shape: of one state.
        eta: what would be passed to DDIM's `step`; other schedulers have no use for it.
        reuse: what drafters reuse: "x0", "v" or "eps".
        dtype: the chain's, whatever the network runs in, and that of timesteps which are no integers.
        device: the chain's.
    """
    if getattr(scheduler, "num_inference_steps", None) is None:
        raise ValueError("the scheduler has no timesteps yet: call scheduler.set_timesteps(steps) first")
    chain = scheduler_chain(scheduler, eta=eta, reuse=reuse)
    start_scale = float(getattr(scheduler, "init_noise_sigma", 1.0))  # flow matching starts at unit noise
    chain = replace(chain, start_scale=start_scale)
    return from_chain(denoiser, chain, shape, dtype=dtype, device=device)


def _cast(denoiser: Denoiser) -> Denoiser:
    """Its output in the chain's dtype: a half-precision network is fine."""

    def cast(x: Tensor, time: Tensor, row: Tensor) -> Tensor:
        output = denoiser(x, time, row)
        return output.to(x.dtype) if isinstance(output, Tensor) and output.is_floating_point() else output

    return cast


def _require_output(output: Any, x: Tensor, chain: Chain) -> None:
    """Refuse what a network returned for states x before a formula broadcasts it."""
    what = "the network of a ChainTarget"
    if not isinstance(output, Tensor):
        remedy = "return a tensor"
        if isinstance(getattr(output, "sample", None), Tensor):
            remedy = "return its .sample"
        elif isinstance(output, tuple | list) and output and isinstance(output[0], Tensor):
            remedy = "return its first element, [0]"
        raise TypeError(f"{what} returned {type(output).__name__}: {remedy}")
    if chain.low_variance is not None:
        return  # twice the channels, which `Chain.predict` makes sure of
    if output.shape != x.shape:
        twice = output.ndim == x.ndim and output.shape == (len(x), 2 * x.shape[1], *x.shape[2:])
        remedy = (
            "; if the second half of its channels are variances, return the first half, or use learned_base"
        )
        raise ValueError(
            f"{what} must return shape {tuple(x.shape)} for states of that shape, not {tuple(output.shape)}"
            + (remedy if twice else "")
        )
    if not output.is_floating_point():
        raise TypeError(f"{what} must return floating-point numbers, not {output.dtype}")
