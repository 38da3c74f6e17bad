"""The errors that `foresample.check` finds, as a table: `python -m tests.power` writes it into docs/guarantee.md.

Each row is a twin of a sound target, drafter or sampler with one thing wrong. `tests/test_power.py` runs all of them
and compares the answers with the table.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

import foresample as fs
from benchmarks.tables import filled
from benchmarks.tables.markdown import table
from foresample.contracts import Wrapper
from foresample.core import round as rounds
from foresample.settings import Settings
from foresample.targets import ChainTarget
from tests.support.small_chains import LooksAhead, flow

PAGE = Path(__file__).parent.parent / "docs" / "guarantee.md"
SAMPLES = (2_000, 20_000)
WINDOW = 14
STEPS = 16


def sound() -> ChainTarget:
    return flow("x0")


@dataclass(frozen=True)
class Twin:
    """Something to check, and how it is sampled."""

    target: Callable[[], fs.Target] = sound
    drafter: Callable[[], fs.Drafter] = fs.Replay
    sampler: Callable[[], Any] = nullcontext
    """A context in which the speculative sampler is a broken one."""


# ------------------------------------------------------------------ targets


class Broken(Wrapper):
    """A target with one method changed; its chain is not offered, so that nothing goes round that method."""

    def __init__(self) -> None:
        super().__init__(sound())
        self.chain, self.calls = None, 0


class MixesRows(Broken):
    def __init__(self, steps: range = range(STEPS), by: float = 0.05) -> None:
        super().__init__()
        self.steps, self.by = steps, by

    def predict(self, x: Tensor, step: Tensor, row: Tensor, **extra: Tensor) -> Tensor:
        here = (step >= self.steps[0]) & (step <= self.steps[-1])
        return super().predict(x, step, row) + self.by * here.unsqueeze(1) * x.mean(0)


class FirstTimeForAll(Broken):
    def predict(self, x: Tensor, step: Tensor, row: Tensor, **extra: Tensor) -> Tensor:
        return super().predict(x, step[:1].expand_as(step), row)


class GoesByPlace(Broken):
    def predict(self, x: Tensor, step: Tensor, row: Tensor, **extra: Tensor) -> Tensor:
        return super().predict(x, step, row) + 0.05 * (torch.arange(len(x)) % 2).unsqueeze(1)


class GoesBySize(Broken):
    def predict(self, x: Tensor, step: Tensor, row: Tensor, **extra: Tensor) -> Tensor:
        return super().predict(x, step, row) + 0.05 * len(x)


class Drops(Broken):
    def predict(self, x: Tensor, step: Tensor, row: Tensor, **extra: Tensor) -> Tensor:
        return torch.nn.functional.dropout(super().predict(x, step, row), 0.02)


class Counts(Broken):
    def predict(self, x: Tensor, step: Tensor, row: Tensor, **extra: Tensor) -> Tensor:
        self.calls += 1
        return super().predict(x, step, row) * (1 + 0.05 * (self.calls % 7 == 0))


class MeanMixesRows(Broken):
    def mean(self, x: Tensor, prediction: Tensor, step: Tensor, *previous: Tensor, **extra: Tensor) -> Tensor:
        mean = super().mean(x, prediction, step)
        return mean + 0.05 * (mean.mean(0) - mean)


class MeanDraws(Broken):
    def mean(self, x: Tensor, prediction: Tensor, step: Tensor, *previous: Tensor, **extra: Tensor) -> Tensor:
        return super().mean(x, prediction, step) + 0.02 * torch.randn_like(x)


class StartMixesRows(Broken):
    def start(self, noise: Tensor, row: Tensor) -> Tensor:
        return super().start(noise - 0.3 * noise.mean(0), row)


class StartDraws(Broken):
    def start(self, noise: Tensor, row: Tensor) -> Tensor:
        return super().start(noise + 0.1 * torch.randn_like(noise), row)


class StartCounts(Broken):
    def start(self, noise: Tensor, row: Tensor) -> Tensor:
        self.calls += 1
        return super().start(noise, row) + 0.05 * self.calls


# ------------------------------------------------------------------ drafters


class PeeksSometimes(LooksAhead):
    """Looks ahead where `peeks(round, rows in the batch, step)` is true."""

    def __init__(self, peeks: Callable[[Tensor, int, Tensor], Tensor | bool]) -> None:
        super().__init__()
        object.__setattr__(self, "peeks", peeks)

    def begin(self, rows: int, window: int, like: Tensor) -> fs.drafters.DrafterMemory:
        return {**super().begin(rows, window, like), "rounds": torch.zeros(rows, dtype=torch.int64)}

    def learn(
        self, memory: fs.drafters.DrafterMemory, path: fs.drafters.DraftPath, committed: Tensor
    ) -> fs.drafters.DrafterMemory:
        kept = {name: value for name, value in memory.items() if name != "rounds"}
        return {**super().learn(kept, path, committed), "rounds": memory["rounds"] + 1}

    def guess(
        self,
        memory: fs.drafters.DrafterMemory,
        x: Tensor,
        position: int,
        step: Tensor,
        row: Tensor,
        before: fs.drafters.PreviousDraft | None,
    ) -> Tensor:
        ahead = super().guess(memory, x, position, step, row, before)
        honest = fs.Replay.guess(self, memory, x, position, step, row, before)
        peeks = torch.as_tensor(self.peeks(memory["rounds"], len(row), step))  # type: ignore[attr-defined]
        return torch.where(peeks.expand(len(row)).unsqueeze(1), ahead, honest)


# ------------------------------------------------------------------ samplers


class Shifted(Wrapper):
    """Every transition's mean off by `by` std of its noise, along one axis."""

    def __init__(self, target: fs.Target, by: float) -> None:
        super().__init__(target)
        self.chain, self.by = None, by

    def mean(self, x: Tensor, prediction: Tensor, step: Tensor, *previous: Tensor, **extra: Tensor) -> Tensor:
        mean = super().mean(x, prediction, step, *previous, **extra).clone()
        mean[:, 0] += self.by * self.std[step]
        return mean


def _of(other: Callable[[fs.Target], fs.Target]) -> Callable[[], Any]:
    """Speculative samples of another target than the one that is checked."""

    def engine(target: fs.Target, settings: Settings) -> fs.Engine:
        return fs.Engine(other(target), settings)

    return lambda: patch("foresample.checks.exactness.Engine", engine)


def _louder(by: float) -> Callable[[fs.Target], fs.Target]:
    def louder(target: fs.Target) -> fs.Target:
        assert isinstance(target, ChainTarget)
        return replace(target, chain=replace(target.chain, std=by * target.std))

    return louder


@contextmanager
def _keeps_every_draft() -> Iterator[None]:
    honest = rounds.verify

    def verify(noise: Tensor, draft_mean: Tensor, target_mean: Tensor, *rest: Any, **how: Any) -> Any:
        return honest(noise, draft_mean, draft_mean, *rest, **how)

    with patch.dict("os.environ", FORESAMPLE_PLAIN="1"), patch.object(rounds, "verify", verify):
        yield


TWINS: dict[str, Twin] = {
    "nothing is wrong": Twin(),
    "`predict` mixes rows": Twin(MixesRows),
    "`predict` mixes rows, at one step of 16": Twin(partial(MixesRows, range(11, 12))),
    "`predict` uses the first row's step for all": Twin(FirstTimeForAll),
    "`predict` goes by a row's place in its call": Twin(GoesByPlace),
    "`predict` goes by the number of rows in its call": Twin(GoesBySize),
    "`predict` draws random numbers (dropout)": Twin(Drops),
    "`predict` answers every seventh call differently": Twin(Counts),
    "`predict` mixes rows, by 1e-6 of a prediction": Twin(partial(MixesRows, by=1e-6)),
    "`mean` mixes rows": Twin(MeanMixesRows),
    "`mean` draws random numbers": Twin(MeanDraws),
    "`start` mixes rows": Twin(StartMixesRows),
    "`start` draws random numbers": Twin(StartDraws),
    "`start` changes from call to call": Twin(StartCounts),
    "the drafter looks one step ahead": Twin(drafter=LooksAhead),
    "… from its fourth round on": Twin(drafter=lambda: PeeksSometimes(lambda n, rows, step: n >= 3)),
    "… in the last quarter of the chain": Twin(
        drafter=lambda: PeeksSometimes(lambda n, rows, step: step >= 12)
    ),
    "… in batches of more than 100": Twin(drafter=lambda: PeeksSometimes(lambda n, rows, step: rows > 100)),
    "… in batches of more than 600": Twin(drafter=lambda: PeeksSometimes(lambda n, rows, step: rows > 600)),
    "the sampler keeps every draft": Twin(sampler=_keeps_every_draft),
    **{
        f"the sampler's means are off by {by} of a step's noise": Twin(sampler=_of(partial(Shifted, by=by)))
        for by in (0.3, 0.1, 0.03)
    },
    **{f"the sampler's noise is {by:.0%} too large": Twin(sampler=_of(_louder(1 + by))) for by in (0.1, 0.03)},
}


def found(name: str, samples: int) -> str:
    """The first question that a twin fails, or "—"."""
    twin = TWINS[name]
    torch.manual_seed(0)
    with twin.sampler():
        result = fs.check(twin.target(), window=WINDOW, drafter=twin.drafter(), samples=samples)
    failed = [finding.question for finding in result.findings if not finding.passed]
    return failed[0] if failed else "—"


def row(name: str, samples: Iterable[int] = SAMPLES) -> list[str]:
    """A twin's row of the table."""
    return [name, *(found(name, count) for count in samples)]


def written() -> dict[str, list[str]]:
    """The rows of the table as the page has it, by their names."""
    text = PAGE.read_text().partition("<!-- power: check -->\n")[2].partition("\n<!-- end -->")[0]
    lines = [line.strip("| ").split(" | ") for line in text.split("\n")[2:]]
    return {line[0]: line for line in lines}


def power() -> str:
    return table(["wrong", *(f"{samples} samples" for samples in SAMPLES)], map(row, TWINS))


if __name__ == "__main__":
    PAGE.write_text(filled(PAGE.read_text(), "power", {"check": power}))
