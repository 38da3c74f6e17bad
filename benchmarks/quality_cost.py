"""Quality against cost: what the lossy methods give up for their calls, and what the exact ones do not.

python -m benchmarks.quality_cost --device cuda

On the Fashion-MNIST model. Quality is the Fréchet distance, in the features of the shipped classifier, from the
pictures of a method to those of the sequential sampler: does it sample the same law? The distance of two finite
sets is never 0, so the floor is that of sequential pictures of other seeds; all sets have one size, because the
floor depends on it. Few-step solvers solve another equation than the chain, and also have another limit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Annotated, Any

import torch
import typer
from torch import Tensor

import foresample as fs
from benchmarks.curves import begun, choose, split
from benchmarks.models import features_of, frechet_distance
from benchmarks.peers import Schedule, blocks, ddim, dpmpp_2m, paradigms, reflection
from benchmarks.results import RESULTS, QualityCost, QualityCostPoint, QualityCostSettings, save
from foresample import pretrained
from foresample.pretrained import Pretrained
from foresample.pretrained.classifier import load_classifier
from foresample.provenance import provenance

Draw = Callable[[Pretrained, int, int, int], Any]
"""draw(model, steps of the chain, count, seed) -> samples, calls and evaluations."""


@dataclass(frozen=True)
class Method:
    """One way to draw pictures."""

    key: str
    exact: bool
    draw: Draw
    detail: dict[str, Any] = field(default_factory=dict)
    """Its window, tolerance or number of steps."""

    def made(self, row: QualityCostPoint) -> bool:
        """Whether a row is of this method."""
        return row.method == self.key and all(
            getattr(row, name) == value for name, value in self.detail.items()
        )


def methods(window: int, tolerances: list[float], few: list[int]) -> list[Method]:
    """All that are compared. The first, of other seeds than the reference, is the floor."""

    def exact(key: str, peer: Callable[..., Any], **options: Any) -> Method:
        def draw(m: Pretrained, steps: int, count: int, seed: int) -> Any:
            return peer(m.target(steps), count, seed=seed, **options)

        return Method(key, True, draw, {"window": options.get("window")})

    def picard(tolerance: float) -> Method:
        def draw(m: Pretrained, steps: int, count: int, seed: int) -> Any:  # as many states a call
            return paradigms(m.target(steps), count, seed=seed, window=window + 1, tolerance=tolerance)

        return Method("paradigms", False, draw, {"tolerance": tolerance})

    def fewer(key: str, solver: Callable[..., Any], number: int) -> Method:
        def draw(m: Pretrained, steps: int, count: int, seed: int) -> Any:
            return solver(Schedule.of_pretrained(m, number), count, seed=seed)

        return Method(key, False, draw, {"steps": number})

    return [
        exact("sequential", fs.sequential),
        exact("default", fs.sample, window=window),
        exact("reflection-nearest", reflection, window=window, draft="nearest"),
        exact("blocks-parent", blocks, window=window, draft="parent"),
        *(picard(tolerance) for tolerance in tolerances),
        *(fewer("ddim", ddim, number) for number in few),
        *(fewer("dpmpp-2m", dpmpp_2m, number) for number in few),
    ]


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
    chosen: Annotated[str | None, typer.Option("--methods", help="Separated by commas.")] = None,
    seed: int = 0,
    part: Annotated[int, typer.Option(help="Pictures drawn together; a multiple of the classes.")] = 1_000,
    half: Annotated[bool, typer.Option(help="Run the network in bfloat16.")] = False,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    out: Annotated[Path, typer.Option(help="Folder for the result file.")] = RESULTS,
) -> None:
    """Draw with every method and save `quality-cost-fashion.json`, row by row."""
    known = methods(window, split(tolerances, (), float), split(few, (), int))
    keys = choose(chosen, list(dict.fromkeys(method.key for method in known)))
    model = pretrained.load(pretrained.EMBEDDED, device, torch.bfloat16 if half else torch.float32)
    judge = load_classifier(pretrained.EMBEDDED.parent / "classifier.safetensors", device)
    settings = QualityCostSettings(
        target="Fashion-MNIST",
        steps=steps,
        count=count,
        window=window,
        seed=seed,
        half=half,
        device=device,
    )
    path = out / "quality-cost-fashion.json"
    cut = begun(QualityCost, path, settings)
    rows, commands = (cut.rows, cut.commands) if cut else ([], [])
    commands = list(dict.fromkeys([*commands, provenance()["command"]]))
    reference, _, _ = draw(model, judge, known[0], steps, count, seed, part)
    for number, method in enumerate(known, 1):
        if method.key not in keys or any(method.made(row) for row in rows):
            continue
        began = perf_counter()
        found, calls, evaluations = draw(model, judge, method, steps, count, seed + 1_000_000 * number, part)
        row = QualityCostPoint(
            method=method.key,
            **method.detail,
            exact=method.exact,
            calls=float(calls.mean()),
            evaluations=float(evaluations.mean()),
            distance=frechet_distance(reference, found),
            seconds=(perf_counter() - began) / count,
        )
        rows.append(row)
        print(f"{row.method:20s} {row.detail:14s} {row.calls:6.1f} calls {row.distance:8.4f}", flush=True)
        save(path, "quality-cost", settings, commands=commands, rows=rows)


if __name__ == "__main__":
    typer.run(main)
