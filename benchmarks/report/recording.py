"""A real run, recorded round by round: what the page's animation plays.

A one-dimensional chain, so that states can be drawn against steps. Guesses are recorded at the drafter and
commits at the observer; the test's own numbers (levels p, bars h, uniforms u) are worked out again from them
with the library's own functions.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from foresample.contracts import DrafterMemory, DraftPath, PreviousDraft
from foresample.core import coupling
from foresample.core import noise as streams
from foresample.core.report import Commit
from foresample.drafters import Replay
from foresample.engine.engine import sample
from foresample.targets import ChainTarget
from foresample.targets.mixture import GaussianMixture

STEPS, WINDOW, SEED = 24, 8, 0


@dataclass(frozen=True)
class Round:
    """One round of one row; lists run over the positions of its window."""

    step: int
    """The first transition."""
    states: list[float]
    """x and its L drafts, at steps step … step + L."""
    draft_mean: list[float]
    """[L]: where the draft of each next state was centred."""
    target_mean: list[float]
    """[L + 1]: where the target centres it, known after the call."""
    mismatch: list[float]
    """[L]"""
    bar: list[float]
    """[L]: h, the bar that the uniform has to stay below."""
    uniform: list[float]
    """[L]: u."""
    accepted: int
    x: float
    """The state after the last draft kept: corrected, or the exact transition after a whole window."""
    visited: int
    """Positions of this window that the last path had been at."""
    replayed: list[float]
    """[visited]: that path's states."""

    @property
    def length(self) -> int:
        """Transitions drafted, L."""
        return len(self.draft_mean)


@dataclass(frozen=True)
class Recording:
    """A run of one sample."""

    steps: int
    rounds: list[Round]
    density: list[tuple[float, float]]
    """(state, density) of the mixture that the chain ends in."""

    def to_json(self) -> dict[str, Any]:
        """Plain numbers, rounded to what a picture shows."""
        return _rounded(asdict(self))


class Overheard:
    """A drafter that writes down what another one guesses and remembers."""

    def __init__(self, drafter: Replay) -> None:
        self.drafter = drafter
        self.guesses: list[float] = []
        self.old: list[float] = []

    def begin(self, rows: int, window: int, like: Tensor) -> DrafterMemory:
        return self.drafter.begin(rows, window, like)

    def reach(self, memory: DrafterMemory, window: int) -> Tensor:
        self.guesses, self.old = [], memory["states"][0, : int(memory["visited"])].flatten().tolist()
        return self.drafter.reach(memory, window)

    def guess(
        self,
        memory: DrafterMemory,
        x: Tensor,
        position: int,
        step: Tensor,
        row: Tensor,
        before: PreviousDraft | None,
    ) -> Tensor:
        guess = self.drafter.guess(memory, x, position, step, row, before)
        self.guesses.append(float(guess))
        return guess

    def learn(self, memory: DrafterMemory, path: DraftPath, committed: Tensor) -> DrafterMemory:
        return self.drafter.learn(memory, path, committed)


def mixture() -> GaussianMixture:
    """Two narrow components on a line: paths have to decide."""
    columns = ([[-0.7], [0.8]], [0.15, 0.2], [0.45, 0.55])
    return GaussianMixture(*(torch.tensor(column, dtype=torch.float64) for column in columns))


def chain(steps: int = STEPS) -> ChainTarget:
    """The churned flow to it, the denoised estimate reused."""
    return mixture().flow(steps, 0.3, reuse="x0")


def record(steps: int = STEPS, window: int = WINDOW, seed: int = SEED) -> Recording:
    """Sample once, and keep every round."""
    target, drafter, rounds = chain(steps), Overheard(Replay()), list[Round]()
    (key,) = streams.seeds_of(seed, 1).tolist()

    def observe(commit: Commit) -> None:
        rounds.append(_round(target, drafter, commit, key, len(rounds)))

    sample(target, 1, window=window, seed=seed, drafter=drafter, observe=observe)
    return Recording(steps, rounds, _density(mixture()))


def _round(target: ChainTarget, drafter: Overheard, commit: Commit, key: int, number: int) -> Round:
    """The record of a round, from its calls."""
    length, first = int(commit.drafted), int(commit.step)
    states = commit.path[0, : length + 1]
    step = torch.arange(first, first + length + 1)
    row, std = torch.zeros_like(step), target.std[step]
    guess = torch.tensor(drafter.guesses[:length], dtype=states.dtype).view(-1, 1)
    draft_mean = target.mean(states[:-1], guess, step[:-1]).flatten()
    target_mean = target.mean(states, target.predict(states, step, row), step).flatten()

    gap = target_mean[:-1] - draft_mean
    mismatch = gap.abs() / std[:-1]
    s = gap.sign() * (states[1:, 0] - draft_mean) / std[:-1]
    log_p, levels = torch.zeros((), dtype=std.dtype), []
    for log_ratio in coupling.log_ratio(mismatch, s):
        log_p = (log_p + log_ratio).clamp(max=0.0)
        levels.append(log_p)
    level = torch.stack(levels) if levels else mismatch
    bar = coupling.acceptance(mismatch.roll(-1), level)
    bar[-1:] = level[-1:].exp()
    width = max(1, length)
    uniform = streams.uniform(torch.tensor([key]), width, round=torch.tensor([number]))[0, :length]
    return Round(
        step=first,
        states=states.flatten().tolist(),
        draft_mean=draft_mean.tolist(),
        target_mean=target_mean.tolist(),
        mismatch=mismatch.tolist(),
        bar=bar.tolist(),
        uniform=uniform.tolist(),
        accepted=int(commit.committed) - 1,
        x=float(commit.x),
        visited=len(drafter.old),
        replayed=drafter.old[: length + 1],
    )


def _density(target: GaussianMixture, points: int = 81) -> list[tuple[float, float]]:
    """The density of the mixture, up to three standard deviations around its components."""
    ends = torch.cat([target.means[:, 0] - 3 * target.stds, target.means[:, 0] + 3 * target.stds])
    x = torch.linspace(float(ends.min()), float(ends.max()), points, dtype=torch.float64).unsqueeze(1)
    each = torch.exp(-0.5 * ((x - target.means.T) / target.stds) ** 2) / target.stds * target.weights
    return list(zip(x.flatten().tolist(), (each.sum(1) / (2 * torch.pi) ** 0.5).tolist(), strict=True))


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _rounded(v) for key, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_rounded(v) for v in value]
    return round(value, 5) if isinstance(value, float) else value
