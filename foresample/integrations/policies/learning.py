"""Learning a prior from a policy's own plans: the conditions, the network it belongs to, and unused noise.

`accelerate(policy, learn=True)` keeps the paths of the plans it draws, each with its observation. `learn()` trains on
them in seconds, and only when it is called. After that, every plan is drafted from its own observation.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from foresample.drafters.learned import LearnedPrior
from foresample.engine.priors import MATRIX_ELEMENTS, prior_of_paths
from foresample.targets import ChainTarget

if TYPE_CHECKING:
    from foresample.integrations.policies.planner import Request

FEWEST = 32
"""Least number of plans to learn from."""
MOST = 4096
"""Number of plans kept to learn from, the latest ones."""


def condition_of(request: Request) -> Tensor:
    """Everything but noise that a plan depends on, [R, C]: the network's conditions, the conditioned coordinates."""
    rows = len(request.data)
    known = [value.reshape(rows, -1) for value in request.conditions.values() if value is not None]
    if request.mask is not None:
        known.append(request.data.flatten(1)[:, request.mask[0].flatten()])
    if not sum(value.shape[1] for value in known):
        raise ValueError("this policy's plans depend on no observation: leave learn out and use pilots=64")
    return torch.cat([value.to(torch.float32) for value in known], 1)


@torch.no_grad()
def weights_of(network: Any) -> Tensor:
    """Two numbers for each parameter, [parameters, 2], that identify a network in any precision."""
    parameters = list(network.parameters()) if isinstance(network, torch.nn.Module) else []
    sums = [torch.stack([p.double().sum(), p.double().abs().sum()]) for p in parameters]
    return torch.stack(sums).cpu() if sums else torch.zeros(0, 2, dtype=torch.float64)


def require_learned_for(prior: LearnedPrior, network: Any) -> None:
    """Refuse a prior that was learned from another policy's plans."""
    ours, theirs = weights_of(network), prior.origin.cpu()
    near = ours.shape == theirs.shape and bool(((ours - theirs).abs() <= 1e-2 * theirs[:, 1:] + 1e-6).all())
    if not near:
        raise ValueError(
            "this prior was learned from the plans of another policy: learn one for this policy "
            "(accelerate(policy, learn=True), plan, and call learn()), or leave prior out"
        )


@torch.no_grad()
def learn_prior(
    target: ChainTarget, network: Any, condition: Tensor, states: Tensor, predictions: Tensor
) -> LearnedPrior:
    """A prior learned from plans: their conditions [P, C] and paths [P, N, F]."""
    size = target.shape.numel()
    if size > MATRIX_ELEMENTS:
        raise ValueError(
            f"learn=True is for plans of at most {MATRIX_ELEMENTS} numbers, and this policy's have {size}"
        )
    if len(condition) < FEWEST:
        raise ValueError(f"{len(condition)} plans are too few to learn from: draw at least {FEWEST} first")
    jacobian = prior_of_paths(target, states, predictions, window=1).jacobian
    assert jacobian is not None
    return LearnedPrior.fit(condition.to(states), states, predictions, jacobian, origin=weights_of(network))


def unused_seeds(seeds: Tensor, past: str) -> Tensor:
    """Seeds whose noise was not used in the `past`: each seed is hashed with it.

    A draft may depend on earlier plans, but not on the noise of its own plan. Otherwise, if a caller gave the same seed
    to several plans, a plan could be drafted from a path that its own noise led to.
    """
    if not past:
        return seeds
    words = (hashlib.blake2b(f"{seed} {past}".encode(), digest_size=8).digest() for seed in seeds.tolist())
    return torch.tensor([int.from_bytes(word, "big") >> 1 for word in words], device=seeds.device)
