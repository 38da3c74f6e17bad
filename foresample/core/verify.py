"""Block verification of a drafted window, with noise recycling (theory: sections 3 and 4).

One round drafted W transitions x̂_{i} = draft_mean_i + std_i z_i, and one call gave the target's means at the
drafted states. `verify` decides how many drafts to keep so that, whatever the draft was, the states kept and
the corrected one after them have exactly the target's distribution, and the noise of all later steps is left i.i.d.
N(0, I), independent of everything committed.

Every decision is about the coordinate of z_i along the line through both means, so noise only ever moves along that
line: z_i ← z_i + (s'_i − s_i) e_i.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.special import ndtri

from foresample.contracts import expand
from foresample.core import coupling

FAR = 1e5
"""Correcting a state over a gap of δ std costs δ·ε std of rounding: for this δ, in float32, about 0.01 std."""


@dataclass(frozen=True)
class Verdict:
    """The decision for each row."""

    accepted: Tensor  # [R]: drafted transitions kept, 0 … length
    length: Tensor  # [R]: drafted transitions before the first hopeless one, which ends the window
    noise: Tensor
    """[R, W, *shape]: the noise after the decision. At position `accepted` (if a draft was rejected) it takes
    the draft mean to the corrected state; behind it, it is fresh noise for the next rounds."""
    mismatch: Tensor  # [R, W], float64: distance of target and draft mean in units of std; 0 behind `length`


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
) -> Verdict:
    """Keep the longest part of a drafted window that the exact test allows.

    `noise`, `draft_mean` and `target_mean` are [R, W, *shape], `std` and `uniforms` [R, W], `length` [R]: row r
    has drafted its first `length[r]` transitions only. Blocks of `block` transitions (None: the whole window)
    are verified one after the other until one is not accepted whole.

    A mismatch that is NaN, or beyond `FAR`, ends the window before that transition, which would be rejected anyway.
    This is decided before the transition's noise is used, so it does not change the distribution.

    With `fresh` noise, [R, W, *shape], independent of all else, the examined noise is replaced instead of
    recycled; the distribution is the same.
    """
    rows, width = noise.shape[:2]
    position = torch.arange(width, device=noise.device)

    # One dimension is enough: the mismatch δ, the direction e, and the noise's coordinate s along it.
    difference = target_mean - draft_mean
    gap = torch.linalg.vector_norm(difference.flatten(2), dim=2, dtype=torch.float64)
    near = (gap <= FAR * std.double()) & (position < length.unsqueeze(1))
    length = near.int().cumprod(1).sum(1)
    inside = position < length.unsqueeze(1)
    gap, difference = torch.where(inside, gap, 0.0), torch.where(expand(inside, noise), difference, 0.0)
    direction = difference / expand(torch.where(gap > 0, gap, 1.0).to(noise.dtype), noise)
    mismatch = torch.where(inside, gap / std.double(), 0.0)
    s = _along(direction, noise)

    # p_i = min(1, p_{i−1} r_i), from 1 at the start of each block.
    block = width if block is None else block
    before, after = _levels(coupling.log_ratio(mismatch, s), block)

    # h_i, and the largest i with u_i < h_i in the first block that is not accepted whole.
    ends_block = (position % block == block - 1) | (position == length.unsqueeze(1) - 1)
    inner = coupling.acceptance(mismatch.roll(-1, dims=1), after)
    passed = inside & (uniforms < torch.where(ends_block, after.exp(), inner))
    index = (position // block).expand(rows, width)
    failing = torch.where(inside & ends_block & ~passed, index, width).amin(1, keepdim=True)
    kept = inside & ((index < failing) | (index == failing) & passed)
    accepted = torch.where(kept, position + 1, 0).amax(1)

    # The rejected coordinates are uniform at level F; the first goes to the residual, the others to N(0, 1).
    at = accepted.unsqueeze(1)
    examined = inside & (index == failing) & (position >= at)
    corrected = examined & (position == at)
    level = coupling.tilted_cdf(s, mismatch, before)
    moved = torch.where(corrected, _corrected(s, level, mismatch, before, at), ndtri(level))
    if fresh is None:
        shift = torch.where(examined, moved - s, 0.0)
    else:
        noise = torch.where(expand(examined, noise), fresh, noise)
        shift = torch.where(corrected, moved - _along(direction, fresh), 0.0)
    noise = noise + expand(shift.to(noise.dtype), noise) * direction
    return Verdict(accepted, length, noise, mismatch)


def _along(direction: Tensor, noise: Tensor) -> Tensor:
    return (direction * noise).flatten(2).sum(2, dtype=torch.float64)


def _levels(log_ratio: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """ln p before and after each transition: add, then cap at 0; a block starts from 0."""
    before, after = torch.zeros_like(log_ratio), torch.empty_like(log_ratio)
    for i in range(log_ratio.shape[1]):
        if i % block:
            before[:, i] = after[:, i - 1]
        after[:, i] = (before[:, i] + log_ratio[:, i]).clamp(max=0.0)
    return before, after


def _corrected(s: Tensor, level: Tensor, mismatch: Tensor, log_p: Tensor, at: Tensor) -> Tensor:
    """The residual coordinate at position `at`, [R, 1]; at p = 1 it is the reflection δ − s."""
    at = at.clamp(max=s.shape[1] - 1)
    s, level, mismatch, log_p = (v.gather(1, at) for v in (s, level, mismatch, log_p))
    return torch.where(log_p < 0, coupling.residual(level, mismatch, log_p), mismatch - s)
