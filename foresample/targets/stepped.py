"""A target made of a package's own step function, for loops that this library does not know.

    x_{k+1} = step(prediction, x_k, k, z),      prediction = network(x_k, k)

If step(p, x, k, z) = step(p, x, k, 0) + std_k·z for a number std_k, the loop is a chain: its mean is the step without
noise, at any state and prediction, and std_k is read off with noise 1. Trials cannot prove that noise enters this way,
but they find many ways in which it does not: each step is tried at states and predictions of several sizes. Refused are
steps

    whose std depends on the state, or differs between elements,
    in which noise enters in another way: clipped together with the state, normalised, mixed between elements or rows,
    which draws noise of its own, or remembers its earlier calls (multistep solvers),
    which makes nothing of the prediction, because it calls the network itself.

`step_error` then compares whole steps along real chains, those of this target or of any other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from foresample.contracts import (
    Target,
    expand,
    extra_shape,
    no_history,
    predict,
    remember,
    require_target,
    start_states,
    transition_mean,
)
from foresample.targets.chained import Denoiser, of_sample

Step = Callable[[Tensor, Tensor, int, Tensor], Tensor]
"""step(prediction, x, k, noise): tensors [R, *shape] at one step k -> the next states [R, *shape]."""

_SIZES = torch.tensor([0.3, 1.0, 3.0, 30.0])
"""Sizes of the states and predictions at which steps are tried."""
_LOUD = 2.0**20
"""Noise beside which the rounding of a state does not count."""


@dataclass(frozen=True)
class StepTarget:
    """A target made from a step function, see the module and `from_step`."""

    step: Step
    network: Denoiser
    shape: torch.Size
    std: Tensor
    start_scale: float
    given_starts: Tensor | None

    def start(self, noise: Tensor, row: Tensor) -> Tensor:
        if self.given_starts is None:
            return self.start_scale * noise
        return of_sample("start", self.given_starts, row)

    def predict(self, x: Tensor, step: Tensor, row: Tensor) -> Tensor:
        return self.network(x, step, row).to(x.dtype)

    def mean(self, x: Tensor, prediction: Tensor, step: Tensor) -> Tensor:
        mean = torch.empty_like(x)
        for k in step.unique().tolist():
            at = step == k
            mean[at] = _called(self.step, prediction[at], x[at], k, torch.zeros_like(x[at]))
        return mean


def from_step(
    step: Step,
    network: Denoiser,
    shape: Sequence[int],
    steps: int,
    *,
    start: Tensor | None = None,
    start_scale: float = 1.0,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> StepTarget:
    """A target from a package's own step function.

    For a method p_sample(model, x, t, noise) that calls its model inside, give it the prediction instead of the model:

        def step(prediction, x, k, noise):
            return diffusion.p_sample(lambda *_: prediction, x, times[k], noise=noise)

        def network(x, k, row):
            return model(x, times[k])          # rows of one call sit at different steps: k is a tensor, [B]

        target = fs.targets.from_step(step, network, (3, 32, 32), steps=1000)

    A step that draws its noise itself is handed it by `unittest.mock.patch("torch.randn_like", return_value=noise)`.
    Let `network` return a denoised estimate or a velocity where the step can be written with it: a noise estimate works
    but costs more calls. A mean takes one call of `step` for every different k among its rows: `step` should be cheap.

    Args:
        step: step(prediction, x, k, noise) -> the next states, [R, *shape] all, for one step number k, 0 … steps − 1.
        network: network(x, k, row) -> predictions: states [B, *shape], their steps [B] and samples [B]; the one
            expensive call of a step.
        shape: of one state.
        steps: N.
        start: the state each sample starts from, [count, *shape], instead of noise.
        start_scale: std of the Gaussian the chain starts from.
        dtype: the chain's. Steps are tried to a hundredfold of its rounding.
        device: the chain's.
    """
    if steps < 1:
        raise ValueError(
            f"steps must be at least 1, not {steps}: it is the number of times that step is called"
        )
    like = torch.empty((), dtype=dtype, device=device)
    with torch.no_grad():
        read = [_read(step, k, steps, torch.Size(shape), like) for k in range(steps)]
    std = torch.stack([number for number, _ in read])
    if not any(uses for _, uses in read):
        raise ValueError(
            "step does not use the prediction: it probably calls the network itself; give it "
            "`lambda *_: prediction` instead of the model"
        )
    if not (std > 0).any():
        raise ValueError("step adds no noise at any k, so there is nothing to speculate on")
    given = None if start is None else start.to(like)
    return StepTarget(step, network, torch.Size(shape), std, start_scale, given)


def step_error(target: Target, step: Step, *, samples: int = 4, seed: int = 0) -> Tensor:
    """The distance of a package's step from a target's transition with the same noise, [N].

    Both are compared at the states that `samples` samples visit, with the target's predictions there, and the largest
    difference of each step is divided by the largest number in its result. If both are the same it is rounding.
    """
    require_target(target)
    if extra_shape(target) is not None:
        raise ValueError(f"{type(target).__name__} has extra noise, which a step with one noise does not take")
    std, generator = target.std, torch.Generator().manual_seed(seed)
    row, errors = torch.arange(samples, device=std.device), []

    def drawn() -> Tensor:
        return torch.randn((samples, *target.shape), generator=generator, dtype=torch.float64).to(std)

    with torch.no_grad():
        x = start_states(target, drawn(), row)
        previous = no_history(target, x)
        for k in range(len(std)):
            at, noise = torch.full_like(row, k), drawn()
            prediction = predict(target, x.clone(), at, row)
            theirs = _called(step, prediction, x, k, noise)
            ours = transition_mean(target, x, prediction, at, previous) + std[k] * noise
            errors.append((theirs - ours).abs().max() / ours.abs().max())
            x, previous = ours, remember(target, prediction, previous)
    return torch.stack(errors)


def _called(step: Step, prediction: Tensor, x: Tensor, k: int, noise: Tensor) -> Tensor:
    """The next states, from copies: a step may write into its arguments."""
    found: Any = step(prediction.clone(), x.clone(), k, noise.clone())
    if not isinstance(found, Tensor) or found.shape != x.shape:
        what = tuple(found.shape) if isinstance(found, Tensor) else type(found).__name__
        raise ValueError(f"step must return the next states, {tuple(x.shape)} here, not {what} (at k = {k})")
    return found.to(x.dtype)


def _read(step: Step, k: int, steps: int, shape: torch.Size, like: Tensor) -> tuple[Tensor, bool]:
    """std_k, and whether the prediction is used; an error for a step that is not a Gaussian transition."""
    generator = torch.Generator().manual_seed(k)
    draws = torch.randn((5, len(_SIZES), *shape), generator=generator, dtype=torch.float64).to(like)
    size = expand(_SIZES.to(like), draws[0])
    x, prediction, other, noise = size * draws[0], size * draws[1], size * draws[2], draws[3]
    zero = torch.zeros_like(x)

    def called(prediction: Tensor, x: Tensor, noise: Tensor, at: int = k) -> Tensor:
        return _called(step, prediction, x, at, noise)

    std = (called(zero, zero, zero + 1) - called(zero, zero, zero)).flatten()[0]
    if not torch.isfinite(std):  # a step that divides by the size of a state or prediction, 0 here
        std = ((called(prediction, x, zero + _LOUD) - called(prediction, x, zero)) / _LOUD).flatten()[0]
    if not torch.isfinite(std):
        raise ValueError(f"step adds {float(std):g} times the noise at k = {k}: the number must be finite")
    mean, noisy = called(prediction, x, zero), called(prediction, x, noise)
    scale = (mean.abs() + noisy.abs() + std.abs()).flatten(1).amax(1) * 100 * torch.finfo(like.dtype).eps

    def differs(one: Tensor, two: Tensor) -> bool:
        apart = (one - two).abs().flatten(1).amax(1)
        return not bool((apart <= scale[: len(one)]).all())  # NaN differs from everything

    called(other, size * draws[4], noise, (k + 1) % steps)
    if differs(called(prediction, x, zero), mean):
        raise ValueError(
            f"step gives another result when it is called again (at k = {k}): it draws noise of its own, or remembers "
            "earlier calls, as multistep solvers do. Take its noise from the argument; for a diffusers scheduler, use "
            "fs.targets.from_scheduler"
        )
    if std < 0:
        raise ValueError(
            f"step adds {float(std):g} times the noise at k = {k}: the number must be finite, not below 0"
        )
    if differs(noisy, mean + std * noise):
        raise ValueError(
            f"step(prediction, x, k, noise) is not step(prediction, x, k, 0) + std·noise with one number std at k = "
            f"{k}: its std depends on the state or the element, or noise is clipped, normalised or mixed. Leave out "
            "what comes after the noise; docs/extending.md treats fixed coordinates, and noise that is no fixed number"
        )
    if differs(called(prediction[:1], x[:1], zero[:1]), mean[:1]):
        raise ValueError(
            f"step treats a state differently in another batch (at k = {k}): rows must not be mixed"
        )
    return std, differs(called(other, x, zero), mean)
