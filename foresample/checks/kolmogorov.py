"""Kolmogorov–Smirnov tests, and the smallest shift that they reveal."""

from __future__ import annotations

import math
from statistics import NormalDist

import numpy as np
import torch


class KolmogorovSmirnov:
    """The two-sample test of a sample that is held in memory against one that comes in parts.

    The distance of the empirical distributions is largest at or just before a held value, so counting there suffices.
    """

    def __init__(self, held: np.ndarray) -> None:
        self.held, self.count = np.sort(held), 0
        self.at, self.before = (np.zeros(len(held) + 1, dtype=np.int64) for _ in range(2))

    def add(self, values: np.ndarray) -> None:
        """Add a part of the other sample."""
        self.count += len(values)
        self.at += np.bincount(np.searchsorted(self.held, values, "left"), minlength=len(self.at))
        self.before += np.bincount(np.searchsorted(self.held, values, "right"), minlength=len(self.at))

    def p_value(self) -> float:
        held, n, m = self.held, len(self.held), max(1, self.count)
        at = np.cumsum(self.at)[:-1] / m - np.searchsorted(held, held, "right") / n
        before = np.cumsum(self.before)[:-1] / m - np.searchsorted(held, held, "left") / n
        return _kolmogorov(float(max(np.abs(at).max(), np.abs(before).max())), n * m / (n + m))


def ks_two_sample(a: np.ndarray, b: np.ndarray) -> float:
    """P-value of the two-sample Kolmogorov–Smirnov test (asymptotic, Stephens' correction)."""
    test = KolmogorovSmirnov(a)
    test.add(b)
    return test.p_value()


def ks_normal(z: np.ndarray) -> float:
    """P-value of the Kolmogorov–Smirnov test against N(0, 1)."""
    z = np.sort(z)
    cdf = torch.special.ndtr(torch.from_numpy(z)).numpy()
    grid = np.arange(len(z) + 1) / len(z)
    return _kolmogorov(float(max((grid[1:] - cdf).max(), (cdf - grid[:-1]).max())), len(z))


def _kolmogorov(distance: float, n: float) -> float:
    """P(sup |empirical − true| ≥ distance) for n points."""
    if not np.isfinite(distance):
        return 0.0
    t = (np.sqrt(n) + 0.12 + 0.11 / np.sqrt(n)) * distance
    if t < 0.3:
        return 1.0
    j = np.arange(1, 101)
    return float(np.clip(2 * np.sum((-1.0) ** (j - 1) * np.exp(-2 * (j * t) ** 2)), 0.0, 1.0))


def smallest_shift(p_value: float, points: float) -> float | None:
    """The shift of N(0, 1) that a Kolmogorov–Smirnov test at that p-value reveals 95 times in 100; None if it
    reveals no shift.

    Shifted by s the distribution functions are 2Φ(s/2) − 1 apart at s/2, where their empirical difference has a
    standard error of at most 1/(2√points). A two-sample test of n and n values has n/2 points.
    """
    distance = critical_distance(p_value, points) + 1.645 / (2 * math.sqrt(points))
    return 2 * NormalDist().inv_cdf((1 + distance) / 2) if distance < 1 else None


def critical_distance(p_value: float, points: float) -> float:
    """The distance of distribution functions with this p-value; 1 or more if no distance has it."""
    low, high = 0.0, 2.0
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (low, middle) if _kolmogorov(middle, points) < p_value else (middle, high)
    return high
