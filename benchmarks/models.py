"""Trained models: how many calls sampling takes, and whether the pictures are as good.

python -m benchmarks.models calls assets/cifar10 --device cuda
python -m benchmarks.models quality --device cuda
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, cast

import torch
import typer
from torch import Tensor
from tqdm import tqdm

import foresample as fs
import recipes.data
from benchmarks.kinds.calls import CallsRow, CallsSettings
from benchmarks.kinds.quality import Distance, PictureRun, QualitySettings
from benchmarks.mixture import METHODS, row_of
from benchmarks.results import RESULTS, save
from foresample import pretrained
from foresample.chains import Kind
from foresample.core.noise import seeds_of
from recipes.classifier import WEIGHTS, load_classifier

app = typer.Typer(add_completion=False, help=__doc__)

COMPARED: tuple[tuple[str, Kind], ...] = (
    ("default", "v"),
    ("default", "x0"),
    ("replay-block", "v"),
    ("reflection-nearest", "x0"),
    ("block-parent-fresh", "x0"),
)
"""Methods of `benchmarks.mixture`, and what each reuses."""

Device = Annotated[str, typer.Option(help="cpu or cuda.")]
Out = Annotated[Path, typer.Option(help="Folder for the result file.")]


@app.command()
def calls(
    model: Annotated[Path, typer.Argument(help="A diffusers DDPM folder.")] = pretrained.EMBEDDED,
    steps: list[int] = [100, 250, 1000],  # noqa: B006
    window: int = 50,
    count: int = 64,
    seed: int = 0,
    half: Annotated[bool, typer.Option(help="Run the network in bfloat16.")] = False,
    device: Device = "cpu",
    out: Out = RESULTS,
    name: Annotated[str | None, typer.Option(help="Of the result file; the model folder's by default.")] = None,
) -> None:
    """Speed-up in calls for chains of several lengths, methods side by side from the same seeds."""
    source = pretrained.load(model, device, torch.bfloat16 if half else torch.float32)
    rows: list[CallsRow] = []
    name = name or f"{model.resolve().name}-calls-w{window}{'-bf16' if half else ''}"
    settings = CallsSettings(model=model.name, window=window, count=count, seed=seed, half=half)
    for length in steps:
        for method, reuse in COMPARED:
            target = source.target(length, reuse=reuse)
            run = fs.sample(target, count, window=window, seed=seed, **METHODS[method])
            row = CallsRow(steps=length, reuse=reuse, **asdict(row_of(method, window, run)))
            print(f"{length:5d}  {row.label:40s} {row.speedup:6.2f} ± {row.speedup_error:.2f}", flush=True)
            rows.append(row)
            save(out / f"{name}.json", "calls", settings, rows=rows)


@app.command()
def quality(
    data: Annotated[
        Path | None, typer.Option(help="Folder with Fashion-MNIST; the recipes' by default.")
    ] = None,
    model: Annotated[Path, typer.Option(help="The Fashion-MNIST model.")] = pretrained.EMBEDDED,
    classifier: Path = WEIGHTS,
    steps: int = 100,
    window: int = 8,
    count: int = 10_000,
    repeats: int = 2,
    batch: int = 2_000,
    half: bool = False,
    device: Device = "cpu",
    out: Out = RESULTS,
) -> None:
    """Fréchet distances in the classifier's features: sequential, speculative and real pictures."""
    judge = load_classifier(device, classifier)
    source = pretrained.load(model, device, torch.bfloat16 if half else torch.float32)
    target = source.target(steps)
    images, _ = recipes.data.load("fashion-mnist", data, train=False)
    features = {"real": features_of(judge, images.to(device).float() / 127.5 - 1)}
    runs: dict[str, PictureRun] = {}
    for method in ("sequential", "speculative"):
        for repeat in range(repeats):
            key = f"{method}-{repeat}"
            seeds = seeds_of(1000 * (method == "speculative") + repeat, count)
            parts, spent = [], []
            for part in tqdm(seeds.split(batch), desc=key):
                if method == "sequential":
                    run = fs.sequential(target, seeds=part)
                else:
                    run = fs.sample(target, seeds=part, window=window)
                parts.append(run.samples.clamp(-1, 1))
                spent.append(run.report.calls_mean)
            pictures = torch.cat(parts)
            asked = (torch.arange(count) % batch % len(source.labels)).to(device)
            answers = torch.cat([judge(p).argmax(1) for p in pictures.split(1000)])
            agreement = float((answers == asked).double().mean())
            runs[key] = PictureRun(sampler=method, calls=sum(spent) / len(spent), agreement=agreement)
            features[key] = features_of(judge, pictures)
    names = list(features)
    distances = [
        Distance(a=a, b=b, distance=frechet_distance(features[a], features[b]))
        for i, a in enumerate(names)
        for b in names[i + 1 :]
    ]
    settings = QualitySettings(steps=steps, window=window, count=count, half=half)
    for row in distances:
        print(f"{row.a:>14s}  {row.b:14s} {row.distance:.4f}")
    print(runs)
    save(out / f"{model.resolve().name}-quality.json", "quality", settings, runs=runs, distances=distances)


@torch.no_grad()
def features_of(judge: torch.nn.Module, images: Tensor) -> Tensor:
    """The classifier's features of pictures, [n, d], float64."""
    extract = cast(Any, judge).features
    return torch.cat([extract(part) for part in images.view(-1, 1, 28, 28).split(1000)]).double()


def frechet_distance(a: Tensor, b: Tensor) -> float:
    """‖μ_a − μ_b‖² + tr(C_a + C_b − 2 (C_a C_b)^½) of two sets of features, [n, d] each."""
    (mean_a, cov_a), (mean_b, cov_b) = ((x.mean(0), torch.cov(x.T)) for x in (a, b))
    values, vectors = torch.linalg.eigh(cov_a)
    root = vectors * values.clamp(min=0).sqrt() @ vectors.T
    cross = torch.linalg.eigvalsh(root @ cov_b @ root).clamp(min=0).sqrt().sum()
    return float((mean_a - mean_b).square().sum() + cov_a.trace() + cov_b.trace() - 2 * cross)


if __name__ == "__main__":
    app()
