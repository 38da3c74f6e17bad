"""One round, compiled: `core.round` for affine chains, `Replay()`, recycled noise and packed calls, on a CPU.

In plain PyTorch a round is several hundred small operations, which take longer than a small network. Here it is

    propose   draft     walk each row's window: x ← a x + b·guess + std·z, and pack its states into the call
    settle    measure   all sums over the state that verification and learning need
              decide    every number of a row, in float64
              commit    noise, memory and state after the round

The round for CUDA has the same four parts (`backends.triton.round` explains them in more detail). Rows are processed
one after the other, so a row does not depend on its batch-mates.

Rows are changed in place, except `x` and `step`, which observers may still read from a `Commit`.

Shapes: R rows, L the window, W = L + 1; D drafts of this round, V = D + 1; B states of its call,
row by row; N steps, `size` elements of a state.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cache
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from foresample.backends.numba.compiling import compiled, summing
from foresample.backends.numba.coupling import acceptance, ndtri, residual, tilted_cdf
from foresample.backends.numba.noise import fill_normal, normal, philox, unit
from foresample.backends.numba.tally import count
from foresample.contracts import AffineChain, Target, affine_chain
from foresample.core import noise as streams
from foresample.core import verify
from foresample.core.report import Commit, Tally
from foresample.core.round import Call, Packed, Rows, Speculation, begin, last_draftable
from foresample.drafters.replay import DIVERGED, Replay, ReplayMemory, is_replay
from foresample.faults import BROKEN_STATE, NO_FAULT

_GAP, _DOT, _SQUARE, _CROSS, _SIZE, _MOVED, _SPREAD, _SWEPT, _AWAY, _BROKEN, _SUMS = range(11)
_STEP, _TEST = streams.STEP, streams.TEST


# fmt: off
@compiled
def _lengths(
    step,                              # [R]
    ready,                             # [R]
    last,                              # [N]
    window,                            # L
    length,                            # out, [R]: transitions to draft
    offset,                            # out, [R]: where a row's states begin in the call
):
    """The sizes D and B; fills `length` and `offset`."""
    longest, total = 1, 0
    for row in range(len(step)):
        first = min(step[row], len(last) - 1)
        length[row] = min(window, last[first] - first) if ready[row] else 0
        offset[row] = total
        longest, total = max(longest, length[row]), total + length[row] + 1
    return longest, total


@compiled
def _copy(out, values):
    """Copy elements in a loop, since Numba compiles slice assignments slowly."""
    for e in range(len(out)):
        out[e] = values[e]


@summing
def _draft(
    x,                                 # [R, size]
    previous,                          # [R, size]
    noise,                             # [R, W, size]
    step,                              # [R]
    sample,                            # [R]
    horizon,                           # [R]
    gain,                              # [R, W]
    kappa,                             # [R]
    old_states,                        # [R, W, size]
    old_predictions,                   # [R, W, size]
    jacobian,                          # [N, size, size], its diagonals, [N, 1, size], or empty
    std,                               # [N]
    state_weight,                      # [N]
    prediction_weight,                 # [N]
    previous_weight,                   # [N], or empty
    length,                            # [R]
    states,                            # out, [R, V, size]
    guesses,                           # out, [R, D, size]
    packed,                            # out, [B, size]
    packed_step,                       # out, [B]
    packed_sample,                     # out, [B]
):
    steps, size, b = len(std), x.shape[1], 0
    change = np.empty(size, x.dtype)
    for row in range(len(x)):
        first = min(step[row], steps - 1)
        _copy(states[row, 0], x[row])
        for j in range(length[row]):
            k = first + j
            here, guess = states[row, j], guesses[row, j]
            if j == 0 or j < horizon[row]:
                old, prediction, slope = old_states[row, j], old_predictions[row, j], gain[row, j]
                for e in range(size):
                    change[e] = here[e] - old[e]
                    guess[e] = prediction[e] + slope * change[e]
            else:
                before, z, scale = guesses[row, j - 1], noise[row, j - 1], std[k - 1]
                follow = kappa[row] if len(jacobian) == 0 else kappa.dtype.type(0)
                for e in range(size):
                    change[e] = scale * z[e]
                    guess[e] = before[e] + follow * change[e]
            if len(jacobian):
                matrix = jacobian[k]
                for e in range(size):
                    guess[e] += _answer(matrix, change, e)
            ahead, z = states[row, j + 1], noise[row, j]
            scale, weight, share = std[k], state_weight[k], prediction_weight[k]
            for e in range(size):
                ahead[e] = weight * here[e] + share * guess[e] + scale * z[e]
            if len(previous_weight):
                before, share = guesses[row, j - 1] if j else previous[row], previous_weight[k]
                for e in range(size):
                    ahead[e] += share * before[e]
        for j in range(length[row] + 1):
            _copy(packed[b], states[row, j])
            packed_step[b] = first + j
            packed_sample[b] = sample[row]
            b += 1


@summing
def _answer(
    jacobian,                          # [size, size], or its diagonal, [1, size]
    change,                            # [size]
    e,
):
    """Element e of J · change."""
    if len(jacobian) == 1:
        return np.float64(jacobian[0, e] * change[e])
    total = 0.0
    for i in range(len(change)):
        total += jacobian[e, i] * change[i]
    return total


@compiled
def _is_broken(values):
    for value in values:  # noqa: SIM110 - Numba compiles no generators here
        if not math.isfinite(value):
            return True
    return False


@summing
def _difference(
    predictions,                       # [V, size]
    guesses,                           # [D, size]
    j,
    k,
    prediction_weight,                 # [N]
    previous_weight,                   # [N], or empty
    out,                               # out, [size]
):
    """Target mean − draft mean at position j of a row."""
    prediction, guess, share = predictions[j], guesses[j], prediction_weight[k]
    for e in range(len(out)):
        out[e] = share * (prediction[e] - guess[e])
    if len(previous_weight) and j:
        prediction, guess, share = predictions[j - 1], guesses[j - 1], previous_weight[k]
        for e in range(len(out)):
            out[e] += share * (prediction[e] - guess[e])


@summing
def _measure(
    states,                            # [V, size]
    predictions,                       # [V, size]
    guesses,                           # [D, size]
    noise,                             # [W, size]
    first,                             # step of position 0
    length,                            # transitions drafted
    old_states,                        # [W, size]
    old_predictions,                   # [W, size]
    jacobian,                          # [N, size, size], its diagonals, [N, 1, size], or empty
    std,                               # [N]
    prediction_weight,                 # [N]
    previous_weight,                   # [N], or empty
    sums,                              # out, [V, _SUMS]
    scratch,                           # [size]
):
    size, leading = len(scratch), predictions[0]
    for j in range(length + 1):
        k = first + j
        x, prediction, old, was = states[j], predictions[j], old_states[j], old_predictions[j]
        square = cross = norm = swept = away = 0.0
        for e in range(size):
            dx, dp = np.float64(x[e] - old[e]), np.float64(prediction[e] - was[e])
            apart, here = np.float64(prediction[e] - leading[e]), np.float64(x[e])
            square += dx * dx
            cross += dx * dp
            swept += dp * dp
            away += apart * apart
            norm += here * here
        if len(jacobian):  # the slope of the change that it does not explain
            for e in range(size):
                scratch[e] = x[e] - old[e]
            matrix = jacobian[k]
            for e in range(size):
                cross -= scratch[e] * _answer(matrix, scratch, e)
        sums[j, _SQUARE], sums[j, _CROSS], sums[j, _SIZE] = square, cross, norm
        sums[j, _SWEPT], sums[j, _AWAY] = swept, away
        sums[j, _BROKEN] = 0.0
        if not math.isfinite(away) and _is_broken(prediction):
            sums[j, _BROKEN] = 1.0
        if not math.isfinite(norm) and _is_broken(x):
            sums[j, _BROKEN] = 2.0
        if j == length:
            break
        _difference(predictions, guesses, j, k, prediction_weight, previous_weight, scratch)
        z, ahead = noise[j], predictions[j + 1]
        gap = dot = moved = spread = 0.0
        for e in range(size):
            difference, unit_noise = np.float64(scratch[e]), np.float64(z[e])
            gap += difference * difference
            dot += difference * unit_noise
            moved += np.float64(ahead[e] - prediction[e]) * unit_noise
            spread += unit_noise * unit_noise
        scale = np.float64(std[k])
        sums[j, _GAP], sums[j, _DOT] = math.sqrt(gap), dot
        sums[j, _MOVED], sums[j, _SPREAD] = scale * moved, scale * scale * spread


@compiled
def _verify(
    sums,                              # [V, _SUMS]
    seed,
    round_,                            # rounds done
    first,                             # step of position 0
    length,                            # transitions drafted
    std,                               # [N]
    block,                             # transitions verified as one
    far,                               # the mismatch that ends a window
    push,                              # out, [D]: move of the noise over the gap
    mismatch,                          # out, [D], zeros
    coordinate,                        # scratch, [D]
    before,                            # scratch, [D]: ln p
    after,                             # scratch, [D]
):
    """Transitions kept, and transitions examined: `core.verify`."""
    for i in range(len(push)):
        push[i] = 0.0
    drafted = 0
    while drafted < length and sums[drafted, _BROKEN] < 2:
        i = drafted
        gap, delta = sums[i, _GAP], sums[i, _GAP] / np.float64(std[first + i])
        if not delta <= far:
            break
        mismatch[i], coordinate[i] = delta, sums[i, _DOT] / gap if gap > 0 else 0.0
        before[i] = after[i - 1] if i % block else 0.0
        after[i] = min(before[i] + delta * (coordinate[i] - 0.5 * delta), 0.0)
        drafted += 1

    # Blocks kept whole, then the last position that passes in the first other block.
    keep = 0
    while keep < drafted:
        start, end = keep, min(keep + block, drafted)
        if _uniform(seed, round_, end - 1) < math.exp(after[end - 1]):
            keep = end
            continue
        i = end - 2
        while i >= start and not _uniform(seed, round_, i) < acceptance(mismatch[i + 1], after[i]):
            i -= 1
        keep = i + 1
        for i in range(keep, end):
            s, level = coordinate[i], tilted_cdf(coordinate[i], mismatch[i], before[i])
            if i > keep:
                moved = ndtri(level)
            elif before[i] < 0:
                moved = residual(level, mismatch[i], before[i])
            else:
                moved = mismatch[i] - s
            if mismatch[i] > 0:
                push[i] = (moved - s) / sums[i, _GAP]
        break
    return keep, drafted


@compiled
def _uniform(seed, round_, i):
    words = philox(seed, i, round_, 0, _TEST)
    return unit(words[0], words[1])


@compiled
def _learn(
    sums,                              # [V, _SUMS]
    keep,                              # transitions kept
    drafted,                           # transitions examined
    seen,                              # positions the path before has visited
    eps,                               # of the chain's dtype
    gain,                              # in place, [W]
):
    """Move gains up to the start of the next window; return how many of its positions are known, and the response."""
    learned = drafted
    if keep < drafted and sums[drafted, _BROKEN] > 0:
        learned -= 1
    for i in range(keep + 2, min(seen, learned + 1)):
        if math.sqrt(sums[i, _SWEPT]) > DIVERGED * math.sqrt(sums[i, _AWAY]):
            learned = i - 1
            break
    remaining = learned - keep
    measured, slope = False, 0.0
    for i in range(learned + 1):
        if i < seen and sums[i, _SQUARE] > eps * sums[i, _SIZE]:
            measured, slope = True, sums[i, _CROSS] / sums[i, _SQUARE]
        if i > keep:
            gain[i - keep - 1] = slope if measured else gain[i]
    for i in range(remaining, len(gain)):
        gain[i] = 0
    moved = spread = 0.0
    for i in range(learned):
        moved, spread = moved + sums[i, _MOVED], spread + sums[i, _SPREAD]
    return remaining, moved / spread if spread > 0 else 0.0


@summing
def _settle(
    states,                            # [R, V, size]
    guesses,                           # [R, D, size]
    packed,                            # [B, size]: predictions
    offset,                            # [R]
    length,                            # in place, [R]: transitions drafted, then those examined
    sample_seed,                       # [R]
    step,                              # [R]
    round_,                            # in place, [R]
    evaluations,                       # in place, [R]
    fault,                             # in place, [R]
    previous,                          # in place, [R, size]
    noise,                             # in place, [R, W, size]
    visited,                           # in place, [R]
    horizon,                           # out, [R]
    gain,                              # in place, [R, W]
    kappa,                             # out, [R]
    ready,                             # out, [R]
    old_states,                        # in place, [R, W, size]
    old_predictions,                   # in place, [R, W, size]
    jacobian,                          # [N, size, size], its diagonals, [N, 1, size], or empty
    std,                               # [N]
    state_weight,                      # [N]
    prediction_weight,                 # [N]
    previous_weight,                   # [N], or empty
    block,                             # transitions verified as one
    far,                               # the mismatch that ends a window
    eps,                               # of the chain's dtype
    x,                                 # out, [R, size]
    step_after,                        # out, [R]
    committed,                         # out, [R]
    mismatch,                          # out, [R, D], zeros
):
    steps, drafts, size = len(std), guesses.shape[1], x.shape[1]
    width = noise.shape[1]
    sums = np.empty((drafts + 1, _SUMS))
    push, coordinate, before, after = np.empty(drafts), np.empty(drafts), np.empty(drafts), np.empty(drafts)
    scratch = np.empty(size, x.dtype)
    for row in range(len(x)):
        if step[row] >= steps:  # nothing to do
            _copy(x[row], states[row, 0])
            step_after[row], committed[row] = step[row], 0
            continue
        first = step[row]
        predictions = packed[offset[row] : offset[row] + length[row] + 1]
        path, guessed = states[row], guesses[row]
        _measure(
            path, predictions, guessed, noise[row], first, length[row], old_states[row], old_predictions[row],
            jacobian, std, prediction_weight, previous_weight, sums, scratch,
        )
        keep, drafted = _verify(
            sums, sample_seed[row], round_[row], first, length[row], std, block, far, push, mismatch[row],
            coordinate, before, after,
        )

        # commit: the state; from the residual if a draft was rejected, else by the exact transition
        k = first + keep
        if keep == drafted:
            here, prediction, z = path[keep], predictions[keep], noise[row, keep]
            weight, share, scale = state_weight[k], prediction_weight[k], std[k]
            for e in range(size):
                x[row, e] = weight * here[e] + share * prediction[e] + scale * z[e]
            if len(previous_weight):
                earlier, share = predictions[keep - 1] if keep else previous[row], previous_weight[k]
                for e in range(size):
                    x[row, e] += share * earlier[e]
        else:
            _difference(predictions, guessed, keep, k, prediction_weight, previous_weight, scratch)
            shift, ahead = x.dtype.type(np.float64(std[k]) * push[keep]), path[keep + 1]
            for e in range(size):
                x[row, e] = ahead[e] + shift * scratch[e]

        # noise: the rest of the window's, moved along the line where examined; then the stream's next
        for j in range(width):
            source = j + keep + 1
            if source < width:
                _copy(noise[row, j], noise[row, source])
                if source < drafted and push[source] != 0:
                    _difference(
                        predictions, guessed, source, first + source, prediction_weight, previous_weight, scratch
                    )
                    shift, z = x.dtype.type(push[source]), noise[row, j]
                    for e in range(size):
                        z[e] += shift * scratch[e]
            elif first + source < steps:
                fill_normal(noise[row, j], sample_seed[row], first + source, 0, _STEP)

        for j in range(keep + 1):
            if sums[j, _BROKEN] > 0 and fault[row] == NO_FAULT:
                fault[row] = BROKEN_STATE - (first + j) if sums[j, _BROKEN] > 1 else first + j
        for e in range(size):
            if not math.isfinite(x[row, e]) and fault[row] == NO_FAULT:
                fault[row] = BROKEN_STATE - (k + 1)
        remaining, response = _learn(sums, keep, drafted, visited[row], eps, gain[row])
        for j in range(width):  # the path, moved up; beyond its end, its last position
            seen = keep + min(j + 1, remaining)
            _copy(old_states[row, j], path[seen])
            _copy(old_predictions[row, j], predictions[seen])
        _copy(previous[row], predictions[keep])
        kappa[row], visited[row], horizon[row], ready[row] = response, remaining, remaining, True
        evaluations[row] += length[row] + 1
        round_[row] += 1
        length[row], committed[row], step_after[row] = drafted, keep + 1, first + keep + 1
# fmt: on


@dataclass(frozen=True)
class CompiledDraft:
    """The proposal of a compiled round; shapes as for `core.round.Draft`."""

    call: Call
    states: Tensor
    guesses: Tensor
    """[R, D, *shape]: the guessed predictions."""
    length: Tensor
    offset: Tensor
    """[R]: where a row's states begin in the call."""


def serves(target: Target, speculation: Speculation) -> bool:
    """Whether this round can replace that of `core.round` for this target and these settings."""
    chain, drafter, size = affine_chain(target), speculation.drafter, target.shape.numel()
    if chain is None or target.std.dtype not in (torch.float32, torch.float64):
        return False
    if not is_replay(drafter) or not drafter.secant:
        return False
    if not speculation.recycle or not isinstance(speculation.layout, Packed):
        return False
    jacobian = None if drafter.prior is None else drafter.prior.jacobian
    like = target.std
    return jacobian is None or (
        jacobian.shape in ((len(like), size, size), (len(like), 1, size))
        and (jacobian.dtype, jacobian.device) == (like.dtype, like.device)
    )


def propose(target: Target, rows: Rows, speculation: Speculation) -> CompiledDraft:
    """See `core.round.propose`."""
    memory, shape = ReplayMemory.of(rows.memory), target.shape
    length, offset = torch.empty_like(rows.step), torch.empty_like(rows.step)
    ready, last = memory.ready.numpy(), speculation.last.numpy()
    drafts, total = _lengths(rows.step.numpy(), ready, last, speculation.window, length.numpy(), offset.numpy())
    states = rows.x.new_zeros((len(rows.x), drafts + 1, *shape))
    guesses = rows.x.new_empty((len(rows.x), drafts, *shape))
    x = rows.x.new_empty((total, *shape))
    step, row = rows.step.new_empty(total), rows.step.new_empty(total)
    _draft(
        *_flat(1, rows.x, rows.previous), *_flat(2, rows.noise), *_arrays(rows.step, rows.sample),
        *_arrays(memory.horizon, memory.slope, memory.response),
        *_flat(2, memory.states, memory.predictions), *_coefficients(target, speculation), length.numpy(),
        *_flat(2, states, guesses), *_flat(1, x), step.numpy(), row.numpy(),
    )  # fmt: skip
    needed = speculation.layout.needed(length, drafts)
    return CompiledDraft(Call(x, step, row, needed), states, guesses, length, offset)


def settle(
    target: Target, rows: Rows, draft: CompiledDraft, predictions: Tensor, speculation: Speculation
) -> tuple[Rows, Commit]:
    """See `core.round.settle`; in place."""
    memory = ReplayMemory.of(rows.memory)
    x, step, committed = torch.empty_like(rows.x), torch.empty_like(rows.step), torch.empty_like(rows.step)
    mismatch = torch.zeros(draft.guesses.shape[:2], dtype=torch.float64)
    _settle(
        *_flat(2, draft.states, draft.guesses), *_flat(1, predictions.detach().contiguous()),
        *_arrays(draft.offset, draft.length, rows.seed, rows.step, rows.round, rows.evaluations, rows.fault),
        *_flat(1, rows.previous), *_flat(2, rows.noise),
        *_arrays(memory.visited, memory.horizon, memory.slope, memory.response, memory.ready),
        *_flat(2, memory.states, memory.predictions), *_coefficients(target, speculation),
        speculation.block or speculation.window, verify.FAR, torch.finfo(x.dtype).eps,
        *_flat(1, x), *_arrays(step, committed, mismatch),
    )  # fmt: skip
    commit = Commit(rows.sample, rows.step, committed, draft.states, x, mismatch, draft.length)
    return replace(rows, x=x, step=step), commit


@cache
def prepare(dtype: torch.dtype) -> None:
    """Compile for chains of this dtype, before any clock runs, by one round of the smallest chain."""
    ones, shape = torch.ones(2, dtype=dtype), torch.Size([1])
    chain = SimpleNamespace(
        affine=True, std=ones, state_weight=ones, prediction_weight=ones, previous_weight=None
    )
    target = cast(Target, SimpleNamespace(chain=chain, std=ones, shape=shape, start=lambda noise, row: noise))
    speculation = Speculation(Replay(), 1, None, True, last_draftable(ones), Packed(), normal)
    rows = begin(target, speculation, torch.zeros(1, dtype=torch.int64))
    draft = propose(target, rows, speculation)
    _, commit = settle(target, rows, draft, draft.call.x, speculation)
    Tally(speculation.window, len(ones), ones.device, count).count(commit)


def _coefficients(target: Target, speculation: Speculation) -> tuple[Any, ...]:
    """The prior's J, std, and the weights of state, prediction and previous prediction; empty if missing."""
    chain, prior = cast(AffineChain, affine_chain(target)), cast(Replay, speculation.drafter).prior
    none = chain.std.new_empty(0)
    jacobian = None if prior is None else prior.jacobian
    previous = none if chain.previous_weight is None else chain.previous_weight
    weights = chain.std, chain.state_weight, chain.prediction_weight, previous
    return _arrays(none.view(0, 0, 0) if jacobian is None else jacobian, *weights)


def _flat(lead: int, *values: Tensor) -> tuple[Any, ...]:
    """Arrays over the same memory, with all dimensions after the first `lead` flattened."""
    return tuple(value.view(*value.shape[:lead], -1).numpy() for value in values)


def _arrays(*values: Tensor) -> tuple[Any, ...]:
    return tuple(value.contiguous().numpy() for value in values)
