"""Speculative sampling: one round, in plain PyTorch, on any device.

A round of one row that stands at state x of step k:

    draft    L transitions with guessed predictions and the row's own noise, up to the next step that cannot
             be drafted across (a deterministic one, or the last of the chain)
    call     the target once, at x and at all L drafts
    verify   how many drafts to keep, up to where one strayed hopelessly, if it did (`verify`)
    commit   the drafts kept, and one transition more: from the residual if a draft was rejected, else the
             exact transition from the last draft, whose prediction the call has just given

So a round commits `accepted + 1` transitions for one call. With nothing to draft from (L = 0) it is a step
of the sequential sampler; a deterministic transition is the exact one with std 0. Nothing is special-cased.

`engine` runs rounds; `kernels.round` is this file once more in four kernels, for CUDA.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from foresample import noise as streams
from foresample.contracts import (
    NO_FAULT,
    Before,
    Drafter,
    Memory,
    Path,
    Target,
    broken,
    expand,
    is_multistep,
    note_fault,
    start_states,
    transition_mean,
)
from foresample.report import Tally
from foresample.verify import verify


@dataclass(frozen=True)
class Rows:
    """Samples under way: all that outlives a round. Memory is O(rows × window × state)."""

    sample: Tensor
    """[R]: index of the sample in the run."""
    seed: Tensor
    """[R]"""
    round: Tensor
    """[R]: rounds done, each of which was one call."""
    evaluations: Tensor
    """[R]: states evaluated."""
    step: Tensor
    """[R]: transitions committed; N in a slot with nothing to do."""
    fault: Tensor
    """[R]: NO_FAULT, or where a transition first used a number that is none (`contracts.fault_error`)."""
    x: Tensor
    """[R, *shape]: the last committed state."""
    previous: Tensor
    """[R, *shape]: the prediction at the state before x; only multistep targets look at it."""
    noise: Tensor
    """[R, L+1, *shape]: unspent noise of steps step … step + L, i.i.d. N(0, I) given all committed."""
    memory: Memory
    """The drafter's."""

    def tensors(self) -> list[Tensor]:
        """Every tensor, in a fixed order."""
        own = [value for value in vars(self).values() if isinstance(value, Tensor)]
        return own + [self.memory[name] for name in sorted(self.memory)]

    def map(self, change: Callable[..., Tensor], *others: Rows) -> Rows:
        """Rows of `change(tensor, *tensors of the others)`."""
        names = [name for name in vars(self) if name != "memory"]
        own = {n: change(*(getattr(rows, n) for rows in (self, *others))) for n in names}
        memory = {n: change(*(rows.memory[n] for rows in (self, *others))) for n in self.memory}
        return Rows(**own, memory=memory)


@dataclass(frozen=True)
class Call:
    """States at which the network is to be evaluated, in one batch."""

    x: Tensor
    """[B, *shape]"""
    step: Tensor
    """[B]"""
    row: Tensor
    """[B]: index of the sample in the run."""


@dataclass(frozen=True)
class Commit:
    """What one round committed, for those who watch a run."""

    sample: Tensor
    """[R]: index of the sample in the run."""
    step: Tensor
    """[R]: the first transition committed."""
    committed: Tensor
    """[R]: how many, at least 1; 0 for a slot with nothing to do."""
    path: Tensor
    """[R, W+1, *shape]: the round's first state and its drafts."""
    x: Tensor
    """[R, *shape]: the last state committed."""
    mismatch: Tensor
    """[R, W]: at the drafted transitions step … step + W − 1, 0 where none was examined."""
    drafted: Tensor
    """[R]: transitions drafted and examined (`verify.Verdict.length`)."""

    @property
    def states(self) -> Tensor:
        """[R, W+1, *shape]: states[r, j] is x_{step + 1 + j}, for j < committed[r]."""
        states = torch.cat([self.path[:, 1:], self.x.unsqueeze(1)], dim=1)
        states[torch.arange(len(self.x), device=self.x.device), self.committed - 1] = self.x
        return states


@dataclass(frozen=True)
class Settings:
    """How to speculate."""

    drafter: Drafter
    window: int
    block: int | None
    recycle: bool
    last: Tensor
    """[N]: from each step on, the first step not to be drafted across."""
    padded: bool = False
    """Evaluate every row at all W + 1 positions, needed or not: shapes are fixed and nothing is read back from
    the device, so that rounds can be queued and captured. Else only what is needed is evaluated."""


def one_round(
    target: Target, rows: Rows, settings: Settings, tally: Tally
) -> Generator[Call, Tensor, tuple[Rows, Commit]]:
    """Draft, call, verify, commit. Law: the committed states continue each row by the target's own chain.

    Yields the round's one call and is sent the predictions; counts itself in the tally.
    """
    steps, index = len(target.std), torch.arange(len(rows.x), device=rows.x.device)
    active = rows.step < steps
    first = rows.step.clamp(max=steps - 1)
    reach = settings.drafter.reach(rows.memory, settings.window)
    length = torch.minimum(reach, settings.last[first] - first)
    width = settings.window if settings.padded else max(1, int(length.max()))
    position = torch.arange(width + 1, device=rows.step.device)
    step = (first.unsqueeze(1) + position).clamp(max=steps - 1)
    std = target.std[step]

    states, draft_mean = draft(target, settings.drafter, rows, step, std)

    needed = position <= length.unsqueeze(1)
    row = rows.sample.unsqueeze(1).expand_as(step)
    predictions = yield from call(states, step, row, None if settings.padded else needed)
    target_mean = _target_means(target, rows, states, predictions, step)

    verdict = verify(
        rows.noise[:, :width],
        draft_mean,
        target_mean[:, :-1],
        std[:, :-1],
        length,
        streams.uniform(rows.seed, width, round=rows.round),
        block=settings.block,
        fresh=None if settings.recycle else _redrawn(rows, step[:, :-1]),
    )

    accepted, examined = verdict.accepted, verdict.length
    committed = active * (accepted + 1)
    noise = torch.cat([verdict.noise, rows.noise[:, width:]], dim=1)
    whole = expand(accepted == examined, rows.x)
    mean = torch.where(whole, target_mean[index, accepted], draft_mean[index, accepted.clamp(max=width - 1)])
    x = mean + expand(std[index, accepted], rows.x) * noise[index, accepted]

    # What broke at a draft that strayed is not learned from; it is a fault if a committed transition used it.
    network, state = broken(predictions), broken(states)
    lost = (network | state)[index, examined] & (accepted < examined)
    path = Path(states, predictions, states[:, 1:] - draft_mean, examined - lost.long())
    rows_after = replace(
        rows,
        round=rows.round + active,
        evaluations=rows.evaluations + active * (width if settings.padded else length) + active,
        step=rows.step + committed,
        fault=note_fault(rows.fault, network, state, step, position <= accepted.unsqueeze(1)),
        x=x,
        previous=predictions[index, accepted],
        noise=_advance(rows, noise, committed, steps, padded=settings.padded),
        memory=settings.drafter.learn(rows.memory, path, accepted + 1),
    )
    commit = Commit(rows.sample, rows.step, committed, states, x, verdict.mismatch, examined)
    tally.count(commit)
    return rows_after, commit


def call(states: Tensor, step: Tensor, row: Tensor, needed: Tensor | None) -> Generator[Call, Tensor, Tensor]:
    """The round's one call, at all positions or at those needed; returns predictions [R, W+1, *shape]."""
    if needed is None:
        prediction = yield Call(states.flatten(0, 1).clone(), step.flatten(), row.flatten())
        return prediction.view_as(states)
    predictions = torch.zeros_like(states)
    predictions[needed] = yield Call(states[needed], step[needed], row[needed])
    return predictions


def draft(target: Target, drafter: Drafter, rows: Rows, step: Tensor, std: Tensor) -> tuple[Tensor, Tensor]:
    """The drafted path from x: states [R, W+1, *shape], the first being x, and draft means [R, W, *shape]."""
    states, means, before, previous = [rows.x], [], None, rows.previous
    for j in range(step.shape[1] - 1):
        guess = drafter.guess(rows.memory, states[j], j, step[:, j], rows.sample, before)
        means.append(transition_mean(target, states[j], guess, step[:, j], previous))
        before, previous = Before(guess, expand(std[:, j], rows.x) * rows.noise[:, j]), guess
        states.append(means[j] + before.innovation)
    return torch.stack(states, 1), torch.stack(means, 1)


def begin(
    target: Target,
    drafter: Drafter,
    window: int,
    seed: Tensor,
    *,
    sample: Tensor | None = None,
    x: Tensor | None = None,
) -> Rows:
    """Rows at the start of their chains, one per seed: samples 0, 1, …, or those said; at states x if given."""
    zero = torch.zeros_like(seed)
    if sample is None:
        sample = torch.arange(len(seed), device=seed.device)
    if x is None:
        unit = streams.normal(seed, target.shape, target.std.dtype, stream=streams.START, step=zero, draw=zero)
        x = start_states(target, unit)
    position = torch.arange(window + 1, device=seed.device).expand(len(seed), -1)
    noise = _stream(seed, position, target.shape, x.dtype)
    x, memory = x.contiguous(), drafter.begin(len(seed), window, x[0])
    rounds, evaluations, step = (torch.zeros_like(seed) for _ in range(3))
    fault, previous = zero + NO_FAULT, torch.zeros_like(x)
    return Rows(sample, seed, rounds, evaluations, step, fault, x, previous, noise, memory)


def last_draftable(std: Tensor) -> Tensor:
    """From each step on, the first that is deterministic or the chain's last."""
    steps = len(std)
    stops = torch.where(std == 0, torch.arange(steps, device=std.device), steps - 1)
    return stops.flip(0).cummin(0).values.flip(0)


def _advance(rows: Rows, noise: Tensor, committed: Tensor, steps: int, *, padded: bool) -> Tensor:
    """Unspent noise after `committed` transitions: what is left of the window's, then the stream's next."""
    position = torch.arange(noise.shape[1], device=noise.device)
    source = position + committed.unsqueeze(1)
    index = torch.arange(len(noise), device=noise.device).unsqueeze(1)
    kept = noise[index, source.clamp(max=noise.shape[1] - 1)]
    step = rows.step.unsqueeze(1) + source
    new = source >= noise.shape[1]
    if padded:
        drawn = _stream(rows.seed, step, noise.shape[2:], noise.dtype)
        return torch.where(expand(new, noise), drawn, kept)
    new &= step < steps
    seed, step = rows.seed.unsqueeze(1).expand_as(new)[new], step[new]
    kept[new] = streams.normal(seed, noise.shape[2:], noise.dtype, step=step, draw=torch.zeros_like(step))
    return kept


def _target_means(target: Target, rows: Rows, states: Tensor, predictions: Tensor, step: Tensor) -> Tensor:
    """The target's means at all positions, [R, W+1, *shape]."""
    previous = predictions
    if is_multistep(target):
        previous = torch.cat([rows.previous.unsqueeze(1), predictions[:, :-1]], dim=1)
    flat = (v.flatten(0, 1) for v in (states, predictions, step, previous))
    return transition_mean(target, *flat).view_as(states)


def _redrawn(rows: Rows, step: Tensor) -> Tensor:
    """Noise for these steps that nobody has seen: the draw of this round."""
    return _stream(rows.seed, step, rows.noise.shape[2:], rows.noise.dtype, draw=rows.round + 1)


def _stream(
    seed: Tensor, step: Tensor, shape: torch.Size, dtype: torch.dtype, draw: Tensor | None = None
) -> Tensor:
    """The streams' noise for steps [R, W] of rows [R]: [R, W, *shape]."""
    draw = torch.zeros_like(seed) if draw is None else draw
    seed, draw = (v.unsqueeze(1).expand_as(step).flatten() for v in (seed, draw))
    return streams.normal(seed, shape, dtype, step=step.flatten(), draw=draw).view(*step.shape, *shape)
