"""The check that a target's chain is its own: kernels read the chain alone and never call the target's mean."""

from __future__ import annotations

import math
from typing import Any

import torch

from foresample.contracts import (
    AffineChain,
    Target,
    Wrapper,
    affine_chain,
    expand,
    is_chain_mean,
    offered_chain,
    transition_mean,
)

_TRIED = 2**17  # elements of the states at which means are compared at a time


def require_own_chain(target: Target) -> None:
    """Refuse a target whose chain has another std or mean than the target: kernels read the chain alone.

    A mean that is not the chain's own by construction (`chain_mean`) is compared at every step.
    """
    chain = affine_chain(target)
    if chain is None:
        return
    for name in ("std", "state_weight", "prediction_weight", "previous_weight"):
        weight = getattr(chain, name)
        if weight is not None and weight.shape != target.std.shape:
            raise ValueError(
                f"{type(target).__name__}.chain.{name} has shape {list(weight.shape)}, but the target has "
                f"{len(target.std)} steps: give one number for each step"
            )
    found = None if torch.equal(chain.std, target.std) else "std"
    if found is None and not _has_mean_of(chain, target):
        step = _first_other_mean(target, chain)
        found = None if step is None else f"mean at step {step}"
    if found is not None:
        raise ValueError(
            f"{type(target).__name__}.chain has another {found} than the target: give the target a chain that agrees "
            "with it, or none (chain = None)"
        )


def _has_mean_of(chain: AffineChain, target: Any) -> bool:
    """Whether the target's mean is the chain's by construction."""
    while getattr(type(target), "mean", None) is Wrapper.mean and "mean" not in vars(target):
        target = target.target
    return offered_chain(target) is chain and all(
        is_chain_mean(getattr(type(one), "mean", None)) and "mean" not in vars(one) for one in (target, chain)
    )


@torch.no_grad()
def _first_other_mean(target: Target, chain: AffineChain) -> int | None:
    """The first step at which the target's mean is not the chain's, else None.

    Random states, predictions and earlier predictions of sizes 1, 10 and 100, in parts that bound the memory: as much
    arithmetic as the means of one sample.
    """
    std, steps, size = target.std, len(target.std), target.shape.numel()
    each = 3 if 3 * steps * size <= _TRIED else 1  # states at a step
    every = torch.arange(steps, device=std.device).repeat_interleave(each)
    count, generator = min(len(every), max(1, _TRIED // size)), torch.Generator().manual_seed(0)
    scale = 10.0 ** ((torch.arange(count).unsqueeze(1) + torch.arange(size)) % 3)
    draws = [scale * torch.randn(count, size, generator=generator) for _ in range(3)]
    states = [draw.view(count, *target.shape).to(std) for draw in draws]
    weights = chain.state_weight, chain.prediction_weight, chain.previous_weight
    for step in every.split(count):
        values = [value[: len(step)] for value in states]
        parts = [expand(w[step], v) * v for w, v in zip(weights, values, strict=True) if w is not None]
        x, prediction, previous = values
        apart = transition_mean(target, x, prediction, step, previous) - torch.stack(parts).sum(0)
        rounding = torch.stack(parts).abs().sum(0) * math.sqrt(torch.finfo(std.dtype).eps)
        wrong = ~(apart.abs() <= rounding).flatten(1).all(1)  # NaN agrees with nothing
        if wrong.any():
            return int(step[wrong][0])
    return None
