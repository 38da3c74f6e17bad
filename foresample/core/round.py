"""Speculative sampling: one round, in plain PyTorch, on any device.

A round of one row that stands at state x of step k:

    propose   draft    L transitions with guessed predictions and the row's own noise, up to the next step that
                       cannot be drafted across (a deterministic one, or the last of the chain)
              call     the states at which to evaluate the target, at once: x and all L drafts
    settle    verify   how many drafts to keep, up to the first that strayed hopelessly, if one did (`verify`)
              commit   the drafts kept, and one transition more: from the residual if a draft was rejected, else
                       the exact transition from the last draft, whose prediction the call has just returned

So a round commits `accepted + 1` transitions for one call. Without drafts (L = 0) it is a step of the sequential
sampler; a deterministic transition is the exact one with std 0. Neither is a special case in the code.

Between the two halves the target is evaluated, by the engine or by a pipeline's own loop.
`backends.triton.round` is the same round in four kernels, for CUDA; `backends.numba.round` is compiled, for CPUs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from foresample.contracts import (
    Drafter,
    DrafterMemory,
    DraftPath,
    PreviousDraft,
    Target,
    begin_memory,
    earlier_predictions,
    expand,
    no_history,
    remember,
    start_states,
    times_written,
    transition_mean,
)
from foresample.core import noise as streams
from foresample.core.noise import Normal
from foresample.core.report import Commit
from foresample.core.verify import verify
from foresample.faults import NO_FAULT, broken, note_fault, note_state


@dataclass(frozen=True)
class Rows:
    """Samples under way: everything kept from round to round. Memory is O(rows × window × state)."""

    sample: Tensor  # [R]: index of the sample in the run
    seed: Tensor  # [R]
    round: Tensor  # [R]: rounds done, each of which was one call
    evaluations: Tensor  # [R]: states evaluated
    step: Tensor  # [R]: transitions committed; N in a slot with nothing to do
    fault: Tensor  # [R]: code of the first NaN or infinity that a transition used (`faults`)
    x: Tensor  # [R, *shape]: the last committed state
    previous: Tensor  # [R, *shape] or [R, 2, *shape]: predictions before x, for multistep targets
    noise: Tensor  # [R, L+1, *shape]: unspent, of steps step … step + L; i.i.d. N(0, I) given all committed
    memory: DrafterMemory

    def map(self, change: Callable[..., Tensor], *others: Rows) -> Rows:
        """Rows of `change(tensor, *tensors of the others)`."""
        names = [name for name in vars(self) if name != "memory"]
        own = {n: change(*(getattr(rows, n) for rows in (self, *others))) for n in names}
        memory = {n: change(*(rows.memory[n] for rows in (self, *others))) for n in self.memory}
        return Rows(**own, memory=memory)


@dataclass(frozen=True)
class Call:
    """States at which the target is to be evaluated, in one batch."""

    x: Tensor  # [B, *shape]
    step: Tensor  # [B]
    row: Tensor  # [B]: index of the sample in the run
    needed: Tensor | None  # [R, W+1]: positions of the window to evaluate; None for all
    extra: Tensor | None = None  # [B, *extra]: the target's extra noise, if it has any

    @staticmethod
    def at(
        states: Tensor, step: Tensor, row: Tensor, needed: Tensor | None, extra: Tensor | None = None
    ) -> Call:
        """The call at states [R, W+1, *shape], or at the needed ones of them."""
        if needed is None:
            extra = None if extra is None else extra.flatten(0, 1)
            return Call(states.flatten(0, 1).clone(), step.flatten(), row.flatten(), None, extra)
        return Call(states[needed], step[needed], row[needed], needed, None if extra is None else extra[needed])

    def spread(self, predictions: Tensor, states: Tensor) -> Tensor:
        """The predictions of the call, [B, *shape], at their positions, [R, W+1, *shape]; 0 at the others."""
        if self.needed is None:
            return predictions.view_as(states)
        spread = torch.zeros_like(states)
        spread[self.needed] = predictions
        return spread


class Packed:
    """Rounds that evaluate and draw only what is needed. Shapes follow the rows and are read back from the device."""

    def drafts(self, window: int) -> int:
        """The most transitions that a round drafts."""
        return window

    def width(self, length: Tensor, window: int) -> int:
        """Transitions to draft for rows that can draft `length`, [R], of them."""
        return max(1, int(length.max()))

    def needed(self, length: Tensor, width: int) -> Tensor | None:
        """[R, W+1]: the positions to evaluate; None for all."""
        return torch.arange(width + 1, device=length.device) <= length.unsqueeze(1)


@dataclass(frozen=True)
class Padded:
    """Rounds that evaluate and draw everything. Shapes are fixed and nothing is read back."""

    most: int | None = None  # transitions drafted, if no row can draft more; the whole window by default

    def drafts(self, window: int) -> int:
        return window if self.most is None else min(self.most, window)

    def width(self, length: Tensor, window: int) -> int:
        return self.drafts(window)

    def needed(self, length: Tensor, width: int) -> Tensor | None:
        return None


Layout = Packed | Padded


@dataclass(frozen=True)
class Speculation:
    """Settings of the rounds of one engine."""

    drafter: Drafter
    window: int
    block: int | None
    recycle: bool
    last: Tensor  # [N]: the first step, from each step on, that cannot be drafted across
    layout: Layout
    normal: Normal = streams.normal  # plain PyTorch's or a backend's


@dataclass(frozen=True)
class Draft:
    """A drafted window, and the call that verifies it."""

    call: Call
    states: Tensor  # [R, W+1, *shape]: x and its drafts
    mean: Tensor  # [R, W, *shape]: mean of each draft
    step: Tensor  # [R, W+1]: of each state
    length: Tensor  # [R]: transitions drafted; later positions hold nothing
    extra: Tensor | None = None  # [R, W+1, *extra]: the target's extra noise, for draft and target alike


def propose(target: Target, rows: Rows, speculation: Speculation) -> Draft:
    """Draft a window for each row, with the call that evaluates the target."""
    steps = len(target.std)
    first = rows.step.clamp(max=steps - 1)
    reach = speculation.drafter.reach(rows.memory, speculation.layout.drafts(speculation.window))
    length = torch.minimum(reach, speculation.last[first] - first)
    width = speculation.layout.width(length, speculation.window)
    position = torch.arange(width + 1, device=rows.step.device)
    step = (first.unsqueeze(1) + position).clamp(max=steps - 1)
    extra = streams.extra_noise(target, rows.seed, step, speculation.normal)
    states, mean = draft_path(target, speculation.drafter, rows, step, target.std[step], extra)
    row = rows.sample.unsqueeze(1).expand_as(step)
    call = Call.at(states, step, row, speculation.layout.needed(length, width), extra)
    return Draft(call, states, mean, step, length, extra)


def settle(
    target: Target, rows: Rows, draft: Draft, predictions: Tensor, speculation: Speculation
) -> tuple[Rows, Commit]:
    """Verify and commit, given the target's predictions at the draft's call.

    Distribution: the committed states continue each row by the target's own chain, and the noise left in the rows is
    i.i.d. N(0, I), independent of everything committed.
    """
    steps, index = len(target.std), torch.arange(len(rows.x), device=rows.x.device)
    active, step, width = rows.step < steps, draft.step, draft.mean.shape[1]
    std = target.std[step]
    predictions = draft.call.spread(predictions, draft.states)
    history = _history(target, rows, predictions)
    target_mean = _target_means(target, draft, predictions, history)

    verdict = verify(
        rows.noise[:, :width],
        draft.mean,
        target_mean[:, :-1],
        std[:, :-1],
        draft.length,
        streams.uniform(rows.seed, width, round=rows.round),
        block=speculation.block,
        fresh=None if speculation.recycle else _redrawn(rows, step[:, :-1], speculation),
    )

    accepted, examined = verdict.accepted, verdict.length
    committed = active * (accepted + 1)
    noise = torch.cat([verdict.noise, rows.noise[:, width:]], dim=1)
    whole = expand(accepted == examined, rows.x)
    mean = torch.where(whole, target_mean[index, accepted], draft.mean[index, accepted.clamp(max=width - 1)])
    x = mean + expand(std[index, accepted], rows.x) * noise[index, accepted]

    # Drafters do not learn from a broken value at a draft that strayed; in a committed transition it is a fault.
    network, state = broken(predictions), broken(draft.states)
    lost = (network | state)[index, examined] & (accepted < examined)
    innovations = draft.states[:, 1:] - draft.mean
    path = DraftPath(draft.states, predictions, innovations, examined - lost.long(), step[:, 0])
    used = torch.arange(width + 1, device=step.device) <= accepted.unsqueeze(1)
    after = rows.step + committed
    evaluated = width + 1 if draft.call.needed is None else draft.length + 1
    fault = note_state(note_fault(rows.fault, network, state, step, used), x, after)
    rows_after = replace(
        rows,
        round=rows.round + active,
        evaluations=rows.evaluations + active * evaluated,
        step=after,
        fault=torch.where(active, fault, rows.fault),
        x=x,
        previous=history[:, -width - 1 :][index, accepted],
        noise=_advance(rows, noise, committed, steps, speculation),
        memory=speculation.drafter.learn(rows.memory, path, accepted + 1),
    )
    return rows_after, Commit(rows.sample, rows.step, committed, draft.states, x, verdict.mismatch, examined)


def draft_path(
    target: Target, drafter: Drafter, rows: Rows, step: Tensor, std: Tensor, extra: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The drafted path from x: states [R, W+1, *shape], the first being x, and draft means [R, W, *shape]."""
    states, means, before, previous = [rows.x], [], None, rows.previous
    for j in range(step.shape[1] - 1):
        written = times_written(states[j])
        guess = drafter.guess(rows.memory, states[j], j, step[:, j], rows.sample, before)
        if times_written(states[j]) != written:
            raise ValueError(
                f"{type(drafter).__name__}.guess writes into the states it is given: work on a copy"
            )
        at = None if extra is None else extra[:, j]
        # A copy, because a mean may be returned in the same memory every time.
        means.append(transition_mean(target, states[j], guess, step[:, j], previous, at).clone())
        before = PreviousDraft(guess, expand(std[:, j], rows.x) * rows.noise[:, j])
        previous = remember(target, guess, previous)
        states.append(means[j] + before.innovation)
    return torch.stack(states, 1), torch.stack(means, 1)


def begin(
    target: Target,
    speculation: Speculation,
    seed: Tensor,
    *,
    sample: Tensor | None = None,
    x: Tensor | None = None,
) -> Rows:
    """Rows at the start of their chains, one per seed: samples 0, 1, … or the given ones, at states x if given."""
    zero = torch.zeros_like(seed)
    if sample is None:
        sample = torch.arange(len(seed), device=seed.device)
    if x is None:
        unit = speculation.normal(
            seed, target.shape, target.std.dtype, stream=streams.START, step=zero, draw=zero
        )
        x = start_states(target, unit, sample)
    position = torch.arange(speculation.window + 1, device=seed.device).expand(len(seed), -1)
    noise = _stream(speculation, seed, position, x.unsqueeze(1))
    x, memory = x.contiguous(), begin_memory(speculation.drafter, speculation.window, sample, x[0])
    rounds, evaluations, step = (torch.zeros_like(seed) for _ in range(3))
    fault, previous = zero + NO_FAULT, no_history(target, x)
    return Rows(sample, seed, rounds, evaluations, step, fault, x, previous, noise, memory)


def last_draftable(std: Tensor) -> Tensor:
    """[N]: the first step, from each step on, that is deterministic or the chain's last."""
    steps = len(std)
    stops = torch.where(std == 0, torch.arange(steps, device=std.device), steps - 1)
    return stops.flip(0).cummin(0).values.flip(0)


def can_draft(target: Target) -> bool:
    """Whether there is any transition to draft: one with noise that is not the last."""
    std = target.std
    return bool((last_draftable(std) > torch.arange(len(std), device=std.device)).any())


def _advance(rows: Rows, noise: Tensor, committed: Tensor, steps: int, speculation: Speculation) -> Tensor:
    """Unspent noise after `committed` transitions: the rest of the window's, then the stream's next."""
    position = torch.arange(noise.shape[1], device=noise.device)
    source = position + committed.unsqueeze(1)
    index = torch.arange(len(noise), device=noise.device).unsqueeze(1)
    kept = noise[index, source.clamp(max=noise.shape[1] - 1)]
    new, step = source >= noise.shape[1], rows.step.unsqueeze(1) + source
    if isinstance(speculation.layout, Padded):
        return torch.where(expand(new, kept), _stream(speculation, rows.seed, step, kept), kept)
    new = new & (step < steps)
    seed, step = rows.seed.unsqueeze(1).expand_as(new)[new], step[new]
    kept[new] = speculation.normal(seed, kept.shape[2:], kept.dtype, step=step, draw=torch.zeros_like(step))
    return kept


def _target_means(target: Target, draft: Draft, predictions: Tensor, history: Tensor) -> Tensor:
    """The target's means at all positions, [R, W+1, *shape]."""
    values = (draft.states, predictions, draft.step, history[:, : predictions.shape[1]])
    x, prediction, step, previous = (v.flatten(0, 1) for v in values)
    extra = None if draft.extra is None else draft.extra.flatten(0, 1)
    return transition_mean(target, x, prediction, step, previous, extra).view_as(predictions)


def _history(target: Target, rows: Rows, predictions: Tensor) -> Tensor:
    """Earlier predictions as the means see them, at all positions and the one after them: [R, W+2, *…].

    A one-step target uses none of them: then these are the predictions themselves, [R, W+1, *shape].
    """
    earlier = earlier_predictions(target)
    if earlier == 0:
        return predictions
    if earlier == 1:
        return torch.cat([rows.previous.unsqueeze(1), predictions], dim=1)
    all_of_them = torch.cat([rows.previous.flip(1), predictions], dim=1)
    return torch.stack([all_of_them[:, 1:], all_of_them[:, :-1]], dim=2)


def _redrawn(rows: Rows, step: Tensor, speculation: Speculation) -> Tensor:
    """Unused noise for these steps: this round's own draw of the stream."""
    return _stream(speculation, rows.seed, step, rows.noise, draw=rows.round + 1)


def _stream(
    speculation: Speculation, seed: Tensor, step: Tensor, like: Tensor, draw: Tensor | None = None
) -> Tensor:
    """The streams' noise for steps [R, W] of rows [R], of the shape and dtype of states like[r, j]: [R, W, *shape]."""
    shape = like.shape[2:]
    draw = torch.zeros_like(seed) if draw is None else draw
    seed, draw = (v.unsqueeze(1).expand_as(step).flatten() for v in (seed, draw))
    return speculation.normal(seed, shape, like.dtype, step=step.flatten(), draw=draw).view(*step.shape, *shape)
