"""Gradients inside a chain: guidance by a classifier, and networks that differentiate.

Samplers run without gradients; a prediction that needs them turns them on. Guidance by a classifier, as by OpenAI's
`cond_fn` (Dhariwal & Nichol 2021), adds std² times the gradient of its log p(y | x) to the mean of each transition,

    x_{k+1} = mean_k(x_k) + std_k² ∇ log p(y | x_k) + std_k z_k,

a function of the state like the mean itself. It goes into the prediction, p + std_k² ∇ log p / prediction_weight, so
that drafts reuse it, too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from foresample.contracts import Target, Wrapper, affine_chain, earlier_predictions, expand, require_target
from foresample.targets.constraints import require_plain_states

LogLikelihood = Callable[[Tensor, Tensor, Tensor], Tensor]
"""log_likelihood(x, step, row): states [B, *shape], their steps and samples [B] -> log p(y | x), [B]."""


def with_gradients(network: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A network(x, …) that runs with gradients on, x being a leaf that requires one, [B, *shape].

    For a network that takes a gradient inside, such as a posterior sampler's (DPS) or the score of an energy:

        fs.targets.langevin(fs.targets.with_gradients(lambda x, step, row: grad(-energy(x).sum(), x)[0]), …)
    """

    def differentiable(x: Tensor, *others: Any) -> Tensor:
        with torch.inference_mode(False), torch.enable_grad():
            rest = [other.clone() if isinstance(other, Tensor) else other for other in others]
            return network(x.detach().clone().requires_grad_(), *rest).detach()

    return differentiable


def guided(target: Target, log_likelihood: LogLikelihood, scale: float = 1.0) -> Target:
    """The chain guided by the gradient of log p(y | x): std² times it is added to the mean of each transition.

    Args:
        target: the chain without guidance, with a mean a·x + b·prediction, a and b numbers for each step.
        log_likelihood: log_likelihood(x, step, row) -> [B], differentiable in x; `row` looks up the condition y.
        scale: a factor of the gradient.
    """
    require_target(target)
    if earlier_predictions(target):
        raise ValueError(
            f"{type(target).__name__} reuses predictions in later steps, which would add their gradients again: guide "
            "a one-step chain, such as chains.euler_ancestral_chain"
        )
    require_plain_states(target, "guide", "guide the target inside it, then constrain it")
    chain = affine_chain(target)
    if chain is None or ((chain.prediction_weight == 0) & (target.std > 0)).any():
        raise ValueError(
            f"the mean of {type(target).__name__} is not known to be affine in state and prediction, or a weight "
            "of the prediction is 0, so the prediction cannot carry the gradient: add it in the mean of your own target"
        )
    strength = torch.where(target.std > 0, scale * target.std**2 / chain.prediction_weight, 0.0)
    return _Guided(target, with_gradients(lambda x, *rest: _gradient(log_likelihood, x, *rest)), strength)


class _Guided(Wrapper):
    """Adds strength_k times the gradient at a state to the prediction there."""

    def __init__(self, target: Target, gradient: Callable[..., Tensor], strength: Tensor) -> None:
        super().__init__(target)
        self.gradient, self.strength = gradient, strength

    def predict(self, x: Tensor, step: Tensor, row: Tensor, **extra: Tensor) -> Tensor:
        push = expand(self.strength[step], x) * self.gradient(
            x, step, row
        )  # before the network may write into x
        return super().predict(x, step, row, **extra) + push


def _gradient(log_likelihood: LogLikelihood, x: Tensor, step: Tensor, row: Tensor) -> Tensor:
    value = log_likelihood(x, step, row)
    if value.shape != row.shape:
        raise ValueError(
            f"log_likelihood must return a number for each state, {tuple(row.shape)} here, not {tuple(value.shape)}: "
            "do not average over the batch"
        )
    return torch.autograd.grad(value.sum(), x)[0]
