"""AlphaFold-3-style samplers of atom positions: churn, random rotations, alignment, a step scale.

The sampler (algorithm 18 of AlphaFold 3, which Boltz, Protenix, Chai and OpenFold3 have) takes positions x,
[atoms, 3], at level σ_k and

    centres x, rotates it by a random R_k and shifts it by a random t_k
    churns     x̂ = x + λ √(σ̂² − σ_k²) z,      σ̂ = σ_k (1 + γ_k),    γ_k = gamma where σ_{k+1} > gamma_min, else 0
    denoises   D = network(x̂, σ̂), and (Boltz) aligns x̂ rigidly to D
    steps      x' = x̂ + step_scale (σ_{k+1} − σ̂) (x̂ − D)/σ̂.

The chain runs on the churned states, seen from a frame that turns along: y_k = R_k⁻¹(x̂_k − t_k). Gaussian noise is the
same from every frame, so in this frame only the states around the network are rotated, and its estimate is
R_k⁻¹(network(R_k y + t_k) − t_k):

    y_{k+1} = centre(y + step_scale (σ_{k+1} − σ̂)(y − D)/σ̂) + λ √(σ̂_{k+1}² − σ_{k+1}²) z.

A turn of a turned structure is as uniform as the first, so the R_k of these frames are independent of one another, as
those of the sampler are. R_k and t_k are extra noise (a quaternion and a vector); the last step goes back to the frame
of the last rotation, as the sampler's result is in it. An equivariant network does not see them at all, and predictions
of other steps are reusable. Below gamma_min no noise is added: that tail is deterministic and takes a call a step.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from foresample.chains.chain import Chain, per_row
from foresample.chains.sigmas import Sigmas, check_levels
from foresample.contracts import expand
from foresample.targets.chained import Denoiser

_ROTATION, _SHIFT = slice(0, 4), slice(4, 7)


@dataclass(frozen=True)
class StructureTarget:
    """An AlphaFold-3-style chain, see the module; `steps` has its coefficients without frames and alignment."""

    network: Denoiser
    shape: torch.Size
    steps: Chain
    shift: float
    align: bool
    mask: Tensor

    extra = torch.Size([7])

    @property
    def std(self) -> Tensor:
        return self.steps.std

    def start(self, noise: Tensor, row: Tensor) -> Tensor:
        """Centred positions and the first churn noise, in one: both are Gaussian around the centre, one along it."""
        centre = noise.mean(1, keepdim=True)
        return self.steps.start_scale * (noise - centre) + self.steps.start_added * centre

    def predict(self, x: Tensor, step: Tensor, row: Tensor, extra: Tensor | None = None) -> Tensor:
        assert self.steps.time is not None
        rotation, shift = self._frame(extra)
        estimate = self.network(_turned(x, rotation) + shift, self.steps.time[step], row).to(x.dtype)
        return _turned(estimate - shift, rotation.mT)

    def mean(self, x: Tensor, prediction: Tensor, step: Tensor, extra: Tensor | None = None) -> Tensor:
        if self.align:
            x = aligned(x, prediction, self.mask)
        weight = per_row(self.steps.state_weight, step, x)
        moved = weight * x + (1 - weight) * prediction
        rotation, shift = self._frame(extra)
        last = expand(step == len(self.std) - 1, x)
        return torch.where(last, _turned(moved, rotation) + shift, moved - moved.mean(1, keepdim=True))

    def _frame(self, extra: Tensor | None) -> tuple[Tensor, Tensor]:
        """Rotations [B, 3, 3], for positions in rows, and shifts [B, 1, 3]."""
        assert extra is not None
        return rotations(extra[:, _ROTATION]), self.shift * extra[:, None, _SHIFT]


def structures(
    network: Denoiser,
    sigmas: Sigmas,
    atoms: int,
    *,
    shift: float = 1.0,
    align: bool = False,
    mask: Tensor | None = None,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    **churn: float,
) -> StructureTarget:
    """An AlphaFold-3-style sampler.

    Args:
        network: network(x, sigma, row) -> denoised positions: states [B, atoms, 3], their levels [B].
        sigmas: levels of the schedule, [N + 1], falling; the last may be 0.
        atoms: the number of atoms.
        shift: std of the random shifts of the structure.
        align: align the state rigidly to the estimate before the step.
        mask: [atoms], 1 for those to align by; all by default.
        dtype: the chain's.
        device: the chain's.
        churn: any of `gamma` (0.8), the churn where the next level is above `gamma_min` (1; below it steps are
            deterministic and cannot be drafted), `noise_scale` (λ, 1.003), and `step_scale` (1.5).
    """
    steps = _steps(check_levels(sigmas), **churn).to(device, dtype)
    mask = torch.ones(atoms) if mask is None else mask
    return StructureTarget(network, torch.Size([atoms, 3]), steps, shift, align, mask.to(device, dtype))


def _steps(
    levels: Tensor,
    *,
    gamma: float = 0.8,
    gamma_min: float = 1.0,
    noise_scale: float = 1.003,
    step_scale: float = 1.5,
) -> Chain:
    """The coefficients of the module's transitions; `start_scale` is the std of the first state around its centre."""
    here, there = levels[:-1], levels[1:]
    churned = here * (1 + torch.where(there > gamma_min, gamma, 0.0))
    added = noise_scale * (churned**2 - here**2).sqrt()
    std = torch.cat([added[1:], added.new_zeros(1)])
    if not (std > 0).any():
        raise ValueError(
            f"no level after the first two lies above gamma_min={gamma_min:g} with gamma={gamma:g}, so no step adds "
            "noise and there is nothing to speculate on; give a smaller gamma_min"
        )
    towards = 1 + step_scale * (there - churned) / churned
    scale, first = math.hypot(levels[0], added[0]), float(added[0])
    return Chain(std, towards, 1 - towards, time=churned, start_scale=scale, start_added=first)


def rotations(quaternions: Tensor) -> Tensor:
    """Rotation matrices of quaternions of any length, [B, 4] -> [B, 3, 3]; uniform where those are Gaussian."""
    r, i, j, k = (quaternions / quaternions.norm(dim=1, keepdim=True)).unbind(1)
    rows = [
        (1 - 2 * (j * j + k * k), 2 * (i * j - k * r), 2 * (i * k + j * r)),
        (2 * (i * j + k * r), 1 - 2 * (i * i + k * k), 2 * (j * k - i * r)),
        (2 * (i * k - j * r), 2 * (j * k + i * r), 1 - 2 * (i * i + j * j)),
    ]
    return torch.stack([torch.stack(row, 1) for row in rows], 1)


def _turned(x: Tensor, rotation: Tensor) -> Tensor:
    """Positions turned, [B, atoms, 3]; autocast is for the network."""
    with torch.autocast(x.device.type, enabled=False):
        return x @ rotation


@torch.autocast("cpu", enabled=False)
@torch.autocast("cuda", enabled=False)
def aligned(x: Tensor, to: Tensor, mask: Tensor) -> Tensor:
    """x moved rigidly, without reflection, as near to `to` as possible (Kabsch), [B, atoms, 3] both."""
    weight = mask.view(1, -1, 1)
    centres = [(weight * v).sum(1, keepdim=True) / weight.sum() for v in (x, to)]
    here, there = x - centres[0], to - centres[1]
    left, _, right = torch.linalg.svd((weight * here).mT.double() @ there.double())
    sign = torch.ones(len(x), 3, dtype=torch.float64, device=x.device)
    sign[:, 2] = torch.linalg.det(left @ right)
    return here @ ((left * sign.unsqueeze(1)) @ right).to(x.dtype) + centres[1]
