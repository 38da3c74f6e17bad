"""Checks of a network: that it returns the declared quantity, and that its learned variance is above its base."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from foresample.backends import extra_noise
from foresample.checks.distribution import Recorder
from foresample.checks.findings import Finding
from foresample.contracts import Wrapper, predict

_NEAR = 1.05  # times its base: a learned variance below that is near it
_FOUND = 0.5  # part of the noise put into samples; a network that finds less is doubtful


def network_is_doubtful(target: Any, samples: Tensor, at_most: int = 256) -> list[Finding]:
    """A note if the network does not find the noise that is put into finished samples, rows 0, 1, … of the target.

    With ξ̂ = E[ξ | x] at x = α y + σ ξ one has E⟨ξ, ξ̂⟩ = E‖ξ̂‖², so the slope of ξ on ξ̂ is 1 at every level. For real
    networks and samples it is near 1; for a score instead of x0 it is near 0 at the lower levels.
    """
    chain, y = getattr(target, "chain", None), samples[:at_most]
    levels = getattr(chain, "levels", None)
    if chain is None or levels is None:
        return []
    generator = torch.Generator().manual_seed(0)
    row, found = torch.arange(len(y), device=y.device), []
    c, d = (v.to(y) for v in levels.kind(chain.reuse))
    alpha, sigma = levels.alpha.to(y), levels.sigma.to(y)
    for k in torch.linspace(0, 0.8 * (len(chain.std) - 1), 4).long().tolist():
        drawn = torch.randn(y.shape, generator=generator, dtype=torch.float64).to(y)
        x, step = alpha[k] * y + sigma[k] * drawn, torch.full_like(row, k)
        extra = extra_noise(target, row, step)
        with torch.no_grad():
            prediction = predict(target, x.clone(), step, row, None if extra is None else 0 * extra)
        noise = (x - alpha[k] * (prediction - c[k] * x) / d[k]) / sigma[k]
        found.append((float((drawn * noise).sum() / (noise * noise).sum()), k))
    worst, k = min(found)
    if not worst < _FOUND:
        return []
    detail = (
        f"the network does not find the noise that is put into finished samples (slope {worst:.2g} at step {k}, 1 for "
        f"a denoiser): check that it is trained and returns {chain.predicts}, as its chain declares"
    )
    return [Finding("network", True, detail, note=True)]


def variance_is_above_its_base(target: Any, recorder: Recorder) -> list[Finding]:
    """Compare a learned variance with the base that the chain assumes for it; [] for other chains."""
    question, chain, ratios = "variance is above its base", getattr(target, "chain", None), []
    if chain is None or getattr(chain, "low_variance", None) is None:
        return []
    while isinstance(target, Wrapper):
        target = target.target
    if not hasattr(target, "output"):
        detail = f"not tested: {type(target).__name__} has no method `output`, as ChainTarget has"
        return [Finding(question, True, detail, note=True)]
    for k, states in zip(recorder.steps, recorder.states, strict=True):
        x, row = states[-2].to(target.std), recorder.row.to(target.std.device)
        step = torch.full_like(row, k)
        with torch.no_grad():
            variance = chain.variance(target.output(x, step, row), step)
        ratios.append((variance / chain.std[k] ** 2).flatten().cpu())
    ratio = torch.cat(ratios)
    near = float((ratio < _NEAR).double().mean())
    detail = f"the learned variance is at least {float(ratio.min()):.3g} of it; {near:.2%} of values are below {_NEAR}"
    return [Finding(question, bool((ratio >= 1).all()), detail)]
