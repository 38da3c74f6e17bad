"""Names of methods and models as people read them, and the interval of a share."""

from __future__ import annotations

import math

LABELS = {
    "reflection-head": "reflection, head",
    "reflection-nearest": "reflection, nearest",
    "per-step-parent-fresh": "per step, parent, fresh noise",
    "block-parent-fresh": "block, parent, fresh noise",
    "replay-per-step": "replay without secant, per step",
    "replay-block": "replay without secant",
    "default": "default",
    "sequential": "sequential",
    "reflection-parent": "reflection, parent",
    "blocks-parent": "blocks, parent",
    "blocks-nearest": "blocks, nearest",
    "asd": "ASD",
    "dgrs": "D-GRS",
    "rass": "RASS",
    "paradigms": "ParaDiGMS",
    "parasolver": "ParaSolver",
    "parataa": "ParaTAA",
    "ddpm": "few-step DDPM",
    "ddim": "DDIM",
    "dpmpp-2m": "DPM-Solver++ 2M",
}
"""Methods as people read them, those of the package and their peers."""
MODELS = {"cifar10": "CIFAR-10", "fashion_mnist": "Fashion-MNIST"}
"""Models by their folders."""


def label(method: str) -> str:
    """A method as people read it."""
    return LABELS.get(method, method)


def wilson(successes: int, count: int) -> tuple[float, float]:
    """Wilson's interval of a share, at 95 %."""
    share, z2 = successes / count, 1.959963984540054**2 / count
    middle, wide = share + z2 / 2, math.sqrt(z2 * (share * (1 - share) + z2 / 4))
    return max(0.0, (middle - wide) / (1 + z2)), min(1.0, (middle + wide) / (1 + z2))
