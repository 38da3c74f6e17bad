"""Published figures of the peers, measured again with our implementations of them.

python -m benchmarks.published --out benchmarks/results

The chain is the mixture of the draft-tree papers (d = 500, churn 0.1, 30 steps, v reused); speed-up is its
number of transitions over the mean number of calls. Published: reflection 1.96–1.99; D-GRS 2.14 with 155 nodes;
RASS 5–20 % fewer calls than D-GRS; block over per-step verification up to 6.3 % faster. The last is measured
for several windows and chains: GROWTH says what decides it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import Tensor

from benchmarks.peers import PeerRun, blocks, dgrs, nodes, rass, reflection
from foresample.bench import provenance
from foresample.contracts import Target
from foresample.targets import GaussianMixture

RESULTS = Path(__file__).parent / "results"

GROWTH = (
    "The per-step test ends a round when the sum of its mismatches nears 1, however long the window; a block "
    "goes on until the root of the sum of their squares does, so its gain grows with the window and with the "
    "number of steps, and where rounds keep less than one draft, as with 30 steps, there is next to nothing to "
    "gain."
)

UNIFORM = (5, 5, 5)
"""The only uniform tree of 155 nodes that is not a single level: 5 + 25 + 125."""
SHAPES: dict[tuple[int, ...], str | None] = {
    UNIFORM: "2.14",
    (3, 3, 3, 3): None,
    (12, 12): None,
    (38, 1, 1, 1): None,
    (7, 4, 2, 1): None,
}
"""Trees of at most about 155 nodes, and what is published of their D-GRS."""
TREE_PART = 20  # samples at a time: a tree's states are held together


@dataclass(frozen=True)
class Speedup:
    """One method on one chain."""

    method: str
    setting: str
    published: str | None
    speedup: float
    error: float
    calls: float
    calls_error: float
    evaluations_a_call: float
    samples: int


@dataclass(frozen=True)
class Gain:
    """One method against another, in per cent."""

    method: str
    against: str
    setting: str
    published: str
    fewer_calls: float
    faster: float
    error: float
    """Of `faster`; that of `fewer_calls` is smaller."""


def measure(
    method: str,
    setting: str,
    target: Target,
    samples: int,
    peer: Callable[..., PeerRun],
    *,
    published: str | None = None,
    part: int = 100,
    **arguments: Any,
) -> Speedup:
    """Draw samples in parts and say what they cost."""
    runs = [peer(target, part, seed=first, **arguments) for first in range(0, samples, part)]
    calls = torch.cat([run.calls for run in runs]).double()
    evaluations = torch.cat([run.evaluations for run in runs]).double()
    mean, error = _mean(calls)
    speedup = len(target.std) / mean
    each = float(evaluations.sum() / calls.sum())
    row = Speedup(method, setting, published, speedup, speedup * error / mean, mean, error, each, len(calls))
    told = f"(published {published})" if published else ""
    print(f"{method:22s} {setting:34s} {row.speedup:6.3f} ± {row.error:.3f}  {told}", flush=True)
    return row


def gain(one: Speedup, two: Speedup, published: str) -> Gain:
    """`one` against `two`."""
    ratio = two.calls / one.calls
    error = ratio * math.hypot(one.calls_error / one.calls, two.calls_error / two.calls)
    figures = (100 * (1 - 1 / ratio), 100 * (ratio - 1), 100 * error)
    row = Gain(one.method, two.method, one.setting, published, *figures)
    print("    {:.1f} % fewer calls, {:.1f} ± {:.1f} % faster".format(*figures), f"(published {published})")
    return row


def _mean(values: Tensor) -> tuple[float, float]:
    return float(values.mean()), float(values.std() / math.sqrt(len(values)))


def trees(target: Target, samples: int) -> tuple[list[Speedup], list[Gain]]:
    """The chain of reflections, then trees tried in turn and by rank."""
    rows, gains = [], []
    for window in (5, 14):
        name = f"window {window}, nearest"
        rows.append(
            measure(
                "reflection",
                name,
                target,
                4 * samples,
                reflection,
                published="1.96–1.99",
                window=window,
                draft="nearest",
            )
        )
    for children, published in SHAPES.items():
        count = samples if published else samples // 2
        setting = f"{nodes(children)} nodes, {'-'.join(map(str, children))}"
        shared: dict[str, Any] = {"children": children, "part": TREE_PART}
        turn = measure("D-GRS", setting, target, count, dgrs, published=published, **shared)
        rank = measure("RASS", setting, target, count, rass, **shared)
        rows += [turn, rank]
        gains.append(gain(rank, turn, "5–20 % fewer calls"))
    return rows, gains


def windows(name: str, target: Target, samples: int, sizes: Sequence[int]) -> tuple[list[Speedup], list[Gain]]:
    """Block against per-step verification with the Free Drafter."""
    rows, gains = [], []
    for window in sizes:
        setting = f"{name}, window {window}"
        shared: dict[str, Any] = {"window": window, "draft": "parent", "part": min(50, samples)}
        step = measure("per step, parent", setting, target, samples, reflection, **shared)
        block = measure("blocks, parent", setting, target, samples, blocks, **shared)
        rows += [step, block]
        gains.append(gain(block, step, "up to 6.3 % faster"))
    return rows, gains


def main(
    out: Annotated[Path, typer.Option(help="Folder for the result file.")] = RESULTS,
    samples: Annotated[int, typer.Option(help="Of the largest trees; others draw more or fewer.")] = 200,
) -> None:
    """Measure all of it and save `published.json`."""
    mixture = GaussianMixture.of_draft_trees(500)
    parts = [
        trees(mixture.flow(30, 0.1), samples),
        windows("d = 500, ε = 0.1, T = 30", mixture.flow(30, 0.1), 2 * samples, (5, 9, 14, 28)),
        windows("d = 500, ε = 0.1, T = 300", mixture.flow(300, 0.1), samples // 4, (5, 9, 14, 30, 50, 100)),
        windows(
            "d = 64, ε = 0.3, T = 300",
            GaussianMixture.of_draft_trees(64).flow(300, 0.3),
            samples // 2,
            (5, 9, 14, 30, 50, 100),
        ),
    ]
    result = {
        **provenance(),
        "settings": {
            "samples": samples,
            "reuse": "v",
            "target": "mixture of the draft-tree papers, churned flow",
        },
        "rows": [asdict(row) for rows, _ in parts for row in rows],
        "gains": [asdict(row) for _, gains in parts for row in gains],
        "growth": GROWTH,
    }
    out.mkdir(parents=True, exist_ok=True)
    (out / "published.json").write_text(json.dumps(result, indent=2, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    typer.run(main)
