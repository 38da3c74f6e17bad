"""Quality against cost: what the lossy methods give up for their calls, and what the exact ones keep.

python -m benchmarks.quality_cost --model mixture --count 600
python -m benchmarks.quality_cost --model policy --count 150 --window 16
python -m benchmarks.quality_cost --model fashion --device cuda --half
python -m benchmarks.quality_cost --model cifar10 --device cuda --half

Quality is the Fréchet distance, in some features, from a method's samples to those of the sequential sampler, and to
real data. Two finite sets of one distribution are not at distance 0, so the floor is the distance of sequential
samples of other seeds. It depends on the size of a set: all sets have one size. Every distance is a mean over several
sets, each compared with a sequential set of its own, so that the sets are independent and have a standard error.

Milliseconds are of samples drawn alone, all methods in turns (`--turns`), once every row is there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product, starmap
from math import sqrt
from pathlib import Path
from time import perf_counter
from typing import Annotated, Any, TypedDict

import torch
import typer
from diffusers import DDPMScheduler
from torch import Tensor

import foresample as fs
import recipes.data
from benchmarks.curves import CIFAR10, PILOT_SEED, begun, choose, split
from benchmarks.kinds.quality import QualityCost, QualityCostPoint, QualityCostSettings
from benchmarks.models import features_of, frechet_distance
from benchmarks.peers import (
    Schedule,
    blocks,
    ddim,
    ddpm,
    dpmpp_2m,
    paradigms,
    parasolver,
    parataa,
    reflection,
    trailing,
)
from benchmarks.results import RESULTS, save
from benchmarks.timing import take_turns
from foresample import pretrained
from foresample.contracts import Target
from foresample.pretrained import Pretrained
from foresample.provenance import provenance
from foresample.targets import ChainTarget, from_scheduler
from recipes import lasa
from recipes.classifier import load_classifier


@dataclass(frozen=True)
class Model:
    """A chain to sample, and the measure of its samples."""

    name: str
    """The name in tables."""
    about: str
    """Description of the features."""
    target: Target
    features: Callable[[Tensor], Tensor]
    """[count, *shape] -> [count, d], float64"""
    fewer: Callable[[int], Schedule]
    """The same network in that many steps."""
    data: str
    """Description of the real data."""
    real: Callable[[int, int], Tensor]
    """real(count, number of the set) -> features of real data, [count, d]"""
    observations: int = 1
    """Samples i and i + observations have the same condition, whose sequential mean is subtracted."""


def fashion(steps: int, device: str, half: bool) -> Model:
    """Fashion-MNIST, with the shipped model and classifier."""
    model = pretrained.load(pretrained.EMBEDDED, device, torch.bfloat16 if half else torch.float32)
    judge = load_classifier(device)
    return _pictures(model, "Fashion-MNIST", "the shipped classifier's", partial(features_of, judge), steps)


def cifar10(steps: int, device: str, half: bool) -> Model:
    """CIFAR-10, with the model of `assets/`."""
    model = pretrained.load(CIFAR10, device, torch.bfloat16 if half else torch.float32)
    about = "thumbnails of 4 × 4 pixels, and how much each colour differs from its own"
    return _pictures(model, "CIFAR-10", about, _thumbnails, steps)


def _pictures(
    model: Pretrained, name: str, about: str, features: Callable[[Tensor], Tensor], steps: int
) -> Model:
    def real(count: int, number: int) -> Tensor:
        images, _ = recipes.data.load(name.lower())
        chosen = images[number * count : (number + 1) * count]
        if len(chosen) < count:
            raise typer.BadParameter(
                f"there are {len(images)} real pictures: choose a smaller --count or --sets"
            )
        return features(chosen.to(model.device).float() / 127.5 - 1)

    return Model(
        name,
        about,
        model.target(steps),
        lambda samples: features(samples.clamp(-1, 1)),
        partial(Schedule.of_pretrained, model),
        "training pictures",
        real,
    )


def robot(steps: int, device: str, half: bool) -> Model:
    """The handwriting policy at moments spread over its demonstrations; the real plans are what was drawn there."""
    planner = lasa.load().to(device)
    data = lasa.moments(lasa.demonstrations(), planner.config.horizon)
    spread = torch.linspace(0, len(data.position) - 1, OBSERVATIONS).round().long()
    condition = planner.condition(data.position[spread], data.velocity[spread], data.shape[spread]).to(device)
    plans = data.future[spread].flatten(1).double() / planner.config.speed

    def network(x: Tensor, time: Tensor, row: Tensor) -> Tensor:
        return planner.diffusion.unet(x, time, global_cond=condition[row % OBSERVATIONS])

    def target(scheduler: Any) -> ChainTarget:
        shape = torch.Size([planner.config.horizon, planner.config.action_dim])
        return from_scheduler(scheduler, network, shape, device=device)

    def fewer(number: int) -> Schedule:
        scheduler = trailing(planner.diffusion.noise_scheduler, number)
        return Schedule.of_scheduler(scheduler, target(scheduler))

    return Model(
        "Robot policy (handwriting)",
        "the plan itself, for the sequential sampler less its mean for that observation",
        target(trailing(planner.diffusion.noise_scheduler, steps)),
        lambda samples: samples.flatten(1).double().cpu(),
        fewer,
        "the plans demonstrated at the same moments",
        lambda count, number: plans[torch.arange(count) % OBSERVATIONS],
        OBSERVATIONS,
    )


def mixture(steps: int, device: str, half: bool) -> Model:
    """The Gaussian mixture of the draft-tree papers in 64 dimensions, whose denoiser is exact, by DDPM."""
    law = fs.GaussianMixture.of_draft_trees(64)
    scheduler = DDPMScheduler(clip_sample=False)

    def fewer(number: int) -> Schedule:
        made = trailing(scheduler, number)
        return Schedule.of_mixture(law, made.alphas_cumprod[made.timesteps].double())

    def features(x: Tensor) -> Tensor:
        nearest = torch.cdist(x, law.means).argmin(1)
        inside = (x - law.means[nearest]) / law.stds[nearest].unsqueeze(1)
        return torch.cat([inside, torch.nn.functional.one_hot(nearest, len(law.means)).double()], 1)

    def real(count: int, number: int) -> Tensor:
        generator = torch.Generator().manual_seed(number)
        which = torch.multinomial(law.weights, count, replacement=True, generator=generator)
        z = torch.randn(count, law.means.shape[1], generator=generator, dtype=torch.float64)
        return features(law.means[which] + law.stds[which].unsqueeze(1) * z)

    return Model(
        "Gaussian mixture, d = 64",
        "the component, and the place in it in its standard deviations",
        fewer(steps).target,
        features,
        fewer,
        "samples of the mixture itself",
        real,
    )


MODELS = {"fashion": fashion, "cifar10": cifar10, "policy": robot, "mixture": mixture}
OBSERVATIONS, DRAWN = 150, 10
"""Moments a plan is drawn for, and how often for its mean."""


def _thumbnails(pictures: Tensor) -> Tensor:
    """[B, 51], without a network to fetch; the second part measures noise that was left and detail that was lost."""
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
        """True if a row was made by this method."""
        return row.method == self.key and all(
            getattr(row, name) == value for name, value in self.detail.items()
        )


ITERATED = {"paradigms": paradigms, "parasolver": parasolver, "parataa": parataa}
FEWER = {"ddpm": ddpm, "ddim": ddim, "dpmpp-2m": dpmpp_2m}
SET = 10_000_000
"""Seeds of one set of samples; those of a method lie `METHOD` behind the last one's."""
METHOD = 1_000_000_000


def methods(window: int, tolerances: list[float], few: list[int]) -> list[Method]:
    """All methods. The first, with other seeds than the reference, is the floor."""

    def exact(key: str, peer: Callable[..., Any], **options: Any) -> Method:
        def draw(model: Model, count: int, seed: int) -> Any:
            return peer(model.target, count, seed=seed, **options)

        return Method(key, True, draw, {"window": options.get("window")})

    def iterated(named: tuple[str, Callable[..., Any]], tolerance: float) -> Method:
        key, peer = named

        def draw(model: Model, count: int, seed: int) -> Any:  # as many states a call
            return peer(model.target, count, seed=seed, window=window + 1, tolerance=tolerance)

        return Method(key, False, draw, {"tolerance": tolerance})

    def fewer(named: tuple[str, Callable[..., Any]], number: int) -> Method:
        key, solver = named

        def draw(model: Model, count: int, seed: int) -> Any:
            return solver(model.fewer(number), count, seed=seed)

        return Method(key, False, draw, {"steps": number})

    return [
        exact("sequential", fs.sequential),
        exact("default", fs.sample, window=window),
        exact("reflection-nearest", reflection, window=window, draft="nearest"),
        exact("blocks-parent", blocks, window=window, draft="parent"),
        *starmap(iterated, product(ITERATED.items(), tolerances)),
        *starmap(fewer, product(FEWER.items(), few)),
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


class Distances(TypedDict):
    """Fields of a row."""

    distance: float
    distance_error: float | None
    to_data: float
    to_data_error: float | None


@dataclass(frozen=True)
class Reference:
    """Sequential and real samples to compare with, set by set."""

    sequential: list[Tensor]
    """Features of sequential samples, less `usual`."""
    real: list[Tensor]
    usual: Tensor
    """[count, d]: the sequential mean of each sample's condition; 0 where all have the same."""

    @classmethod
    def of(cls, model: Model, settings: QualityCostSettings, part: int) -> Reference:
        """The sets of the settings, and enough other samples for the means."""
        plain, count, kinds = methods(settings.window, [], [])[0], settings.count, model.observations
        usual = torch.zeros(())
        if kinds > 1:
            many, _, _ = draw(model, plain, DRAWN * kinds, settings.seed + SET, max(part // kinds, 1) * kinds)
            usual = many.unflatten(0, (DRAWN, kinds)).mean(0)[torch.arange(count) % part % kinds]
        found = [
            draw(model, plain, count, settings.seed + SET * (2 + i), part)[0] for i in range(settings.sets)
        ]
        return cls([one - usual for one in found], [model.real(count, i) for i in range(settings.sets)], usual)

    def distances(self, found: list[Tensor]) -> Distances:
        """The mean distances of a method's sets, and their errors."""
        pairs = zip(found, self.sequential, self.real, strict=True)
        each = torch.tensor(
            [
                (frechet_distance(sequential, one - self.usual), frechet_distance(real, one))
                for one, sequential, real in pairs
            ],
            dtype=torch.float64,
        )
        (distance, to_data), errors = each.mean(0).tolist(), (each.std(0) / sqrt(len(each))).tolist()
        error, data_error = errors if len(each) > 1 else (None, None)
        return Distances(distance=distance, distance_error=error, to_data=to_data, to_data_error=data_error)


def in_turns(
    model: Model, known: list[Method], rows: list[QualityCostPoint], turns: int
) -> list[QualityCostPoint]:
    """The rows with the time of a sample drawn alone."""
    made = {next(i for i, method in enumerate(known) if method.made(row)): row for row in rows}
    if min(made) != 0:
        raise typer.BadParameter("--turns needs the sequential sampler among the --methods")

    def alone(method: Method, turn: int) -> Tensor:
        samples: Tensor = method.draw(model, 1, PILOT_SEED + turn).samples
        return samples

    timing = take_turns(
        {str(i): partial(alone, known[i]) for i in sorted(made)}, least=min(turns, 8), most=turns
    )
    return [
        replace(row, alone_ms=1e3 * timing.median(str(i)), faster=timing.ratio(str(i)) if i else None)
        for i, row in made.items()
    ]


def main(
    model: Annotated[str, typer.Option(help="fashion, cifar10, policy or mixture.")] = "fashion",
    steps: Annotated[int, typer.Option(help="Steps of the chain.")] = 100,
    count: Annotated[int, typer.Option(help="Samples of a set.")] = 5_000,
    sets: Annotated[int, typer.Option(min=1, help="Sets of samples of each method.")] = 5,
    window: Annotated[
        int, typer.Option(help="Window of the exact methods; the iterations have as many states a call.")
    ] = 8,
    tolerances: Annotated[
        str, typer.Option(help="Tolerances of the iterations, separated by commas; 0.001 is their authors'.")
    ] = "0.001,0.05,0.1,0.3,1",
    few: Annotated[str, typer.Option(help="Steps of the few-step methods.")] = "10,25,50",
    chosen: Annotated[str | None, typer.Option("--methods", help="Separated by commas.")] = None,
    seed: int = 0,
    part: Annotated[int, typer.Option(help="Samples drawn together; a multiple of classes.")] = 1_000,
    turns: Annotated[int, typer.Option(help="Most turns in which samples are timed alone; 0: not.")] = 0,
    half: Annotated[bool, typer.Option(help="Run the network in bfloat16.")] = False,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    out: Annotated[Path, typer.Option(help="Folder for the result file.")] = RESULTS,
) -> None:
    """Draw with every method and save `quality-cost-….json`, row by row."""
    source = MODELS[choose(model, list(MODELS))[0]](steps, device, half)
    known = methods(window, split(tolerances, (), float), split(few, (), int))
    keys = choose(chosen, list(dict.fromkeys(method.key for method in known)))
    settings = QualityCostSettings(
        target=source.name,
        steps=steps,
        count=count,
        window=window,
        seed=seed,
        half=half,
        device=device,
        features=source.about,
        sets=sets,
        data=source.data,
    )
    path = out / f"quality-cost-{model}.json"
    cut = begun(QualityCost, path, settings)
    rows, commands = (cut.rows, cut.commands) if cut else ([], [])
    commands = list(dict.fromkeys([*commands, provenance()["command"]]))
    missing = {
        number: method
        for number, method in enumerate(known, 1)
        if method.key in keys and not any(method.made(row) for row in rows)
    }
    reference = Reference.of(source, settings, part) if missing else None
    for number, method in missing.items():
        assert reference is not None
        began = perf_counter()
        drawn = [draw(source, method, count, seed + METHOD * number + SET * i, part) for i in range(sets)]
        found, calls, evaluations = zip(*drawn, strict=True)
        row = QualityCostPoint(
            method=method.key,
            **method.detail,
            exact=method.exact,
            calls=float(torch.cat(calls).mean()),
            evaluations=float(torch.cat(evaluations).mean()),
            seconds=(perf_counter() - began) / (count * sets),
            **reference.distances(list(found)),
        )
        rows.append(row)
        print(
            f"{row.method:20s} {row.detail:15s} {row.calls:6.1f} calls {row.distance:8.4f} ± {row.distance_error} "
            f"{row.to_data:8.4f} to the data",
            flush=True,
        )
        save(path, "quality-cost", settings, commands=commands, rows=rows)
    if turns:
        rows = in_turns(source, known, rows, turns)
        save(path, "quality-cost", settings, commands=commands, rows=rows)


if __name__ == "__main__":
    typer.run(main)
