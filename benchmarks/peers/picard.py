"""ParaDiGMS (Shih, Belkhale, Ermon, Sadigh, Anari 2023): Picard iterations on a sliding window, to a tolerance.

The noise of all steps is drawn upfront, so the chain is one deterministic path, the fixed point of

    x_{t+j} = x_t + Σ_{i<j} [mean_{t+i}(x_{t+i}) + std_{t+i} z_{t+i} − x_{t+i}].

One iteration evaluates the window's states in one call and puts the sums in place of them. The window then
moves to the first state that changed by more than the tolerance; its new states start as copies of its last.
Tolerance 0 returns the sequential samples of the same noise; a larger one is lossy: its law is not the chain's.
"""

from __future__ import annotations

import torch
from torch import Tensor

from benchmarks.peers.common import Committed, Counted, Observer, PeerRun
from foresample.contracts import Target, at_least_one, expand
from foresample.core import noise as streams


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
    if not tolerance >= 0:
        raise ValueError(f"tolerance must not be negative, not {tolerance}")
    window = at_least_one("window", window)
    counted, steps = Counted(target, count), len(target.std)
    bound = (tolerance * _scales(target.std)) ** 2
    with torch.no_grad():
        rows = counted.begin(seed)
        step, samples = rows.step, rows.x.clone()
        position = torch.arange(window + 1, device=step.device)
        path = rows.x.unsqueeze(1).repeat(1, window + 1, *(1,) * len(target.shape))
        sample, key = rows.sample, rows.seed
        while len(sample):
            length = (steps - step).clamp(max=window)
            at = (step.unsqueeze(1) + position[:-1]).clamp(max=steps - 1)
            inside = position[:-1] < length.unsqueeze(1)
            row = sample.unsqueeze(1).expand_as(at)
            x, k = path[:, :-1][inside], at[inside]
            mean = target.mean(x, counted.predict(x, k, row[inside]), k)
            seed_of = key.unsqueeze(1).expand_as(at)[inside]
            z = streams.normal(seed_of, target.shape, target.std.dtype, step=k, draw=torch.zeros_like(k))
            change = torch.zeros_like(path[:, 1:])
            change[inside] = mean + expand(target.std[k], mean) * z - x
            new = path[:, :1] + change.cumsum(1)
            # The first transition is exact: say so in its own rounding, too.
            new[:, 0] = path[:, 0] + change[:, 0]

            error = (new - path[:, 1:]).flatten(2).square().mean(2, dtype=torch.float64)
            moved = inside & (error > bound[at])
            first = torch.where(moved, position[:-1], window).amin(1)
            stride = torch.minimum(first + 1, length)
            if observe is not None:
                observe(Committed(sample, step, stride, new))
            samples[sample] = new[torch.arange(len(sample), device=step.device), stride - 1]
            source = (position + stride.unsqueeze(1)).clamp(max=window)
            whole = torch.cat([path[:, :1], new], 1)
            path = whole[torch.arange(len(sample), device=step.device).unsqueeze(1), source]
            step = step + stride
            going = step < steps
            sample, key, step, path = sample[going], key[going], step[going], path[going]
    return counted.finish(samples)


def _scales(std: Tensor) -> Tensor:
    """std, float64, with zeros replaced by the nearest positive one before, else behind."""
    index = torch.arange(len(std), device=std.device)
    positive = std > 0
    if not positive.any():
        return torch.ones_like(std, dtype=torch.float64)
    before = torch.where(positive, index, -1).cummax(0).values
    return std.double()[torch.where(before < 0, index[positive][0], before)]
