"""Draft trees: several drafts for each transition, all evaluated in one call. Exact.

From each node of a level, K children share the draft Gaussian N(draft_mean, std²); the draft freezes one
prediction for the whole tree. One call evaluates the root and all nodes. Then the tree is walked from the root:
at each node a test keeps one of its children, which is followed, or none, and the round ends with a state from
the residual. The walk that reaches a leaf takes the exact transition behind it, whose prediction is known.

Tests are about coordinates along the line through both means, s_1 … s_K i.i.d. N(0, 1) under the draft (theory,
section 2); the orthogonal part is standard normal and independent of all decisions. So the corrected state may
take it from a rejected child: that one is taken whose coordinate is nearest to the residual's, and its
prediction drafts the next tree (with K = 1, the `nearest` draft of the reflection chain).

    dgrs    children in turn, each against what the ones before it left of the target
    rass    one child, chosen by the rank of its coordinate
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from benchmarks.peers import ranks
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
from foresample.contracts import Target, at_least_one, expand
from foresample.core import coupling

Test = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
"""test(s [R, K], δ [R], uniforms [R, K + 2]) -> child kept [R] or −1, residual's coordinate [R]."""


def dgrs(
    target: Target, count: int, *, seed: int, children: Sequence[int], observe: Observer | None = None
) -> PeerRun:
    """Bullo et al. 2026, D-GRS: `children[l]` children for each node of level l, tried one after the other.

    A call evaluates 1 + Σ_l Π_{m ≤ l} children[m] states.
    """
    return tree(target, count, seed, children, try_in_turn, observe)


def rass(
    target: Target, count: int, *, seed: int, children: Sequence[int], observe: Observer | None = None
) -> PeerRun:
    """Bullo et al. 2026, RASS: the same trees; at each node one child, chosen by rank, is tried."""
    return tree(target, count, seed, children, try_by_rank, observe)


def nodes(children: Sequence[int]) -> int:
    """Drafts in a tree, the root not counted."""
    return sum(math.prod(children[: level + 1]) for level in range(len(children)))


def try_in_turn(s: Tensor, delta: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    """Keep child k with probability min(1, (ρ_k − λ_{k−1})₊/G_k), ρ_k = target/draft there.

    After k rejections what is left of the target is ∝ (target − λ_k draft)₊, of mass G_{k+1}, and λ_k is
    λ_{k−1} + G_k. With probability G_{K+1} none is kept, and the residual is that of λ_K.
    """
    levels = leftover(delta, s.shape[1])
    kept = torch.full_like(delta, -1, dtype=torch.int64)
    for k, (lam, mass) in enumerate(levels[:-1]):
        passed = uniforms[:, k] * mass < ratio(delta, s[:, k]) - lam
        kept = torch.where((kept < 0) & passed, k, kept)
    return kept, coupling.residual(uniforms[:, -1], delta, -levels[-1][0].log())


def leftover(delta: Tensor, count: int) -> list[tuple[Tensor, Tensor]]:
    """(λ_k, G_{k+1}) for k = 0 … K: λ_0 = 0, G_1 = 1, and for k ≥ 1

    G_{k+1} = ∫ (target − λ_k draft)₊ = Φ̄(ln λ_k/δ − δ/2) − λ_k Φ̄(ln λ_k/δ + δ/2) = λ_k S(δ, 1/λ_k)

    with the surplus S of the theory.
    """
    levels = [(torch.zeros_like(delta), torch.ones_like(delta))]
    for _ in range(count):
        lam = levels[-1][0] + levels[-1][1]
        levels.append((lam, lam * coupling.surplus(delta, -lam.log())))
    return levels


def try_by_rank(s: Tensor, delta: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    """Pick the child of rank r with probability λ_r, keep it with probability min(1, f/g), else (f − g)₊.

    A single child has but one rank: the test is that of children in turn, and cheaper there.
    """
    if s.shape[1] == 1:
        return try_in_turn(s, delta, uniforms)
    lean = ranks.leans(delta, s.shape[1])
    cumulative = (lean + 1 / s.shape[1]).cumsum(1)
    rank = (uniforms[:, :1] >= cumulative).sum(1, keepdim=True).clamp(max=s.shape[1] - 1)
    child = s.argsort(1).gather(1, rank).squeeze(1)
    picked = s.gather(1, child.unsqueeze(1)).squeeze(1)
    passed = uniforms[:, 1] * (1 + ranks.tilt(picked, lean)) < ratio(delta, picked)
    coordinate, failed = torch.zeros_like(picked), ~passed
    coordinate[failed] = ranks.residual(uniforms[failed, -1], delta[failed], lean[failed])
    return torch.where(passed, child, -1), coordinate


def tree(
    target: Target,
    count: int,
    seed: int,
    children: Sequence[int],
    test: Test,
    observe: Observer | None = None,
) -> PeerRun:
    """Rounds of one tree and test until all samples are at their end."""
    shape = tuple(at_least_one("children", number) for number in children)
    at_least_one("the depth of the tree", len(shape))
    counted = Counted(target, count)
    random = Random(torch.Generator(target.std.device).manual_seed(seed), target.std)
    with torch.no_grad():
        rows = counted.begin(seed)
        samples = torch.empty_like(rows.x)
        while len(rows.sample):
            rows, committed = one_round(counted, rows, shape, test, random)
            if observe is not None:
                observe(committed)
            done = rows.step == len(target.std)
            samples[rows.sample[done]] = rows.x[done]
            rows = rows.select(~done)
    return counted.finish(samples)


@dataclass(frozen=True)
class Random:
    """A run's random numbers, on the device of `like`: normals in its dtype, uniforms in float64."""

    generator: torch.Generator
    like: Tensor

    def normal(self, *size: int) -> Tensor:
        return torch.randn(size, generator=self.generator, dtype=self.like.dtype, device=self.like.device)

    def uniform(self, *size: int) -> Tensor:
        return torch.rand(size, generator=self.generator, dtype=torch.float64, device=self.like.device)


@dataclass(frozen=True)
class Level:
    """The nodes of one level and the drafts of their children: K i … K i + K − 1 of the next are node i's."""

    step: Tensor
    """[R]"""
    states: Tensor
    """[R, n, *shape]"""
    draft_mean: Tensor
    """[R, n, *shape]: of the children."""
    noise: Tensor
    """[R, n, K, *shape]: of the children; K = 0 at the leaves."""


def one_round(
    target: Counted, rows: Rows, children: tuple[int, ...], test: Test, random: Random
) -> tuple[Rows, Committed]:
    """Grow a tree, evaluate it in one call, walk it. A row without a prediction yet takes an exact step."""
    length = room(target.std)[rows.step].clamp(max=len(children)) * rows.has_guess
    levels = _grow(target, rows, children[: int(length.max())], random)
    predictions = _evaluate(target, rows, levels, length)
    path, committed, guess = _walk(target, rows, levels, predictions, length, test, random)
    rows_after = replace(
        rows,
        round=rows.round + 1,
        step=rows.step + committed,
        x=path[torch.arange(len(path), device=path.device), committed - 1],
        guess=guess,
        has_guess=torch.ones_like(rows.has_guess),
    )
    return rows_after, Committed(rows.sample, rows.step, committed, path)


def _grow(target: Counted, rows: Rows, children: tuple[int, ...], random: Random) -> list[Level]:
    """The root's level and one for each entry of `children`."""
    levels, x = [], rows.x.unsqueeze(1)
    for depth, count in enumerate([*children, 0]):
        step = (rows.step + depth).clamp(max=len(target.std) - 1)
        every = step.unsqueeze(1).expand(x.shape[:2]).flatten()
        guess = rows.guess.unsqueeze(1).expand_as(x).flatten(0, 1)
        mean = target.mean(x.flatten(0, 1), guess, every).view_as(x)
        noise = random.normal(*x.shape[:2], count, *target.shape)
        levels.append(Level(step, x, mean, noise))
        x = (mean.unsqueeze(2) + expand(target.std[step], noise) * noise).flatten(1, 2)
    return levels


def _evaluate(target: Counted, rows: Rows, levels: list[Level], length: Tensor) -> tuple[Tensor, ...]:
    """The predictions at the nodes of each level, from one call; a row's tree ends at its own length."""
    shapes = [level.states.shape[:2] for level in levels]
    x = torch.cat([level.states for level in levels], 1)
    step = torch.cat([v.step.unsqueeze(1).expand(shape) for v, shape in zip(levels, shapes, strict=True)], 1)
    grown = [(depth <= length).unsqueeze(1).expand(shape) for depth, shape in enumerate(shapes)]
    needed = torch.cat(grown, 1)
    sample = rows.sample.unsqueeze(1).expand_as(step)
    predictions = torch.zeros_like(x)
    predictions[needed] = target.predict(x[needed], step[needed], sample[needed])
    return predictions.split([shape[1] for shape in shapes], 1)


def _walk(
    target: Counted,
    rows: Rows,
    levels: list[Level],
    predictions: tuple[Tensor, ...],
    length: Tensor,
    test: Test,
    random: Random,
) -> tuple[Tensor, Tensor, Tensor]:
    """The states committed, [R, J, *shape], how many, [R], and the prediction for the next tree."""
    index = torch.arange(len(rows.x), device=rows.x.device)
    node, walking, committed = torch.zeros_like(rows.step), rows.step >= 0, torch.zeros_like(rows.step)
    guess, path = rows.guess, []
    for depth, level in enumerate(levels):
        std, prediction = target.std[level.step], predictions[depth][index, node]
        target_mean = target.mean(level.states[index, node], prediction, level.step)
        committed = committed + walking

        # At the end of the row's tree: the exact transition.
        ends = walking & (length == depth)
        exact = target_mean + expand(std, rows.x) * random.normal(*rows.x.shape)
        guess, walking = _put(ends, prediction, guess), walking & ~ends
        count = level.noise.shape[2]
        if not count or not walking.any():
            path.append(exact)
            break

        draft_mean, z = level.draft_mean[index, node], level.noise[index, node]
        delta, e = mismatch(draft_mean, target_mean, std, lead=1)
        s = along(e.unsqueeze(1), z, lead=2)
        uniforms = random.uniform(len(s), count + 2)
        kept, coordinate = torch.full_like(node, -1), torch.zeros_like(delta)
        kept[walking], coordinate[walking] = test(s[walking], delta[walking], uniforms[walking])

        # None kept: the residual's coordinate, all others from the child nearest to it.
        none = kept < 0
        child = torch.where(none, (s - coordinate.unsqueeze(1)).abs().argmin(1), kept)
        shift = torch.where(none, coordinate - s[index, child], 0.0).to(z.dtype)
        drafted = draft_mean + expand(std, e) * (z[index, child] + expand(shift, e) * e)
        path.append(_put(ends, exact, drafted))
        node = node * count + child
        guess = _put(walking & none, predictions[depth + 1][index, node], guess)
        walking = walking & ~none
    return torch.stack(path, 1), committed, guess


def _put(where: Tensor, new: Tensor, old: Tensor) -> Tensor:
    return torch.where(expand(where, new), new, old)
