"""EDM's stochastic sampler around any model(x, sigma).

python examples/edm.py
"""

from __future__ import annotations

import torch
from torch import Tensor

import foresample as fs


class Preconditioned(torch.nn.Module):
    """A denoiser as EDM writes it: D(x, σ) = c_skip x + c_out F(c_in x, c_noise), here around a random F."""

    def __init__(self, size: int, classes: int, data_std: float = 0.5) -> None:
        super().__init__()
        self.data_std = data_std
        self.label = torch.nn.Embedding(classes, 16)
        self.inner = torch.nn.Sequential(
            torch.nn.Linear(size + 17, 64), torch.nn.SiLU(), torch.nn.Linear(64, size)
        )

    def forward(self, x: Tensor, sigma: Tensor, label: Tensor) -> Tensor:
        sigma = sigma.view(-1, 1)
        total = (sigma**2 + self.data_std**2).sqrt()
        features = torch.cat([x / total, sigma.log() / 4, self.label(label)], 1)
        return (self.data_std / total) ** 2 * x + sigma * self.data_std / total * self.inner(features)


def main(steps: int = 64, count: int = 64) -> fs.Run:
    torch.manual_seed(0)
    model = Preconditioned(size=16, classes=10)
    labels = torch.arange(count) % 10
    target = fs.targets.from_edm(
        lambda x, sigma, row: model(x, sigma, labels[row]),
        fs.chains.karras_sigmas(steps),
        shape=(16,),
        churn=40,  # with s_min … s_noise, EDM's settings for ImageNet-64
        s_min=0.05,
        s_max=50,
        s_noise=1.003,
    )
    run = fs.sample(target, count, window=16, seed=0)
    print(run.report)
    return run


if __name__ == "__main__":
    main()
