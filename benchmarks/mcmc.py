"""Markov chain Monte Carlo on a CPU, in effective samples a second: Langevin chains, sequential and speculative.

python -m benchmarks.mcmc --out benchmarks/results

Both samplers draw paths of one distribution, so a transition is worth the same in either, and the gain in effective
samples a second is the ratio of the times: processor time of one core, so that other work on the machine counts
little. Every run keeps its path, as an estimate needs it. The number of effective
samples of a path of N transitions is that of its slowest coordinate,

    N / τ,    τ = 1 + 2 Σ_{t ≥ 1} ρ_t,

with the autocorrelations ρ_t averaged over chains and the sum cut by Geyer's initial monotone sequence.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from time import process_time
from typing import Annotated

import torch
import typer
from torch import Tensor

import foresample as fs
from benchmarks.curves import Problem, posterior, split, wells
from benchmarks.kinds.clock import McmcChain, McmcRow, McmcSettings
from benchmarks.results import RESULTS, save
from benchmarks.timing import take_turns
from foresample.contracts import Target

CHAINS: dict[str, Callable[[int, str, bool], Problem]] = {"langevin": posterior, "wells": wells}
COUNTED, COUNT_SEED = 100, 700_000
"""Paths whose effective samples are counted, and the seed of the first set; the timed runs have others."""


def path(target: Target, chains: int, window: int, seed: int) -> tuple[Tensor, float]:
    """The states [chains, N, d] behind every transition and the mean number of calls; window 0 is sequential."""
    states = torch.empty(chains, len(target.std), *target.shape, dtype=target.std.dtype)

    def keep(commit: fs.Commit) -> None:
        if not window:
            states[commit.sample, commit.step] = commit.x
            return
        committed = commit.states
        inside = torch.arange(committed.shape[1]) < commit.committed.unsqueeze(1)
        row, ahead = inside.nonzero(as_tuple=True)
        states[commit.sample[row], commit.step[row] + ahead] = committed[row, ahead]

    if not window:
        run = fs.sequential(target, chains, seed=seed, observe=keep)
    else:
        run = fs.sample(target, chains, seed=seed, window=window, observe=keep)
    return states, run.report.calls_mean


def effective(states: Tensor) -> tuple[float, float]:
    """Effective samples of one path, the slowest coordinate's, from paths [chains, N, d] of one distribution.

    With the standard error from leaving out one chain at a time.
    """
    count, length = states.shape[:2]
    spectra = torch.fft.rfft(states - states.mean((0, 1)), n=2 * length, dim=1).abs().square()
    left = torch.tensor([_effective(spectra.sum(0) - own, length) for own in spectra], dtype=torch.float64)
    return _effective(spectra.sum(0), length), float(left.std(correction=0) * math.sqrt(count - 1))


def _effective(spectrum: Tensor, length: int) -> float:
    covariance = torch.fft.irfft(spectrum, n=2 * length, dim=0)[:length]
    correlation = covariance / covariance[0]
    pairs = correlation[: length // 2 * 2].view(length // 2, 2, -1).sum(1)  # ρ_{2m} + ρ_{2m+1}
    positive = (pairs > 0).cumprod(0)
    tau = 2 * (pairs.cummin(0).values * positive).sum(0) - 1
    return float(length / tau.max())


def measure(
    name: str, steps: int, burn: int, windows: list[int], together: int, seed: int, seconds: float
) -> tuple[McmcChain, list[McmcRow]]:
    """Effective samples of one chain, and what they cost one chain at a time and `together` at a time."""
    problem = CHAINS[name](steps, "cpu", False)
    (target,) = problem.targets.values()
    found = [
        effective(path(target, COUNTED, window, COUNT_SEED + window)[0][:, burn:])
        for window in (0, windows[-1])
    ]
    (ess, ess_error), (speculative, speculative_error) = found
    chain = McmcChain(
        name=problem.name,
        effective=ess,
        effective_error=ess_error,
        speculative=speculative,
        speculative_error=speculative_error,
    )
    rows = []
    for chains in (1, together):

        def draw(window: int, turn: int, chains: int = chains) -> object:
            return path(target, chains, window, seed + turn)

        sides = {str(window): partial(draw, window) for window in (0, *windows)}
        timing = take_turns(sides, seconds=seconds, clock=process_time)
        for window in (0, *windows):
            took, error = timing.median(str(window)), timing.median_error(str(window))
            row = McmcRow(
                chain=problem.name,
                chains=chains,
                window=window,
                calls=path(target, chains, window, seed)[1],
                ms=1e3 * took,
                ms_error=1e3 * error,
                effective_a_second=chains * ess / took,
                gain=timing.ratio(str(window)) if window else None,
            )
            print(
                f"{name:9s} {chains:3d} at a time, window {window:3d}: {row.ms:8.1f} ms, {row.gain}", flush=True
            )
            rows.append(row)
    return chain, rows


def main(
    steps: Annotated[int, typer.Option(min=2, help="Transitions of a chain.")] = 2_000,
    burn: Annotated[int, typer.Option(min=0, help="First transitions that are not counted.")] = 500,
    windows: Annotated[str, typer.Option(help="Windows, separated by commas.")] = "16,64",
    together: Annotated[int, typer.Option(min=2, help="Chains of a batch.")] = 25,
    seconds: Annotated[float, typer.Option(help="Most seconds to time one chain at one batch size.")] = 20.0,
    seed: Annotated[int, typer.Option(min=1_000, help="Seed of the timed runs.")] = 1_000,
    out: Annotated[Path, typer.Option(help="Folder for the result file.")] = RESULTS,
) -> None:
    """Measure every chain and save `mcmc.json`."""
    if burn >= steps:
        raise typer.BadParameter(f"--burn {burn} leaves nothing of {steps} steps: choose a smaller one")
    torch.set_num_threads(1)
    sizes = split(windows, (), int)
    parts = [measure(name, steps, burn, sizes, together, seed, seconds) for name in CHAINS]
    settings = McmcSettings(steps=steps, burn=burn, seed=seed)
    rows = [row for _, part in parts for row in part]
    save(out / "mcmc.json", "mcmc", settings, chains=[chain for chain, _ in parts], rows=rows)


if __name__ == "__main__":
    typer.run(main)
