"""One round in four kernels: `core.round` for affine chains, `Replay()` and recycled noise.

    propose   draft     a program per row and part of the state walks the window: x ← a x + b·guess + std·z
    settle    measure   a program per row and position: all sums over the state that verification and learning need
              decide    a program per row: every scalar, in float64
              commit    a program per row, position and part of the state: noise, memory and state after the round

Two things are done differently from the plain round, to the same effect. The difference of the means is taken
as b·(prediction − guess), the states being the same; the corrected state is the drafted one moved along it.
Every sum is over one row alone in a fixed order, so a row does not depend on its batch-mates here either.

Lanes that share a sum of products exchange their terms and add them in pairs. Where a multiplication may be fused with
the addition that follows it (`enable_fp_fusion`), each lane of a pair rounds the other's product and not its own, and
their copies of the sum differ in the last bit. Kernels with such sums are compiled without.

The rows are changed in place: what `settle` returns are the tensors it was given.

A round may be narrower than the window: it then drafts fewer transitions, `drafts`, for rows that cannot draft more
anyway, and evaluates fewer states; noise and memory keep the window's size.

Shapes, beside the arguments: R rows, L the window, W = L + 1; D drafts of this round, V = D + 1; N steps, `size`
elements of a state.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import cast

import torch
import triton
import triton.language as tl
from torch import Tensor

from foresample.backends.triton.coupling import acceptance, normcdfinv, residual, tilted_cdf
from foresample.backends.triton.noise import normals, unit
from foresample.backends.triton.transition import coefficients
from foresample.contracts import AffineChain, Target, affine_chain
from foresample.core import noise as streams
from foresample.core.coupling import quadrature
from foresample.core.report import Commit
from foresample.core.round import Call, Padded, Rows, Speculation
from foresample.core.verify import FAR
from foresample.drafters.prior import is_diagonal
from foresample.drafters.replay import DIVERGED, Replay, ReplayMemory, is_replay
from foresample.faults import BROKEN_STATE, NO_FAULT

_BLOCK, _WIDE = 256, 1024  # elements a program takes at a time
_TILE = tl.constexpr(16)  # positions copied at a time
_CHUNK = tl.constexpr(32)  # positions whose integrals are taken at a time
MOST_ELEMENTS = 128  # of a state whose Jacobian one program holds
_GAP, _DOT, _SQUARE, _CROSS, _SIZE, _MOVED, _SPREAD, _SWEPT, _AWAY, _BROKEN = map(tl.constexpr, range(10))
_BEFORE, _AFTER, _BAR, _LEVEL = map(tl.constexpr, range(10, 14))
_SUMS = tl.constexpr(14)
_STEP = tl.constexpr(streams.STEP)
_TEST = tl.constexpr(streams.TEST)
_NO_FAULT = tl.constexpr(NO_FAULT)
_BROKEN_STATE = tl.constexpr(BROKEN_STATE)
_FAR = tl.constexpr(FAR)
_DIVERGED = tl.constexpr(DIVERGED)
_jit = triton.jit(do_not_specialize=["drafts"])
"""One code for all widths: a sample's last bits do not depend on how wide its rounds were."""


# fmt: off
@_jit
def _draft(
    x,                                 # [R, size]
    previous,                          # [R, size]
    noise,                             # [R, W, size]
    step,                              # [R]
    sample,                            # [R]
    ready,                             # [R]
    horizon,                           # [R]
    gain,                              # [R, W]
    kappa,                             # [R]
    old_states,                        # [R, W, size]
    old_predictions,                   # [R, W, size]
    jacobian,                          # [N, size, size], or its diagonals, [N, size]
    std,                               # [N]
    state_weight,                      # [N]
    prediction_weight,                 # [N]
    previous_weight,                   # [N]
    last,                              # [N]
    states,                            # out, [R, V, size]
    asked,                             # out, [R, V, size]: the same, for the target to write into
    guesses,                           # out, [R, D, size]
    spent,                             # out, [R, W, size]
    length,                            # out, [R]
    at_step,                           # out, [R, V]
    of_sample,                         # out, [R, V]
    steps,                             # N
    window,                            # L
    drafts,                            # D
    size,                              # elements of a state
    MULTISTEP: tl.constexpr,
    JACOBIAN: tl.constexpr,            # whether there is one
    DIAGONAL: tl.constexpr,            # else BLOCK ≥ size
    BLOCK: tl.constexpr,
    LANES: tl.constexpr,               # a power of 2 ≥ V
    STAGES: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    element = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = element < size
    width = window + 1
    places = drafts + 1
    first = tl.minimum(tl.load(step + row), steps - 1)
    if tl.program_id(2) > 0:  # what is not drafted waits for nothing: other programs copy it, many places at a time
        place = drafts + (tl.program_id(2) - 1) * _TILE + tl.arange(0, _TILE)[:, None]
        rest = (row * width + place) * size + element[None, :]
        of_use = (place < tl.minimum(width, steps - first)) & inside[None, :]
        tl.store(spent + rest, tl.load(noise + rest, mask=of_use, other=0.0), mask=of_use)
        return
    if tl.program_id(1) == 0:
        lane = tl.arange(0, LANES)
        tl.store(at_step + row * places + lane, tl.minimum(first + lane, steps - 1), mask=lane < places)
        tl.store(of_sample + row * places + lane, tl.load(sample + row) + lane * 0, mask=lane < places)
        reach = tl.load(ready + row).to(tl.int64) * drafts
        tl.store(length + row, tl.minimum(reach, tl.load(last + first) - first))

    known = tl.load(horizon + row)
    follow = tl.load(kappa + row)
    here = tl.load(x + row * size + element, mask=inside, other=0.0)
    guess = tl.zeros_like(here)
    innovation = tl.zeros_like(here)
    before = tl.zeros_like(here)
    if MULTISTEP:
        before = tl.load(previous + row * size + element, mask=inside)
    at = row * width * size + element
    out = row * places * size + element
    for j in tl.range(0, drafts, num_stages=STAGES):  # loads run ahead of the recurrence
        k = tl.minimum(first + j, steps - 1)
        old = tl.load(old_states + at + j * size, mask=inside, other=0.0)
        prediction = tl.load(old_predictions + at + j * size, mask=inside, other=0.0)
        z = tl.load(noise + at + j * size, mask=inside, other=0.0)
        apart = here - old
        is_within = (j == 0) | (j < known)
        within = prediction + tl.load(gain + row * width + j) * apart
        if JACOBIAN:
            change = tl.where(is_within, apart, innovation)
            answer = _answer(jacobian, k, change, element, inside, size, DIAGONAL)
            guess = tl.where(is_within, within, guess) + answer
        else:
            guess = tl.where(is_within, within, guess + follow * innovation)
        mean = tl.load(state_weight + k) * here + tl.load(prediction_weight + k) * guess
        if MULTISTEP:
            mean += tl.load(previous_weight + k) * before
            before = guess
        tl.store(spent + at + j * size, z, mask=inside)
        tl.store(states + out + j * size, here, mask=inside)
        tl.store(asked + out + j * size, here, mask=inside)
        tl.store(guesses + (row * drafts + j) * size + element, guess, mask=inside)
        innovation = tl.load(std + k) * z
        here = mean + innovation
    tl.store(states + out + drafts * size, here, mask=inside)
    tl.store(asked + out + drafts * size, here, mask=inside)


@triton.jit
def _answer(jacobian, k, change, element, inside, size, DIAGONAL):
    """J_k · change; for a state that one program holds, unless J is a diagonal."""
    if DIAGONAL:
        product = tl.load(jacobian + k * size + element, mask=inside, other=0.0) * change
    else:
        both = inside[:, None] & inside[None, :]
        matrix = tl.load(jacobian + (k * size + element[:, None]) * size + element[None, :], mask=both, other=0.0)
        product = tl.sum(matrix * change[None, :], 1)
    return product


@triton.jit
def _difference(
    predictions,                       # [R, V, size]
    guesses,                           # [R, D, size]
    row,
    j,
    k,
    element,
    inside,
    prediction_weight,                 # [N]
    previous_weight,                   # [N]
    drafts,
    size,
    MULTISTEP,
):
    """Target mean − draft mean at position j of a row."""
    at = (row * (drafts + 1) + j) * size + element
    guessed = (row * drafts + j) * size + element
    prediction = tl.load(predictions + at, mask=inside, other=0.0)
    guess = tl.load(guesses + guessed, mask=inside, other=0.0)
    difference = tl.load(prediction_weight + k) * (prediction - guess)
    if MULTISTEP:
        earlier = inside & (j > 0)
        prediction = tl.load(predictions + at - size, mask=earlier, other=0.0)
        guess = tl.load(guesses + guessed - size, mask=earlier, other=0.0)
        difference += tl.load(previous_weight + k) * (prediction - guess)
    return difference


@_jit
def _measure(
    states,                            # [R, V, size]
    predictions,                       # [R, V, size]
    guesses,                           # [R, D, size]
    noise,                             # [R, W, size]
    at_step,                           # [R, V]
    length,                            # [R]
    old_states,                        # [R, W, size]
    old_predictions,                   # [R, W, size]
    jacobian,                          # [N, size, size], or its diagonals, [N, size]
    std,                               # [N]
    prediction_weight,                 # [N]
    previous_weight,                   # [N]
    sums,                              # out, [R, V, _SUMS]
    steps,                             # N
    window,                            # L
    drafts,                            # D
    size,                              # elements of a state
    MULTISTEP: tl.constexpr,
    JACOBIAN: tl.constexpr,            # whether there is one
    DIAGONAL: tl.constexpr,            # else BLOCK ≥ size
    BLOCK: tl.constexpr,
):
    width = window + 1
    places = drafts + 1
    row = (tl.program_id(0) // places).to(tl.int64)
    j = tl.program_id(0) % places
    drafted = tl.load(length + row)
    if j > drafted:
        return
    k = tl.load(at_step + row * places + j)
    scale = tl.load(std + k)
    gap = tl.zeros([BLOCK], tl.float64)
    dot = tl.zeros([BLOCK], tl.float64)
    square = tl.zeros([BLOCK], tl.float64)
    cross = tl.zeros([BLOCK], tl.float64)
    norm = tl.zeros([BLOCK], tl.float64)
    moved = tl.zeros([BLOCK], tl.float64)
    spread = tl.zeros([BLOCK], tl.float64)
    swept = tl.zeros([BLOCK], tl.float64)
    away = tl.zeros([BLOCK], tl.float64)
    broken = tl.zeros([BLOCK], tl.int32)
    for start in range(0, size, BLOCK):
        element = start + tl.arange(0, BLOCK)
        inside = element < size
        at = (row * places + j) * size + element
        kept = (row * width + j) * size + element
        x = tl.load(states + at, mask=inside, other=0.0)
        prediction = tl.load(predictions + at, mask=inside, other=0.0)
        broken = tl.maximum(broken, tl.where(tl.abs(prediction) < float("inf"), 0, 1))
        broken = tl.maximum(broken, tl.where(tl.abs(x) < float("inf"), 0, 2))
        dx = (x - tl.load(old_states + kept, mask=inside, other=0.0)).to(tl.float64)
        dp = (prediction - tl.load(old_predictions + kept, mask=inside, other=0.0)).to(tl.float64)
        leading = tl.load(predictions + row * places * size + element, mask=inside, other=0.0)
        apart = (prediction - leading).to(tl.float64)
        square += dx * dx
        if JACOBIAN:  # the slope of what it leaves unexplained
            cross += dx * (dp - _answer(jacobian, k, dx, element, inside, size, DIAGONAL))
        else:
            cross += dx * dp
        swept += dp * dp
        away += apart * apart
        norm += x.to(tl.float64) * x
        if j < drafted:
            difference = _difference(
                predictions, guesses, row, j, k, element, inside,
                prediction_weight, previous_weight, drafts, size, MULTISTEP,
            ).to(tl.float64)
            z = tl.load(noise + kept, mask=inside, other=0.0).to(tl.float64)
            gap += difference * difference
            dot += difference * z
            ahead = tl.load(predictions + at + size, mask=inside, other=0.0)
            innovation = scale * z
            moved += (ahead - prediction) * innovation
            spread += innovation * innovation
    out = sums + (row * places + j) * _SUMS
    tl.store(out + _GAP, tl.sum(gap))
    tl.store(out + _DOT, tl.sum(dot))
    tl.store(out + _SQUARE, tl.sum(square))
    tl.store(out + _CROSS, tl.sum(cross))
    tl.store(out + _SIZE, tl.sum(norm))
    tl.store(out + _MOVED, tl.sum(moved))
    tl.store(out + _SPREAD, tl.sum(spread))
    tl.store(out + _SWEPT, tl.sum(swept))
    tl.store(out + _AWAY, tl.sum(away))
    tl.store(out + _BROKEN, tl.max(broken, 0).to(tl.float64))


@triton.jit
def _coordinates(sums, std, first, i, drafted, steps):
    """Gap between the means, mismatch, and the noise's coordinate, at positions i of a row (0 outside)."""
    inside = (i >= 0) & (i < drafted)
    gap = tl.sqrt(tl.load(sums + i * _SUMS + _GAP, mask=inside, other=0.0))
    dot = tl.load(sums + i * _SUMS + _DOT, mask=inside, other=0.0)
    scale = tl.load(std + tl.minimum(first + i, steps - 1), mask=inside, other=1.0).to(tl.float64)
    return gap, gap / scale, tl.where(gap > 0, dot / gap, 0.0)


@triton.jit
def _then(slope_1, cap_1, slope_2, cap_2):
    """p ← min(cap, p + slope), one after the other."""
    return slope_1 + slope_2, tl.minimum(cap_2, cap_1 + slope_2)


@triton.jit
def _latest(known_1, value_1, known_2, value_2):
    return tl.maximum(known_1, known_2), tl.where(known_2 > 0, value_2, value_1)


@_jit
def _decide(
    sums,                              # [R, V, _SUMS]
    seed,                              # [R]
    round,                             # in place, [R]
    evaluations,                       # in place, [R]
    step,                              # in place, [R]
    fault,                             # in place, [R]
    length,                            # in place, [R]
    visited,                           # in place, [R]
    horizon,                           # out, [R]
    gain,                              # in place, [R, W]
    kappa,                             # out, [R]
    ready,                             # out, [R]
    std,                               # [N]
    nodes,                             # [16]
    weights,                           # [16]
    accepted,                          # out, [R]
    committed,                         # out, [R]
    push,                              # out, [R, D]: move of the noise over the gap
    mismatch_out,                      # out, [R, D]
    steps,                             # N
    window,                            # L
    drafts,                            # D
    block,                             # transitions verified as one
    eps,                               # of the chain's dtype
    PADDED: tl.constexpr,
    LANES: tl.constexpr,               # a power of 2 ≥ W
):
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, LANES)
    width = window + 1
    sums += row * (drafts + 1) * _SUMS
    u = tl.load(nodes + tl.arange(0, 16))
    w = tl.load(weights + tl.arange(0, 16))
    # All that is changed in place is read before the first barrier and written after it. A warp that came late would
    # read what another had written, decide otherwise, and wait at a later barrier where nobody comes.
    drafted = tl.load(length + row)
    at = tl.load(step + row)
    key = tl.load(seed + row)
    done = tl.load(round + row)
    seen = tl.load(visited + row)
    known = tl.load(fault + row)
    counted = tl.load(evaluations + row)
    old_gain = tl.load(gain + row * width + i, mask=i < width, other=0.0)
    active = at < steps
    first = tl.minimum(at, steps - 1)

    # verify: the same lines as there
    _, mismatch, _ = _coordinates(sums, std, first, i, drafted, steps)
    evaluated = drafts + 1
    if not PADDED:
        evaluated = drafted + 1
    code = tl.load(sums + i * _SUMS + _BROKEN, mask=i <= drafted, other=0.0)
    near = (mismatch <= _FAR) & (code < 2)
    drafted = tl.min(tl.where(near, drafted, tl.minimum(i, drafted)), 0)
    gap, mismatch, s = _coordinates(sums, std, first, i, drafted, steps)
    _, mismatch_past, s_past = _coordinates(sums, std, first, i - 1, drafted, steps)
    inside = i < drafted
    past = mismatch_past * (s_past - 0.5 * mismatch_past)
    slope = tl.where(i % block == 0, float("inf"), past)
    _, before = tl.associative_scan((slope, tl.zeros([LANES], tl.float64)), 0, _then)
    after = tl.minimum(before + mismatch * (s - 0.5 * mismatch), 0.0)
    ends = (i % block == block - 1) | (i == drafted - 1)
    tl.store(sums + i * _SUMS + _BEFORE, before, mask=inside)
    tl.store(sums + i * _SUMS + _AFTER, after, mask=inside)
    tl.debug_barrier()
    for start in range(0, drafted, _CHUNK):  # integrals take the time: none where a narrow round has no drafts
        c = start + tl.arange(0, _CHUNK)
        here = sums + c * _SUMS
        _gap_c, mismatch_c, s_c = _coordinates(sums, std, first, c, drafted, steps)
        _gap_next, mismatch_next, _s_next = _coordinates(sums, std, first, c + 1, drafted, steps)
        before_c = tl.load(here + _BEFORE, mask=c < drafted, other=0.0)
        after_c = tl.load(here + _AFTER, mask=c < drafted, other=0.0)
        tl.store(here + _BAR, acceptance(mismatch_next, after_c, u, w), mask=c < drafted)
        tl.store(here + _LEVEL, tilted_cdf(s_c, mismatch_c, before_c, u, w), mask=c < drafted)
    tl.debug_barrier()
    # From here on every branch, address and mask comes from numbers in memory, one for all lanes: copies that lanes add
    # up for themselves may differ in the last bit, and lanes that decide differently never meet again.
    after = tl.load(sums + i * _SUMS + _AFTER, mask=inside, other=0.0)
    h = tl.where(ends, tl.exp(after), tl.load(sums + i * _SUMS + _BAR, mask=inside, other=0.0))
    lane = i.to(tl.uint32)
    words = tl.philox(key, lane, lane * 0 + done.to(tl.uint32), lane * 0, lane * 0 + _TEST)
    passed = inside & (unit(words[0], words[1]) < h)
    which = i // block
    failing = tl.min(tl.where(inside & ends & (passed == 0), which, LANES), 0)
    kept = inside & ((which < failing) | ((which == failing) & passed))
    keep = tl.max(tl.where(kept, i + 1, 0), 0)
    examined = inside & (which == failing) & (i >= keep)
    corrected = examined & (i == keep)
    level = tl.load(sums + i * _SUMS + _LEVEL, mask=inside, other=0.5)

    # the corrected coordinate, of one position
    before_at = tl.load(sums + keep * _SUMS + _BEFORE, mask=keep < drafted, other=0.0)
    drawn = tl.zeros([1], tl.float64)
    if before_at < 0:  # else the residual is a reflection
        _gap_at, mismatch_at, _s_at = _coordinates(sums, std, first, keep, drafted, steps)
        level_at = tl.load(sums + keep * _SUMS + _LEVEL)
        drawn = residual(drawn + level_at, drawn + mismatch_at, drawn + before_at, u, w)
    residual_s = tl.where(before_at < 0, drawn, mismatch - s)
    shift = tl.where(examined, tl.where(corrected, residual_s, normcdfinv(level)) - s, 0.0)
    tl.store(push + row * drafts + i, tl.where(gap > 0, shift / gap, 0.0), mask=i < drafts)
    tl.store(mismatch_out + row * drafts + i, mismatch, mask=i < drafts)

    # commit: all that is one number per row
    moves = tl.where(active, keep + 1, 0)
    one_more = active.to(tl.int64)
    tl.store(accepted + row, keep)
    tl.store(committed + row, moves)
    tl.store(step + row, at + moves)
    tl.store(round + row, done + one_more)
    tl.store(length + row, drafted)
    tl.store(evaluations + row, counted + one_more * evaluated)
    worst = tl.min(tl.where((code > 0) & (i <= keep), i, LANES), 0)
    kind = tl.sum(tl.where(i == worst, code, 0.0), 0)
    k = tl.minimum(first + worst, steps - 1)
    new = tl.where(kind > 1, _BROKEN_STATE - k, k)
    tl.store(fault + row, tl.where((known == _NO_FAULT) & (worst < LANES), new, known))

    # learn: gains of this path, moved up to where the next window starts, and the response
    lost = (keep < drafted) & (tl.max(tl.where(i == drafted, code, 0.0), 0) > 0)
    learned = drafted - lost.to(tl.int64)
    swept = tl.load(sums + i * _SUMS + _SWEPT, mask=i <= learned, other=0.0)
    away = tl.load(sums + i * _SUMS + _AWAY, mask=i <= learned, other=0.0)
    diverges = (i > keep + 1) & (i < seen) & (tl.sqrt(swept) > _DIVERGED * tl.sqrt(away))
    learned = tl.minimum(learned, tl.min(tl.where(diverges, i, LANES), 0) - 1)
    square = tl.load(sums + i * _SUMS + _SQUARE, mask=i <= learned, other=0.0)
    norm = tl.load(sums + i * _SUMS + _SIZE, mask=i <= learned, other=0.0)
    cross = tl.load(sums + i * _SUMS + _CROSS, mask=i <= learned, other=0.0)
    telling = (square > eps * norm) & (i < seen)
    slope = tl.where(telling, cross / tl.where(telling, square, 1.0), 0.0)
    told, slope = tl.associative_scan((telling.to(tl.int32), slope), 0, _latest)
    slope = tl.where(told > 0, slope, old_gain)
    remaining = learned - keep
    moved_up = i - (keep + 1)
    tl.store(gain + row * width + moved_up, slope, mask=(moved_up >= 0) & (moved_up < remaining))
    tl.store(gain + row * width + i, tl.zeros([LANES], tl.float64), mask=(i >= remaining) & (i < width))
    tl.store(visited + row, remaining)
    tl.store(horizon + row, remaining)
    tl.store(ready + row, 1)
    moved = tl.sum(tl.load(sums + i * _SUMS + _MOVED, mask=i < learned, other=0.0), 0)
    spread = tl.sum(tl.load(sums + i * _SUMS + _SPREAD, mask=i < learned, other=0.0), 0)
    tl.store(kappa + row, tl.where(spread > 0, moved / tl.where(spread > 0, spread, 1.0), 0.0))


@_jit
def _commit(
    states,                            # [R, V, size]
    predictions,                       # [R, V, size]
    guesses,                           # [R, D, size]
    spent,                             # [R, W, size]
    seed,                              # [R]
    at_step,                           # [R, V]
    length,                            # [R]
    visited,                           # [R]
    accepted,                          # [R]
    committed,                         # [R]
    push,                              # [R, D]
    std,                               # [N]
    state_weight,                      # [N]
    prediction_weight,                 # [N]
    previous_weight,                   # [N]
    x,                                 # out, [R, size]
    previous,                          # in place, [R, size]
    noise,                             # out, [R, W, size]
    old_states,                        # out, [R, W, size]
    old_predictions,                   # out, [R, W, size]
    fault,                             # in place, [R]
    steps,                             # N
    window,                            # L
    drafts,                            # D
    size,                              # elements of a state
    MULTISTEP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    width = window + 1
    places = drafts + 1
    row = (tl.program_id(0) // width).to(tl.int64)
    j = tl.program_id(0) % width
    element = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = element < size
    at = (row * width + j) * size + element
    drafted = tl.load(length + row)
    first = tl.load(at_step + row * places)
    moves = tl.load(committed + row)
    source = j + moves

    keep = tl.load(accepted + row)
    if first + source < steps:  # else nothing comes there any more
        # noise: what is left of the window's, moved along the line where it was examined; then the stream's next
        if source < width:
            z = tl.load(spent + (row * width + source) * size + element, mask=inside)
            if source < drafted:
                k = first + source
                shift = tl.load(push + row * drafts + source).to(z.dtype)
                difference = _difference(
                    predictions, guesses, row, source, k, element, inside,
                    prediction_weight, previous_weight, drafts, size, MULTISTEP,
                )
                z += shift * difference
            tl.store(noise + at, z, mask=inside)
        else:
            fresh = normals(tl.load(seed + row), size, element, first + source, first * 0, _STEP)
            tl.store(noise + at, fresh, mask=inside)

        # memory: the path, moved up; beyond its end, the last one
        seen = (row * places + keep + tl.minimum(j + 1, tl.load(visited + row))) * size + element
        tl.store(old_states + at, tl.load(states + seen, mask=inside), mask=inside)
        tl.store(old_predictions + at, tl.load(predictions + seen, mask=inside), mask=inside)

    if j == 0:
        k = tl.minimum(first + keep, steps - 1)
        last = (row * places + keep) * size + element
        prediction = tl.load(predictions + last, mask=inside)
        scale = tl.load(std + k)
        if keep == drafted:
            here = tl.load(states + last, mask=inside)
            new = tl.load(state_weight + k) * here + tl.load(prediction_weight + k) * prediction
            if MULTISTEP:
                if keep > 0:
                    before = tl.load(predictions + last - size, mask=inside)
                else:
                    before = tl.load(previous + row * size + element, mask=inside)
                new += tl.load(previous_weight + k) * before
            new += scale * tl.load(spent + (row * width + keep) * size + element, mask=inside)
        else:
            difference = _difference(
                predictions, guesses, row, keep, k, element, inside,
                prediction_weight, previous_weight, drafts, size, MULTISTEP,
            )
            shift = tl.load(push + row * drafts + keep).to(scale.dtype)
            new = tl.load(states + last + size, mask=inside) + scale * shift * difference
        tl.store(x + row * size + element, new, mask=inside)
        tl.store(previous + row * size + element, prediction, mask=inside)
        wrong = tl.max(tl.where((tl.abs(new) < float("inf")) | (element >= size), 0, 1), 0)
        if wrong > 0:
            code = tl.where(moves > 0, _BROKEN_STATE - (first + moves), _NO_FAULT)
            tl.atomic_cas(fault + row, tl.full([], _NO_FAULT, tl.int64), code)


@dataclass(frozen=True)
class FusedDraft:
    """What a fused round proposes; shapes as for `core.round.Draft`."""

    call: Call
    states: Tensor
    guesses: Tensor
    """[R, D, *shape]: the guessed predictions."""
    spent: Tensor
    """[R, W, *shape]: the rows' noise, which `settle` overwrites."""
    step: Tensor
    length: Tensor


def serves(target: Target, speculation: Speculation) -> bool:
    """Whether this round is that of `core.round`, for this target and these settings."""
    drafter = speculation.drafter
    if affine_chain(target) is None or not speculation.recycle or not is_replay(drafter) or not drafter.secant:
        return False
    jacobian = None if drafter.prior is None else drafter.prior.jacobian
    return jacobian is None or is_diagonal(jacobian) or target.shape.numel() <= MOST_ELEMENTS


def propose(target: Target, rows: Rows, speculation: Speculation) -> FusedDraft:
    """See `core.round.propose`."""
    chain = cast(AffineChain, affine_chain(target))
    count, memory, jacobian = len(rows.x), ReplayMemory.of(rows.memory), _Jacobian.of(speculation, target)
    sizes = _sizes(target, speculation)
    drafts, size = sizes["drafts"], sizes["size"]
    std, state_weight, *weights = coefficients(chain)
    states, asked = (rows.x.new_empty((count, drafts + 1, *target.shape)) for _ in range(2))
    spent = torch.empty_like(rows.noise)
    guesses = rows.x.new_empty((count, drafts, *target.shape))
    step, sample = (rows.step.new_empty((count, drafts + 1)) for _ in range(2))
    length = torch.empty_like(rows.step)
    part = triton.next_power_of_2(size) if jacobian.is_matrix else _BLOCK
    with torch.cuda.device_of(states):
        _draft[(count, triton.cdiv(size, part), 1 + triton.cdiv(speculation.window + 1 - drafts, _TILE.value))](
            rows.x, rows.previous, rows.noise, rows.step, rows.sample, memory.ready, memory.horizon,
            memory.slope, memory.response, memory.states, memory.predictions,
            jacobian.values, std, state_weight, *weights, speculation.last,
            states, asked, guesses, spent, length, step, sample,
            **sizes, MULTISTEP=chain.previous_weight is not None, **jacobian.kind, BLOCK=part,
            LANES=triton.next_power_of_2(drafts + 1), STAGES=2 if jacobian.is_matrix else 4,
            enable_fp_fusion=not jacobian.is_matrix,
        )
    needed = speculation.layout.needed(length, drafts)
    if needed is None:
        call = Call(asked.flatten(0, 1), step.flatten(), sample.flatten(), None)
    else:
        call = Call.at(states, step, sample, needed)
    return FusedDraft(call, states, guesses, spent, step, length)


def settle(
    target: Target, rows: Rows, draft: FusedDraft, predictions: Tensor, speculation: Speculation
) -> tuple[Rows, Commit]:
    """See `core.round.settle`; in place."""
    chain = cast(AffineChain, affine_chain(target))
    count, memory, jacobian = len(rows.x), ReplayMemory.of(rows.memory), _Jacobian.of(speculation, target)
    states, guesses, spent, step, length = draft.states, draft.guesses, draft.spent, draft.step, draft.length
    std, state_weight, *weights = coefficients(chain)
    sizes, multistep = _sizes(target, speculation), chain.previous_weight is not None
    window, drafts, size = (sizes[name] for name in ("window", "drafts", "size"))
    predictions = draft.call.spread(predictions, states).contiguous()
    accepted, committed = (torch.empty_like(rows.step) for _ in range(2))
    sums = torch.empty((count, drafts + 1, _SUMS.value), dtype=torch.float64, device=states.device)
    push, mismatch = (sums.new_empty((count, drafts)) for _ in range(2))
    with torch.cuda.device_of(states):
        _measure[(count * (drafts + 1),)](
            states, predictions, guesses, spent, step, length, memory.states, memory.predictions,
            jacobian.values, std, *weights, sums, **sizes, MULTISTEP=multistep, **jacobian.kind,
            BLOCK=triton.next_power_of_2(size) if jacobian.is_matrix else _WIDE,
            enable_fp_fusion=not jacobian.is_matrix,
        )
        _decide[(count,)](
            sums, rows.seed, rows.round, rows.evaluations, rows.step, rows.fault, length, memory.visited,
            memory.horizon, memory.slope, memory.response, memory.ready, std,
            *quadrature(states.device), accepted, committed, push, mismatch,
            sizes["steps"], window, drafts, speculation.block or window, torch.finfo(states.dtype).eps,
            PADDED=isinstance(speculation.layout, Padded), LANES=triton.next_power_of_2(window + 1), num_warps=8,
            enable_fp_fusion=False,
        )
        _commit[(count * (window + 1), triton.cdiv(size, _BLOCK))](
            states, predictions, guesses, spent, rows.seed, step, length, memory.visited, accepted,
            committed, push, std, state_weight, *weights, rows.x, rows.previous, rows.noise,
            memory.states, memory.predictions, rows.fault, **sizes, MULTISTEP=multistep, BLOCK=_BLOCK,
        )
    return rows, Commit(rows.sample, step[:, 0], committed, states, rows.x, mismatch, length)


def _sizes(target: Target, speculation: Speculation) -> dict[str, int]:
    """What the kernels share."""
    drafts = speculation.layout.drafts(speculation.window)
    return {"steps": len(target.std), "window": speculation.window, "drafts": drafts, "size": math.prod(target.shape)}


@dataclass(frozen=True)
class _Jacobian:
    """The prior's J, and of what kind it is."""

    values: Tensor
    """[N, size, size], or [N, 1, size]; anything if there is none."""
    kind: dict[str, bool]

    @staticmethod
    def of(speculation: Speculation, target: Target) -> _Jacobian:
        prior = cast(Replay, speculation.drafter).prior
        if prior is None or prior.jacobian is None:
            return _Jacobian(target.std, {"JACOBIAN": False, "DIAGONAL": True})
        values = prior.jacobian.to(target.std).contiguous()
        return _Jacobian(values, {"JACOBIAN": True, "DIAGONAL": is_diagonal(values)})

    @property
    def is_matrix(self) -> bool:
        return not self.kind["DIAGONAL"]
