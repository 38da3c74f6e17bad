"""Picard iterations on a sliding window, to a tolerance: ParaDiGMS, and ParaSolver, which starts them better. Lossy.

The noise of all steps is drawn upfront, so the chain is one deterministic path, the fixed point of

    x_{t+j} = x_t + Σ_{i<j} [mean_{t+i}(x_{t+i}) + std_{t+i} z_{t+i} − x_{t+i}].

One iteration evaluates the window's states in one call and puts the sums in place of them. The window then
moves to the first state that changed by more than the tolerance. Newton's method on the chain's equations, with the
identity for the Jacobian of a transition, is the same iteration. The two differ in where a state starts from:

    paradigms    as a copy of the window's last                         (Shih, Belkhale, Ermon, Sadigh, Anari 2023)
    parasolver   by walking on with the last prediction kept; the first `warm` steps
                 are taken one by one                                                       (Lu, Zhu, Hou 2025)

Tolerance 0 returns the sequential samples of the same noise; a larger one is lossy: samples do not have the chain's
distribution.
ParaSolver can also group several steps into an interval that is walked one by one within an iteration; its authors'
settings have one step an interval, and so has this.
"""

from __future__ import annotations

import torch
from torch import Tensor

from benchmarks.peers.common import Committed, Counted, Observer, PeerRun
from foresample.backends import normal
from foresample.contracts import Target, at_least_one, expand


def paradigms(
    target: Target,
    count: int,
    *,
    seed: int,
    window: int,
    tolerance: float,
    observe: Observer | None = None,
) -> PeerRun:
    """Parallel sampling of the stochastic chain.

    A state x_{k+1} is converged if the mean square of its change is at most (tolerance · std_k)²; where a
    transition is deterministic, the std of the nearest stochastic one before it (or else behind it) is taken.
    """
    return _iterate(target, count, seed, window, tolerance, None, observe)


def parasolver(
    target: Target,
    count: int,
    *,
    seed: int,
    window: int,
    tolerance: float,
    warm: int = 5,
    observe: Observer | None = None,
) -> PeerRun:
    """The same, started by `warm` steps taken one by one and by predictions kept; these should be of x0."""
    return _iterate(target, count, seed, window, tolerance, at_least_one("warm", warm), observe)


def _iterate(
    target: Target,
    count: int,
    seed: int,
    window: int,
    tolerance: float,
    warm: int | None,
    observe: Observer | None,
) -> PeerRun:
    """ParaSolver with that many warm steps, or ParaDiGMS."""
    require_tolerance(tolerance)
    window = at_least_one("window", window)
    counted, steps = Counted(target, count), len(target.std)
    bound = (tolerance * scales(target.std)) ** 2
    with torch.no_grad():
        rows = counted.begin(seed)
        sample, key, step, x = rows.sample, rows.seed, rows.step, rows.x
        position = torch.arange(window + 1, device=step.device)
        path = x.unsqueeze(1).repeat(1, window + 1, *(1,) * len(target.shape))
        for _ in range(min(warm or 0, steps)):
            kept = counted.predict(x, step, sample)
            x = walk(target, x, kept, step, key)
            if observe is not None:
                observe(Committed(sample, step, torch.ones_like(step), x.unsqueeze(1)))
            step = step + 1
        samples = x.clone()
        if warm is not None:
            path[:, 0] = x
            _walk_on(target, path, kept, step, key, torch.zeros_like(step))
        while len(sample) and int(step[0]) < steps:
            index = torch.arange(len(sample), device=step.device)
            length = (steps - step).clamp(max=window)
            at = (step.unsqueeze(1) + position[:-1]).clamp(max=steps - 1)
            inside = position[:-1] < length.unsqueeze(1)
            row = sample.unsqueeze(1).expand_as(at)
            x, k = path[:, :-1][inside], at[inside]
            prediction = counted.predict(x, k, row[inside])
            mean = target.mean(x, prediction, k)
            z = noise(target, key.unsqueeze(1).expand_as(at)[inside], k)
            change = torch.zeros_like(path[:, 1:])
            change[inside] = mean + expand(target.std[k], mean) * z - x
            new = path[:, :1] + change.cumsum(1)
            # The first transition is exact, also in its own rounding.
            new[:, 0] = path[:, 0] + change[:, 0]

            error = (new - path[:, 1:]).flatten(2).square().mean(2, dtype=torch.float64)
            moved = inside & (error > bound[at])
            first = torch.where(moved, position[:-1], window).amin(1)
            stride = torch.minimum(first + 1, length)
            if observe is not None:
                observe(Committed(sample, step, stride, new))
            samples[sample] = new[index, stride - 1]
            source = (position + stride.unsqueeze(1)).clamp(max=window)
            path = torch.cat([path[:, :1], new], 1)[index.unsqueeze(1), source]
            step = step + stride
            if warm is not None:
                last = inside.sum(1).cumsum(0) - 1  # index of each row's last prediction
                _walk_on(target, path, prediction[last], step, key, window - stride)
            going = step < steps
            sample, key, step, path = sample[going], key[going], step[going], path[going]
    return counted.finish(samples)


def _walk_on(target: Target, path: Tensor, kept: Tensor, step: Tensor, key: Tensor, known: Tensor) -> None:
    """Positions behind `known`, [R], of paths [R, W+1, *shape] that begin at `step`, with a prediction kept."""
    for j in range(int(known.min()), path.shape[1] - 1):
        at = (step + j).clamp(max=len(target.std) - 1)
        new = expand(j >= known, path[:, j])
        path[:, j + 1] = torch.where(new, walk(target, path[:, j], kept, at, key), path[:, j + 1])


def walk(target: Target, x: Tensor, prediction: Tensor, step: Tensor, key: Tensor) -> Tensor:
    """The next states, [R, *shape], given a prediction."""
    mean = target.mean(x, prediction, step)
    return mean + expand(target.std[step], mean) * noise(target, key, step)


def noise(target: Target, key: Tensor, step: Tensor) -> Tensor:
    """The noise of the sequential sampler, [B, *shape]."""
    return normal(key, target.shape, target.std.dtype, step=step, draw=torch.zeros_like(step))


def require_tolerance(tolerance: float) -> None:
    if not tolerance >= 0:
        raise ValueError(f"tolerance must not be negative, not {tolerance}")


def scales(std: Tensor) -> Tensor:
    """std, float64, with zeros replaced by the nearest positive one before, else behind."""
    index = torch.arange(len(std), device=std.device)
    positive = std > 0
    if not positive.any():
        return torch.ones_like(std, dtype=torch.float64)
    before = torch.where(positive, index, -1).cummax(0).values
    return std.double()[torch.where(before < 0, index[positive][0], before)]
