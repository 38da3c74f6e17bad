"""Quality against cost: what the lossy methods give up for their calls, and what the exact ones do not.

python -m benchmarks.quality_cost --device cuda

On the Fashion-MNIST model. Quality is the Fréchet distance, in the features of the shipped classifier, from the
pictures of a method to those of the sequential sampler: does it sample the same law? The distance of two finite
sets is never 0, so the floor is that of sequential pictures of other seeds; all sets have one size, because the
floor depends on it. Few-step solvers solve another equation than the chain, and also have another limit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter
from typing import Annotated, Any

import torch
import typer
from torch import Tensor

import foresample as fs
from benchmarks.curves import saved_rows, split
from benchmarks.models import RESULTS, features_of, frechet_distance, save
from benchmarks.peers import Schedule, blocks, ddim, dpmpp_2m, paradigms, reflection
from foresample import pretrained
from foresample.bench import provenance
from foresample.pretrained import Pretrained
from foresample.pretrained.classifier import load_classifier

FLOOR = "sequential"
Draw = Callable[[Pretrained, int, int, int], Any]
"""draw(model, steps of the chain, count, seed) -> samples, calls and evaluations."""


@dataclass(frozen=True)
class Method:
    """One way to draw pictures."""

    exact: bool
    draw: Draw


@dataclass(frozen=True)
class Point:
    """What a method's pictures cost and how far they are from the sequential sampler's."""

    method: str
    exact: bool
    calls: float
    evaluations: float
    distance: float
    seconds: float
    """A sample."""


def methods(window: int, tolerances: tuple[float, ...], few: tuple[int, ...]) -> dict[str, Method]:
    """All that are compared. The first, of other seeds than the reference, is the floor."""

    def exact(peer: Callable[..., Any], **options: Any) -> Method:
        return Method(True, lambda m, steps, count, seed: peer(m.target(steps), count, seed=seed, **options))

    def picard(tolerance: float) -> Method:
        options: dict[str, Any] = {"window": window + 1, "tolerance": tolerance}  # as many states a call
        return Method(
            False, lambda m, steps, count, seed: paradigms(m.target(steps), count, seed=seed, **options)
        )

    def fewer(solver: Callable[..., Any], number: int) -> Method:
        return Method(
            False, lambda m, steps, count, seed: solver(Schedule.of_pretrained(m, number), count, seed=seed)
        )

    found = {
        FLOOR: exact(fs.sequential),
        f"default, window {window}": exact(fs.sample, window=window),
        f"reflection, nearest, window {window}": exact(reflection, window=window, draft="nearest"),
        f"blocks, parent, window {window}": exact(blocks, window=window, draft="parent"),
    }
    found |= {f"ParaDiGMS, tolerance {tolerance:g}": picard(tolerance) for tolerance in tolerances}
    found |= {f"DDIM, {number} steps": fewer(ddim, number) for number in few}
    return found | {f"DPM-Solver++ 2M, {number} steps": fewer(dpmpp_2m, number) for number in few}


def draw(
    model: Pretrained, judge: torch.nn.Module, method: Method, steps: int, count: int, seed: int, part: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Features [count, d] of a method's pictures, calls and evaluations of each."""
    found, calls, evaluations = [], [], []
    for first in range(0, count, part):
        run = method.draw(model, steps, min(part, count - first), seed + first)
        found.append(features_of(judge, run.samples.clamp(-1, 1)))
        calls.append(run.calls.double())
        evaluations.append(run.evaluations.double())
    return torch.cat(found), torch.cat(calls), torch.cat(evaluations)


def main(
    steps: Annotated[int, typer.Option(help="Of the chain.")] = 100,
    count: Annotated[int, typer.Option(help="Pictures of each method.")] = 5_000,
    window: Annotated[int, typer.Option(help="Of the exact methods; ParaDiGMS has as many states a call.")] = 8,
    tolerances: Annotated[str, typer.Option(help="Of ParaDiGMS, separated by commas.")] = "0.05,0.1,0.3,1",
    few: Annotated[str, typer.Option(help="Steps of the few-step solvers.")] = "10,20,50",
    chosen: Annotated[str | None, typer.Option("--methods", help="Names, separated by semicolons.")] = None,
    seed: int = 0,
    part: Annotated[int, typer.Option(help="Pictures drawn together; a multiple of the classes.")] = 1_000,
    half: Annotated[bool, typer.Option(help="Run the network in bfloat16.")] = False,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    out: Annotated[Path, typer.Option(help="Folder for the result file.")] = RESULTS,
) -> None:
    """Draw with every method and save `quality-cost-fashion.json`, row by row."""
    known = methods(window, tuple(split(tolerances, (), float)), tuple(split(few, (), int)))
    names: list[str] = split(chosen, list(known))
    if unknown := [name for name in names if name not in known]:
        raise typer.BadParameter(f"no method {unknown[0]!r}; there are: {'; '.join(known)}")
    model = pretrained.load(pretrained.EMBEDDED, device, torch.bfloat16 if half else torch.float32)
    judge = load_classifier(pretrained.EMBEDDED.parent / "classifier.safetensors", device)
    settings = {
        "target": "Fashion-MNIST",
        "steps": steps,
        "count": count,
        "window": window,
        "seed": seed,
        "half": half,
        "device": device,
    }
    path = out / "quality-cost-fashion.json"
    rows, commands = saved_rows(path, settings)
    commands = list(dict.fromkeys([*commands, provenance()["command"]]))
    reference, _, _ = draw(model, judge, known[FLOOR], steps, count, seed, part)
    for number, (name, method) in enumerate(known.items(), 1):
        if name not in names or any(row["method"] == name for row in rows):
            continue
        began = perf_counter()
        found, calls, evaluations = draw(model, judge, method, steps, count, seed + 1_000_000 * number, part)
        distance = frechet_distance(reference, found)
        each = (perf_counter() - began) / count
        cost = float(calls.mean()), float(evaluations.mean())
        rows.append(asdict(Point(name, method.exact, *cost, distance, each)))
        print("{method:34s} {calls:6.1f} calls {distance:8.4f}".format(**rows[-1]), flush=True)
        save(path, settings, commands=commands, rows=rows)


if __name__ == "__main__":
    typer.run(main)
