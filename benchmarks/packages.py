"""Samplers of other packages: network calls, seconds and distribution, before and after one line.

python -m benchmarks.packages                             # two samples each on a CPU, tens of minutes
python -m benchmarks.packages --train --network u.pt      # the U-Net's training alone, minutes on a CPU
python -m benchmarks.packages --device cuda --count 64 --checked 512 --network u.pt
python -m benchmarks.packages --openai guided-diffusion   # OpenAI's class from that checkout, for 1 to 1000 samples
python -m benchmarks.packages --sbi vp                    # a posterior of sbi, for 1 to 1000 samples; or ve, subvp
python -m benchmarks.packages --posterior                 # deepinv's DPS, for 1 to 1000 samples

    21cmPSDenoiser                the package's pretrained score network, its reverse SDE by Euler–Maruyama;
                                  `foresample.check` compares it with the sequential sampler
    denoising-diffusion-pytorch   its own U-Net and GaussianDiffusion, trained here a little on Fashion-MNIST;
                                  its samples are compared with those of its own loop
    OpenAI's diffusion class      the real files of a checkout and a small network, trained here by the class itself on
                                  points of two moons
    sbi                           an NPSE posterior of two moons, sbi's own network and loss, trained here
    deepinv                       DPS with a small network, trained here a little on Fashion-MNIST in 8×8 pixels, half
                                  of which are missing; a gradient through the network at every step

The last three take about a minute each on a quiet CPU. For each number of samples the window is chosen on a pilot, then
the package's own loop and the accelerated one are timed in turns (`benchmarks.timing`) on samples drawn after it. Rows
are saved as they are measured, so an interrupted run keeps them.

Needs `pip install --no-deps -r tests/packages.txt`.
"""

from __future__ import annotations

import importlib.util
import math
import os
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Annotated, Any

import torch
import typer
from torch import Tensor, nn

import foresample as fs
from benchmarks.results import RESULTS, PackageCountRow, PackageRow, save
from benchmarks.timing import take_turns
from foresample.checks.samples import samples_law
from recipes import data
from tests.support import deepinv
from tests.support.openai import CHECKOUT, copies
from tests.support.packages import load
from tests.support.posteriors import box, sbi

ROOT = Path(__file__).parent.parent
STEPS = 1000
DPS_STEPS = 200
COUNTS = (1, 10, 100, 1000)
"""Samples drawn at a time."""
PILOT = 10**6
"""First seed of what is drawn for warm-up and for the choice of a window; the seeds of reported samples are turns."""
SECONDS = 10.0
"""Seconds after which no turn is begun, once there are four; for each number of samples."""

WINDOWS = [6, 16, 50, 100]
"""Windows tried on a pilot."""

Sample = Callable[[Any, int], Tensor]
"""Draws `count` samples with an object of a package."""


@dataclass(frozen=True)
class Verdict:
    """The result of comparing distributions."""

    tests: int
    smallest_p: float
    passed: bool


@dataclass(frozen=True)
class Package:
    """A sampler as its user calls it, before and after."""

    name: str
    plain: Callable[[int], Tensor]
    """Samples of the sequential sampler."""
    draw: Callable[[int, int], tuple[Tensor, fs.Report]]
    """(count, window) -> samples and report."""
    compare: Callable[[int, int], Verdict]
    """(count, window) -> the test of the distribution."""


def power_spectrum(device: str) -> Package:
    """The example's target."""
    spec = importlib.util.spec_from_file_location("power_spectrum", ROOT / "examples/power_spectrum.py")
    assert spec is not None
    assert spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    network, folder = example.load_network()
    target = example.make_target(network, example.noisy_spectrum(folder), STEPS, device)

    def draw(count: int, window: int) -> tuple[Tensor, fs.Report]:
        run = fs.sample(target, count, window=window, seed=1)
        return run.samples, run.report

    def compare(count: int, window: int) -> Verdict:
        result = fs.check(target, window=window, samples=count, slots=256)
        law = next(finding for finding in result.findings if finding.question == "law")
        print(result, flush=True)
        assert law.tests is not None
        assert law.smallest_p is not None
        return Verdict(law.tests, law.smallest_p, result.passed)

    return Package("21cmPSDenoiser, reverse SDE", lambda n: fs.sequential(target, n).samples, draw, compare)


def small_pictures(device: str, network: Path | None, updates: int, folder: Path | None) -> Package:
    """The package's diffusion, trained or read."""
    diffusion = make_diffusion().to(device)
    if network is not None and network.exists():
        diffusion.load_state_dict(torch.load(network, map_location=device, weights_only=True))
    else:
        train(diffusion, updates, device, folder)
        if network is not None:
            torch.save(diffusion.state_dict(), network)
    diffusion.eval()
    return in_one_line(
        "denoising-diffusion-pytorch, DDPM", diffusion, lambda count: diffusion.sample(batch_size=count)
    )


def in_one_line(name: str, served: Any, sample: Callable[[int], Tensor]) -> Package:
    """A sampler before and after `accelerate`."""

    def plain(count: int) -> Tensor:
        torch.manual_seed(0)
        return sample(count)

    def draw(count: int, window: int) -> tuple[Tensor, fs.Report]:
        torch.manual_seed(1)
        with fs.accelerate(served, window=window):
            sample(count)  # compares its loop, which later calls need not do
            began = perf_counter()
            samples, report = sample(count).cpu(), served.foresample_report
            report.seconds = perf_counter() - began  # with all that is around the run
            return samples, report

    def compare(count: int, window: int) -> Verdict:
        law = samples_law(plain(count), [draw(count, window)[0]])
        return Verdict(law.tests, law.smallest_p, law.passed)

    return Package(name, plain, draw, compare)


def make_diffusion(seed: int = 0) -> Any:
    """The package's GaussianDiffusion on 28×28 pictures."""
    unused = ("torchvision", "ema_pytorch", "accelerate", "denoising_diffusion_pytorch.fid_evaluation")
    package = load("denoising_diffusion_pytorch.denoising_diffusion_pytorch", without=unused)
    torch.manual_seed(seed)
    network = package.Unet(
        dim=16, dim_mults=(1, 2, 4), channels=1, attn_dim_head=8, attn_heads=2, full_attn=(False, False, True)
    )
    return package.GaussianDiffusion(network, image_size=28, timesteps=STEPS, objective="pred_v")


def train(diffusion: Any, updates: int, device: str, folder: Path | None) -> None:
    """A few updates of the package's own loss on Fashion-MNIST; its ten thousand test pictures are enough for them."""
    pictures = data.load("fashion-mnist", folder, train=False).images.float().view(-1, 1, 28, 28) / 255
    optimizer = torch.optim.Adam(diffusion.parameters(), lr=1e-3)
    for update in range(updates):
        for group in optimizer.param_groups:
            group["lr"] = 1e-3 * min(1, (updates - update) / (0.5 * updates))
        batch = pictures[torch.randint(len(pictures), (32,))].to(device)
        loss = diffusion(batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if update % 50 == 0:
            print(f"update {update}: loss {float(loss.detach()):.4f}", flush=True)


class Points(nn.Module):
    """A small network of points in the plane and their timesteps."""

    def __init__(self, width: int = 128) -> None:
        super().__init__()
        layers: list[nn.Module] = [nn.Linear(2 + 16, width), nn.SiLU(), nn.Linear(width, width), nn.SiLU()]
        self.layers = nn.Sequential(*layers, nn.Linear(width, 2))
        self.frequencies = torch.exp(torch.linspace(0, 6, 8))

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        angle = (t / STEPS).unsqueeze(1) * self.frequencies
        return self.layers(torch.cat([x, angle.sin(), angle.cos()], 1))


def openai_points(checkout: Path, updates: int) -> tuple[str, Callable[[], Any], Sample]:
    """OpenAI's class, from the files of a checkout, on points of two moons."""
    os.environ[CHECKOUT] = str(checkout.resolve())
    diffusion = copies()[0].make(variance="FIXED_LARGE", steps=STEPS)
    torch.manual_seed(0)
    network = Points()

    def loss(_: int) -> Tensor:
        angle, side = math.pi * torch.rand(256), torch.randint(2, (256,)) * 2.0 - 1
        x = torch.stack([side * (angle.cos() - 0.5), side * (angle.sin() - 0.25)], 1) / 2
        x = x + 0.02 * torch.randn(256, 2)
        return diffusion.training_losses(network, x, torch.randint(STEPS, (256,)))["loss"].mean()

    fit(network, loss, updates, rate=1e-3)
    name = f"OpenAI's diffusion class ({copies()[0]}), DDPM"
    return name, partial(deepcopy, diffusion), lambda served, count: served.p_sample_loop(network, (count, 2))


def fit(network: nn.Module, loss: Callable[[int], Tensor], updates: int, rate: float) -> None:
    """A few updates; the network is left in eval mode."""
    optimizer = torch.optim.Adam(network.parameters(), lr=rate)
    for update in range(updates):
        value = loss(update)
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
    network.eval()


def two_moons(theta: Tensor) -> Tensor:
    """The simulator of that name: x given θ."""
    angle, radius = math.pi * (torch.rand(len(theta)) - 0.5), 0.1 + 0.01 * torch.randn(len(theta))
    point = torch.stack([radius * angle.cos() + 0.25, radius * angle.sin()], 1)
    a, b = theta.unbind(1)
    return point + torch.stack([-(a + b).abs(), b - a], 1) / math.sqrt(2)


def sbi_posterior(sde: str, updates: int) -> tuple[str, Callable[[], Any], Sample]:
    """NPSE with sbi's default network: 499 steps."""
    torch.manual_seed(0)
    theta = 2 * torch.rand(20_000, 2) - 1
    x = two_moons(theta)
    build = sbi("neural_nets.net_builders.vector_field_nets").build_vector_field_estimator
    options = {"z_score_x": "independent", "z_score_y": "independent"}
    estimator = build(theta, x, estimator_type="score", sde_type=sde, **options)

    def loss(_: int) -> Tensor:
        batch = torch.randint(len(theta), (256,))
        return estimator.loss(theta[batch], x[batch]).mean()

    fit(estimator, loss, updates, rate=5e-4)
    kind = sbi("inference.posteriors.vector_field_posterior").VectorFieldPosterior
    posterior = kind(estimator, box(2.0), device="cpu")  # with room: no sample is rejected
    asked = {"x": torch.zeros(1, 2), "show_progress_bars": False, "reject_outside_prior": False}
    return (
        f"sbi's NPSE, {sde}",
        partial(deepcopy, posterior),
        lambda served, count: served.sample((count,), **asked),
    )


class SmallDenoiser(nn.Module):
    """Three convolutions, on scales of pictures between 0 and 1, at a noise level for each row."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.mean, self.variance = 0.3, 0.08
        layers: list[nn.Module] = [nn.Conv2d(2, width, 3, padding=1), nn.SiLU()]
        layers += [nn.Conv2d(width, width, 3, padding=1), nn.SiLU(), nn.Conv2d(width, 1, 3, padding=1)]
        self.layers = nn.Sequential(*layers)

    def forward(self, x: Tensor, sigma: Tensor) -> Tensor:
        sigma = sigma.view(-1, 1, 1, 1).expand(len(x), 1, 1, 1)
        scale = (sigma**2 + self.variance).rsqrt()
        level = (sigma.log() / 4).expand_as(x)
        found = self.layers(torch.cat([(x - self.mean) * scale, level], 1))
        skip = self.variance * scale**2
        return self.mean + skip * (x - self.mean) + sigma * self.variance**0.5 * scale * found


def inpainting(device: str, updates: int, folder: Path | None) -> tuple[str, Callable[[], Any], Sample]:
    """deepinv's DPS on small pictures of which every other pixel, chosen at random, is missing."""
    dinv = deepinv.package()
    whole = data.load("fashion-mnist", folder, train=False).images.float().view(-1, 1, 28, 28) / 255
    pictures = nn.functional.adaptive_avg_pool2d(whole, 8)
    torch.manual_seed(0)
    denoiser = SmallDenoiser().to(device)

    def loss(_: int) -> Tensor:
        clean = pictures[torch.randint(len(pictures), (64,))].to(device)
        sigma = torch.exp(torch.empty(64, 1, 1, 1, device=device).uniform_(math.log(0.005), math.log(80)))
        found = denoiser(clean + sigma * torch.randn_like(clean), sigma)
        return ((found - clean).square() * (1 + 0.1 / sigma**2)).mean()

    fit(denoiser, loss, updates, rate=2e-3)
    noise = dinv.physics.GaussianNoise(0.05)
    physics = dinv.physics.Inpainting((1, 8, 8), mask=0.5, noise_model=noise, device=device)
    measured = physics(pictures[:1].to(device))

    def make() -> Any:
        return dinv.sampling.DPS(denoiser, num_steps=DPS_STEPS, device=device)

    return "deepinv, DPS", make, lambda served, count: served(measured, physics, x_init=(count, 1, 8, 8))


def measure(
    package: Package, window: int, count: int, checked: int, sequential_seconds: float
) -> tuple[PackageRow, Tensor]:
    """A row, and the samples it was measured with."""
    package.draw(1, window)  # compilers and caches
    samples, report = package.draw(count, window)
    verdict = package.compare(checked, window) if checked else None
    row = PackageRow(
        name=package.name,
        steps=report.steps,
        window=window,
        count=count,
        calls=report.calls_mean,
        calls_error=None if count == 1 else report.calls_error,
        evaluations=report.evaluations_mean,
        seconds=report.seconds,
        sequential_seconds=sequential_seconds,
        checked=checked,
        smallest_p=None if verdict is None else verdict.smallest_p,
        tests=None if verdict is None else verdict.tests,
        passed=None if verdict is None else verdict.passed,
    )
    return row, samples.cpu()


def by_count(
    name: str, make: Callable[[], Any], sample: Sample, windows: list[int], out: Path, **settings: Any
) -> None:
    """Time an object's own loop and the accelerated one for few samples and for many, and compare their samples."""
    rows: list[PackageCountRow] = []
    served, copy = make(), make()
    for count in COUNTS:
        window = min(windows, key=partial(_pilot, copy, sample, count))
        with fs.accelerate(copy, window=window):
            row, own, ours, steps = _timed(served, copy, sample, count, window)
        rows.append(row)
        print(row, flush=True)
        law = samples_law(torch.cat(own), ours)  # of the most samples at a time
        save(out, "package-counts", settings, package=name, steps=steps, rows=rows, law=law)


def _pilot(copy: Any, sample: Sample, count: int, window: int) -> float:
    """Seconds of the fastest of a few accelerated draws, of samples that are not reported."""
    seconds = []
    with fs.accelerate(copy, window=window):
        _seeded(sample, copy, 1, PILOT)  # compares its loop, which later calls need not do
        for seed in range(PILOT, PILOT + (5 if count < COUNTS[-1] else 1)):
            began = perf_counter()
            _seeded(sample, copy, count, seed)
            seconds.append(perf_counter() - began)
    return min(seconds)


def _timed(
    served: Any, copy: Any, sample: Sample, count: int, window: int
) -> tuple[PackageCountRow, list[Tensor], list[Tensor], int]:
    """A row, the samples of both loops that it was measured with, and the steps of the chain."""
    own: list[Tensor] = []
    ours: list[Tensor] = []
    reports: list[fs.Report] = []

    def accelerated(turn: int) -> None:
        ours.append(_seeded(sample, copy, count, turn))
        reports.append(copy.foresample_report)

    for each in (served, copy):
        _seeded(sample, each, min(count, 10), PILOT)  # warm
    sides = {"own": lambda turn: own.append(_seeded(sample, served, count, turn)), "accelerated": accelerated}
    timing = take_turns(sides, warm=0, least=4, most=60, seconds=SECONDS)
    calls = torch.tensor([report.calls_mean for report in reports])
    row = PackageCountRow(
        count=count,
        window=window,
        calls=float(calls.mean()),
        calls_error=float(calls.std()) / len(calls) ** 0.5,
        evaluations=sum(report.evaluations_mean for report in reports) / len(reports),
        seconds=timing.median("accelerated"),
        own_seconds=timing.median("own"),
        faster=timing.ratio("accelerated"),
    )
    return row, own, ours, reports[0].steps


def _seeded(sample: Sample, served: Any, count: int, seed: int) -> Tensor:
    torch.manual_seed(seed)
    return sample(served, count).detach().cpu()


def _seconds(package: Package, count: int) -> float:
    began = perf_counter()
    package.plain(count).cpu()
    return perf_counter() - began


def picture(path: Path, samples: Tensor) -> None:
    """The first samples, side by side."""
    from PIL import Image

    low, high = samples.min(), samples.max()
    tiles = ((samples[:8, 0] - low) / (high - low) * 255).byte()
    strip = torch.cat(list(tiles), 1).numpy()
    Image.fromarray(strip).resize((strip.shape[1] * 4, strip.shape[0] * 4), 0).save(path)


def main(
    windows: Annotated[list[int] | None, typer.Option("--window", help="windows to try [50, 200]")] = None,
    count: Annotated[int, typer.Option(help="samples measured")] = 2,
    checked: Annotated[int, typer.Option(help="samples whose distributions are compared, 0 for none")] = 0,
    folder: Annotated[Path | None, typer.Option("--data", help="folder of Fashion-MNIST")] = None,
    network: Annotated[Path | None, typer.Option(help="the U-Net, read if it is there, else written")] = None,
    updates: Annotated[int, typer.Option(help="of the U-Net's training")] = 600,
    train: Annotated[bool, typer.Option("--train", help="train the U-Net and stop")] = False,
    openai: Annotated[
        Path | None, typer.Option(help="checkout with OpenAI's class; measure that alone")
    ] = None,
    sde: Annotated[
        str | None, typer.Option("--sbi", help="a process of sbi (vp, ve or subvp); measure that alone")
    ] = None,
    posterior: Annotated[bool, typer.Option("--posterior", help="measure deepinv alone")] = False,
    device: str = "cpu",
    out: Annotated[Path, typer.Option(help="folder for the result file and pictures")] = RESULTS,
) -> None:
    """Measure two packages, or OpenAI's class, sbi or deepinv."""
    if openai is not None:
        file = out / "packages-openai.json"
        by_count(*openai_points(openai, updates), windows or WINDOWS, file, updates=updates)
        return
    if sde is not None:
        file = out / f"packages-sbi-{sde}.json"
        by_count(*sbi_posterior(sde, updates), windows or WINDOWS, file, updates=updates)
        return
    if posterior:
        file = out / "packages-deepinv.json"
        by_count(*inpainting(device, updates, folder), windows or WINDOWS, file, updates=updates, device=device)
        return
    pictures = small_pictures(device, network, updates, folder)
    if train:
        return
    settings = {"count": count, "checked": checked, "updates": updates, "device": device}
    rows: list[PackageRow] = []
    out.mkdir(parents=True, exist_ok=True)
    for package, name in ((pictures, "pictures"), (power_spectrum(device), "spectra")):
        with torch.no_grad():
            sequential_seconds = _seconds(package, count)
            for window in windows or [50, 200]:
                many = (
                    0 if any(row.name == package.name for row in rows) else checked
                )  # the law of one is enough
                row, samples = measure(package, window, count, many, sequential_seconds)
                rows.append(row)
                print(row, flush=True)
                save(out / "packages.json", "packages", settings, rows=rows)
                picture(out / f"packages-{name}.png", samples)


if __name__ == "__main__":
    typer.run(main)
