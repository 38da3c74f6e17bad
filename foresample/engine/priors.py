"""Fits a prior to a target: draws a few pilot samples and records the predictions along their paths.

The prior's path is the mean of the pilots' paths. The denoised estimate is a martingale along the chain, so its change
from step k − 1 to k is its response to the noise of step k − 1. Regressing the change on the noise over the pilots
gives the average Jacobian J_k (docs/theory.md, "Starting warm"): for small states a matrix, shrunk towards a multiple
of the identity; for a target with `bands` (`targets.in_frequencies`) a diagonal with one number per band. For other
targets a scalar slope around the mean path is fitted for each step of the path.

With any prior samples have the target's distribution, unless it was fitted on their own noise. So pilots have seeds
of their own.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from foresample.backends import extra_noise
from foresample.contracts import (
    Target,
    Wrapper,
    at_least_one,
    bands,
    no_history,
    remember,
    require_target,
    seed_number,
    transition_mean,
)
from foresample.core.noise import seeds_of
from foresample.drafters import Prior
from foresample.engine.engine import Engine
from foresample.settings import WINDOW

MATRIX_ELEMENTS = 128
"""The largest state, in elements, that gets a matrix."""
_SEED = 2**61  # of the pilots, far from the seeds that users choose
_RIDGE = 0.1  # of the mean eigenvalue


class RecordingTarget(Wrapper):
    """Records each sample's last evaluated state in each step, which is the committed one, and its prediction.

    Sample i uses row i % rows of the target. Nothing is read back from the device.
    """

    def __init__(self, target: Target, samples: int, steps: int, rows: int | None = None) -> None:
        super().__init__(target)
        self.steps, self.unrecorded, self.rows = steps, target, rows or samples
        # The last place takes all later steps.
        self.states = target.std.new_zeros((samples, steps + 1, *target.shape))
        self.predictions = torch.zeros_like(self.states)

    def start(self, noise: Tensor, row: Tensor) -> Tensor:
        return super().start(noise, row % self.rows)

    def predict(self, x: Tensor, step: Tensor, row: Tensor, **extra: Tensor) -> Tensor:
        place = step.clamp(max=self.steps)
        self.states[row, place] = x  # before the target may write into it
        prediction = super().predict(x, step, row % self.rows, **extra)
        self.predictions[row, place] = prediction
        return prediction


def fit_prior(
    target: Target,
    *,
    window: int = WINDOW,
    pilots: int = 64,
    paths: int = 1,
    seed: int = 0,
    slots: int | None = None,
    rows: int | None = None,
) -> Prior:
    """Draw pilots and fit a prior for `Replay`.

    Args:
        target: the chain.
        window: the window of the runs that will use the prior: its path has window + 1 steps.
        pilots: samples to draw.
        paths: number of paths to fit: sample i uses path i % paths. A conditional target whose classes come in turn
            may have one path for each class.
        seed: the pilots' seed.
        slots: pilots under way at a time; all by default.
        rows: number of rows of a target that looks something up by `row` (labels, prompts, start states): pilots
            take rows 0 … rows − 1 in turn. By default every pilot has a row of its own.
    """
    require_target(target)
    given = ("window", window), ("pilots", pilots), ("paths", paths)
    window, pilots, paths = (at_least_one(name, value) for name, value in given)
    if pilots < 2 * paths:
        raise ValueError(f"{pilots} pilots are too few for {paths} paths: draw at least two for each")
    rows, steps = pilots if rows is None else at_least_one("rows", rows), len(target.std)
    kept = steps if _has_jacobian(target) else min(window + 1, steps)
    recorded = RecordingTarget(target, pilots, kept, rows)
    # The runs that use the prior check the target themselves.
    engine = Engine(recorded, window=window, slots=slots or pilots, look=False)
    seeds = seeds_of(_SEED + seed_number(seed), pilots)
    with naming_rows(min(rows, pilots), "rows=4"):
        engine.sample(seeds)
    states, predictions = recorded.states[:, :kept], recorded.predictions[:, :kept]
    return prior_of_paths(target, states, predictions, window=window, paths=paths, seeds=seeds)


@contextmanager
def naming_rows(rows: int, remedy: str) -> Iterator[None]:
    """Turn an IndexError of a target with fewer rows than pilots into an error that names the remedy."""
    try:
        yield
    except IndexError as error:
        raise ValueError(
            f"the target cannot look up one of rows 0 … {rows - 1} ({error}): give their number, as in {remedy}"
        ) from error


def prior_of_paths(
    target: Target,
    states: Tensor,
    predictions: Tensor,
    *,
    window: int,
    paths: int = 1,
    seeds: Tensor | None = None,
) -> Prior:
    """A prior from the states and predictions along the pilots' paths, [pilots, K, *shape] both.

    K = N if a Jacobian is fitted, else the steps of the prior's path. A target with extra noise needs the pilots'
    `seeds`.
    """
    pilots, table = len(states), min(window + 1, len(target.std))
    means = [torch.stack([v[i::paths, :table].mean(0) for i in range(paths)]) for v in (states, predictions)]
    if _has_jacobian(target):
        return Prior(means[0], means[1], jacobian=_jacobians(target, states, predictions, seeds))
    which = torch.arange(pilots, device=states.device) % paths
    dx, dp = (
        (v[:, :table] - mean[which]).flatten(2) for v, mean in zip((states, predictions), means, strict=True)
    )
    square = (dx * dx).sum((0, 2))
    return Prior(means[0], means[1], slope=torch.where(square > 0, (dx * dp).sum((0, 2)) / square, 0.0))


def _has_jacobian(target: Target) -> bool:
    return target.shape.numel() <= MATRIX_ELEMENTS or bands(target) is not None


def _jacobians(target: Target, states: Tensor, predictions: Tensor, seeds: Tensor | None) -> Tensor:
    """J_k of every step, [N, d, d] or [N, 1, d]; 0 if the transition to step k has no noise."""
    steps, size, pilots, alike = len(target.std), target.shape.numel(), len(states), bands(target)
    found = target.std.new_zeros((steps, size if alike is None else 1, size))
    before = no_history(target, states[:, 0])
    for k in range(1, steps):
        previous, before = before, remember(target, predictions[:, k - 1], before)
        step = torch.full((pilots,), k - 1, device=states.device)
        extra = None if seeds is None else extra_noise(target, seeds.to(states.device), step)
        mean = transition_mean(target, states[:, k - 1], predictions[:, k - 1], step, previous, extra)
        noise = (states[:, k] - mean).flatten(1).double()
        if target.std[k - 1] > 0 and noise.any():  # otherwise there is none, or all of it is lost in rounding
            moved = (predictions[:, k] - predictions[:, k - 1]).flatten(1).double()
            found[k] = _matrix(noise, moved) if alike is None else _diagonal(noise, moved, alike)
    return found


def _matrix(noise: Tensor, moved: Tensor) -> Tensor:
    """Slope [d, d] of the predictions' change in the noise, [pilots, d] both."""
    size = noise.shape[1]
    identity = torch.eye(size, dtype=noise.dtype, device=noise.device)
    slope = (noise * moved).sum() / (noise * noise).sum()
    square = noise.T @ noise
    ridge = _RIDGE * square.trace() / size
    rest = torch.linalg.solve(square + ridge * identity, noise.T @ (moved - slope * noise))
    return rest.T + slope * identity


def _diagonal(noise: Tensor, moved: Tensor, alike: Tensor) -> Tensor:
    """Diagonal [d] of the slope, one number for each band.

    Bands are summed on the CPU, always in the same order, so the same pilots give the same prior.
    """
    product, square = (torch.bincount(alike, (noise * other).sum(0).cpu()) for other in (moved, noise))
    return torch.where(square > 0, product / square, 0.0)[alike]
