"""A pretrained score model of cosmology, sampled as the reverse SDE it was trained for, in a fraction of the calls.

21cmPSDenoiser (Breitman et al.) turns one noisy power spectrum of the 21-cm signal, 32×16, into samples of its mean: a
conditional VP-SDE U-Net of 9 million parameters that comes with its weights,

    pip install --no-deps 21cmPSDenoiser==1.0.2 einops

The package solves the probability-flow ODE. Here is the reverse SDE its network was trained for as a target,
Euler–Maruyama in 1000 steps. The network returns −σ(t)·score at times 0 … 999.

    python examples/power_spectrum.py --picture out.png
"""

from __future__ import annotations

import argparse
import importlib.util
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

import foresample as fs


def load_network() -> tuple[torch.nn.Module, Path]:
    """The package's U-Net with its weights; only its module is loaded, since the rest needs astropy."""
    package = importlib.util.find_spec("psdenoiser")
    if package is None or package.submodule_search_locations is None:
        raise SystemExit("pip install --no-deps 21cmPSDenoiser==1.0.2 einops")
    folder = Path(next(iter(package.submodule_search_locations)))
    spec = importlib.util.spec_from_file_location("psdenoiser_model", folder / "model.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    network = module.UNet(dim=(32, 16), channels=2, dim_mults=(1, 2, 4, 8), cdn_len=None)
    network.load_state_dict(torch.load(folder / "denoiser_model.pt", map_location="cpu", weights_only=True))
    return network.eval(), folder


def noisy_spectrum(folder: Path, seed: int = 0) -> Tensor:
    """A spectrum as one simulation measures it, [1, 32, 16] in the network's units: a power law, 30 mK² at k = 0.5/Mpc,
    with the scatter of the few Fourier modes in each bin."""
    constants = np.load(folder / "constants.npz")
    k = np.hypot(constants["kperp"][:, None], constants["kpar"])
    modes = np.maximum(constants["Nmodes"], 1)
    measured = 30 * (k / 0.5) ** 0.8 * np.random.default_rng(seed).gamma(modes, 1 / modes)
    unit = (np.log10(measured) - constants["noisy_mean"]) / constants["noisy_std"]
    return torch.from_numpy(2 * unit - 1).float().view(1, 32, 16)


def log_power(x: Tensor, folder: Path, of: str) -> Tensor:
    """log10 of the power in mK², of a "noisy" spectrum or a "mean" one in the network's units."""
    constants = np.load(folder / "constants.npz")
    return (x + 1) / 2 * float(constants[f"{of}_std"][0]) + float(constants[f"{of}_mean"][0])


def make_target(
    network: torch.nn.Module, spectrum: Tensor, steps: int, device: str = "cpu"
) -> fs.targets.ChainTarget:
    network, condition = network.to(device), spectrum.to(device)

    def eps(x: Tensor, t: Tensor, row: Tensor) -> Tensor:
        return network(x, t * 999, x_cdn=condition.expand(len(x), -1, -1, -1))

    process = fs.chains.VP(beta_min=0.1, beta_max=20.0)
    return fs.targets.reverse_sde(eps, process, steps, (1, 32, 16), predicts="eps", device=device)


def main(
    steps: int = 1000, count: int = 2, window: int = 50, device: str = "cpu", picture: Path | None = None
) -> fs.Run:
    network, folder = load_network()
    spectrum = noisy_spectrum(folder)
    run = fs.sample(make_target(network, spectrum, steps, device), count, window=window)
    print(run.report)
    if picture is not None:
        from PIL import Image

        noisy, clean = log_power(spectrum, folder, "noisy"), log_power(run.samples.cpu()[:, 0], folder, "mean")
        tiles = torch.cat([noisy, clean])
        low, high = clean.min(), clean.max()
        strip = ((torch.cat(list(tiles), 1) - low) / (high - low) * 255).clamp(0, 255).byte().numpy()
        Image.fromarray(strip).resize((strip.shape[1] * 8, strip.shape[0] * 8), 0).save(picture)
    return run


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--count", type=int, default=2)
    parser.add_argument("--window", type=int, default=50)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--picture", type=Path)
    main(**vars(parser.parse_args()))
