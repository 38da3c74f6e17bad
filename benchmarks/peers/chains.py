"""Speculative chains with one frozen prediction: reflection coupling, block verification, autospeculation.

All samples have exactly the target's distribution. One round drafts a window with a frozen prediction and evaluates it
in one call; a test of one-dimensional coordinates decides how much of it is kept (docs/theory.md, section 2). The peers
differ in the origin of the prediction, in the test, and in the noise of the corrected state.

    draft      prediction frozen                                      calls a round
    head       at the window's first state, x                         2 (1 if the last window was kept whole)
    parent     at the last accepted state, already paid for           1
    nearest    at the rejected draft of the step x stands at          1

With `head` the first transition is exact, δ = 0, and the verifying call skips x. A window kept whole ends at a
state whose prediction that call has given: the next head is free. With the free drafts the exact transition
behind the last draft is taken at once, so that a round commits one transition more than it keeps drafts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Literal, get_args

import torch
from torch import Tensor

from benchmarks.peers.common import (
    Committed,
    Counted,
    Observer,
    PeerRun,
    Rows,
    along,
    mismatch,
    ratio,
    room,
)
from foresample.backends import normal
from foresample.contracts import Target, at_least_one, expand
from foresample.core import coupling
from foresample.core import noise as streams

Draft = Literal["head", "parent", "nearest"]
Test = Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
"""test(s [R, W], δ [R, W], length [R], uniforms [R, W + 1]) -> drafts kept [R], corrected coordinate [R]."""


def reflection(
    target: Target, count: int, *, seed: int, window: int, draft: Draft, observe: Observer | None = None
) -> PeerRun:
    """De Bortoli, Galashov, Gretton, Doucet 2025: each transition is tested by itself, a rejected one mirrored.

    Keep draft i with probability min(1, r_i), up to the first that fails; there the target's noise is the
    draft's reflected at the hyperplane between the means, s ↦ δ − s, and all other coordinates stay. The next
    window draws fresh noise.
    """
    return chain(target, count, seed, window, draft, reflect, observe=observe)


def blocks(
    target: Target, count: int, *, seed: int, window: int, draft: Draft, observe: Observer | None = None
) -> PeerRun:
    """Soen, Husain, De Bortoli, Doucet 2026: the window is verified as one block (theory, section 3).

    After a rejection the corrected state is drawn from the residual with fresh noise, as is the next window.
    """
    return chain(target, count, seed, window, draft, verify_block, fresh_residual=True, observe=observe)


def asd(
    target: Target, count: int, *, seed: int, lookahead: int | None, observe: Observer | None = None
) -> PeerRun:
    """Hu, Das, Sadigh, Anari 2025: autospeculation, `lookahead` transitions ahead or (None) to the chain's end.

    The increments of the reverse process, written as stochastic localisation, are exchangeable, so the drift at
    the present state is the best guess of all later ones; there the drift is the denoised estimate, so give a
    target that reuses x0. A call at the head gives the drift, a parallel one verifies by reflection.

    On our contract this is `reflection` with draft="head": the algorithm, the costs and the distribution of both
    are the same. They differ in the random numbers used: ASD draws one Gaussian for each step, once for the whole
    chain, and a later proposal reuses it unless a test has examined it; `reflection` draws fresh ones for each
    window. (The noise behind the first rejection is unexamined, so samples and costs have the same distribution.)
    """
    window = len(target.std) if lookahead is None else at_least_one("lookahead", lookahead)
    return chain(target, count, seed, window, "head", reflect, upfront=True, observe=observe)


def reflect(s: Tensor, delta: Tensor, length: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    """Keep drafts up to the first that fails u < r; there, reflect."""
    position = torch.arange(s.shape[1], device=s.device)
    passed = (uniforms[:, :-1] < ratio(delta, s)) & (position < length.unsqueeze(1))
    kept = passed.cumprod(1).sum(1)
    return kept, at(delta - s, kept)


def verify_block(s: Tensor, delta: Tensor, length: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    """Keep the largest i with u_i < h_i; the next coordinate has density ∝ (p_i φ(s − δ) − φ(s))₊."""
    log_p, h = block_levels(s, delta, length)
    position = torch.arange(s.shape[1], device=s.device)
    passed = (uniforms[:, :-1] < h) & (position < length.unsqueeze(1))
    kept = torch.where(passed, position + 1, 0).amax(1)
    return kept, coupling.residual(uniforms[:, -1], at(delta, kept), at(log_p, kept))


def block_levels(s: Tensor, delta: Tensor, length: Tensor) -> tuple[Tensor, Tensor]:
    """ln p_{i−1} and h_i for i = 1 … W, where p_0 = 1, p_i = min(1, p_{i−1} r_i), h_i = S_i/c_i, h_L = p_L."""
    log_r = coupling.log_ratio(delta, s)
    log_p = [torch.zeros_like(log_r[:, 0])]
    for i in range(s.shape[1]):
        log_p.append((log_p[-1] + log_r[:, i]).clamp(max=0.0))
    before, after = torch.stack(log_p[:-1], 1), torch.stack(log_p[1:], 1)
    last = torch.arange(s.shape[1], device=s.device) == length.unsqueeze(1) - 1
    return before, torch.where(last, after.exp(), coupling.acceptance(delta.roll(-1, 1), after))


def chain(
    target: Target,
    count: int,
    seed: int,
    window: int,
    draft: Draft,
    test: Test,
    *,
    fresh_residual: bool = False,
    upfront: bool = False,
    observe: Observer | None = None,
) -> PeerRun:
    """Rounds of one test and draft until all samples are at their end.

    Args:
        fresh_residual: the corrected state takes fresh noise across e instead of the rejected draft's.
        upfront: noise is that of the step, whatever the round, instead of fresh in each round.
    """
    if draft not in get_args(Draft):
        raise ValueError(f"draft is one of {', '.join(get_args(Draft))}, not {draft!r}")
    window = at_least_one("window", window)
    counted = Counted(target, count)
    with torch.no_grad():
        rows = counted.begin(seed)
        samples = torch.empty_like(rows.x)
        while len(rows.sample):
            rows, committed = _round(counted, rows, window, draft, test, fresh_residual, upfront)
            if observe is not None:
                observe(committed)
            done = rows.step == len(target.std)
            samples[rows.sample[done]] = rows.x[done]
            rows = rows.select(~done)
    return counted.finish(samples)


def _round(
    target: Counted, rows: Rows, window: int, draft: Draft, test: Test, fresh_residual: bool, upfront: bool
) -> tuple[Rows, Committed]:
    index = torch.arange(len(rows.x), device=rows.x.device)
    guess, head = rows.guess.clone(), draft == "head"
    if head and not rows.has_guess.all():
        new = ~rows.has_guess
        guess[new] = target.predict(rows.x[new], rows.step[new], rows.sample[new])
    length = room(target.std)[rows.step].clamp(max=window) * (rows.has_guess | head)
    width = max(1, int(length.max()))
    position = torch.arange(width + 1, device=rows.x.device)
    step = (rows.step.unsqueeze(1) + position).clamp(max=len(target.std) - 1)
    std = target.std[step]
    draw = 0 * step if upfront else (2 * rows.round + 1).unsqueeze(1).expand_as(step)
    noise = _normal(rows.seed, step, draw, target)

    states, means = [rows.x], []
    for j in range(width):
        means.append(target.mean(states[j], guess, step[:, j]))
        states.append(means[j] + expand(std[:, j], rows.x) * noise[:, j])
    path, draft_mean = torch.stack(states, 1), torch.stack(means, 1)

    needed = position <= length.unsqueeze(1)
    predictions = torch.zeros_like(path)
    if head:
        needed[:, 0] = False
        predictions[:, 0] = guess
    if needed.any():
        sample = rows.sample.unsqueeze(1).expand_as(step)
        predictions[needed] = target.predict(path[needed], step[needed], sample[needed])
    flat = (v.flatten(0, 1) for v in (path, predictions, step))
    target_mean = target.mean(*flat).view_as(path)

    delta, direction = mismatch(draft_mean, target_mean[:, :-1], std[:, :-1], lead=2)
    delta = torch.where(position[:-1] < length.unsqueeze(1), delta, 0.0)
    uniforms = streams.uniform(rows.seed, width + 1, round=rows.round)
    kept, coordinate = test(along(direction, noise[:, :-1], lead=2), delta, length, uniforms)

    # Behind the drafts kept: the corrected state, or the exact transition.
    whole, failed = kept == length, kept.clamp(max=width - 1)
    z, e = noise[index, failed], direction[index, failed]
    if fresh_residual:
        z = _normal(rows.seed, step[index, failed].unsqueeze(1), draw[:, :1] + 1, target)[:, 0]
    shift = torch.where(whole, 0.0, coordinate - along(e, z, lead=1)).to(z.dtype)
    corrected = draft_mean[index, failed] + expand(std[index, failed], z) * (z + expand(shift, z) * e)
    exact = target_mean[index, kept] + expand(std[index, kept], z) * noise[index, kept]
    path = torch.cat([path[:, 1:], rows.x.unsqueeze(1)], 1)
    ended = head & whole & (length > 0)  # at a draft whose prediction is known: no transition more
    last = torch.where(ended, kept - 1, kept)
    after = torch.where(expand(ended, z), path[index, last], torch.where(expand(whole, z), exact, corrected))
    path[index, last] = after

    source = torch.minimum(kept + 1, length) if draft == "nearest" else kept
    rows_after = replace(
        rows,
        round=rows.round + 1,
        step=rows.step + last + 1,
        x=after,
        guess=predictions[index, source],
        has_guess=ended if head else torch.ones_like(ended),
    )
    return rows_after, Committed(rows.sample, rows.step, last + 1, path)


def _normal(seed: Tensor, step: Tensor, draw: Tensor, target: Counted) -> Tensor:
    """Noise of the steps [R, J] in these draws, [R, J, *shape]."""
    key = seed.unsqueeze(1).expand_as(step)
    flat = (key.flatten(), target.shape, target.std.dtype)
    noise = normal(*flat, step=step.flatten(), draw=draw.flatten())
    return noise.view(*step.shape, *target.shape)


def at(values: Tensor, position: Tensor) -> Tensor:
    """values[r, position[r]] of [R, W]; the last one where position is W."""
    return values.gather(1, position.clamp(max=values.shape[1] - 1).unsqueeze(1)).squeeze(1)
