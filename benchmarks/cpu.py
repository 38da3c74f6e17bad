"""The clock on one CPU core: what samples take with either sampler, one at a time and some together.

python -m benchmarks.cpu

The window is the fastest of several on pilot samples; the times come from other samples, with both samplers in turns
(`benchmarks.timing`).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any

import torch
import typer

import foresample as fs
from benchmarks.curves import PILOT_SEED, PROBLEMS
from benchmarks.kinds.clock import CpuClockRow, CpuClockSettings
from benchmarks.results import RESULTS, save
from benchmarks.timing import take_turns
from foresample.baseline import Sequential
from foresample.contracts import Target
from foresample.core.noise import seeds_of

CASES: dict[str, tuple[int, int]] = {
    "policy": (100, 1),
    "langevin": (200, 1),
    "langevin-25": (200, 25),
    "wells": (100, 1),
    "wells-25": (100, 25),
    "fashion": (50, 1),
    "fashion-20": (10, 20),
}
"""Steps of the chain and samples drawn together; the names begin with a key of `curves.PROBLEMS`."""
PILOT_TURNS = 4


def main(
    cases: Annotated[str, typer.Option(help="Names of cases, separated by commas.")] = ",".join(CASES),
    windows: Annotated[list[int], typer.Option("--window")] = [4, 8, 16, 32, 64],  # noqa: B006
    seconds: Annotated[float, typer.Option(help="Time limit of each case.")] = 20.0,
    seed: int = 5,
    out: Annotated[Path, typer.Option(help="Folder for the result file.")] = RESULTS,
) -> None:
    """Time both samplers on one core and save `cpu.json`."""
    torch.set_num_threads(1)
    rows: list[CpuClockRow] = []
    for case in cases.split(","):
        if case not in CASES:
            raise typer.BadParameter(f"--cases names {case!r}; the cases are {', '.join(CASES)}")
        steps, together = CASES[case]
        problem = PROBLEMS[case.split("-")[0]][0](steps, "cpu", False)
        target = next(iter(problem.targets.values()))
        fitting = [window for window in windows if window < steps]
        window = _fastest(target, together, fitting, seconds)
        row = _timed(problem.name, target, together, window, seed, seconds)
        rows.append(row)
        print(f"{case}: window {window}, {row.sequential_ms:.2f} ms to {row.ms:.2f}, {row.ratio}", flush=True)
        save(out / "cpu.json", "cpu-clock", CpuClockSettings(seconds=seconds, seed=seed), rows=rows)


def _fastest(target: Target, together: int, windows: list[int], seconds: float) -> int:
    """The window with the smallest median time on pilot samples."""
    engines = {f"{window}": fs.Engine(target, window=window, slots=together) for window in windows}
    sides = {name: partial(_draw, engine.sample, PILOT_SEED, together) for name, engine in engines.items()}
    timing = take_turns(sides, least=PILOT_TURNS, most=4 * PILOT_TURNS, seconds=seconds / 2)
    return int(min(sides, key=timing.median))


def _timed(name: str, target: Target, together: int, window: int, seed: int, seconds: float) -> CpuClockRow:
    plain, ours = Sequential(target, together), fs.Engine(target, window=window, slots=together)
    calls: list[float] = []

    def speculative(turn: int) -> None:
        calls.append(_draw(ours.sample, seed, together, turn).report.calls_mean)

    sides: dict[str, Callable[[int], Any]] = {
        "sequential": partial(_draw, plain.sample, seed, together),
        "speculative": speculative,
    }
    timing = take_turns(sides, most=400, seconds=seconds)
    return CpuClockRow(
        target=name,
        steps=len(target.std),
        together=together,
        window=window,
        calls=fmean(calls[1:]),  # the first is the warm-up
        sequential_ms=1e3 * timing.median("sequential") / together,
        ms=1e3 * timing.median("speculative") / together,
        ratio=timing.ratio("speculative"),
    )


def _draw(sample: Callable[..., fs.Run], seed: int, together: int, turn: int) -> fs.Run:
    """The samples of one turn: new seeds, classes and observations in every turn."""
    first = (turn + 1) * together
    return sample(seeds_of(seed, together, first), rows=first + torch.arange(together))


if __name__ == "__main__":
    typer.run(main)
