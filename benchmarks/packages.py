"""Samplers of other packages at a thousand steps: calls, clock and law, before and after one line.

python -m benchmarks.packages                             # two samples each on a CPU, tens of minutes
python -m benchmarks.packages --train --network u.pt      # the U-Net's training alone, minutes on a CPU
python -m benchmarks.packages --device cuda --count 64 --checked 512 --network u.pt
python -m benchmarks.packages --openai guided-diffusion   # OpenAI's class from that checkout, for 1 to 1000 samples
python -m benchmarks.packages --sbi vp                    # a posterior of sbi, for 1 to 1000 samples; or ve, subvp
python -m benchmarks.packages --posterior                 # deepinv's DPS, for 1 to 100 samples

    21cmPSDenoiser                the package's pretrained score network, its reverse SDE by Euler–Maruyama;
                                  `foresample.check` compares it with the sequential sampler
    denoising-diffusion-pytorch   its own U-Net and GaussianDiffusion, trained here a little on Fashion-MNIST;
                                  its samples are compared with those of its own loop
    deepinv                       DPS with its own DRUNet, trained here a little on Fashion-MNIST: half of the pixels
                                  are painted in, with a gradient through the network at every step
    OpenAI's diffusion class      the real files of a checkout and a small network, trained here by the class itself on
                                  points of two moons
    sbi                           an NPSE posterior of two moons, sbi's own network and loss, trained here

Needs `pip install --no-deps -r tests/packages.txt`. The file is written after every row: what is stopped keeps them.
"""

from __future__ import annotations

import importlib.util
import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Annotated, Any

import torch
import typer
from torch import Tensor, nn

import foresample as fs
from benchmarks.results import RESULTS, PackageRow, save
from foresample.checks.samples import samples_law
from recipes import data
from tests.support import deepinv
from tests.support.openai import CHECKOUT, copies
from tests.support.packages import load
from tests.support.posteriors import box, sbi

ROOT = Path(__file__).parent.parent
STEPS = 1000


@dataclass(frozen=True)
class Verdict:
    """What a comparison of laws said."""

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
    """So many samples, with this window."""
    compare: Callable[[int, int], Verdict]
    """The law of so many samples, with this window."""


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


def openai_points(checkout: Path, updates: int) -> Package:
    """OpenAI's class, from the files of a checkout, on points of two moons."""
    os.environ[CHECKOUT] = str(checkout.resolve())
    diffusion = copies()[0].make(variance="FIXED_LARGE", steps=STEPS)
    torch.manual_seed(0)
    network = Points()
    optimizer = torch.optim.Adam(network.parameters(), lr=1e-3)
    for _ in range(updates):
        angle, side = math.pi * torch.rand(256), torch.randint(2, (256,)) * 2.0 - 1
        x = torch.stack([side * (angle.cos() - 0.5), side * (angle.sin() - 0.25)], 1) / 2 + 0.02 * torch.randn(
            256, 2
        )
        loss = diffusion.training_losses(network, x, torch.randint(STEPS, (256,)))["loss"].mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    network.eval()
    name = f"OpenAI's diffusion class ({copies()[0]}), DDPM"
    return in_one_line(name, diffusion, lambda count: diffusion.p_sample_loop(network, (count, 2)))


def two_moons(theta: Tensor) -> Tensor:
    """The simulator of that name: x given θ."""
    angle, radius = math.pi * (torch.rand(len(theta)) - 0.5), 0.1 + 0.01 * torch.randn(len(theta))
    point = torch.stack([radius * angle.cos() + 0.25, radius * angle.sin()], 1)
    a, b = theta.unbind(1)
    return point + torch.stack([-(a + b).abs(), b - a], 1) / math.sqrt(2)


def sbi_posterior(sde: str, updates: int) -> Package:
    """NPSE with sbi's default network: 499 steps."""
    torch.manual_seed(0)
    theta = 2 * torch.rand(20_000, 2) - 1
    x = two_moons(theta)
    build = sbi("neural_nets.net_builders.vector_field_nets").build_vector_field_estimator
    options = {"z_score_x": "independent", "z_score_y": "independent"}
    estimator = build(theta, x, estimator_type="score", sde_type=sde, **options)
    optimizer = torch.optim.Adam(estimator.parameters(), lr=5e-4)
    for _ in range(updates):
        batch = torch.randint(len(theta), (256,))
        loss = estimator.loss(theta[batch], x[batch]).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    kind = sbi("inference.posteriors.vector_field_posterior").VectorFieldPosterior
    posterior = kind(estimator, box(2.0), device="cpu")  # with room: no sample is rejected
    asked = {"x": torch.zeros(1, 2), "show_progress_bars": False, "reject_outside_prior": False}
    return in_one_line(f"sbi's NPSE, {sde}", posterior, lambda count: posterior.sample((count,), **asked))


class Preconditioned(nn.Module):
    """A network around which scales are those of pictures between 0 and 1, at a noise level for each of them."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network, self.mean, self.variance = network, 0.3, 0.12

    def forward(self, x: Tensor, sigma: Tensor) -> Tensor:
        sigma = sigma.view(-1, 1, 1, 1).expand(len(x), 1, 1, 1)
        scale = (sigma**2 + self.variance).rsqrt()
        found = self.network((x - self.mean) * scale, sigma.log() / 4)
        skip = self.variance * scale**2
        return self.mean + skip * (x - self.mean) + sigma * self.variance**0.5 * scale * found


def inpainting(device: str, updates: int, folder: Path | None) -> Package:
    """deepinv's DPS on pictures of which every other pixel, chosen at random, is missing."""
    dinv = deepinv.package()
    pictures = data.load("fashion-mnist", folder, train=False).images.float().view(-1, 1, 28, 28) / 255
    torch.manual_seed(0)
    network = dinv.models.DRUNet(1, 1, nc=(16, 32, 32, 32), nb=1, pretrained=None)
    denoiser = Preconditioned(network).to(device)
    optimizer = torch.optim.Adam(denoiser.parameters(), lr=2e-3)
    for update in range(updates):
        clean = pictures[torch.randint(len(pictures), (32,))].to(device)
        sigma = torch.exp(torch.empty(32, 1, 1, 1, device=device).uniform_(math.log(0.005), math.log(80)))
        found = denoiser(clean + sigma * torch.randn_like(clean), sigma)
        loss = ((found - clean).square() * (1 + 0.1 / sigma**2)).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if update % 50 == 0:
            print(f"update {update}: loss {float(loss.detach()):.4f}", flush=True)
    physics = dinv.physics.Inpainting(
        (1, 28, 28), mask=0.5, noise_model=dinv.physics.GaussianNoise(0.05), device=device
    )
    measured = physics(pictures[:1].to(device))
    model = dinv.sampling.DPS(denoiser.eval(), num_steps=STEPS, device=device)

    def sample(count: int) -> Tensor:
        return model(measured.expand(count, -1, -1, -1), physics).detach()

    return in_one_line("deepinv, DPS", model, sample)


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


def few_and_many(
    package: Package, counts: tuple[int, ...], windows: list[int], checked: int, out: Path, **settings: Any
) -> None:
    """Few samples and many: where a call's overhead counts, and where states do. `out` is the result file."""
    rows: list[PackageRow] = []
    for count in counts:
        sequential_seconds = min(_seconds(package, count) for _ in range(3))
        for window in windows:
            many = 0 if rows else checked
            best, _ = min(
                (measure(package, window, count, many, sequential_seconds) for _ in range(3)), key=_clock
            )
            rows.append(best)
            print(best, flush=True)
            save(out, "packages", {"checked": checked, **settings}, rows=rows)


def _clock(measured: tuple[PackageRow, Tensor]) -> float:
    return measured[0].seconds


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
    checked: Annotated[int, typer.Option(help="samples compared in law, 0 for none")] = 0,
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
        package, counts = openai_points(openai, updates), (1, 10, 100, 1000)
        few_and_many(
            package, counts, windows or [16, 50], checked, out / "packages-openai.json", updates=updates
        )
        return
    if sde is not None:
        package, file = sbi_posterior(sde, updates), out / f"packages-sbi-{sde}.json"
        few_and_many(package, (1, 10, 100, 1000), windows or [12, 24], checked, file, updates=updates)
        return
    if posterior:
        package, settings = inpainting(device, updates, folder), {"updates": updates, "device": device}
        file = out / "packages-deepinv.json"
        few_and_many(package, (1, 10, 100), windows or [16, 50], checked, file, **settings)
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
