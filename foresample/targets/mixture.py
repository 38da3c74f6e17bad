"""A Gaussian mixture, whose denoiser and score are known in closed form: the target of tests and comparisons.

Components have isotropic covariances s_j² I. Noised to x = α x0 + σ ξ, component j is N(α μ_j, V_j I) with
V_j = α² s_j² + σ², and

    E[x0 | x] = Σ_j w_j(x) [μ_j + (α s_j²/V_j)(x − α μ_j)],    w_j(x) ∝ weight_j · N(x; α μ_j, V_j I).

Everything is a broadcast sum, no matrix product: the same bits for a state whatever batch it is in.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from foresample.chains import Kind
from foresample.targets.chained import ChainTarget, flow, langevin, vp


@dataclass(frozen=True)
class GaussianMixture:
    """Means [K, d], component stds [K], weights [K] summing to 1; all float64."""

    means: Tensor
    stds: Tensor
    weights: Tensor

    @classmethod
    def of_draft_trees(cls, dim: int, components: int = 5, seed: int = 20260714) -> GaussianMixture:
        """The benchmark of the draft-tree papers: means uniform in [−2, 2]^d, stds uniform in [0.10, 0.25]."""
        rng = np.random.default_rng(seed)
        means = torch.from_numpy(rng.uniform(-2.0, 2.0, (components, dim)))
        stds = torch.from_numpy(rng.uniform(0.10, 0.25, components))
        return cls(means, stds, torch.full((components,), 1 / components, dtype=torch.float64))

    def denoise(self, x: Tensor, alpha: Tensor, sigma: Tensor) -> Tensor:
        """E[x0 | α x0 + σ ξ = x] for states [B, d] and levels [B]."""
        weight, pull, from_mean = self._posterior(x, alpha, sigma)
        alpha = alpha.view(-1, 1, 1)
        shrink = alpha * self.stds.view(1, -1, 1) ** 2 * pull
        return (weight * (self.means + shrink * from_mean)).sum(1)

    def score(self, x: Tensor) -> Tensor:
        """∇ log density of the mixture itself, [B, d]."""
        weight, pull, from_mean = self._posterior(x, torch.ones_like(x[:, 0]), torch.zeros_like(x[:, 0]))
        return -(weight * pull * from_mean).sum(1)

    def _posterior(self, x: Tensor, alpha: Tensor, sigma: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """w_j and 1/V_j, [B, K, 1], and x − α μ_j, [B, K, d]."""
        alpha, sigma = alpha.view(-1, 1, 1), sigma.view(-1, 1, 1)
        from_mean = x.unsqueeze(1) - alpha * self.means
        variance = (alpha * self.stds.view(1, -1, 1)) ** 2 + sigma**2
        exponent = -0.5 * (from_mean**2).sum(2, keepdim=True) / variance
        logits = exponent - 0.5 * x.shape[1] * variance.log() + self.weights.log().view(1, -1, 1)
        return logits.softmax(1), 1 / variance, from_mean

    def flow(self, steps: int, churn: float, *, reuse: Kind = "v") -> ChainTarget:
        """Churned flow on linspace(1, 0.001, steps) and 0: the chain of the draft-tree papers."""
        sigmas = torch.linspace(1, 0.001, steps, dtype=torch.float64)

        def x0(x: Tensor, sigma: Tensor, row: Tensor) -> Tensor:
            return self.denoise(x, 1 - sigma, sigma)

        return flow(x0, sigmas, self.means.shape[1:], churn=churn, predicts="x0", reuse=reuse, dtype=x64)

    def vp(self, alpha_bar: Tensor | Sequence[float], *, eta: float = 1.0, reuse: Kind = "x0") -> ChainTarget:
        """DDPM (eta = 1) or DDIM on this ᾱ grid."""

        def x0(x: Tensor, level: Tensor, row: Tensor) -> Tensor:
            return self.denoise(x, level.sqrt(), (1 - level).sqrt())

        grid = torch.as_tensor(alpha_bar, dtype=x64)
        return vp(x0, grid, self.means.shape[1:], eta=eta, predicts="x0", reuse=reuse, dtype=x64)

    def langevin(self, steps: int, step_size: float) -> ChainTarget:
        """Unadjusted Langevin on the mixture."""
        return langevin(
            lambda x, step, row: self.score(x),
            self.means.shape[1:],
            step_size=step_size,
            steps=steps,
            dtype=x64,
        )


x64 = torch.float64
