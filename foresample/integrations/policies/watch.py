"""Is a policy's method the loop it looks like? It is run once, on the observation at hand.

A policy is known by its method's arguments and attributes. A subclass may do something else behind them (guidance, a
temperature, another order), which the chain read from the scheduler knows nothing of. The network answers at three
steps, and then at a state of each together, as it will be called in rounds.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from foresample.chains import Chain
from foresample.integrations.explain import STEPS, Rerun, Standard, difference, largest, require_explained
from foresample.integrations.policies.plans import Request


def policy_standard(name: str) -> Standard:
    """What a policy's method of this name is held to; half precision is rounded after every step."""
    return Standard(
        f"{name} is not the loop it looks like: {{what}}; plan with the policy as it is (foresample.restore), make a "
        "target with foresample.targets, or give trace=False if you know that its distribution is the scheduler's",
        rounding={torch.float64: 1e-6, torch.float32: 1e-3},
        coarse=0.1,
        scale=partial(largest, least=1.0),
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
    standard = policy_standard(name)
    loop = Rerun(
        standard,
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
        size = difference(together[k], call.output[0], partial(largest, least=1e-6))
        if not standard.explains(size, request.data.dtype):
            standard.refuse(
                f"where states of a call are at different steps its network's answer changes by {size:.2g}"
            )
