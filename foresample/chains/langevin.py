"""Unadjusted Langevin: x_{k+1} = x_k + h_k score(x_k) + √(2 h_k) z_k, a chain of any length."""

from __future__ import annotations

import torch
from torch import Tensor

from foresample.chains.chain import Chain


def langevin_chain(step_size: float | Tensor, steps: int | None = None, *, start_scale: float = 1.0) -> Chain:
    """A Langevin chain, whose prediction is the score.

    Args:
        step_size: h, one number or one per step, [N].
        steps: N, with a single step size.
        start_scale: std of the Gaussian the chain starts from.
    """
    sizes = torch.as_tensor(step_size, dtype=torch.float64).cpu()
    if sizes.ndim == 0:
        if steps is None or steps < 1:
            raise ValueError("a single step_size needs steps=N, the length of the chain")
        sizes = sizes.expand(steps)
    elif steps is not None and steps != len(sizes):
        raise ValueError(f"steps={steps} disagrees with {len(sizes)} step sizes: leave steps out")
    if not (torch.isfinite(sizes) & (sizes > 0)).all():
        raise ValueError("step_size must be positive and finite")
    return Chain(
        (2 * sizes).sqrt(),
        torch.ones_like(sizes),
        sizes.clone(),
        start_scale=start_scale,
        predicts="score",
        reuse="score",
    )
