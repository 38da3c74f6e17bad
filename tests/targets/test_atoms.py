"""Samplers of atom positions: frames, alignment, distribution. integrations/test_packages replays Boltz's loop."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import foresample as fs
from foresample.chains import karras_sigmas
from foresample.targets import structures
from foresample.targets.atoms import aligned, rotations

f64 = torch.float64


def quaternions(count: int, seed: int = 0) -> Tensor:
    return torch.randn(count, 4, dtype=f64, generator=torch.Generator().manual_seed(seed))


def test_rotations_are_uniform() -> None:
    turned = rotations(quaternions(20_000))
    torch.testing.assert_close(turned @ turned.mT, torch.eye(3, dtype=f64).expand_as(turned))
    torch.testing.assert_close(torch.linalg.det(turned), torch.ones(20_000, dtype=f64))
    assert turned.mean(0).abs().max() < 5 * (1 / 3 / 20_000) ** 0.5


@pytest.mark.parametrize("mirrored", [False, True])
def test_alignment_undoes_a_rigid_motion_but_not_a_mirror(mirrored: bool) -> None:
    generator = torch.Generator().manual_seed(3)
    to = torch.randn(6, 7, 3, dtype=f64, generator=generator)
    away = (to @ rotations(quaternions(6, 4))) + torch.randn(6, 1, 3, dtype=f64, generator=generator)
    found = aligned(-away if mirrored else away, to, torch.ones(7, dtype=f64))
    assert torch.allclose(found, to) != mirrored
    masked = torch.tensor([1.0, 1, 1, 1, 0, 0, 0], dtype=f64)
    bent = torch.cat([away[:, :4], away[:, 4:] + 1], 1)
    assert torch.allclose(aligned(bent, to, masked)[:, :4], to[:, :4])


def equivariant(x: Tensor, sigma: Tensor, row: Tensor) -> Tensor:
    centre = x.mean(1, keepdim=True)
    return centre + (x - centre) * (9 / (9 + sigma**2)).view(-1, 1, 1)


def test_an_equivariant_network_does_not_see_the_frames() -> None:
    target = structures(equivariant, karras_sigmas(8, 0.1, 20.0), 4, dtype=f64)
    x = torch.randn(2, 4, 3, dtype=f64)
    row = torch.zeros(2, dtype=torch.int64)
    frames = [torch.randn(2, 7, dtype=f64) for _ in range(2)]
    one, two = (target.predict(x, row, row, xi) for xi in frames)
    torch.testing.assert_close(one, two)
    torch.testing.assert_close(*(target.mean(x, one, row, xi) for xi in frames))


@pytest.mark.law
@pytest.mark.parametrize("align", [False, True])
def test_speculation_is_exact(align: bool) -> None:
    """The network is not equivariant: it distinguishes up from down."""

    def network(x: Tensor, sigma: Tensor, row: Tensor) -> Tensor:
        return equivariant(x, sigma, row) + 0.5 * torch.tanh(x.roll(1, 2))

    target = structures(network, karras_sigmas(12, 0.1, 20.0), 4, gamma_min=0.3, align=align, dtype=f64)
    result = fs.check(target, window=5, samples=2000, slots=2000)
    assert result.passed, str(result)
    assert fs.sample(target, 100, window=5).speedup > 1.1


@pytest.mark.parametrize(
    ("change", "sentence"),
    [({"sigmas": [1.0, 2.0]}, "fall strictly"), ({"gamma_min": 99.0}, "give a smaller gamma_min")],
)
def test_bad_input_is_refused_with_the_remedy(change: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        structures(equivariant, **dict[str, Any](sigmas=[9.0, 3.0, 1.5, 0.0], atoms=4) | change)


@pytest.mark.parametrize("align", [False, True])
def test_autocast_is_for_the_network_only(align: bool) -> None:
    levels = torch.linspace(10, 0.1, 12)
    target = fs.targets.structures(lambda x, sigma, row: 0.5 * x, levels, 5, align=align)
    plain = fs.sample(target, 2, window=4).samples
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(fs.sample(target, 2, window=4).samples, plain)
