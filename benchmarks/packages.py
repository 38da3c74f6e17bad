"""Samplers of other packages at a thousand steps: calls, clock and law, before and after one line.

python -m benchmarks.packages                   # two samples each on a CPU, minutes
python -m benchmarks.packages --device cuda --count 64 --checked 512

    21cmPSDenoiser                the package's pretrained score network, its reverse SDE by Euler–Maruyama
    denoising-diffusion-pytorch   its own U-Net and GaussianDiffusion, trained here a little on Fashion-MNIST

Needs `pip install --no-deps -r tests/packages.txt`. With `--checked`, as many samples of each are compared in law with
as many sequential ones.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Annotated, Any

import torch
import typer
from torch import Tensor

import foresample as fs
from benchmarks.results import RESULTS, PackageRow, save
from foresample.contracts import Target
from foresample.core.noise import seeds_of
from foresample.integrations import packages
from foresample.selftest import samples_law
from recipes import data
from tests.packages import load

ROOT = Path(__file__).parent.parent
STEPS = 1000


def power_spectrum(device: str) -> Target:
    """The example's target."""
    spec = importlib.util.spec_from_file_location("power_spectrum", ROOT / "examples/power_spectrum.py")
    assert spec is not None
    assert spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    network, folder = example.load_network()
    return example.make_target(network, example.noisy_spectrum(folder), STEPS, device)


def trained_diffusion(device: str, updates: int, seed: int = 0) -> Any:
    """The package's GaussianDiffusion on 28×28 pictures, after a few updates of its own loss."""
    unused = ("torchvision", "ema_pytorch", "accelerate")
    package = load("denoising_diffusion_pytorch.denoising_diffusion_pytorch", without=unused)
    torch.manual_seed(seed)
    network = package.Unet(
        dim=16, dim_mults=(1, 2, 4), channels=1, attn_dim_head=8, attn_heads=2, full_attn=(False, False, True)
    )
    diffusion = package.GaussianDiffusion(network, image_size=28, timesteps=STEPS, objective="pred_v").to(
        device
    )
    pictures = data.load("fashion-mnist").images.float().view(-1, 1, 28, 28)
    pictures = (pictures - pictures.min()) / (pictures.max() - pictures.min())
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
    return diffusion.eval()


def measure(
    name: str,
    target: Target,
    draw: Callable[[int, int], tuple[Tensor, fs.Report]],
    window: int,
    count: int,
    checked: int,
) -> PackageRow:
    """One row: `draw(count, window)` is what a user calls."""
    with torch.no_grad():
        draw(min(count, 2), window)  # compilers and caches
        began = perf_counter()
        _, report = draw(count, window)
        seconds = perf_counter() - began
        step_seconds = _call_seconds(target, count)
    law = None
    if checked:
        drawn, _ = draw(checked, window)
        law = samples_law(target, [drawn], seeds_of(2**40, checked), checked)
    return PackageRow(
        name=name,
        steps=report.steps,
        window=window,
        count=count,
        calls=report.calls_mean,
        calls_error=None if count == 1 else report.calls_error,
        evaluations=report.evaluations_mean,
        seconds=seconds,
        sequential_seconds=step_seconds * report.steps,
        checked=checked,
        smallest_p=None if law is None else law.smallest_p,
        tests=None if law is None else law.tests,
        passed=None if law is None else law.passed,
    )


def _call_seconds(target: Target, count: int, calls: int = 20) -> float:
    """Of one sequential step: the mean of a few network calls over the chain."""
    std = target.std
    x, row = torch.randn(count, *target.shape, device=std.device), torch.arange(count, device=std.device)
    target.predict(x, row * 0, row)
    if std.is_cuda:
        torch.cuda.synchronize()
    began = perf_counter()
    for k in torch.linspace(0, len(std) - 1, calls).long().tolist():
        target.predict(x, torch.full_like(row, k), row)
    if std.is_cuda:
        torch.cuda.synchronize()
    return (perf_counter() - began) / calls


def main(
    windows: Annotated[list[int] | None, typer.Option("--window", help="windows to try [50, 200]")] = None,
    count: Annotated[int, typer.Option(help="samples measured")] = 2,
    checked: Annotated[int, typer.Option(help="samples compared in law, 0 for none")] = 0,
    updates: Annotated[int, typer.Option(help="of the U-Net's training")] = 600,
    device: str = "cpu",
    out: Annotated[Path, typer.Option(help="folder for the result file")] = RESULTS,
) -> None:
    """Measure both packages."""
    spectrum = power_spectrum(device)
    diffusion = trained_diffusion(device, updates)
    start = torch.zeros(1, 1, 28, 28, device=device)
    pictures = packages._gaussian_target(diffusion, packages._gaussian_chain(diffusion), start)
    # The oracle of the law starts from its own noise, not at given states.
    pictures = fs.targets.ChainTarget(pictures.chain, pictures.shape, pictures.network)

    def draw_spectra(number: int, window: int) -> tuple[Tensor, fs.Report]:
        run = fs.sample(spectrum, number, window=window, seed=number)
        return run.samples, run.report

    def draw_pictures(number: int, window: int) -> tuple[Tensor, fs.Report]:
        torch.manual_seed(number)
        with fs.accelerate(diffusion, window):
            samples = diffusion.sample(batch_size=number)
            return diffusion.normalize(samples).clone(), diffusion.foresample_report

    rows = []
    for window in windows or [50, 200]:
        for name, target, draw in (
            ("21cmPSDenoiser, reverse SDE", spectrum, draw_spectra),
            ("denoising-diffusion-pytorch, DDPM", pictures, draw_pictures),
        ):
            rows.append(measure(name, target, draw, window, count, checked))
            print(rows[-1], flush=True)
    settings = {"count": count, "checked": checked, "updates": updates, "device": device}
    save(out / "packages.json", "packages", settings, rows=rows)


if __name__ == "__main__":
    typer.run(main)
