"""Tests that finished samples have the distribution of sequential ones."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from foresample.checks.findings import LEVEL, require_level
from foresample.checks.kolmogorov import KolmogorovSmirnov, critical_distance

_PROJECTIONS = 8
_TESTS = _PROJECTIONS + 1  # and the norm


@dataclass(frozen=True)
class SamplesLaw:
    """The result of comparing finished samples with sequential ones."""

    passed: bool
    tests: int
    smallest_p: float
    worst: str  # the test with the smallest p-value
    level: float  # false-alarm probability of all tests together
    samples: int
    sequential: int


def samples_law(plain: Tensor, parts: Iterable[Tensor], level: float = LEVEL) -> SamplesLaw:
    """Test whether samples, [n, *shape] in parts, have the distribution of the sequential samples `plain`.

    Kolmogorov–Smirnov tests of random projections and of the norm. Each part is read once and then dropped, so memory
    does not grow with the number of parts. The seeds of the two sets must differ. With very few samples the test passes
    whatever they are (`can_fail`).
    """
    require_level(level)
    generator = torch.Generator().manual_seed(0)
    directions = torch.randn(plain[0].numel(), _PROJECTIONS, generator=generator, dtype=torch.float64)

    def features(x: Tensor) -> np.ndarray:
        flat = x.flatten(1).double().cpu()
        return torch.cat([flat @ directions, flat.norm(dim=1, keepdim=True)], 1).T.numpy()

    tests = [KolmogorovSmirnov(values) for values in features(plain)]
    for part in parts:
        for test, values in zip(tests, features(part), strict=True):
            test.add(values)
    names = [*(f"projection {i}" for i in range(directions.shape[1])), "norm"]
    smallest, worst = min((test.p_value(), name) for test, name in zip(tests, names, strict=True))
    passed = smallest >= level / len(tests)
    return SamplesLaw(passed, len(tests), smallest, worst, level, tests[0].count, len(plain))


def can_fail(sequential: int, samples: int, level: float = LEVEL) -> bool:
    """Whether `samples_law` of so many samples fails if the two sets do not even overlap."""
    return critical_distance(level / _TESTS, sequential * samples / (sequential + samples)) <= 1


def fewest_sequential(samples: int) -> int | None:
    """The smallest number of sequential samples with which `samples_law` can fail; None if it cannot with any."""
    return next((n for n in range(1, 100) if can_fail(n, samples)), None)
