"""Samplers of other packages, timed in turns with ours: network calls, seconds and distribution.

python -m benchmarks.packages --device cuda --network u.pt   # minutes on a GPU, days on a CPU
python -m benchmarks.packages --train --network u.pt      # the U-Net's training alone, minutes on a CPU
python -m benchmarks.packages --openai guided-diffusion   # OpenAI's class from that checkout, for 1 to 1000 samples
python -m benchmarks.packages --sbi vp                    # a posterior of sbi, for 1 to 1000 samples; or ve, subvp
python -m benchmarks.packages --posterior                 # deepinv's DPS, for 1 to 1000 samples

    denoising-diffusion-pytorch   its own U-Net and GaussianDiffusion, trained here a little on Fashion-MNIST
    21cmPSDenoiser                the package's pretrained score network, its reverse SDE by Euler–Maruyama
    OpenAI's diffusion class      the real files of a checkout and a small network, trained here by the class itself on
                                  points of two moons
    sbi                           an NPSE posterior of two moons, sbi's own network and loss, trained here
    deepinv                       DPS with a small network, trained here a little on Fashion-MNIST in 8×8 pixels, half
                                  of which are missing; a gradient through the network at every step

The last three take about a minute each on a quiet CPU. For each number of samples the window is chosen on a pilot, then
the package's own loop and the accelerated one are timed in turns (`benchmarks.timing`) on samples drawn after it. Rows
are saved as they are measured, so an interrupted run keeps them.

The first two have a second row for each number of samples: the sequential sampler against ours, both captured as CUDA
graphs. Their own loops take seconds for every turn, so a loop with a tenth of the steps is timed and its time is
multiplied by ten. All timed samples of each row are compared with those of the captured sequential sampler.

Needs `pip install --no-deps -r tests/packages.txt`.
"""

from __future__ import annotations

import importlib.util
import math
import os
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from time import perf_counter
from typing import Annotated, Any, NamedTuple

import torch
import typer
from torch import Tensor, nn

import foresample as fs
from benchmarks.kinds.packages import PackageCountRow, PackageRow
from benchmarks.results import RESULTS, save
from benchmarks.timing import take_turns
from foresample.baseline import Sequential
from foresample.checks.samples import samples_law
from foresample.core.noise import seeds_of
from foresample.integrations.packages.gaussian import gaussian_chain
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

GPU_COUNTS = (1, 16, 64)
"""Samples drawn at a time on a GPU."""
GPU_WINDOWS = [25, 50, 100, 200]
"""Windows tried on a pilot there, unless all samples together would draft more than `DRAFTS` transitions."""
DRAFTS = 4000
PILOTS = 2
"""Pilot runs of each window there, of which the faster one counts: the first may compile."""
SHARE = 10
"""The own loops that are timed on a GPU have this many times fewer steps."""

Sample = Callable[[Any, int], Tensor]
"""Draws `count` samples with an object of a package."""
Draw = Callable[[int], tuple[Tensor, fs.Report]]
"""Draws samples with a seed."""


@dataclass(frozen=True)
class Sampler:
    """A package's sampler: its own loop, the accelerated one, and the chain of both."""

    name: str
    target: fs.targets.ChainTarget
    own: Callable[[int, int], Tensor]
    """(count, seed) -> samples of the package's own loop with `SHARE` times fewer steps, which are only timed."""
    ours: Callable[[int, int], Draw]
    """(count, window) -> draws from `target` as a user of the package does."""


def spectra(device: str) -> Sampler:
    """The example's target; the package solves another equation, so `fs.sequential` is its own loop here."""
    spec = importlib.util.spec_from_file_location("power_spectrum", ROOT / "examples/power_spectrum.py")
    assert spec is not None
    assert spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    network, folder = example.load_network()
    target, short = (
        example.make_target(network, example.noisy_spectrum(folder), steps, device)
        for steps in (STEPS, STEPS // SHARE)
    )

    def ours(count: int, window: int) -> Draw:
        return partial(_run, fs.Engine(target, window=window, slots=count), count)

    return Sampler(
        "21cmPSDenoiser, reverse SDE",
        target,
        lambda count, seed: fs.sequential(short, seeds=seeds_of(seed, count)).samples,
        ours,
    )


def small_pictures(device: str, network: Path | None, updates: int, folder: Path | None) -> Sampler:
    """The package's diffusion, trained or read."""
    diffusion = make_diffusion(steps=STEPS).to(device)
    if network is not None and network.exists():
        diffusion.load_state_dict(torch.load(network, map_location=device, weights_only=True))
    else:
        train(diffusion, updates, device, folder)
        if network is not None:
            torch.save(diffusion.state_dict(), network)
    diffusion.eval()
    chain = gaussian_chain(diffusion)
    target = fs.targets.from_chain(lambda x, t, row: diffusion.model(x, t), chain, (1, 28, 28), device=device)
    short = make_diffusion(steps=STEPS // SHARE).to(device).eval()
    short.model.load_state_dict(diffusion.model.state_dict())

    def own(count: int, seed: int) -> Tensor:
        torch.manual_seed(seed)
        return short.sample(batch_size=count)

    @cache  # compares the loop once for each window
    def accelerated(window: int) -> Any:
        served = deepcopy(diffusion)
        fs.accelerate(served, window=window)
        return served

    def ours(count: int, window: int) -> Draw:
        served = accelerated(window)

        def draw(seed: int) -> tuple[Tensor, fs.Report]:
            torch.manual_seed(seed)
            pictures = served.sample(batch_size=count)
            return 2 * pictures - 1, served.foresample_report  # in units of the chain's states

        return draw

    return Sampler("denoising-diffusion-pytorch, DDPM", target, own, ours)


def _run(sampler: fs.Engine | Sequential, count: int, seed: int) -> tuple[Tensor, fs.Report]:
    run = sampler.sample(seeds_of(seed, count))
    return run.samples, run.report


def make_diffusion(steps: int, seed: int = 0) -> Any:
    """The package's GaussianDiffusion on 28×28 pictures."""
    unused = ("torchvision", "ema_pytorch", "accelerate", "denoising_diffusion_pytorch.fid_evaluation")
    package = load("denoising_diffusion_pytorch.denoising_diffusion_pytorch", without=unused)
    torch.manual_seed(seed)
    network = package.Unet(
        dim=16, dim_mults=(1, 2, 4), channels=1, attn_dim_head=8, attn_heads=2, full_attn=(False, False, True)
    )
    return package.GaussianDiffusion(network, image_size=28, timesteps=steps, objective="pred_v")


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


class Timed(NamedTuple):
    """A row, the samples of both sides that it was measured with, and the steps of the chain."""

    row: PackageCountRow
    own: list[Tensor]
    ours: list[Tensor]
    steps: int


def _timed(served: Any, copy: Any, sample: Sample, count: int, window: int) -> Timed:
    """An object's own loop against that of its accelerated copy."""

    def accelerated(turn: int) -> tuple[Tensor, fs.Report]:
        return _seeded(sample, copy, count, turn), copy.foresample_report

    for each in (served, copy):
        _seeded(sample, each, min(count, 10), PILOT)  # warm
    return _in_turns(partial(_seeded, sample, served, count), accelerated, count, window, seconds=SECONDS)


def _in_turns(
    own: Callable[[int], Tensor],
    ours: Draw,
    count: int,
    window: int,
    *,
    seconds: float,
    least: int = 4,
    repeats: int = 1,
    share: int = 1,
) -> Timed:
    """Both sides in turns, ours `repeats` times in each; `own` draws with `share` times fewer steps."""
    theirs: list[Tensor] = []
    drawn: list[Tensor] = []
    reports: list[fs.Report] = []

    def draw_own(turn: int) -> None:
        theirs.append(own(turn).cpu())

    def draw_ours(turn: int) -> None:
        samples, report = ours(turn)
        drawn.append(samples.cpu())
        reports.append(report)

    sides = {"own": draw_own, "accelerated": draw_ours}
    often = {"accelerated": repeats}
    timing = take_turns(sides, warm=0, least=least, most=60, seconds=seconds, repeats=often)
    calls = torch.tensor([report.calls_mean for report in reports])
    faster = timing.ratio("accelerated")
    row = PackageCountRow(
        count=count,
        window=window,
        calls=float(calls.mean()),
        calls_error=float(calls.std()) / len(calls) ** 0.5,
        evaluations=sum(report.evaluations_mean for report in reports) / len(reports),
        seconds=timing.median("accelerated"),
        own_seconds=share * timing.median("own"),
        faster=replace(faster, ratio=share * faster.ratio, error=share * faster.error),
    )
    return Timed(row, theirs, drawn, reports[0].steps)


def on_device(
    samplers: Iterable[tuple[str, Sampler]],
    counts: Sequence[int],
    windows: list[int],
    seconds: float,
    out: Path,
    **settings: Any,
) -> None:
    """Time every sampler's own loop and the accelerated one, then both samplers captured, and compare samples."""
    done: list[PackageRow] = []
    for kind, sampler in samplers:
        timed: list[tuple[bool, Timed]] = []
        plain: list[Tensor] = []
        for count in counts:
            for captured in (True, False):
                found = (_captured if captured else _eager)(sampler, count, windows, seconds)
                if captured:
                    plain += found.own
                timed.append((captured, found))
                print(f"{sampler.name}, captured: {captured}: {found.row}", flush=True)
                rows = [
                    PackageRow(
                        **vars(each.row),
                        name=sampler.name,
                        steps=each.steps,
                        captured=whether,
                        law=samples_law(torch.cat(plain), each.ours),
                    )
                    for whether, each in timed
                ]
                save(out / "packages.json", "packages", settings, rows=done + rows)
        picture(out / f"packages-{kind}.png", torch.cat(timed[-1][1].ours))
        done += rows


def _eager(sampler: Sampler, count: int, windows: list[int], seconds: float) -> Timed:
    """The package's own loop against the accelerated one."""
    draws = {window: sampler.ours(count, window) for window in _tried(windows, count)}
    window, ours = _quickest(draws, f"eager {count}")
    own = partial(_numbered, partial(sampler.own, count), f"own {count}")
    accelerated = partial(_numbered, ours, f"accelerated {count}")
    own(-1)  # warm; ours is, by the pilots
    return _in_turns(
        own, accelerated, count, window, seconds=seconds, least=3, repeats=_repeats(count, 4), share=SHARE
    )


def _captured(sampler: Sampler, count: int, windows: list[int], seconds: float) -> Timed:
    """The sequential sampler against ours: both are kept between runs, on a GPU as CUDA graphs."""
    target = sampler.target
    graph = target.std.device.type == "cuda"
    plain = Sequential(target, count, graph=graph)
    draws: dict[int, Draw] = {}
    for size in _tried(windows, count):
        engine = fs.Engine(target, window=size, slots=count, graph=graph)
        engine.prepare()
        draws[size] = partial(_run, engine, count)
    window, ours = _quickest(draws, f"captured {count}")
    del draws, engine

    def own(turn: int) -> Tensor:
        return _numbered(partial(_run, plain, count), f"sequential {count}", turn)[0]

    accelerated = partial(_numbered, ours, f"engine {count}")
    return _in_turns(own, accelerated, count, window, seconds=seconds, least=3, repeats=_repeats(count, 8))


def _tried(windows: list[int], count: int) -> list[int]:
    """The windows to try for so many samples at a time."""
    return [window for window in windows if count * window <= DRAFTS] or [min(windows)]


def _repeats(count: int, most: int) -> int:
    """Runs of our side in each turn: the time of one sample varies more than that of many together."""
    return max(1, most // count)


def _quickest(draws: Mapping[int, Draw], stream: str) -> tuple[int, Draw]:
    """The window that draws fastest, on samples that are not reported."""
    seconds: dict[int, list[float]] = {window: [] for window in draws}
    for turn in range(-PILOTS, 0):
        for window, draw in draws.items():
            began = perf_counter()
            _numbered(draw, f"pilot {stream}", turn)[0].cpu()
            seconds[window].append(perf_counter() - began)
    best = min(draws, key=lambda window: min(seconds[window]))
    return best, draws[best]


def _numbered(draw: Callable[[int], Any], stream: str, turn: int) -> Any:
    """A draw whose seed no other stream and no other turn has."""
    return draw(zlib.crc32(stream.encode()) * PILOT + turn % PILOT)


def _seeded(sample: Sample, served: Any, count: int, seed: int) -> Tensor:
    torch.manual_seed(seed)
    return sample(served, count).detach().cpu()


def picture(path: Path, samples: Tensor) -> None:
    """The first samples, side by side."""
    from PIL import Image

    low, high = samples.min(), samples.max()
    tiles = ((samples[:8, 0] - low) / (high - low) * 255).byte()
    strip = torch.cat(list(tiles), 1).numpy()
    Image.fromarray(strip).resize((strip.shape[1] * 4, strip.shape[0] * 4), 0).save(path)


def main(
    windows: Annotated[list[int] | None, typer.Option("--window", help="windows to try")] = None,
    count: Annotated[list[int] | None, typer.Option(help="samples at a time [1, 16, 64]")] = None,
    seconds: Annotated[float, typer.Option(help="after which no turn is begun, for each row")] = 8.0,
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
    samplers = {"pictures": pictures, "spectra": spectra(device)}
    out.mkdir(parents=True, exist_ok=True)
    settings = {"updates": updates, "device": device}
    on_device(samplers.items(), count or GPU_COUNTS, windows or GPU_WINDOWS, seconds, out, **settings)


if __name__ == "__main__":
    typer.run(main)
