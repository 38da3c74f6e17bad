"""Is a policy's method the loop it looks like? It is run once, on the observation at hand.

A policy is known by its method's arguments and attributes. A subclass may do something else behind them (guidance, a
temperature, another order), which the chain read from the scheduler knows nothing of. The network answers at three
steps, and then at a state of each together, as it will be called in rounds.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from foresample.chains import Chain
from foresample.integrations.explain import STEPS, Rerun, Subject, require_explained
from foresample.integrations.policies.plans import Request


def policy_subject(name: str) -> Subject:
    """A policy's method, as a refusal names it, with the ways out."""
    return Subject(
        name,
        "plan with the policy as it is (foresample.restore), make a target with foresample.targets, or give "
        "trace=False if you know that its distribution is the scheduler's",
    )


def require_same_chain(
    name: str,
    run: Callable[[torch.Generator], Any],
    network: Callable[..., Tensor],
    instead: Callable[[nn.Module], AbstractContextManager[Any]],
    request: Request,
    chain: Chain,
    *,
    whole: bool = True,
) -> None:
    """Refuse a method that does something else than the chain; the arguments are those of `Rerun`."""
    loop = Rerun(
        policy_subject(name),
        run,
        instead,
        request.data.device,
        network=network,
        conditions=[v for v in request.conditions.values() if v is not None],
        start=request.noise,
        data=request.data,
        free=request.free,
        whole=whole,
    )
    seen = require_explained(loop, chain)[:STEPS]
    if chain.time is None:
        return
    times = chain.time[: len(seen)].to(request.data.device)
    conditions = {
        n: v if v is None else v[:1].expand(len(seen), *v.shape[1:]) for n, v in request.conditions.items()
    }
    with torch.no_grad():
        together = request.network(torch.cat([call.sample[:1] for call in seen]), times, **conditions)
    for k, call in enumerate(seen):
        what = f"where states of a call are at different steps its network's answer to step {k}"
        loop.subject.require_same(what, call.output[0], together[k], request.data.dtype)
