"""Block verification written a second time, straight from the formulas, and ways to get it wrong.

Row by position instead of vectorised, scipy instead of the stable forms of `foresample.core.coupling`, root finding
by bisection: slow to fool, good for mismatches that are neither tiny nor huge. With `bug` it makes one of the
mistakes that the law suite must catch.
"""

from __future__ import annotations

import numpy as np
import torch
from scipy.stats import norm
from torch import Tensor

from foresample.core import verify as ours

BUGS = (
    "redraw from the target",  # on rejection, ignoring the residual
    "first failure",  # instead of the largest index that passes
    "per-step residual",  # (target − draft)₊ after a block rejection, instead of (p·target − draft)₊
    "noise reused",  # examined noise kept as it is
    "old scalar kept",  # the corrected state is the rejected draft
    "last h like an inner one",  # with a next mismatch of 0
    "window ends by its own noise",  # the noise examined decides whether it is examined
)


def verify(
    noise: Tensor,
    draft_mean: Tensor,
    target_mean: Tensor,
    std: Tensor,
    length: Tensor,
    uniforms: Tensor,
    *,
    block: int | None = None,
    fresh: Tensor | None = None,
    bug: str | None = None,
) -> ours.Verdict:
    """Same contract as `foresample.core.verify.verify`."""
    assert bug is None or bug in BUGS
    rows, width = noise.shape[:2]
    block = block or width
    z, gap = noise.flatten(2).numpy(), (target_mean - draft_mean).flatten(2).numpy()
    with np.errstate(over="ignore", invalid="ignore"):  # NaN or infinity ends the window
        size = np.linalg.norm(gap, axis=2)
    n = length.numpy().copy()
    for row in range(rows):
        for i in range(n[row]):
            far = not size[row, i] <= ours.FAR * std[row, i].item()
            if far or (bug == "window ends by its own noise" and z[row, i, 0] > 1):
                n[row] = i
                break
    drafted = np.arange(width) < n[:, None]
    e = np.where(drafted[..., None], gap, 0) / np.where(drafted & (size > 0), size, 1)[..., None]
    delta = np.divide(size, std.numpy(), out=np.zeros_like(size), where=drafted)
    s, u = (e * z).sum(2), uniforms.numpy()

    accepted = np.zeros(rows, dtype=np.int64)
    done = np.zeros(rows, dtype=bool)  # a block was not accepted whole: nothing after it is examined
    out = z.copy()
    for first in range(0, width, block):
        last = np.minimum(first + block, n)  # per row, exclusive
        active = ~done & (first < n)
        p = np.ones((rows, width + 1))  # p[:, i]: level before transition i
        best = np.full(rows, first)
        failed = np.zeros(rows, dtype=bool)
        for i in range(first, min(first + block, width)):
            inside = active & (i < last)
            p[:, i + 1] = np.minimum(1, p[:, i] * np.exp(delta[:, i] * s[:, i] - delta[:, i] ** 2 / 2))
            following = delta[:, min(i + 1, width - 1)]
            ends = i == last - 1
            h = np.where(ends, p[:, i + 1], _inner_h(p[:, i + 1], following))
            if bug == "last h like an inner one":
                h = np.where(ends, p[:, i + 1] == 1, h)
            passed = inside & (u[:, i] < h)
            if bug == "first failure":
                failed |= inside & ~passed
                passed &= ~failed
            best = np.where(passed, i + 1, best)
        accepted = np.where(active, best, accepted)
        rejected = active & (best < last)
        done |= rejected
        for i in range(first, min(first + block, width)):
            level, d = p[:, i], delta[:, i]
            here, later = rejected & (i == best), rejected & (i > best) & (i < last)
            if not (here.any() or later.any()):
                continue
            U = np.clip(_tilted_cdf(s[:, i], d, level), 1e-300, 1 - 2.0**-53)
            residual = _residual(U, d, np.ones_like(level) if bug == "per-step residual" else level, here)
            new = np.where(here, residual, norm.ppf(U))
            base = z[:, i]
            if fresh is not None:
                base = np.where((here | later)[:, None], fresh[:, i].flatten(1).numpy(), base)
                new = np.where(later, (base * e[:, i]).sum(1), new)
            if bug == "noise reused":
                new = np.where(later, s[:, i], new)
            if bug == "old scalar kept":
                new = np.where(here, s[:, i], new)
            moved = base + (new - (base * e[:, i]).sum(1))[:, None] * e[:, i]
            if bug == "redraw from the target":
                drawn = np.random.default_rng(int(1e9 * u.sum()) % 2**32).standard_normal(base.shape)
                moved = np.where(here[:, None], drawn + d[:, None] * e[:, i], moved)
            out[:, i] = np.where((here | later)[:, None], moved, out[:, i])
    return ours.Verdict(*map(torch.from_numpy, (accepted, n, out.reshape(noise.shape), delta)))


def _surplus(p: np.ndarray, d: np.ndarray) -> np.ndarray:
    safe = np.where(d > 0, d, 1)
    t = safe / 2 - np.log(np.maximum(p, 1e-300)) / safe
    return np.where(d > 0, p * norm.sf(t - safe) - norm.sf(t), 0)


def _inner_h(p: np.ndarray, d: np.ndarray) -> np.ndarray:
    S = _surplus(p, d)
    with np.errstate(invalid="ignore"):
        return np.where(p == 1, 1, S / (S + 1 - p))


def _tilted_cdf(s: np.ndarray, d: np.ndarray, p: np.ndarray) -> np.ndarray:
    c = _surplus(p, d) + 1 - p
    return np.where(c > 0, (norm.cdf(s) - p * norm.cdf(s - d)) / np.where(c > 0, c, 1), norm.cdf(s))


def _residual(U: np.ndarray, d: np.ndarray, p: np.ndarray, where: np.ndarray) -> np.ndarray:
    """Bisection for p Φ̄(s − δ) − Φ̄(s) = U S on s > t."""
    out = np.zeros_like(U)
    U, d, p = U[where], d[where], p[where]
    low = d / 2 - np.log(p) / d
    high, aim = low + d + 40, U * _surplus(p, d)
    for _ in range(80):
        middle = (low + high) / 2
        above = p * norm.sf(middle - d) - norm.sf(middle) > aim
        low, high = np.where(above, middle, low), np.where(above, high, middle)
    out[where] = (low + high) / 2
    return out
