"""The test that `start`, `predict` and `mean` process each row independently, with the same answer each time."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from foresample.backends import extra_noise, normal
from foresample.checks.findings import Finding
from foresample.contracts import Target, no_history, predict, remember, start_states, transition_mean
from foresample.core.look import (
    DIFFERS,
    PLACED,
    STATES,
    Difference,
    Part,
    Shift,
    State,
    dependence,
    placed,
    require_unedited,
    shift_at,
)
from foresample.core.noise import START, seeds_of

_AT_ONCE = 64  # states, of many steps, in one call
_DOUBTED = 64  # answers that are computed twice more, at most
_STARTS = 4 * STATES  # first states that are compared
_HELD = 2**24  # numbers in the states kept of a walk
_ELEMENTS = 2**20  # numbers in the states of one call


@dataclass(frozen=True)
class Answers:
    """A method of a target, with arguments for many rows and its first answers to them."""

    part: Part
    answer: Callable[[Tensor], Tensor]  # computes the answers of these indices again, in one call
    before: Tensor  # [M, *shape]: the first answers, NaN where there was no answer
    allowed: Tensor  # [M]: relative changes that rounding explains
    shift: Callable[[int], Shift]


@torch.no_grad()
def rows_are_independent(target: Target, seed: int = 0, rows: int | None = None) -> Finding:
    """Compute first states, predictions and means a second time, with other batch-mates, at every step of the chain.

    The answers along the paths of a few samples are computed again, in calls on states of many steps. A difference may
    be rounding, so such an answer is computed twice more, in calls of one size with different batch-mates.
    """
    key = seeds_of(seed, _STARTS).to(target.std.device)
    row = torch.arange(_STARTS, device=key.device) % (rows or STATES)
    start = _started(target, key, row)
    columns, edited = _walk(target, start.before[:STATES], key[:STATES], row[:STATES])
    worst = []
    for answers in (start, *_along(target, columns)):
        change, wrong = _depends(answers)
        if wrong is not None:
            return Finding("rows are independent", False, str(replace(wrong, part=answers.part)))
        worst.append(change)
    detail = (
        f"with other batch-mates a prediction changes by {worst[1]:.1e} of its size, a mean by {worst[2]:.1e}, a first "
        f"state by {worst[0]:.1e} ({len(target.std)} steps)"
    )
    if edited:
        detail += "; predict writes into its states, which is harmless, as they are copies"
    return Finding("rows are independent", True, detail)


def _depends(answers: Answers) -> tuple[float, Difference | None]:
    """The largest change of an answer, and its cause if one changes too much."""
    count, device = len(answers.before), answers.before.device
    changes = torch.zeros(count, dtype=torch.float32)
    order = torch.randperm(count, generator=torch.Generator().manual_seed(0))
    half = order % STATES < STATES // 2  # half of the samples, so that averages over the rows of a call differ
    at_once = max(STATES, min(_AT_ONCE, _ELEMENTS // answers.before[0].numel()))
    for part in (*order[half].split(at_once), *order[~half].split(at_once)):
        at = part.to(device)
        one, two = answers.before[at].flatten(1), answers.answer(at).flatten(1)
        apart = (one - two).norm(dim=1) / (one.norm(dim=1) + 1e-30)
        changes[part] = torch.where(apart.isfinite(), apart, 0.0).float().cpu()
    doubted = (changes > answers.allowed).nonzero().flatten()
    for i in doubted[torch.linspace(0, len(doubted) - 1, min(_DOUBTED, len(doubted))).long()].tolist():
        ask, shift, allowed = partial(_in_company, answers, i), answers.shift(i), float(answers.allowed[i])
        found = dependence(ask, shift, allowed)[1]
        if found is None:
            copies = answers.answer(torch.full((STATES,), i, device=device))
            found = placed(copies, shift, PLACED if answers.part == "prediction" else allowed)
        if found is not None:
            return float(changes.max()), found
    return float(changes.max()), None


def _in_company(answers: Answers, i: int, kind: int) -> Tensor:
    """Answer i, second in a call with answers of other samples (kind 0) or with copies of itself: an `Ask`."""
    away = [1, 2, 3] if kind == 0 else [0, 0, 0]
    mates = [(i + n) % len(answers.before) for n in away]
    at = torch.tensor([mates[0], i, *mates[1:]], device=answers.before.device)
    return answers.answer(at)[1].clone()


def _started(target: Target, key: Tensor, row: Tensor) -> Answers:
    """First states, made in calls of four rows."""
    zero = torch.zeros_like(key)
    unit = normal(key, target.shape, target.std.dtype, stream=START, step=zero, draw=zero)

    def started(i: Tensor) -> Tensor:
        return start_states(target, unit[i], row[i])

    x = torch.cat([started(i) for i in torch.arange(len(key), device=key.device).split(STATES)])
    return Answers("start", started, x, torch.full((len(key),), DIFFERS), lambda i: lambda one, two: (0, None))


def _walk(target: Target, x: Tensor, key: Tensor, row: Tensor) -> tuple[list[Any], bool]:
    """Take a few samples through the chain. Returns columns for `_along`, and whether predict writes into its states.

    The columns are states, steps, rows, predictions, earlier predictions, means and extra noise, at all steps, or at
    steps spread over the chain if all would take too much memory.
    """
    std, steps = target.std, len(target.std)
    kept = set(range(steps))
    if steps * x.numel() > _HELD:
        kept = set(torch.linspace(0, steps - 1, min(_AT_ONCE, steps)).long().tolist())
    walked, edited = [], False
    previous, zero = no_history(target, x), torch.zeros_like(key)
    for k in range(steps):
        step = torch.full_like(key, k)
        given = x.clone(), step.clone(), row.clone()
        extra = extra_noise(target, key, step)
        prediction = predict(target, *given, extra).clone()
        edited |= not torch.equal(given[0], x)
        require_unedited((step, row), given[1:])
        mean = transition_mean(target, x, prediction, step, previous, extra)
        if k in kept:
            walked.append((x, step, row, prediction, previous, mean, extra))
        previous = remember(target, prediction, previous)
        x = mean + std[k] * normal(key, target.shape, std.dtype, step=step, draw=zero)
    return [None if v[0] is None else torch.cat(v) for v in zip(*walked, strict=True)], edited


def _along(target: Target, columns: list[Any]) -> tuple[Answers, Answers]:
    """The predictions and means of a walk, from its columns."""
    x, step, row, prediction, previous, mean, extra = columns
    some = (lambda i: None) if extra is None else (lambda i: extra[i])

    def predicted(i: Tensor) -> Tensor:
        return predict(target, x[i], step[i], row[i], some(i))

    def meant(i: Tensor) -> Tensor:
        return transition_mean(target, x[i], prediction[i], step[i], previous[i], some(i))

    def of_prediction(i: int) -> Shift:
        one = slice(i, i + 1)
        return shift_at(target, State(x[one], step[one], row[one], some(one)))

    def of_mean(i: int) -> Shift:
        k, scale = int(step[i]), float(target.std[step[i]])
        return lambda one, two: (k, float((one - two).norm()) / scale if scale > 0 else None)

    # A mean's change matters relative to the step's noise, within the precision of its dtype.
    std = target.std[step] * math.sqrt(target.shape.numel())
    noise = 1e-2 * std / (mean.flatten(1).norm(dim=1) + 1e-30)
    allowed = torch.where(std > 0, noise.clamp(64 * torch.finfo(std.dtype).eps, DIFFERS), DIFFERS).float().cpu()
    return (
        Answers("prediction", predicted, prediction, torch.full_like(allowed, DIFFERS), of_prediction),
        Answers("mean", meant, mean, allowed, of_mean),
    )
