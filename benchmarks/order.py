"""The bias of choosing samples by the time they finish, measured on a chain whose right half needs more rounds.

python -m benchmarks.order --out benchmarks/results

The chain wanders from N(0, START²) with little noise. Left of 0 it has no force; right of 0 the force is a steep wave,
no two nearby states feel the same, and drafts are rejected. So P(x > 0) among samples chosen by when they were done is
too small. It is measured for every rule of choosing samples: by index or by the order of finishing, and for the
samples that may be kept of a run that is stopped after some rounds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from itertools import islice
from pathlib import Path
from typing import Annotated

import torch
import typer
from torch import Tensor

import foresample as fs
from benchmarks.kinds.calls import OrderRow, OrderSettings
from benchmarks.results import RESULTS, save
from foresample.chains import Chain
from foresample.core.noise import seeds_of
from foresample.targets import ChainTarget

STEPS, WINDOW, SLOTS, START, STD = 16, 8, 64, 2.0, 0.05
COUNT = 10_000
"""Samples of a stream; most of them are never drawn."""
STOPPED = (12, 60)
"""Rounds after which a run is stopped: each slot has finished once or twice, or many times."""


def uneven() -> ChainTarget:
    """x + force(x) + 0.05 z, the force a steep wave of three std where x > 0."""

    def wave(x: Tensor, step: Tensor, row: Tensor) -> Tensor:
        return torch.where(x > 0, torch.sin(10 * x / STD), 0.0)

    one = torch.ones(STEPS, dtype=torch.float64)
    chain = Chain(STD * one, one, 3 * STD * one, start_scale=START)
    return ChainTarget(chain, torch.Size([1]), wave)


def first(seed: int, count: int, *, ordered: bool) -> Tensor:
    """The first samples of a stream, in order or as they finish."""
    engine = fs.Engine(uneven(), window=WINDOW, slots=SLOTS, look=False)
    if ordered:
        return torch.stack([sample.x for sample in islice(engine.stream(seeds_of(seed, COUNT)), count)])
    return torch.stack(list(islice((x for done in engine.draw(seeds_of(seed, COUNT)) for x in done.x), count)))


def stopped(seed: int, rounds: int) -> dict[str, Tensor]:
    """The samples that three rules keep of a run that is stopped after `rounds` rounds."""
    x = torch.full((COUNT, 1), torch.nan, dtype=torch.float64)
    begun = torch.full((COUNT,), COUNT)  # the round in which a sample was begun
    now = 0

    def observe(commit: fs.Commit) -> None:
        nonlocal now
        begun[commit.sample[commit.step == 0]] = now
        now += 1
        done = commit.step + commit.committed == STEPS
        x[commit.sample[done]] = commit.x[done]
        if now == rounds:
            raise KeyboardInterrupt

    engine = fs.Engine(uneven(), window=WINDOW, slots=SLOTS, look=False)
    try:
        engine.sample(seeds_of(seed, COUNT), observe)
    except KeyboardInterrupt:
        done = x.isfinite().flatten()
        prefix = int(done.int().cumprod(0).sum())
        return {
            "all that are finished": x[done],
            "the longest prefix that is finished": x[:prefix],
            "those begun N rounds before": x[begun <= now - STEPS],
        }
    raise AssertionError("the run was over before it was stopped")


def ended(seed: int, rounds: int) -> Tensor:
    """A run that begins no more samples after `rounds` rounds, and finishes those under way."""
    x = torch.full((COUNT, 1), torch.nan, dtype=torch.float64)
    now = 0

    def observe(commit: fs.Commit) -> None:
        nonlocal now
        now += 1

    engine = fs.Engine(uneven(), window=WINDOW, slots=SLOTS, look=False)
    parts = [(torch.arange(COUNT), seeds_of(seed, COUNT))]
    for done in engine.draw(parts, observe, stop=lambda: now >= rounds):
        x[done.index] = done.x
    begun = int(x.isfinite().sum())
    assert x[:begun].isfinite().all()
    return x[:begun]


def share(chosen: Iterable[Tensor]) -> tuple[float, float, float]:
    """P(x > 0) of the samples chosen in several runs, its standard error, and the mean number chosen in a run."""
    counts = torch.tensor([[float((x > 0).sum()), float(len(x))] for x in chosen], dtype=torch.float64)
    right, drawn = counts.T
    ratio = float(right.sum() / drawn.sum())
    error = float((right - ratio * drawn).std()) * math.sqrt(len(counts)) / float(drawn.sum())
    return ratio, error, float(drawn.mean())


def measure(runs: int, seed: int) -> list[OrderRow]:
    """Every rule, on runs of their own seeds."""
    rows: list[OrderRow] = []

    def row(rule: str, rounds: int | None, choose: Callable[[int], Tensor]) -> None:
        ratio, error, kept = share([choose(seed + run) for run in range(runs)])
        rows.append(OrderRow(rule=rule, rounds=rounds, kept=kept, right=ratio, error=error))

    for count in (SLOTS, 10 * SLOTS):
        row(f"the first {count} in order", None, lambda s, n=count: first(s, n, ordered=True))  # type: ignore[misc]
        row(f"the first {count} finished", None, lambda s, n=count: first(s, n, ordered=False))  # type: ignore[misc]
    for rounds in STOPPED:
        found = [stopped(seed + run, rounds) for run in range(runs)]
        for rule in found[0]:
            if any(len(kept[rule]) for kept in found):
                ratio, error, kept = share([run[rule] for run in found])
                rows.append(OrderRow(rule=rule, rounds=rounds, kept=kept, right=ratio, error=error))
        row("no more begun, those under way finished", rounds, lambda s, n=rounds: ended(s, n))  # type: ignore[misc]
    return rows


def main(
    out: Annotated[Path, typer.Option(help="Folder for the result file.")] = RESULTS,
    runs: Annotated[int, typer.Option(min=2, help="Runs of each rule.")] = 100,
    seed: Annotated[int, typer.Option(min=0)] = 0,
) -> None:
    """Measure all of it and save `order.json`."""
    truth = fs.sequential(uneven(), 200_000, seed=2**40, slots=20_000).samples > 0
    right = float(truth.double().mean())
    settings = OrderSettings(
        steps=STEPS, window=WINDOW, slots=SLOTS, runs=runs, seed=seed, sequential=len(truth)
    )
    error = math.sqrt(right * (1 - right) / len(truth))
    save(out / "order.json", "order", settings, right=right, error=error, rows=measure(runs, seed))


if __name__ == "__main__":
    typer.run(main)
