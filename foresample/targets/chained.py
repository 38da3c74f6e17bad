"""A target is a chain and a network.

`ChainTarget` joins the two; the functions make one of a denoiser for each family of chains. Each takes
denoiser(x, time, row): states [B, *shape], the chain's times of their steps [B], and the index of the sample that each
state belongs to [B], to look up its class or prompt. It returns a tensor [B, *shape], which is never broadcast and is
cast to the chain's dtype, so a half-precision network is fine.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

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
    sde_chain,
    vp_chain,
)
from foresample.chains.chain import per_row
from foresample.chains.sde import OfTime, Process
from foresample.contracts import UnknownRow, chain_mean

Denoiser = Callable[[Tensor, Tensor, Tensor], Tensor]
"""denoiser(x, time, row): states [B, *shape], their times [B] and sample indices [B] -> [B, *shape]."""


@dataclass(frozen=True)
class ChainTarget:
    """A chain walked with a network; see `foresample.Target`.

    `chain` has the device and dtype of the run (`Chain.to`); network(scale·x, time, row) returns the quantity
    `chain.predicts`; `start_states`, [count, *shape], are states to start from instead of noise; `start_law` is the
    mean and std of the Gaussian to start from, if it is not N(0, chain.start_scale²).
    """

    chain: Chain
    shape: torch.Size
    network: Denoiser
    start_states: Tensor | None = None
    start_law: tuple[Tensor, Tensor] | None = None

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
        """A further cause of NaN predictions, to end the error with."""
        if self.chain.low_variance is None:
            return ""
        return (
            "; if its output is finite, its variance lies below the chain's lower bound there: use a fixed "
            "variance, or give a smaller learned_base to foresample.targets.vp"
        )

    @property
    def calls_per_step(self) -> int:
        return 1 if self.chain.second_weight is None else 2

    def start(self, noise: Tensor, row: Tensor) -> Tensor:
        if self.start_states is None:
            if self.start_law is None:
                return self.chain.start_scale * noise
            mean, std = self.start_law
            return mean + std * noise
        return of_sample("start", self.start_states, row) + self.chain.start_added * noise

    def predict(self, x: Tensor, step: Tensor, row: Tensor, extra: Tensor | None = None) -> Tensor:
        chain = self.chain
        prediction = chain.predict(x, self.output(x, step, row), step, extra)
        if chain.inner_time is None:
            return prediction
        inner = chain.inner(x, prediction, step, extra)
        return chain.effective(prediction, self._answer(inner, chain.inner_time[step], row), step)

    def output(self, x: Tensor, step: Tensor, row: Tensor) -> Tensor:
        """The network's output at these states; with a learned variance, twice their channels."""
        chain = self.chain
        # The network may write into its input; the chain still needs x.
        seen = x.clone() if chain.scale is None else per_row(chain.scale, step, x) * x
        return self._answer(seen, step if chain.time is None else chain.time[step], row)

    def _answer(self, x: Tensor, time: Tensor, row: Tensor) -> Tensor:
        """The network's output in the chain's dtype, refused before a formula can broadcast it."""
        shape, what = x.shape, "the network of a ChainTarget"
        try:
            output = self.network(x, time, row)
        except RuntimeError as error:
            if "not require grad" not in str(error):
                raise
            raise RuntimeError(
                f"{what} takes a gradient, and samplers run without: wrap the network with "
                "foresample.targets.with_gradients"
            ) from error
        if not isinstance(output, Tensor):
            remedy = "return a tensor"
            if isinstance(getattr(output, "sample", None), Tensor):
                remedy = "return its .sample"
            elif isinstance(output, tuple | list) and output and isinstance(output[0], Tensor):
                remedy = "return its first element, [0]"
            raise TypeError(f"{what} returned {type(output).__name__}: {remedy}")
        if self.chain.low_variance is not None and (
            (output.shape[0], *output.shape[2:]) != (shape[0], *shape[2:]) or not output.is_floating_point()
        ):
            raise ValueError(
                f"{what} must return floating-point numbers of shape {(shape[0], 2 * shape[1], *shape[2:])}, with a "
                f"learned variance, not {output.dtype} of {tuple(output.shape)}"
            )
        if self.chain.low_variance is None:  # else there are twice the channels, as `Chain.predict` checks
            if output.shape != shape:
                twice = len(shape) > 1 and output.shape == (shape[0], 2 * shape[1], *shape[2:])
                half = "if the second half of its channels are variances, return the first half, or use learned_base"
                raise ValueError(
                    f"{what} must return shape {tuple(shape)} for states of that shape, not {tuple(output.shape)}"
                    + f"; {half}" * twice
                )
            if not output.is_floating_point():
                raise TypeError(f"{what} must return floating-point numbers, not {output.dtype}")
        return output.to(x.dtype)

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


def of_sample(name: str, values: Tensor, row: Tensor) -> Tensor:
    """The values of these samples, values[row]; an error for a sample that has none."""
    known = len(values)
    if not (row.is_cuda and torch.cuda.is_current_stream_capturing()) and int(row.max()) >= known:
        raise UnknownRow(
            f"sample {int(row.max())} has no {name}: {name} holds {known} states, for samples 0 to {known - 1}; "
            "give one for each sample"
        )
    return values[row]


def vp(
    denoiser: Denoiser, alpha_bar: Tensor | Sequence[float], shape: Sequence[int], **options: Any
) -> ChainTarget:
    """DDPM (eta = 1) or DDIM sampling: `from_chain` with `chains.vp_chain(alpha_bar, …)`.

    Options are those of `chains.vp_chain` (time, eta, predicts, reuse, clip, variance, learned_base) and of
    `from_chain` (start, dtype, device).
    """
    return _made(denoiser, shape, options, vp_chain, alpha_bar)


def flow(
    denoiser: Denoiser, sigmas: Tensor | Sequence[float], shape: Sequence[int], **options: Any
) -> ChainTarget:
    """Stochastic flow matching: `from_chain` with `chains.flow_chain(sigmas, …)`."""
    return _made(denoiser, shape, options, flow_chain, sigmas)


def from_edm(
    denoiser: Denoiser, sigmas: Tensor | Sequence[float], shape: Sequence[int], **options: Any
) -> ChainTarget:
    """EDM's stochastic sampler: `from_chain` with `chains.edm_chain(sigmas, …)`.

    A plain model(x, sigma) is wrapped as `lambda x, sigma, row: model(x, sigma)`, one that also takes classes
    as `lambda x, sigma, row: model(x, sigma, labels[row])`.
    """
    return _made(denoiser, shape, options, edm_chain, sigmas)


def reverse_sde(
    network: Denoiser, process: Process, steps: int, shape: Sequence[int], **options: Any
) -> ChainTarget:
    """The reverse-time SDE of a score model: `from_chain` with `chains.reverse_sde_chain(process, steps, …)`."""
    return _made(network, shape, options, reverse_sde_chain, process, steps)


def from_sde(
    score: Denoiser,
    times: Tensor | Sequence[float],
    drift: OfTime,
    diffusion: OfTime,
    shape: Sequence[int],
    *,
    start_mean: Tensor | float | None = None,
    start_std: Tensor | float | None = None,
    **options: Any,
) -> ChainTarget:
    """Euler–Maruyama of a reverse-time SDE on any grid of times: `from_chain` with `chains.sde_chain(times, …)`.

    For the forward SDE dx = f(t) x dt + g(t) dw and score(x, t, row) = ∇ log p_t(x), a step from t to t − Δ is
    x' = (1 − f Δ) x + g² Δ score + g √Δ z, which starts from N(start_mean, start_std²).

    Args:
        score: score(x, time, row), or the quantity that `predicts` names.
        times: [N + 1], falling from noise to data.
        drift: f, a function of times.
        diffusion: g, a function of times.
        shape: of one state.
        start_mean: mean of the first state, 0 by default: a number, or a tensor that is broadcast to one state.
        start_std: standard deviation of the first state, 1 by default: a number, or a tensor like start_mean.
        **options: those of `chains.sde_chain` (levels, last, predicts, reuse) and of `from_chain`.
    """
    given = start_mean is not None or start_std is not None
    if given and options.get("start") is not None:
        raise ValueError(
            "start gives the first states themselves: leave out start_mean and start_std, or start"
        )
    target = _made(score, shape, options, sde_chain, times, drift, diffusion)
    started = (0.0 if start_mean is None else start_mean, 1.0 if start_std is None else start_std)
    try:
        mean, std = (
            torch.as_tensor(value, dtype=target.std.dtype, device=target.std.device).expand(target.shape)
            for value in started
        )
    except RuntimeError:
        raise ValueError(
            f"start_mean and start_std must be numbers or broadcast to one state, {tuple(target.shape)}: to start each "
            "sample elsewhere, give the states themselves as start"
        ) from None
    return replace(target, start_law=(mean, std)) if given else target


def langevin(score: Denoiser, shape: Sequence[int], **options: Any) -> ChainTarget:
    """A Langevin chain: `from_chain` with `chains.langevin_chain(…)` and score(x, step, row) -> ∇ log density."""
    return _made(score, shape, options, langevin_chain)


def _made(
    network: Denoiser, shape: Sequence[int], options: dict[str, Any], chain: Callable[..., Chain], *of: Any
) -> ChainTarget:
    """`from_chain` with chain(*of), each taking its part of the options."""
    placed = {name: options.pop(name) for name in ("start", "dtype", "device") if name in options}
    return from_chain(network, chain(*of, **options), shape, **placed)


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
        denoiser: denoiser(x, time, row) -> the quantity that the chain predicts (`chain.predicts`).
        chain: its coefficients.
        shape: of one state.
        start: the state each sample starts from, [count, *shape], instead of noise.
        dtype: of the chain, and of times that are not integers.
        device: of the chain.
    """
    if start is not None and start.shape[1:] != torch.Size(shape):
        raise ValueError(
            f"start must hold one state of shape {tuple(shape)} for each sample, [count, *shape], not "
            f"{tuple(start.shape)}"
        )
    times = {name: getattr(chain, name) for name in ("time", "inner_time")}
    real = {name: t.to(dtype) for name, t in times.items() if t is not None and t.is_floating_point()}
    walked = replace(chain, **real).to(device, dtype)
    start = None if start is None else start.to(device, dtype)
    return ChainTarget(walked, torch.Size(shape), denoiser, start)


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
    """A diffusers scheduler's sampler around your own network, with the distribution of a loop of its `step`.

    For example, for a U-Net that predicts noise:

        scheduler = DDPMScheduler(clip_sample=True)
        scheduler.set_timesteps(100)
        target = targets.from_scheduler(scheduler, lambda x, t, row: unet(x, t).sample, (3, 32, 32))

    The chain starts at N(0, init_noise_sigma²), as pipelines do. A scheduler without an exact coupling is refused.

    Args:
        scheduler: a stochastic scheduler of diffusers, after `set_timesteps`.
        denoiser: denoiser(x, time, row) -> the quantity that the scheduler's `prediction_type` names; x is scaled as
            `scale_model_input` scales it, time is the scheduler's timestep, one a state.
        shape: of one state.
        eta: the argument of DDIM's `step`; other schedulers ignore it.
        reuse: the quantity that drafters reuse: "x0", "v" or "eps".
        dtype: the chain's, whatever the network runs in, and that of timesteps which are no integers.
        device: of the chain.
    """
    if getattr(scheduler, "num_inference_steps", None) is None:
        raise ValueError("the scheduler has no timesteps yet: call scheduler.set_timesteps(steps) first")
    chain = scheduler_chain(scheduler, eta=eta, reuse=reuse)
    start_scale = float(getattr(scheduler, "init_noise_sigma", 1.0))  # flow matching starts at unit noise
    chain = replace(chain, start_scale=start_scale)
    return from_chain(denoiser, chain, shape, dtype=dtype, device=device)
