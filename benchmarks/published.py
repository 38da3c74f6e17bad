"""Published figures of the peers, measured again with our implementations of them.

python -m benchmarks.published --out benchmarks/results

The chain is the mixture of the draft-tree papers (d = 500, churn 0.1, 30 steps, v reused); speed-up is its
number of transitions over the mean number of calls. Published: reflection 1.96–1.99; D-GRS 2.14 with 155 nodes;
RASS 5–20 % fewer calls than D-GRS; block over per-step verification up to 6.3 % faster. The last is measured
for several windows and chains, and GROWTH explains what decides it; `benchmarks.ranked` does the same for RASS.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import Tensor

from benchmarks.kinds.rivals import Claim, Gain, PublishedRow, PublishedSettings, Setting
from benchmarks.peers import PeerRun, blocks, dgrs, rass, reflection
from benchmarks.results import RESULTS, save
from foresample.contracts import Target
from foresample.targets.mixture import GaussianMixture

GROWTH = (
    "The per-step test ends a round when the sum of its mismatches nears 1, however long the window; a block "
    "goes on until the root of the sum of their squares does, so its gain grows with the window and with the "
    "number of steps, and where rounds keep less than one draft, as with 30 steps, there is next to nothing to "
    "gain."
)

UNIFORM = (5, 5, 5)
"""The only uniform tree of 155 nodes that is not a single level: 5 + 25 + 125."""
REFLECTION, TURN, RANK = Claim(low=1.96, high=1.99), Claim(low=2.14, high=2.14), Claim(low=5, high=20)
BLOCK = Claim(low=None, high=6.3)
"""Speed-ups of reflection and of D-GRS; the calls RASS saves on it, and the gain of blocks in speed, in per cent."""
SHAPES: dict[tuple[int, ...], Claim | None] = {
    UNIFORM: TURN,
    (3, 3, 3, 3): None,
    (12, 12): None,
    (38, 1, 1, 1): None,
    (7, 4, 2, 1): None,
}
"""Trees of at most about 155 nodes, with the published speed-up of D-GRS."""
TREE_PART = 20  # samples at a time: a tree's states are held together


def measure(
    method: str,
    setting: Setting,
    target: Target,
    samples: int,
    peer: Callable[..., PeerRun],
    *,
    published: Claim | None = None,
    part: int = 100,
    **arguments: Any,
) -> PublishedRow:
    """The cost of samples that are drawn in parts."""
    runs = [peer(target, part, seed=first, **arguments) for first in range(0, samples, part)]
    calls = torch.cat([run.calls for run in runs]).double()
    evaluations = torch.cat([run.evaluations for run in runs]).double()
    mean, error = _mean(calls)
    speedup = len(target.std) / mean
    row = PublishedRow(
        method=method,
        setting=setting,
        published=published,
        speedup=speedup,
        error=speedup * error / mean,
        calls=mean,
        calls_error=error,
        evaluations_a_call=float(evaluations.sum() / calls.sum()),
        samples=len(calls),
    )
    beside = f"(published {published})" if published else ""
    where = setting.tree or f"{setting.chain}, window {setting.window}"
    print(f"{method:18s} {where:38s} {row.speedup:6.3f} ± {row.error:.3f}  {beside}", flush=True)
    return row


def gain(one: PublishedRow, two: PublishedRow, published: Claim) -> Gain:
    """The gain of `one` over `two`."""
    ratio = two.calls / one.calls
    row = Gain(
        method=one.method,
        against=two.method,
        setting=one.setting,
        published=published,
        fewer_calls=100 * (1 - 1 / ratio),
        faster=100 * (ratio - 1),
        error=100 * ratio * math.hypot(one.calls_error / one.calls, two.calls_error / two.calls),
    )
    gained = f"{row.fewer_calls:.1f} % fewer calls, {row.faster:.1f} ± {row.error:.1f} % faster"
    print(f"    {gained} (published {published} %)")
    return row


def _mean(values: Tensor) -> tuple[float, float]:
    return float(values.mean()), float(values.std() / math.sqrt(len(values)))


Part = tuple[list[PublishedRow], list[Gain]]


def trees(chain: Setting, samples: int) -> Part:
    """The chain of reflections, then trees tried in turn and by rank."""
    target, rows, gains = target_of(chain), list[PublishedRow](), list[Gain]()
    shared: dict[str, Any]
    for window in (5, 14):
        setting, shared = replace(chain, window=window), {"window": window, "draft": "nearest"}
        rows.append(
            measure(
                "reflection-nearest",
                setting,
                target,
                4 * samples,
                reflection,
                published=REFLECTION,
                **shared,
            )
        )
    for children, published in SHAPES.items():
        count = samples if published else samples // 2
        setting = replace(chain, tree="-".join(map(str, children)))
        shared = {"children": children, "part": TREE_PART}
        turn = measure("dgrs", setting, target, count, dgrs, published=published, **shared)
        rank = measure("rass", setting, target, count, rass, **shared)
        rows += [turn, rank]
        gains.append(gain(rank, turn, RANK))
    return rows, gains


def windows(chain: Setting, samples: int, sizes: Sequence[int]) -> Part:
    """Block against per-step verification with the Free Drafter."""
    target, rows, gains = target_of(chain), list[PublishedRow](), list[Gain]()
    for window in sizes:
        setting = replace(chain, window=window)
        shared: dict[str, Any] = {"window": window, "draft": "parent", "part": min(50, samples)}
        step = measure("reflection-parent", setting, target, samples, reflection, **shared)
        block = measure("blocks-parent", setting, target, samples, blocks, **shared)
        rows += [step, block]
        gains.append(gain(block, step, BLOCK))
    return rows, gains


def target_of(chain: Setting) -> Target:
    """The mixture of the draft-tree papers."""
    return GaussianMixture.of_draft_trees(chain.dim).flow(chain.steps, chain.churn)


def main(
    out: Annotated[Path, typer.Option(help="Folder for the result file.")] = RESULTS,
    samples: Annotated[
        int, typer.Option(help="Samples of the largest trees; others draw more or fewer.")
    ] = 200,
) -> None:
    """Measure all of it and save `published.json`."""
    short = Setting(dim=500, churn=0.1, steps=30)
    many = (5, 9, 14, 30, 50, 100)
    parts = [
        trees(short, samples),
        windows(short, 2 * samples, (5, 9, 14, 28)),
        windows(replace(short, steps=300), samples // 4, many),
        windows(Setting(dim=64, churn=0.3, steps=300), samples // 2, many),
    ]
    settings = PublishedSettings(
        samples=samples, reuse="v", target="mixture of the draft-tree papers, churned flow"
    )
    rows, gains = ([row for part in column for row in part] for column in zip(*parts, strict=True))
    save(out / "published.json", "published", settings, rows=rows, gains=gains, growth=GROWTH)


if __name__ == "__main__":
    typer.run(main)
