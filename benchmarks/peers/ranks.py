"""Choosing one of K drafts by rank: densities, best weights and the residual, in one dimension.

K drafts have i.i.d. coordinates N(0, 1) along the line through both means; the target's is N(δ, 1). Picking the
r-th smallest with probability λ_r gives a coordinate of density

    g(s) = φ(s) w(Φ(s)),    w(u) = Σ_r λ_r b_r(u),    b_r(u) = r C(K, r) u^{r−1} (1 − u)^{K−r}   (Beta).

The overlap ∫ min(f, g) with f(s) = φ(s − δ) is the probability that the pick is kept. It is concave in λ, so
the best weights are a linear programme, solved once on a grid of δ and interpolated: any weights are exact as
long as the test and the residual use the same ones. The differences λ_r − 1/K are stored, because
Σ b_r = K makes w − 1 = Σ (λ_r − 1/K) b_r, and f − g = φ·[(f/φ − 1) − (w − 1)] loses no digits at small δ.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache

import numpy as np
import torch
from torch import Tensor

from foresample.core.coupling import log_ratio, normal_cdf

_NODES = 600  # of the linear programme, uniform in s on ±_REACH around both means
_REACH = 9.0  # Φ̄(9) = 1e-19
_CELLS = 180
_BISECTIONS = 60


def rank_densities(u: Tensor, count: int) -> Tensor:
    """b_1 … b_K at levels u, [*, K]."""
    r = torch.arange(1, count + 1, device=u.device)
    scale = torch.tensor([r * math.comb(count, r) for r in range(1, count + 1)], dtype=u.dtype, device=u.device)
    u = u.unsqueeze(-1)
    return scale * u ** (r - 1) * (1 - u) ** (count - r)


def rank_cdfs(u: Tensor, count: int) -> Tensor:
    """∫₀ᵘ b_r = P(at least r of K uniforms lie below u) = Σ_{j ≥ r} C(K, j) u^j (1 − u)^{K−j}, [*, K]."""
    j = torch.arange(1, count + 1, device=u.device)
    scale = torch.tensor([math.comb(count, j) for j in range(1, count + 1)], dtype=u.dtype, device=u.device)
    u = u.unsqueeze(-1)
    return (scale * u**j * (1 - u) ** (count - j)).flip(-1).cumsum(-1).flip(-1)


def tilt(s: Tensor, lean: Tensor) -> Tensor:
    """w − 1 at coordinates s, [*]; `lean` = λ − 1/K, [*, K]."""
    return (lean * rank_densities(normal_cdf(s), lean.shape[-1])).sum(-1)


def overlap(delta: float, lean: Tensor) -> float:
    """∫ min(f, g), by quadrature."""
    s, weight = _quadrature(delta)
    d = torch.tensor(delta, dtype=torch.float64)
    shortfall = (torch.expm1(log_ratio(d, s)) - tilt(s, lean.expand(len(s), -1))).clamp(min=0)
    return 1 - float((weight * shortfall).sum())


def leans(delta: Tensor, count: int) -> Tensor:
    """λ − 1/K to use at mismatches δ [R], [R, K]: the best ones of a grid, interpolated."""
    grid, table = (v.to(delta.device) for v in _table(count))
    at = delta.clamp(max=float(grid[-1]))
    above = torch.searchsorted(grid, at).clamp(1, len(grid) - 1)
    part = ((at - grid[above - 1]) / (grid[above] - grid[above - 1])).unsqueeze(1)
    return (1 - part) * table[above - 1] + part * table[above]


def residual(level: Tensor, delta: Tensor, lean: Tensor) -> Tensor:
    """The coordinate at level U of the residual, density (f − g)₊ over its mass, [R].

    f − g has an antiderivative, H(s) = [Φ(s − δ) − Φ(s)] − Σ_r (λ_r − 1/K) ∫ b_r, and few changes of sign.
    A grid finds them, bisection refines them; the mass of each cell's positive part is a difference of H; and
    bisection inverts H in the cell that holds level U. All of the residual lies where f does.
    """
    offset = torch.linspace(-_REACH, _REACH, _CELLS + 1, dtype=torch.float64, device=delta.device)
    edge = delta.unsqueeze(1) + offset
    d, tilted = delta.unsqueeze(1).expand_as(edge), lean.unsqueeze(1).expand(*edge.shape, -1)
    positive = _excess(edge, d, tilted) > 0

    low, high = edge[:, :-1].clone(), edge[:, 1:].clone()
    rises, falls = ~positive[:, :-1] & positive[:, 1:], positive[:, :-1] & ~positive[:, 1:]
    change = rises | falls
    d, tilted = d[:, 1:], tilted[:, 1:]
    upward = rises[change]
    crossing = _bisect(
        low[change], high[change], lambda s: (_excess(s, d[change], tilted[change]) > 0) == upward
    )
    low[rises], high[falls] = crossing[upward], crossing[~upward]

    mass = (_antiderivative(high, d, tilted) - _antiderivative(low, d, tilted)).clamp(min=0)
    mass = torch.where(positive[:, :-1] | positive[:, 1:], mass, 0.0)
    total = mass.cumsum(1)
    aim = level * total[:, -1]
    row = torch.arange(len(aim), device=aim.device)
    cell = torch.searchsorted(total, aim.unsqueeze(1), right=True).squeeze(1).clamp(max=_CELLS - 1)
    a, b = low[row, cell], high[row, cell]
    aim = aim - (total - mass)[row, cell] + _antiderivative(a, delta, lean)
    return _bisect(a, b, lambda s: _antiderivative(s, delta, lean) >= aim)


def _excess(s: Tensor, delta: Tensor, lean: Tensor) -> Tensor:
    """(f − g)/φ at s."""
    return torch.expm1(log_ratio(delta, s)) - tilt(s, lean)


def _antiderivative(s: Tensor, delta: Tensor, lean: Tensor) -> Tensor:
    """H(s) = ∫_{−∞}^s (f − g)."""
    u = normal_cdf(s)
    return normal_cdf(s - delta) - u - (lean * rank_cdfs(u, lean.shape[-1])).sum(-1)


def _bisect(low: Tensor, high: Tensor, is_right: Callable[[Tensor], Tensor]) -> Tensor:
    """The point between low and high at which a predicate turns from false to true."""
    for _ in range(_BISECTIONS):
        middle = 0.5 * (low + high)
        right = is_right(middle)
        low, high = torch.where(right, low, middle), torch.where(right, middle, high)
    return 0.5 * (low + high)


def _quadrature(delta: float) -> tuple[Tensor, Tensor]:
    """Points s and weights φ(s) ds."""
    s = torch.linspace(-_REACH, _REACH + delta, _NODES, dtype=torch.float64)
    return s, torch.exp(-0.5 * s * s) / math.sqrt(2 * math.pi) * (s[1] - s[0])


@cache
def _table(count: int) -> tuple[Tensor, Tensor]:
    """A grid of δ and the best λ − 1/K on it."""
    grid = np.concatenate([[0.0], np.geomspace(0.02, 8.0, 40)])
    best = [_best_lean(delta, count) for delta in grid[1:]]
    return torch.from_numpy(grid), torch.from_numpy(np.stack([np.zeros(count), *best]))


def _best_lean(delta: float, count: int) -> np.ndarray:
    """Minimise Σ_i q_i t_i over λ and t ≥ 0 with t_i ≥ (f/φ)(s_i) − Σ_r λ_r b_r(s_i), λ in the simplex.

    Where f/φ is huge the quadrature weight is tiny; constraints are scaled by it.
    """
    from scipy.optimize import linprog

    s, weight = _quadrature(delta)
    target = torch.exp(-0.5 * (s - delta) ** 2) / math.sqrt(2 * math.pi) * (s[1] - s[0])
    selected = weight.unsqueeze(1) * rank_densities(normal_cdf(s), count)
    cost = np.concatenate([np.zeros(count), np.ones(len(s))])
    above = np.hstack([-selected.numpy(), -np.eye(len(s))])
    simplex = np.concatenate([np.ones(count), np.zeros(len(s))])[None]
    # The interior-point method: with many ranks, nearly dependent, the simplex method may not end.
    found = linprog(cost, above, -target.numpy(), simplex, [1.0], bounds=(0, None), method="highs-ipm")
    weights = np.clip(found.x[:count], 0, None)
    return weights / weights.sum() - 1 / count
