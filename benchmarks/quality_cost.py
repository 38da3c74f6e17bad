"""Quality against cost: what the lossy methods give up for their calls, and what the exact ones do not.

python -m benchmarks.quality_cost --device cuda
python -m benchmarks.quality_cost --model policy
python -m benchmarks.quality_cost --model cifar10 --device cuda --half

Quality is the Fréchet distance, in some features, from the samples of a method to those of the sequential sampler:
does it sample the same law? The distance of two finite sets is never 0, so the floor is that of sequential samples
of other seeds; all sets have one size, because the floor depends on it. Few-step solvers solve another equation than
the chain, and also have another limit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Annotated, Any

import torch
import typer
from torch import Tensor

import foresample as fs
from benchmarks.curves import CIFAR10, PILOT_SEED, begun, choose, policy, split
from benchmarks.models import features_of, frechet_distance
from benchmarks.peers import (
    Schedule,
    blocks,
    ddim,
    dpmpp_2m,
    paradigms,
    parasolver,
    parataa,
    reflection,
)
from benchmarks.results import RESULTS, QualityCost, QualityCostPoint, QualityCostSettings, save
from foresample import pretrained
from foresample.contracts import Target
from foresample.pretrained.classifier import load_classifier
from foresample.provenance import provenance
from foresample.targets import ChainTarget


@dataclass(frozen=True)
class Model:
    """What is sampled, and how its samples are judged."""

    name: str
    """As read by people."""
    told: str
    """What the features are."""
    target: Target
    features: Callable[[Tensor], Tensor]
    """[count, *shape] -> [count, d]"""
    fewer: Callable[[int], Schedule] | None = None
    """The same network in that many steps."""
    kinds: int = 1
    """Samples i and i + kinds are of one law: of one observation."""


def fashion(steps: int, device: str, half: bool) -> Model:
    model = pretrained.load(pretrained.EMBEDDED, device, torch.bfloat16 if half else torch.float32)
    judge = load_classifier(pretrained.EMBEDDED.parent / "classifier.safetensors", device)
    return Model(
        "Fashion-MNIST",
        "the shipped classifier's",
        model.target(steps),
        lambda samples: features_of(judge, samples.clamp(-1, 1)),
        lambda number: Schedule.of_pretrained(model, number),
    )


def cifar10(steps: int, device: str, half: bool) -> Model:
    model = pretrained.load(CIFAR10, device, torch.bfloat16 if half else torch.float32)
    return Model(
        "CIFAR-10",
        "thumbnails of 4 × 4 pixels, and how much each colour differs from its own",
        model.target(steps),
        lambda samples: _thumbnails(samples.clamp(-1, 1)),
        lambda number: Schedule.of_pretrained(model, number),
    )


def robot(steps: int, device: str, half: bool) -> Model:
    problem = policy(steps, device, half)
    (target,) = problem.targets.values()
    assert isinstance(target, ChainTarget)
    plan = target.network
    target = replace(target, network=lambda x, time, row: plan(x, time, row % OBSERVATIONS))
    told = "the plan itself, less the sequential mean of its observation"
    return Model(problem.name, told, target, lambda plans: plans.flatten(1).double(), kinds=OBSERVATIONS)


MODELS = {"fashion": fashion, "cifar10": cifar10, "policy": robot}
OBSERVATIONS = 20
"""Of those of `benchmarks.curves.policy`: few, so that each is drawn often."""


def _thumbnails(pictures: Tensor) -> Tensor:
    """[B, 51]: no network's, so that nothing has to be fetched; the second part sees noise left and detail lost."""
    small = torch.nn.functional.avg_pool2d(pictures, pictures.shape[-1] // 4)
    rest = pictures - torch.nn.functional.interpolate(small, size=pictures.shape[-2:])
    return torch.cat([small.flatten(1), rest.square().mean((2, 3)).sqrt()], 1).double().cpu()


Draw = Callable[[Model, int, int], Any]
"""draw(model, count, seed) -> samples, calls and evaluations."""


@dataclass(frozen=True)
class Method:
    """One way to draw samples."""

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
        def draw(model: Model, count: int, seed: int) -> Any:
            return peer(model.target, count, seed=seed, **options)

        return Method(key, True, draw, {"window": options.get("window")})

    def iterated(key: str, peer: Callable[..., Any], tolerance: float) -> Method:
        def draw(model: Model, count: int, seed: int) -> Any:  # as many states a call
            return peer(model.target, count, seed=seed, window=window + 1, tolerance=tolerance)

        return Method(key, False, draw, {"tolerance": tolerance})

    def fewer(key: str, solver: Callable[..., Any], number: int) -> Method:
        def draw(model: Model, count: int, seed: int) -> Any:
            assert model.fewer is not None
            return solver(model.fewer(number), count, seed=seed)

        return Method(key, False, draw, {"steps": number})

    return [
        exact("sequential", fs.sequential),
        exact("default", fs.sample, window=window),
        exact("reflection-nearest", reflection, window=window, draft="nearest"),
        exact("blocks-parent", blocks, window=window, draft="parent"),
        *(iterated("paradigms", paradigms, tolerance) for tolerance in tolerances),
        *(iterated("parasolver", parasolver, tolerance) for tolerance in tolerances),
        *(iterated("parataa", parataa, tolerance) for tolerance in tolerances),
        *(fewer("ddim", ddim, number) for number in few),
        *(fewer("dpmpp-2m", dpmpp_2m, number) for number in few),
    ]


def draw(model: Model, method: Method, count: int, seed: int, part: int) -> tuple[Tensor, Tensor, Tensor]:
    """Features [count, d] of a method's samples, calls and evaluations of each."""
    found, calls, evaluations = [], [], []
    for first in range(0, count, part):
        run = method.draw(model, min(part, count - first), seed + first)
        found.append(model.features(run.samples))
        calls.append(run.calls.double())
        evaluations.append(run.evaluations.double())
    return torch.cat(found), torch.cat(calls), torch.cat(evaluations)


def drawn_alone(model: Model, method: Method, seed: int, times: int) -> float | None:
    """Milliseconds of one sample: the median of so many, after one that may have something to compile."""
    clocked = []
    for i in range(times + 1 if times else 0):
        began = perf_counter()
        method.draw(model, 1, seed + i).samples.cpu()  # waits for the device
        clocked.append(1e3 * (perf_counter() - began))
    return median(clocked[1:]) if clocked else None


def main(
    model: Annotated[str, typer.Option(help="fashion, cifar10 or policy.")] = "fashion",
    steps: Annotated[int, typer.Option(help="Of the chain.")] = 100,
    count: Annotated[int, typer.Option(help="Samples of each method.")] = 5_000,
    window: Annotated[
        int, typer.Option(help="Of the exact methods; the others have as many states a call.")
    ] = 8,
    tolerances: Annotated[str, typer.Option(help="Of the iterations, separated by commas.")] = "0.05,0.1,0.3,1",
    few: Annotated[str, typer.Option(help="Steps of the few-step solvers.")] = "10,20,50",
    chosen: Annotated[str | None, typer.Option("--methods", help="Separated by commas.")] = None,
    seed: int = 0,
    part: Annotated[int, typer.Option(help="Samples drawn together; a multiple of classes.")] = 1_000,
    alone: Annotated[int, typer.Option(help="Samples drawn one by one, on the clock.")] = 0,
    half: Annotated[bool, typer.Option(help="Run the network in bfloat16.")] = False,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    out: Annotated[Path, typer.Option(help="Folder for the result file.")] = RESULTS,
) -> None:
    """Draw with every method and save `quality-cost-….json`, row by row."""
    source = MODELS[choose(model, list(MODELS))[0]](steps, device, half)
    known = methods(window, split(tolerances, (), float), split(few, (), int) if source.fewer else [])
    keys = choose(chosen, list(dict.fromkeys(method.key for method in known)))
    settings = QualityCostSettings(
        target=source.name,
        steps=steps,
        count=count,
        window=window,
        seed=seed,
        half=half,
        device=device,
        features=source.told,
    )
    path = out / f"quality-cost-{model}.json"
    cut = begun(QualityCost, path, settings)
    rows, commands = (cut.rows, cut.commands) if cut else ([], [])
    commands = list(dict.fromkeys([*commands, provenance()["command"]]))
    reference, _, _ = draw(source, known[0], count, seed, part)
    which = torch.arange(count) % part % source.kinds  # parts begin at the first observation again
    usual = torch.stack([reference[which == kind].mean(0) for kind in range(source.kinds)])
    for number, method in enumerate(known, 1):
        if method.key not in keys or any(method.made(row) for row in rows):
            continue
        began = perf_counter()
        found, calls, evaluations = draw(source, method, count, seed + 1_000_000 * number, part)
        row = QualityCostPoint(
            method=method.key,
            **method.detail,
            exact=method.exact,
            calls=float(calls.mean()),
            evaluations=float(evaluations.mean()),
            distance=frechet_distance(reference - usual[which], found - usual[which]),
            seconds=(perf_counter() - began) / count,
            alone_ms=drawn_alone(source, method, PILOT_SEED, alone),
        )
        rows.append(row)
        print(f"{row.method:20s} {row.detail:14s} {row.calls:6.1f} calls {row.distance:8.4f}", flush=True)
        save(path, "quality-cost", settings, commands=commands, rows=rows)


if __name__ == "__main__":
    typer.run(main)
