"""Helpers for tests of chains: grids, random states, and the weights of a mean, read off its values."""

from __future__ import annotations

import torch
from hypothesis import settings
from hypothesis import strategies as st
from torch import Tensor

from foresample.chains import Chain

f64 = torch.float64
few = settings(derandomize=True, deadline=None, max_examples=60)

# DDPM's own schedule, from data to noise; chains run on any part of it, from noise to data.
LINEAR = torch.cumprod(1 - torch.linspace(1e-4, 0.02, 1000, dtype=f64), 0)
alpha_bars = st.lists(st.integers(0, 999), min_size=2, max_size=12, unique=True).map(
    lambda index: LINEAR[sorted(index, reverse=True)]
)
levels = st.lists(st.integers(1, 999), min_size=2, max_size=12, unique=True).map(
    lambda index: torch.tensor(sorted(index, reverse=True), dtype=f64) / 1000
)


def every_step(chain: Chain) -> Tensor:
    return torch.arange(len(chain.std))


def weights(chain: Chain) -> tuple[Tensor, Tensor]:
    """The mean is A x + B prediction: (A, B), found by asking."""
    step = every_step(chain)
    one, zero = torch.ones(len(step), 1, dtype=f64), torch.zeros(len(step), 1, dtype=f64)
    return chain.mean(one, zero, step).squeeze(1), chain.mean(zero, one, step).squeeze(1)


def states(steps: int, size: int = 3, seed: int = 0) -> Tensor:
    return torch.randn(steps, size, dtype=f64, generator=torch.Generator().manual_seed(seed))
