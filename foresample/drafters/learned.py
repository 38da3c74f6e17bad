"""A conditional prior: a small network that predicts a sample's path from its condition.

The best draft of a conditional sample's first window is its mean path given the condition. `LearnedPrior` estimates
that path by least squares from samples that were drawn anyway (docs/theory.md, "A prior for each condition"):

    path(c) = m + Σ_j B_j · net(c)_j      B_j: the leading principal components, in time, of the training paths

Any function of the condition may draft, because the condition is independent of noise not used yet: a bad estimate
costs calls and never changes the distribution. Two layers of 512 suffice, and training takes seconds.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import torch
from torch import Tensor, nn

from foresample.drafters.prior import Prior, read_tensors
from foresample.faults import first_line
from foresample.text import printable

WIDTH = 512
COMPONENTS = 8
_BATCH = 256
_RATE = 2e-3


class LearnedPrior(nn.Module):
    """The mean path given a condition of C numbers, for states of d elements in N steps.

    Args:
        conditions: C.
        steps: N.
        size: d.
        weights: parameters of the network it is learned for, of which `origin` keeps two numbers each.
    """

    shift: Tensor
    scale: Tensor
    mean: Tensor
    components: Tensor
    unit: Tensor
    jacobian: Tensor
    origin: Tensor

    def __init__(self, conditions: int, steps: int, size: int, weights: int = 0) -> None:
        super().__init__()
        self.sizes = conditions, steps, size
        kept = min(COMPONENTS, steps)
        buffers = {
            "shift": (conditions,),
            "scale": (conditions,),
            "mean": (2, steps, size),
            "components": (2, kept, steps),
            "unit": (),
            "jacobian": (steps, size, size),
            "origin": (weights, 2),
        }
        for name, shape in buffers.items():
            self.register_buffer(name, torch.zeros(shape, dtype=torch.float64 if name == "origin" else None))
        self.net = nn.Sequential(
            nn.Linear(conditions, WIDTH),
            nn.SiLU(),
            nn.Linear(WIDTH, WIDTH),
            nn.SiLU(),
            nn.Linear(WIDTH, 2 * kept * size),
        )
        self.requires_grad_(False)

    def forward(self, condition: Tensor) -> tuple[Tensor, Tensor]:
        """States and predictions of the mean path, [R, N, d] both, given conditions [R, C]."""
        weights = self._weights(condition).view(len(condition), 2, -1, self.sizes[2])
        path = self.mean + torch.einsum("rcjd,cjk->rckd", weights * self.unit, self.components)
        return path[:, 0], path[:, 1]

    def _weights(self, condition: Tensor) -> Tensor:
        return self.net((condition - self.shift) / self.scale)

    @staticmethod
    def fit(
        condition: Tensor,
        states: Tensor,
        predictions: Tensor,
        jacobian: Tensor,
        *,
        origin: Tensor | None = None,
        steps: int = 1500,
        seed: int = 0,
    ) -> LearnedPrior:
        """Least squares on conditions [P, C] and the paths, [P, N, d] both, of samples drawn under them.

        Args:
            condition: the numbers that each sample was conditioned on.
            states: each sample's states, from the start.
            predictions: the network's predictions at those states.
            jacobian: the average slope of predictions, [N, d, d].
            origin: numbers that identify the network, [parameters, 2].
            steps: steps of Adam, each on 256 samples.
            seed: seed of the initial weights and of the batches.
        """
        paths = torch.stack([states, predictions], 1)  # [P, 2, N, d]
        length, size = paths.shape[2:]
        origin = torch.zeros(0, 2) if origin is None else origin
        prior = LearnedPrior(condition.shape[1], length, size, len(origin)).to(paths)
        prior.origin = origin.double()
        prior.shift.copy_(condition.mean(0))
        spread = condition.std(0, correction=0)
        prior.scale.copy_(torch.where(spread > 1e-6 * condition.abs().amax(0).clamp(min=1e-6), spread, 1.0))
        prior.mean.copy_(paths.mean(0))
        apart = paths - prior.mean
        for kind in range(2):
            square = torch.einsum("pkd,pld->kl", apart[:, kind], apart[:, kind])
            leading = torch.linalg.eigh(square.double()).eigenvectors.flip(1)[:, : prior.components.shape[1]]
            prior.components[kind].copy_(leading.T)
        wanted = torch.einsum("pckd,cjk->pcjd", apart, prior.components).flatten(1)
        prior.unit.copy_(wanted.square().mean().sqrt().clamp(min=torch.finfo(wanted.dtype).tiny))
        prior.jacobian.copy_(jacobian)
        prior._train(condition, wanted / prior.unit, steps, seed)
        return prior

    def _train(self, condition: Tensor, wanted: Tensor, steps: int, seed: int) -> None:
        device, generator = condition.device, torch.Generator().manual_seed(seed)
        for layer in self.net:
            if isinstance(layer, nn.Linear):
                bound = layer.in_features**-0.5
                for weight in layer.parameters():
                    weight.copy_((2 * torch.rand(weight.shape, generator=generator) - 1) * bound)
        batches = torch.randint(len(condition), (steps, min(_BATCH, len(condition))), generator=generator).to(
            device
        )
        weights = list(self.net.requires_grad_(True).parameters())
        optimizer = torch.optim.Adam(weights, _RATE)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, _RATE, total_steps=steps)
        with torch.enable_grad():
            for batch in batches:
                optimizer.zero_grad()
                (self._weights(condition[batch]) - wanted[batch]).square().mean().backward()
                optimizer.step()
                schedule.step()
        self.requires_grad_(False)

    def __repr__(self) -> str:
        """A short text that differs for different weights."""
        return f"LearnedPrior({' × '.join(map(str, self.sizes))}, {self.digest()})"

    def digest(self) -> str:
        """A hash of all numbers."""
        found = hashlib.sha256()
        for value in self.state_dict().values():
            found.update(value.detach().cpu().reshape(-1).view(torch.uint8).numpy().data)
        return found.hexdigest()[:12]

    def save(self, path: str | Path) -> None:
        """Save the prior as safetensors."""
        from safetensors.torch import save_file

        save_file({name: value.cpu().contiguous() for name, value in self.state_dict().items()}, path)

    @staticmethod
    def load(path: str | Path) -> LearnedPrior:
        """The prior in a file written by `save`."""
        tensors = read_tensors(path)
        try:
            (conditions,), (_, steps, size) = tensors["shift"].shape, tensors["mean"].shape
            prior = LearnedPrior(conditions, steps, size, len(tensors["origin"])).to(tensors["mean"].dtype)
            prior.origin = prior.origin.double()
            prior.load_state_dict(tensors)
        except (KeyError, RuntimeError, ValueError) as error:
            reason = printable(first_line(error))
            raise ValueError(f"{printable(path)} holds no learned prior ({reason}): learn it again") from None
        return prior


def load_prior(path: str | Path) -> Prior | LearnedPrior:
    """A prior of either kind, from a file written by its `save`."""
    tensors = read_tensors(path)
    return LearnedPrior.load(path) if "components" in tensors else Prior.of(tensors, path)
