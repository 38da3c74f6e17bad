"""ParaTAA (Tang, Tang, Luo, Wang, Chang 2024): triangular Anderson acceleration of fixed-point sweeps. Lossy.

With the noise drawn upfront, the chain is a triangular system. Its equations of order K unroll K transitions, with
predictions p_i at the states of the last iterate,

    F_j(x):   y_s = x_s,   y_{i+1} = mean_i(y_i, p_i) + std_i z_i,   F_j = y_j,     s = max(window's start, j − K).

All orders have one solution, the sequential path. From the residuals R = F(x) − x of the last m iterates and their
differences, Anderson's method takes a step of its own at every state j,

    x_j ← x_j + R_j − (ΔX_j + ΔR_j) γ_j,     γ_j = argmin ‖R − ΔR γ‖² over the states up to j,

triangular because γ_j depends on states up to j only: later ones are further off and would mislead it. A state is
converged if it obeys its first-order equation to the tolerance; the first state that is not is set by its exact
transition, so that every sweep makes progress.
"""

from __future__ import annotations

import torch
from torch import Tensor

from benchmarks.peers.common import Committed, Counted, Observer, PeerRun
from benchmarks.peers.picard import noise, require_tolerance, scales
from foresample.contracts import Target, at_least_one, expand

RIDGE = 1e-4
"""Added to the normal equations, relative to their mean diagonal."""


def parataa(
    target: Target,
    count: int,
    *,
    seed: int,
    window: int,
    tolerance: float,
    order: int | None = None,
    history: int = 1,
    observe: Observer | None = None,
) -> PeerRun:
    """Parallel sampling of the stochastic chain; `order` None unrolls from the window's start, `history` 0 is the
    plain fixed-point sweep. The defaults take fewer calls on the chains measured here than order 8 and history 3 do.

    A state x_{k+1} is converged if the mean square of x_{k+1} − (its transition from x_k) is at most
    (tolerance · std_k)²; deterministic transitions as for `paradigms`.
    """
    require_tolerance(tolerance)
    window = at_least_one("window", window)
    order = window if order is None else at_least_one("order", order)
    counted, steps = Counted(target, count), len(target.std)
    bound = (tolerance * scales(target.std)) ** 2
    with torch.no_grad():
        rows = counted.begin(seed)
        sample, key, step, samples = rows.sample, rows.seed, rows.step, rows.x.clone()
        position = torch.arange(window + 1, device=step.device)
        path = rows.x.unsqueeze(1).repeat(1, window + 1, *(1,) * len(target.shape))
        past = path.new_zeros((len(path), 0, 2, *path.shape[1:]))  # [R, m, x and R, W+1, *shape], newest first
        while len(sample):
            index = torch.arange(len(sample), device=step.device)
            length = (steps - step).clamp(max=window)
            at = (step.unsqueeze(1) + position[:-1]).clamp(max=steps - 1)
            inside = position[:-1] < length.unsqueeze(1)
            row = sample.unsqueeze(1).expand_as(at)
            predictions = torch.zeros_like(path[:, :-1])
            predictions[inside] = counted.predict(path[:, :-1][inside], at[inside], row[inside])
            z = noise(target, key.unsqueeze(1).expand_as(at).flatten(), at.flatten()).view_as(predictions)

            exact = _unrolled(target, path, predictions, z, at, 1)
            error = (exact - path[:, 1:]).flatten(2).square().mean(2, dtype=torch.float64)
            moved = inside & (error > bound[at])
            first = torch.where(moved, position[:-1], window).amin(1)  # transitions that hold
            residual = torch.zeros_like(path)
            residual[:, 1:] = _unrolled(target, path, predictions, z, at, order) - path[:, 1:]
            current = torch.stack([path, residual], 1)
            open_ = (position > first.unsqueeze(1)) & (position <= length.unsqueeze(1))
            new = path + _step(current, past, open_) if history else path + residual
            new = torch.where(expand(open_, path), new, path)
            new[:, 1:] = torch.where(expand(position[:-1] == first.unsqueeze(1), exact), exact, new[:, 1:])

            stride = torch.minimum(first + 1, length)
            if observe is not None:
                observe(Committed(sample, step, stride, new[:, 1:]))
            samples[sample] = new[index, stride]
            source = (position + stride.unsqueeze(1)).clamp(max=window)
            path, step = new[index.unsqueeze(1), source], step + stride
            past = torch.cat([current.unsqueeze(1), past], 1)[:, :history]
            past = past.movedim(3, 1)[index.unsqueeze(1), source].movedim(1, 3)
            # States that were not in the window have no past: their differences are 0.
            was = position + stride.unsqueeze(1) <= length.unsqueeze(1)
            past = torch.where(was.view(len(was), 1, 1, -1, *(1,) * len(target.shape)), past, 0.0)
            going = step < steps
            sample, key, step, path, past = (v[going] for v in (sample, key, step, path, past))
    return counted.finish(samples)


def _unrolled(target: Target, path: Tensor, predictions: Tensor, z: Tensor, at: Tensor, order: int) -> Tensor:
    """F_j of this order at positions 1 … W of paths [R, W+1, *shape]: [R, W, *shape]."""
    width = path.shape[1] - 1
    begin = (torch.arange(width, device=path.device) + 1 - order).clamp(min=0)
    x = path[:, begin]
    for i in range(min(order, width)):
        source = begin + i
        goes_on = source <= torch.arange(width, device=path.device)
        source = source.clamp(max=width - 1)
        flat = (v[:, source].flatten(0, 1) for v in (predictions, at))
        mean = target.mean(x.flatten(0, 1), *flat).view_as(x)
        ahead = mean + expand(target.std[at[:, source]], x) * z[:, source]
        x = torch.where(expand(goes_on.expand(len(x), -1), x), ahead, x)
    return x


def _step(current: Tensor, past: Tensor, open_: Tensor) -> Tensor:
    """The move of every state, [R, W+1, *shape]: the residual less the correction of Anderson's method."""
    residual = current[:, 1]
    if not past.shape[1]:
        return residual
    newer = torch.cat([current.unsqueeze(1), past[:, :-1]], 1)
    seen = (past != 0).flatten(4).any(4).any(2)  # [R, m, W+1]
    change = torch.where(expand(seen & open_.unsqueeze(1), newer[:, :, 0]).unsqueeze(2), newer - past, 0.0)
    dx, dr = change[:, :, 0].flatten(3).double(), change[:, :, 1].flatten(3).double()  # [R, m, W+1, d]
    gram = torch.einsum("rawd,rbwd->rwab", dr, dr).cumsum(1)
    right = torch.einsum("rawd,rwd->rwa", dr, residual.flatten(2).double()).cumsum(1)
    diagonal = gram.diagonal(dim1=2, dim2=3).mean(2)
    ridge = torch.where(diagonal > 0, RIDGE * diagonal, 1.0)
    eye = torch.eye(gram.shape[2], dtype=gram.dtype, device=gram.device)
    weights = torch.linalg.solve(gram + ridge[..., None, None] * eye, right)
    taken = torch.einsum("rawd,rwa->rwd", dx + dr, weights)
    return residual - taken.view_as(residual).to(residual.dtype)
