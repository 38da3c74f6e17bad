"""Pictures by their frequencies: the same chain in a basis in which the network's average Jacobian is diagonal.

A chain whose mean is a number times the state plus a number times the prediction commutes with an orthonormal
transform Q: y = Qx is a chain of the same kind, with the network y ↦ Q predict(Qᵀy), the same steps and the same
distribution of noise. Its samples, transformed back, have the distribution of the original chain.

Q is the cosine transform of height, width and channels. A network for pictures answers to noise much the same
wherever it falls, so on average its Jacobian only tells frequencies apart: `bands` says which elements are alike, and
`foresample.fit_prior` fits one number for each of them and each step (docs/theory.md, "Starting warm").
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from foresample.backends import backend_for
from foresample.contracts import Target, Wrapper, affine_chain, require_target

_RINGS = 4
"""Bands in an octave of frequency, for each mixture of the channels."""


def in_frequencies(target: Target) -> FrequencyTarget:
    """The same chain of pictures, by their frequencies; `pictures` turns its samples back.

    Args:
        target: a chain of pictures [channels, height, width], such as an image model or its latents.
    """
    require_target(target)
    if len(target.shape) != 3:
        raise ValueError(
            f"in_frequencies takes pictures [channels, height, width], not states of shape {tuple(target.shape)}: "
            "sample this target as it is"
        )
    if affine_chain(target) is None:
        raise ValueError(
            f"the mean of {type(target).__name__} is not known to be affine in state and prediction, as a change of "
            "basis requires: sample this target as it is"
        )
    return FrequencyTarget(target)


class FrequencyTarget(Wrapper):
    """A chain of pictures in the basis of `in_frequencies`; states have the pictures' shape."""

    def __init__(self, target: Target) -> None:
        super().__init__(target)
        channels, height, width = target.shape
        self.bands = bands(target.shape)
        """[elements of a state]: the number of the band each is in."""
        left, right = torch.kron(cosines(channels), cosines(height)), cosines(width)
        there, back = (left, right.T), (left.T, right)
        self._there, self._back = ([m.contiguous().to(target.std) for m in way] for way in (there, back))

    def start(self, noise: Tensor, row: Tensor) -> Tensor:
        return self._turned(super().start(self._turned_back(noise), row))

    def predict(self, x: Tensor, step: Tensor, row: Tensor, **extra: Tensor) -> Tensor:
        return self._turned(super().predict(self._turned_back(x), step, row, **extra))

    def pictures(self, samples: Tensor) -> Tensor:
        """Samples of this target as pictures, [n, *shape]."""
        return self._turned_back(samples)

    def _turned(self, x: Tensor) -> Tensor:
        return _product(x, *self._there)

    def _turned_back(self, y: Tensor) -> Tensor:
        return _product(y, *self._back)


def _product(x: Tensor, left: Tensor, right: Tensor) -> Tensor:
    """left · x · right for each of the pictures, [B, channels, height, width], channels and height as one."""
    with torch.autocast(x.device.type, enabled=False):  # which is for the network
        return backend_for(x.device, x.dtype).change_basis(left, x.flatten(1, 2), right).view_as(x)


def cosines(size: int) -> Tensor:
    """The orthonormal cosine transform of this many elements (DCT-II), one frequency per row."""
    frequency, place = torch.arange(size, dtype=torch.float64).view(-1, 1), torch.arange(size) + 0.5
    waves = torch.cos(math.pi / size * frequency * place) * math.sqrt(2 / size)
    waves[0] /= math.sqrt(2)
    return waves


def bands(shape: torch.Size) -> Tensor:
    """The band of each element, flat: rings of like frequency, apart for each mixture of the channels."""
    channels, height, width = shape
    up, across = (torch.arange(n, dtype=torch.float64) * max(height, width) / n for n in (height, width))
    ring = (_RINGS * torch.log2(1 + torch.hypot(up.view(-1, 1), across))).long()
    apart = ring + (ring.max() + 1) * torch.arange(channels).view(-1, 1, 1)
    return apart.flatten().unique(return_inverse=True)[1]
