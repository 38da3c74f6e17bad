"""The fingerprint of a target: a few numbers that differ between targets, but not between machines.

    start        the first states of two samples
    mean         the mean of every transition, at one fixed state and prediction, in blocks of steps
    prediction   the predictions at two states in each of eight steps, for sixteen samples: the first eight and eight
                 others (or all, if there are fewer), so that most changes to a table of conditions are noticed

The states of the predictions are near those that the chain visits: two chains walk from their start with fixed noise,
and steps between the eight reuse the last prediction, so the walk takes eight calls on four states. A number is a
projection v = ⟨r, value⟩ / √d on a fixed random direction r ~ N(0, I), so a change of the value with root mean
square δ changes the number by about δ.

Starts and means are arithmetic in the chain's own dtype: they may differ by √ε of their size, ε being the dtype's
precision. Predictions come from a network, whose rounding depends on the machine, its threads and its dtype: a
prediction may differ by 2⁻⁷ of its size, or by four times as much as in a second walk whose states are off by 2⁻⁸, the
precision of bfloat16. A smaller change of a network is taken for rounding. NaN and infinity are left out, because a
broken sample may be drawn again later.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from random import Random
from typing import Annotated

import torch
from torch import Tensor

from foresample.backends import extra_noise, normal
from foresample.contracts import (
    Target,
    expand,
    no_history,
    predict,
    remember,
    start_states,
    transition_mean,
)
from foresample.core.noise import START
from foresample.schema import Rule
from foresample.text import printable

Mark = Annotated[list[float], Rule("a number and its tolerance", lambda mark: len(mark) == 2 and mark[1] >= 0)]
Fingerprint = dict[str, Mark]
"""Name → a number and its tolerance."""

_PATHS, _STOPS, _BLOCKS, _WALK = 2, 8, 32, 1024
_SEED = 2**61  # away from the seeds that people choose
_HALF = 2.0**-8  # relative precision of bfloat16
_AT_A_TIME = 2**20  # elements of the states in one call of `mean`


def fingerprint(target: Target, count: int) -> Fingerprint:
    """The fingerprint of a target, computed at samples 0 … count − 1 only."""
    with torch.no_grad():
        return {**_means(target), **_walk(target, _rows(count))}


def difference(there: Mapping[str, list[float]], here: Mapping[str, list[float]]) -> str | None:
    """Half a sentence about the largest difference of two fingerprints, None if they agree."""
    shared = [name for name in there if name in here]
    if not shared:
        return "their fingerprints have nothing in common"

    def excess(name: str) -> float:
        (one, tolerance), (two, other) = there[name], here[name]
        return abs(one - two) / max(tolerance, other, 1e-300)

    worst = max(shared, key=excess)
    if excess(worst) <= 1:
        return None
    one, two = there[worst][0], here[worst][0]
    return f"its {printable(worst)} is {one:.6g} there and {two:.6g} here, which no rounding explains"


def _means(target: Target) -> Fingerprint:
    """The mean of every step at one state and prediction."""
    std, shape = target.std, target.shape
    rounding = math.sqrt(torch.finfo(std.dtype).eps)
    x, prediction, direction = (_noise(target, i) for i in range(3))
    like = no_history(target, x)
    previous = torch.cat([_noise(target, 3 + i) for i in range(like.numel() // x.numel())]).view(like.shape)
    values, scales = [], []
    for step in torch.arange(len(std), device=std.device).split(max(1, _AT_A_TIME // shape.numel())):
        history = expand((step > 0).to(std.dtype), previous)  # none at step 0
        mean = transition_mean(
            target,
            x.repeat(len(step), *[1] * len(shape)),
            prediction.repeat(len(step), *[1] * len(shape)),
            step,
            previous * history,
            extra_noise(target, torch.full_like(step, _SEED), step),
        )
        values.append(_projected(mean, direction))
        scales.append(_size(mean) + _size(x) + _size(prediction))
    marks: Fingerprint = {}
    value, scale = torch.cat(values), torch.cat(scales)
    # With weights, an exchange of two steps is noticed.
    weight = 1 + (0.618 * torch.arange(len(std), dtype=torch.float64)) % 1
    for block in torch.arange(len(std)).split(-(-len(std) // _BLOCKS)):
        first, last = int(block[0]), int(block[-1])
        name = f"mean at step {first}" if first == last else f"mean at steps {first} to {last}"
        total = (weight * value)[block].sum() / math.sqrt(len(block))
        _note(marks, name, total, rounding * scale[block].max())
    return marks


def _rows(count: int) -> Tensor:
    """[stops, paths]: the samples whose predictions are part of the fingerprint."""
    total = _PATHS * _STOPS
    rows = list(range(min(count, total)))
    if count > total:
        rows[::2], rows[1::2] = range(_STOPS), Random(0).sample(range(_STOPS, min(count, 2**53)), _STOPS)
    return torch.tensor([rows[i % len(rows)] for i in range(total)]).view(_STOPS, _PATHS)


def _walk(target: Target, rows: Tensor) -> Fingerprint:
    """Starts, and predictions along a walk near the chain.

    Each path has a twin, whose state is perturbed at every prediction by as much as a network rounds. The distance
    between the two is the effect of rounding, at that step and later.
    """
    std = target.std
    asked = getattr(target, "unrecorded", target)  # calls of the walk are not recorded
    marks: Fingerprint = {}
    rows, direction = rows.to(std.device), _noise(target, 2)
    path = _SEED + torch.arange(_PATHS, device=std.device)
    seed = path.repeat(2)  # twins share their noise
    unit = _unit(path, target, stream=START).repeat(2, *[1] * len(target.shape))
    x = start_states(target, unit, rows[0].repeat(2))
    tolerance = math.sqrt(torch.finfo(std.dtype).eps) * (_size(x) + _size(unit))
    for row, *mark in zip(rows[0].tolist(), _projected(x, direction), tolerance, strict=False):
        _note(marks, f"start of sample {row}", *mark)
    prediction, previous = torch.zeros_like(x), no_history(target, x)
    sound = _finite(x)
    steps = torch.linspace(0, len(std) - 1, min(_WALK, len(std))).long().unique().tolist()
    stops = torch.linspace(0, len(steps) - 1, min(_STOPS, len(steps))).long().unique().tolist()
    for turn, k in enumerate(steps):
        step = torch.full_like(seed, k)
        extra, noise = extra_noise(target, seed, step), _unit(path, target, k)
        if turn in stops:
            row = rows[stops.index(turn)]
            x[_PATHS:] *= 1 + _HALF * _unit(path, target, k, draw=1)
            prediction = predict(asked, x.clone(), step, row.repeat(2), extra).clone()
            sound &= _finite(prediction)
            prediction = torch.where(expand(sound, prediction), prediction, 0.0)
            one, twin = prediction.chunk(2)
            tolerance = torch.maximum(2 * _HALF * _size(one), 4 * _size(one - twin))
            value = _projected(one, direction)
            for i in sound.view(2, _PATHS).all(0).nonzero().flatten().tolist():
                _note(marks, f"prediction at step {k} of sample {int(row[i])}", value[i], tolerance[i])
        x = transition_mean(target, x, prediction, step, previous, extra) + std[k] * torch.cat([noise, noise])
        previous = remember(target, prediction, previous)
        sound &= _finite(x)
        x = torch.where(expand(sound, x), x, 0.0)
        if not sound.any():
            break
    return marks


def _note(marks: Fingerprint, name: str, value: Tensor, tolerance: Tensor) -> None:
    numbers = [float(f"{float(number):.10g}") for number in (value, tolerance)]
    if all(map(math.isfinite, numbers)):
        marks[name] = numbers


def _finite(values: Tensor) -> Tensor:
    """[R]: whether all values of a row are finite."""
    return torch.isfinite(values.flatten(1)).all(1)


def _noise(target: Target, number: int) -> Tensor:
    """Fixed unit noise of this number, [1, *shape]."""
    return _unit(torch.tensor([_SEED - 1], device=target.std.device), target, draw=number)


def _unit(seed: Tensor, target: Target, step: int = 0, draw: int = 0, **stream: int) -> Tensor:
    """Unit noise of these seeds, [R, *shape]."""
    at, number = torch.full_like(seed, step), torch.full_like(seed, draw)
    return normal(seed, target.shape, target.std.dtype, step=at, draw=number, **stream)


def _projected(values: Tensor, direction: Tensor) -> Tensor:
    """⟨r, value⟩ / √d of each row, on the host."""
    flat = values.flatten(1).cpu().double()
    return flat @ direction.flatten().cpu().double() / math.sqrt(flat.shape[1])


def _size(values: Tensor) -> Tensor:
    """The root mean square of each row, on the host."""
    return values.flatten(1).cpu().double().square().mean(1).sqrt()
