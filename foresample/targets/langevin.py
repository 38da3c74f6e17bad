"""Unadjusted Langevin: x_{k+1} = x_k + h_k score(x_k) + √(2 h_k) z_k, a chain of any length."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from foresample.targets.affine import AffineTarget


def langevin(
    score: Callable[[Tensor, Tensor, Tensor], Tensor],
    shape: Sequence[int],
    *,
    step_size: float | Tensor,
    steps: int | None = None,
    start_scale: float = 1.0,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> AffineTarget:
    """A Langevin chain; its prediction is the score.

    Args:
        score: score(x, step, row) -> ∇ log density, [B, *shape].
        shape: of one state.
        step_size: h, one number or one per step, [N].
        steps: N, with a single step size.
        start_scale: std of the Gaussian the chain starts from.
        dtype: the chain's.
        device: the chain's.
    """
    sizes = torch.as_tensor(step_size, dtype=torch.float64)
    if sizes.ndim == 0:
        if steps is None or steps < 1:
            raise ValueError("a single step_size needs steps=N, the length of the chain")
        sizes = sizes.expand(steps)
    elif steps is not None and steps != len(sizes):
        raise ValueError(f"steps={steps} disagrees with {len(sizes)} step sizes: leave steps out")
    if not (torch.isfinite(sizes) & (sizes > 0)).all():
        raise ValueError("step_size must be positive and finite")
    h = sizes.to(device=device, dtype=dtype)
    std = (2 * sizes).sqrt().to(device=device, dtype=dtype)
    return AffineTarget(torch.Size(shape), std, torch.ones_like(h), h, score, start_scale)
