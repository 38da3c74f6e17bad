"""deepinv, imported without what its samplers have no use for, and a small inverse problem."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tests.support.packages import load_whole

SHAPE = (1, 1, 2)


class Softly(nn.Module):
    """Estimates a pixel softly, at a noise level for each row."""

    def __init__(self, classes: bool = False) -> None:
        super().__init__()
        self.held, self.classes, self.calls = nn.Parameter(torch.ones(1)), classes, 0

    def forward(self, x: Tensor, sigma: Tensor, shift: Tensor | float = 0.0) -> Tensor:
        self.calls += 1
        return self.held * (0.5 + 0.3 * torch.tanh((x - 0.5) / (sigma**2 + 0.4))) + shift


def package() -> Any:
    return load_whole("deepinv", without=("torchvision", "torchmetrics", "h5py", "natsort"))


def physics() -> Any:
    dinv = package()
    mask = torch.tensor([[[[1.0, 0.0]]]])
    return dinv.physics.Inpainting(SHAPE, mask=mask, noise_model=dinv.physics.GaussianNoise(0.2))


def measured(count: int) -> Tensor:
    return torch.linspace(0.1, 0.9, count).view(-1, 1, 1, 1) * torch.tensor([1.0, 0.0])
