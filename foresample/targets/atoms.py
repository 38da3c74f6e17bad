"""AlphaFold-3-style samplers of atom positions: churn, random rotations, alignment, a step scale.

The sampler (algorithm 18 of AlphaFold 3, which Boltz, Protenix, Chai and OpenFold3 have) takes positions x,
[atoms, 3], at level σ_k and

    centres x, rotates it by a random R_k and shifts it by a random t_k
    churns     x̂ = x + λ √(σ̂² − σ_k²) z,      σ̂ = σ_k (1 + γ_k),    γ_k = gamma where σ_{k+1} > gamma_min, else 0
    denoises   D = network(x̂, σ̂), and (Boltz) aligns x̂ rigidly to D
    steps      x' = x̂ + step_scale (σ_{k+1} − σ̂) (x̂ − D)/σ̂.

The chain runs on the churned states, seen from a frame that turns along: y_k = R_k⁻¹(x̂_k − t_k). Gaussian noise is the
same from every frame, so in this one nothing is rotated but around the network, whose estimate is
R_k⁻¹(network(R_k y + t_k) − t_k):

    y_{k+1} = centre(y + step_scale (σ_{k+1} − σ̂)(y − D)/σ̂) + λ √(σ̂_{k+1}² − σ_{k+1}²) z.

A turn of a turned structure is as uniform as the first, so the R_k of these frames are independent of one another, as
those of the sampler are. R_k and t_k are extra noise (a quaternion and a vector); the last step goes back to the frame
of the last rotation, as the sampler's result is in it. An equivariant network does not see them at all, and predictions
of other steps are reusable. Below gamma_min no noise is added: that tail is deterministic and takes a call a step.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from foresample.contracts import expand
from foresample.targets.chained import Denoiser

_ROTATION, _SHIFT = slice(0, 4), slice(4, 7)


@dataclass(frozen=True)
class StructureTarget:
    """See the module; all per-step values are [N]."""

    network: Denoiser
    shape: torch.Size
    """[atoms, 3]"""
    churned: Tensor
    """σ̂: what the network is told."""
    towards: Tensor
    """1 + step_scale (σ_{k+1} − σ̂)/σ̂: the weight of the state."""
    std: Tensor
    start_scale: tuple[float, float]
    """Std of the first state, around its centre and of the noise alone."""
    shift: float
    """Std of the random shifts."""
    align: bool
    mask: Tensor
    """[atoms]: those that are aligned by."""

    extra = torch.Size([7])

    def start(self, noise: Tensor, row: Tensor) -> Tensor:
        """Centred positions and the first churn noise, in one: both are Gaussian around the centre, one along it."""
        centre = noise.mean(1, keepdim=True)
        around, along = self.start_scale
        return around * (noise - centre) + along * centre

    def predict(self, x: Tensor, step: Tensor, row: Tensor, extra: Tensor | None = None) -> Tensor:
        assert extra is not None
        rotation, shift = self._frame(extra)
        seen = x @ rotation + shift
        estimate = self.network(seen, self.churned[step], row).to(x.dtype)
        return (estimate - shift) @ rotation.mT

    def mean(self, x: Tensor, prediction: Tensor, step: Tensor, extra: Tensor | None = None) -> Tensor:
        assert extra is not None
        if self.align:
            x = aligned(x, prediction, self.mask)
        weight = expand(self.towards[step], x)
        moved = weight * x + (1 - weight) * prediction
        rotation, shift = self._frame(extra)
        last = expand(step == len(self.std) - 1, x)
        return torch.where(last, moved @ rotation + shift, moved - moved.mean(1, keepdim=True))

    def _frame(self, extra: Tensor) -> tuple[Tensor, Tensor]:
        """Rotations [B, 3, 3], for positions in rows, and shifts [B, 1, 3]."""
        return rotations(extra[:, _ROTATION]), self.shift * extra[:, None, _SHIFT]


def structures(
    network: Denoiser,
    sigmas: Tensor | Sequence[float],
    atoms: int,
    *,
    gamma: float = 0.8,
    gamma_min: float = 1.0,
    noise_scale: float = 1.003,
    step_scale: float = 1.5,
    shift: float = 1.0,
    align: bool = False,
    mask: Tensor | None = None,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> StructureTarget:
    """An AlphaFold-3-style sampler.

    Args:
        network: network(x, sigma, row) -> denoised positions: states [B, atoms, 3], their levels [B].
        sigmas: levels of the schedule, [N + 1], falling; the last may be 0.
        atoms: how many.
        gamma: churn, where the next level is above `gamma_min`.
        gamma_min: see there; below it steps are deterministic and cannot be drafted.
        noise_scale: λ.
        step_scale: of the step towards the estimate.
        shift: std of the random shifts of the whole.
        align: align the state rigidly to the estimate before the step.
        mask: [atoms], 1 for those to align by; all by default.
        dtype: the chain's.
        device: the chain's.
    """
    levels = torch.as_tensor(sigmas, dtype=torch.float64).cpu()
    if levels.ndim != 1 or len(levels) < 2 or not (levels.diff() < 0).all() or levels[-1] < 0:
        raise ValueError(
            "sigmas must fall strictly from noise to data, at least two levels, the last at least 0"
        )
    here, there = levels[:-1], levels[1:]
    churned = here * (1 + torch.where(there > gamma_min, gamma, 0.0))
    added = noise_scale * (churned**2 - here**2).sqrt()
    std = torch.cat([added[1:], torch.zeros(1, dtype=torch.float64)])
    if not (std > 0).any():
        raise ValueError(
            f"no level after the first two lies above gamma_min={gamma_min:g} with gamma={gamma:g}, so no step adds "
            "noise and there is nothing to speculate on; give a smaller gamma_min"
        )
    towards = 1 + step_scale * (there - churned) / churned
    mask = torch.ones(atoms) if mask is None else mask
    return StructureTarget(
        network,
        torch.Size([atoms, 3]),
        churned.to(device, dtype),
        towards.to(device, dtype),
        std.to(device, dtype),
        (math.hypot(levels[0], added[0]), float(added[0])),
        shift,
        align,
        mask.to(device, dtype),
    )


def rotations(quaternions: Tensor) -> Tensor:
    """Rotation matrices of quaternions of any length, [B, 4] -> [B, 3, 3]; uniform where those are Gaussian."""
    r, i, j, k = (quaternions / quaternions.norm(dim=1, keepdim=True)).unbind(1)
    rows = [
        (1 - 2 * (j * j + k * k), 2 * (i * j - k * r), 2 * (i * k + j * r)),
        (2 * (i * j + k * r), 1 - 2 * (i * i + k * k), 2 * (j * k - i * r)),
        (2 * (i * k - j * r), 2 * (j * k + i * r), 1 - 2 * (i * i + j * j)),
    ]
    return torch.stack([torch.stack(row, 1) for row in rows], 1)


def aligned(x: Tensor, to: Tensor, mask: Tensor) -> Tensor:
    """x moved rigidly, without reflection, as near to `to` as it gets (Kabsch), [B, atoms, 3] both."""
    weight = mask.view(1, -1, 1)
    centres = [(weight * v).sum(1, keepdim=True) / weight.sum() for v in (x, to)]
    here, there = x - centres[0], to - centres[1]
    left, _, right = torch.linalg.svd((weight * here).mT.double() @ there.double())
    sign = torch.ones(len(x), 3, dtype=torch.float64, device=x.device)
    sign[:, 2] = torch.linalg.det(left @ right)
    return here @ ((left * sign.unsqueeze(1)) @ right).to(x.dtype) + centres[1]
