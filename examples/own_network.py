"""Speculative sampling around your own network: DDPM, any denoiser, any conditioning.

python examples/own_network.py
"""

from __future__ import annotations

import torch
from torch import Tensor

import foresample as fs


def make_target(steps: int = 200) -> fs.Target:
    """A noise-predicting network with a class for each sample, here a small random one."""
    torch.manual_seed(0)
    network = torch.nn.Sequential(torch.nn.Linear(18, 64), torch.nn.SiLU(), torch.nn.Linear(64, 16))

    def denoiser(x: Tensor, time: Tensor, row: Tensor) -> Tensor:
        condition = torch.stack([time / 1000, row % 10 / 10], 1)
        return network(torch.cat([x, condition], 1))

    beta = torch.linspace(1e-4, 0.02, 1000, dtype=torch.float64)
    timesteps = torch.linspace(999, 0, steps).long()  # from noise to data
    alpha_bar = (1 - beta).cumprod(0)[timesteps]
    return fs.targets.vp(denoiser, alpha_bar, shape=(16,), time=timesteps, predicts="eps")


def main(steps: int = 200, count: int = 64) -> fs.Run:
    target = make_target(steps)
    print(fs.check(target, window=20, samples=200))
    run = fs.sample(target, count, window=20, seed=0)
    print(run.report)
    return run


if __name__ == "__main__":
    main()
