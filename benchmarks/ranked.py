"""The saving of ranking the children of a draft tree: RASS against D-GRS on several chains, and why it differs.

python -m benchmarks.ranked --out benchmarks/results

RASS is published with 5–20 % fewer calls than D-GRS. Choosing a child by its rank rejects less than trying the children
in turn where the mismatch of draft and target is about a standard deviation or less. Where it is large, no child is
good, and both reject alike. So the saving depends on the mismatches of the chain: both tests' rejections are computed
at the mismatches that D-GRS met.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated

import torch
import typer
from torch import Tensor

from benchmarks.curves import PROBLEMS, with_error
from benchmarks.kinds.rivals import RankGain, RankSettings
from benchmarks.peers import ranks, rass
from benchmarks.peers.trees import leftover, tree, try_in_turn
from benchmarks.results import RESULTS, save

BRANCHING = (2, 2, 2, 1, 1, 1, 1, 1)
"""The tree of both methods, near the best shapes at 64 states a call."""
RANKED = (("mixture", 30), ("mixture", 300), ("langevin", 200), ("wells", 100))
"""Chains of `benchmarks.curves`."""
PART = 20  # samples at a time: the states of a tree are held together
SPREAD = 500  # mismatches, evenly spread over those met, at which rejections are averaged


def by_rank(problem: str, steps: int, samples: int) -> RankGain:
    """The saving on one chain, and how often both tests reject at the mismatches met there."""
    source = PROBLEMS[problem][0](steps, "cpu", False)
    target, met = next(iter(source.targets.values())), list[Tensor]()

    def noting(s: Tensor, delta: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
        if s.shape[1] > 1:
            met.append(delta)
        return try_in_turn(s, delta, uniforms)

    parts, count = range(0, samples, PART), BRANCHING[0]
    turn = torch.cat([tree(target, PART, seed, BRANCHING, noting).calls for seed in parts]).double()
    rank = torch.cat([rass(target, PART, seed=seed, children=BRANCHING).calls for seed in parts]).double()
    delta = torch.cat(met).sort().values
    spread = delta[torch.linspace(0, len(delta) - 1, SPREAD).long()]
    spread = spread.clamp(max=20.0)  # beyond, both reject surely
    kept = [ranks.overlap(float(d), lean) for d, lean in zip(spread, ranks.leans(spread, count), strict=True)]
    (turn_mean, turn_error), (rank_mean, rank_error) = with_error(turn), with_error(rank)
    ratio = rank_mean / turn_mean
    row = RankGain(
        chain=f"{source.name}, {steps} steps",
        mismatch=float(delta.median()),
        rejected_in_turn=float(leftover(spread, count)[-1][1].mean()),
        rejected_by_rank=1 - sum(kept) / len(kept),
        fewer_calls=100 * (1 - ratio),
        error=100 * ratio * math.hypot(turn_error / turn_mean, rank_error / rank_mean),
    )
    print(
        f"{row.chain}: {row.fewer_calls:.1f} ± {row.error:.1f} % fewer calls at δ = {row.mismatch:.2f}",
        flush=True,
    )
    return row


def main(
    out: Annotated[Path, typer.Option(help="Folder for the result file.")] = RESULTS,
    samples: Annotated[int, typer.Option(help="Samples of each method and chain, a multiple of 20.")] = 100,
) -> None:
    """Measure every chain and save `ranked.json`."""
    rows = [by_rank(problem, steps, samples) for problem, steps in RANKED]
    settings = RankSettings(samples=samples, tree="-".join(map(str, BRANCHING)))
    save(out / "ranked.json", "ranked", settings, rows=rows)


if __name__ == "__main__":
    typer.run(main)
