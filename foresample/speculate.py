"""Speculative sampling: one round, and `sample`.

A round of one row that stands at state x of step k:

    draft    L transitions with guessed predictions and the row's own noise, up to the next step that cannot
             be drafted across (a deterministic one, or the last of the chain)
    call     the target once, at x and at all L drafts
    verify   how many drafts to keep (`verify`)
    commit   the drafts kept, and one transition more: from the residual if a draft was rejected, else the
             exact transition from the last draft, whose prediction the call has just given

So a round commits `accepted + 1` transitions for one call. With nothing to draft from (L = 0) it is a step
of the sequential sampler; a deterministic transition is the exact one with std 0. Nothing is special-cased.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, replace
from time import perf_counter
from typing import cast

import torch
from torch import Tensor

from foresample import noise as streams
from foresample.contracts import (
    Before,
    Drafter,
    Memory,
    Path,
    Target,
    at_least_one,
    is_multistep,
    predict,
    require_drafter,
    require_finite,
    require_target,
    start_states,
    transition_mean,
)
from foresample.drafters import Replay
from foresample.report import Report, Run, Tally
from foresample.verify import verify


@dataclass(frozen=True)
class Rows:
    """Samples under way: all that outlives a round. Memory is O(rows × window × state)."""

    sample: Tensor
    """[R]: index of the sample in the run."""
    seed: Tensor
    """[R]"""
    round: Tensor
    """[R]: rounds done."""
    step: Tensor
    """[R]: transitions committed."""
    x: Tensor
    """[R, *shape]: the last committed state."""
    previous: Tensor
    """[R, *shape]: the prediction at the state before x; only multistep targets look at it."""
    noise: Tensor
    """[R, L+1, *shape]: unspent noise of steps step … step + L, i.i.d. N(0, I) given all committed."""
    memory: Memory
    """The drafter's."""

    def select(self, index: Tensor) -> Rows:
        """Some of the rows."""
        return Rows(
            self.sample[index],
            self.seed[index],
            self.round[index],
            self.step[index],
            self.x[index],
            self.previous[index],
            self.noise[index],
            {name: value[index] for name, value in self.memory.items()},
        )


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
    """[R]: how many, at least 1."""
    states: Tensor
    """[R, W+1, *shape]: states[r, j] is x_{step + 1 + j}, for j < committed[r]."""
    mismatch: Tensor
    """[R, W]: at the drafted transitions step … step + W − 1, 0 where none was drafted."""
    drafted: Tensor
    """[R]: transitions drafted; the call evaluated one state more."""


@dataclass(frozen=True)
class Settings:
    """How to speculate."""

    drafter: Drafter
    window: int
    block: int | None
    recycle: bool
    last: Tensor
    """[N]: from each step on, the first step not to be drafted across."""


def one_round(target: Target, rows: Rows, settings: Settings) -> Generator[Call, Tensor, tuple[Rows, Commit]]:
    """Draft, call, verify, commit. Law: the committed states continue each row by the target's own chain.

    Yields the round's one call and is sent the predictions.
    """
    index = torch.arange(len(rows.x), device=rows.x.device)
    reach = settings.drafter.reach(rows.memory, settings.window)
    length = torch.minimum(reach, settings.last[rows.step] - rows.step)
    width = max(1, int(length.max()))
    position = torch.arange(width + 1, device=rows.step.device)
    step = (rows.step.unsqueeze(1) + position).clamp(max=len(target.std) - 1)
    std = target.std[step]

    states, draft_mean = draft(target, settings.drafter, rows, step, std)

    needed = position <= length.unsqueeze(1)
    row = rows.sample.unsqueeze(1).expand_as(step)
    predictions = torch.zeros_like(states)
    predictions[needed] = yield Call(states[needed], step[needed], row[needed])
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

    accepted = verdict.accepted
    noise = torch.cat([verdict.noise, rows.noise[:, width:]], dim=1)
    whole = _expand(accepted == length, rows.x)
    mean = torch.where(whole, target_mean[index, accepted], draft_mean[index, accepted.clamp(max=width - 1)])
    x = mean + _expand(std[index, accepted], rows.x) * noise[index, accepted]

    drafted = Path(states, predictions, states[:, 1:] - draft_mean, length)
    rows_after = replace(
        rows,
        round=rows.round + 1,
        step=rows.step + accepted + 1,
        x=x,
        previous=predictions[index, accepted],
        noise=_advance(rows, noise, accepted + 1, len(target.std)),
        memory=settings.drafter.learn(rows.memory, drafted, accepted + 1),
    )
    path = torch.cat([states[:, 1:], x.unsqueeze(1)], dim=1)
    path[index, accepted] = x
    return rows_after, Commit(rows.sample, rows.step, accepted + 1, path, verdict.mismatch, length)


def draft(target: Target, drafter: Drafter, rows: Rows, step: Tensor, std: Tensor) -> tuple[Tensor, Tensor]:
    """The drafted path from x: states [R, W+1, *shape], the first being x, and draft means [R, W, *shape]."""
    states, means, before, previous = [rows.x], [], None, rows.previous
    for j in range(step.shape[1] - 1):
        guess = drafter.guess(rows.memory, states[j], j, step[:, j], rows.sample, before)
        means.append(transition_mean(target, states[j], guess, step[:, j], previous))
        before, previous = Before(guess, _expand(std[:, j], rows.x) * rows.noise[:, j]), guess
        states.append(means[j] + before.innovation)
    return torch.stack(states, 1), torch.stack(means, 1)


def all_rounds(
    target: Target, rows: Rows, settings: Settings, observe: Callable[[Commit], None]
) -> Generator[Call, Tensor, Tensor]:
    """Rounds until every row is at its end. Yields calls, is sent predictions, returns samples [R, *shape]."""
    samples = torch.empty_like(rows.x)
    while len(rows.sample):
        rows, commit = yield from one_round(target, rows, settings)
        observe(commit)
        done = rows.step == len(target.std)
        if done.any():
            samples[rows.sample[done]] = rows.x[done]
            rows = rows.select((~done).nonzero().squeeze(1))
    return samples


def sample(
    target: Target,
    count: int | None = None,
    *,
    window: int,
    seed: int = 0,
    seeds: Sequence[int] | Tensor | None = None,
    drafter: Drafter | None = None,
    block: int | None = None,
    recycle: bool = True,
    observe: Callable[[Commit], None] | None = None,
) -> Run:
    """Draw samples whose law is exactly that of `sequential`, with far fewer sequential calls.

    A sample depends on its seed and the settings, not on its batch-mates.

    Args:
        target: the chain to sample.
        count: number of samples; may be left out when `seeds` are given.
        window: transitions drafted in a round, L; a call evaluates at most L + 1 states of each sample.
        seed: the run's seed, from which each sample's is derived.
        seeds: one seed per sample instead.
        drafter: where guesses come from; `Replay()` by default.
        block: transitions verified as one block; the whole window by default. 1 is the per-step test.
        recycle: turn rejected noise back into fresh noise; False draws fresh noise instead.
        observe: called after every round with what it committed.
    """
    require_target(target)
    window = at_least_one("window", window)
    block = None if block is None else at_least_one("block", block)
    drafter = Replay() if drafter is None else drafter
    require_drafter(drafter)
    key = resolve_seeds(count, seed, seeds).to(target.std.device)
    settings = Settings(drafter, window, block, recycle, last_draftable(target.std))
    name = f"{drafter}, block {block or 'window'}, {'recycled' if recycle else 'fresh'} noise"
    tally = Tally(Report(name, len(target.std), len(key), window), key.device)

    def watch(commit: Commit) -> None:
        count_round(tally, commit)
        if observe is not None:
            observe(commit)

    started, timed = perf_counter(), Timed(target)
    with torch.no_grad():
        rounds = all_rounds(target, begin(target, drafter, window, key), settings, watch)
        samples = _answer(rounds, timed)
    require_finite(samples)
    return tally.close(samples, perf_counter() - started, timed.seconds)


def _answer(rounds: Generator[Call, Tensor, Tensor], target: Target) -> Tensor:
    """Answer every call with the target's prediction; returns what the rounds return."""
    call = next(rounds)
    while True:
        try:
            call = rounds.send(predict(target, call.x, call.step, call.row))
        except StopIteration as end:
            return cast(Tensor, end.value)


def begin(target: Target, drafter: Drafter, window: int, seed: Tensor, x: Tensor | None = None) -> Rows:
    """Rows at the start of their chains, one per seed; at the states x if these are given."""
    zero = torch.zeros_like(seed)
    if x is None:
        unit = streams.normal(seed, target.shape, target.std.dtype, stream=streams.START, step=zero, draw=zero)
        x = start_states(target, unit)
    sample = torch.arange(len(seed), device=seed.device)
    unspent = x.new_empty((len(seed), window + 1, *target.shape))
    memory = drafter.begin(len(seed), window, x[0])
    rows = Rows(sample, seed, zero, zero, x, torch.zeros_like(x), unspent, memory)
    everything = torch.full_like(zero, window + 1)
    return replace(
        rows, noise=_advance(replace(rows, step=zero - everything), unspent, everything, len(target.std))
    )


def resolve_seeds(count: int | None, seed: int, seeds: Sequence[int] | Tensor | None) -> Tensor:
    """One seed per sample."""
    if seeds is None:
        if count is None:
            raise ValueError("say how many samples to draw: count=64, or seeds=[…], one per sample")
        return streams.seeds_of(seed, at_least_one("count", count))
    key = streams.as_seeds(seeds)
    if count is not None and len(key) != count:
        raise ValueError(f"{len(key)} seeds for count={count} samples: give one seed per sample, or no count")
    if not len(key):
        raise ValueError("seeds is empty: give one seed per sample")
    return key


def last_draftable(std: Tensor) -> Tensor:
    """From each step on, the first that is deterministic or the chain's last."""
    steps = len(std)
    stops = torch.where(std == 0, torch.arange(steps, device=std.device), steps - 1)
    return stops.flip(0).cummin(0).values.flip(0)


def _advance(rows: Rows, noise: Tensor, committed: Tensor, steps: int) -> Tensor:
    """Unspent noise after `committed` transitions: what is left of the window's, then the stream's next."""
    position = torch.arange(noise.shape[1], device=noise.device)
    source = position + committed.unsqueeze(1)
    index = torch.arange(len(noise), device=noise.device).unsqueeze(1)
    kept = noise[index, source.clamp(max=noise.shape[1] - 1)]
    step = rows.step.unsqueeze(1) + source
    new = (source >= noise.shape[1]) & (step < steps)
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
    seed = rows.seed.unsqueeze(1).expand_as(step).flatten()
    draw = (rows.round + 1).unsqueeze(1).expand_as(step).flatten()
    shape = rows.noise.shape[2:]
    drawn = streams.normal(seed, shape, rows.noise.dtype, step=step.flatten(), draw=draw)
    return drawn.view(*step.shape, *shape)


def _expand(scalar: Tensor, like: Tensor) -> Tensor:
    return scalar.view(-1, *(1,) * (like.ndim - 1))


def count_round(tally: Tally, commit: Commit) -> None:
    """Enter one round's commit."""
    tally.round(commit.sample, commit.drafted + 1, commit.drafted, commit.committed - 1)
    position = torch.arange(commit.mismatch.shape[1], device=commit.mismatch.device)
    inside = position < commit.drafted.unsqueeze(1)
    tally.mismatches((commit.step.unsqueeze(1) + position)[inside], commit.mismatch[inside])


class Timed:
    """A target that clocks its own predictions."""

    def __init__(self, target: Target) -> None:
        self.shape, self.std, self.start, self.mean = target.shape, target.std, target.start, target.mean
        self.multistep = is_multistep(target)
        self._predict = target.predict
        self.seconds = 0.0

    def predict(self, x: Tensor, step: Tensor, row: Tensor) -> Tensor:
        started = perf_counter()
        prediction = self._predict(x, step, row)
        self.seconds += perf_counter() - started
        return prediction
