"""Is this method the loop it looks like? Watch it for a few steps, and require that the chain explains them.

A policy is known by its method's arguments and attributes. A subclass may do something else behind them (guidance,
a temperature, another order), which the chain read from the scheduler knows nothing of. So before the first plan the
untouched method runs a few steps with known noise, on the observation at hand; what its network was shown must be what
the chain says, to rounding.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from foresample.chains import Chain
from foresample.contracts import no_history, remember
from foresample.integrations.plans import Request

STEPS = 3
_SEED = 20  # any
_ROUNDING = {
    torch.float64: 1e-6,
    torch.float32: 1e-3,
}  # of a state's size; half precision is rounded after every step


class _SeenEnough(Exception):
    pass


@dataclass(frozen=True)
class _Seen:
    """One call of the network."""

    sample: Tensor
    timestep: Tensor
    conditions: list[Tensor]
    output: Tensor


class _Watch(nn.Module):
    """The network, noting what it is shown, until it has seen enough."""

    def __init__(self, network: Callable[..., Tensor], calls: int) -> None:
        super().__init__()
        self.network, self.calls, self.seen = network, calls, list[_Seen]()

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        output = self.network(*args, **kwargs)
        sample, timestep, *others = [v for v in (*args, *kwargs.values()) if v is not None]
        conditions = [v for v in others if isinstance(v, Tensor)]
        self.seen.append(_Seen(sample.clone(), torch.as_tensor(timestep), conditions, output.clone()))
        if len(self.seen) == self.calls:
            raise _SeenEnough
        return output


def require_same_chain(
    model: Any,
    network: str,
    method: Callable[..., Tensor],
    arguments: inspect.BoundArguments,
    request: Request,
    free: Tensor,
    chain: Chain,
) -> None:
    """Refuse a method whose first steps are not the chain's.

    Args:
        model: what the method belongs to.
        network: the attribute of the model that holds the network.
        method: the untouched one.
        arguments: of the call at hand.
        request: the same call as read here.
        free: [*shape]: the coordinates drawn.
        chain: as read from the scheduler.
    """
    data, transitions = request.data, min(STEPS, len(chain.std) - 1)
    watch = _Watch(request.network, transitions + 1)
    again = inspect.BoundArguments(arguments.signature, dict(arguments.arguments))
    again.arguments["generator"] = torch.Generator(data.device).manual_seed(_SEED)
    devices = [data.device] if data.is_cuda else []
    with torch.random.fork_rng(devices), torch.no_grad(), _in_place_of(model, network, watch):
        torch.manual_seed(_SEED)  # the same numbers for a method that draws from the global generator
        with suppress(_SeenEnough):
            method(*again.args, **again.kwargs)
    name = f"{type(model).__name__}.{getattr(method, '__name__', 'conditional_sample')}"
    if len(watch.seen) <= transitions:
        raise ValueError(
            _refusal(name, f"it calls its network {len(watch.seen)} times instead of {len(chain.std)}")
        )
    _compare(
        name, watch.seen, request, free, chain.to(data.device, torch.promote_types(data.dtype, torch.float32))
    )


def _compare(name: str, seen: list[_Seen], request: Request, free: Tensor, chain: Chain) -> None:
    data = request.data
    noise = torch.Generator(data.device).manual_seed(_SEED)

    def draw() -> Tensor:
        return torch.randn(data.shape, generator=noise, dtype=data.dtype, device=data.device).to(chain.std)

    given = [v for v in request.conditions.values() if v is not None]
    if not _same_conditions(seen[0].conditions, given):
        raise ValueError(_refusal(name, "it shows its network other conditions than it was given"))
    expected = draw() if request.noise is None else request.noise.to(chain.std)
    previous = no_history(chain, expected)
    for k, one in enumerate(seen):
        if chain.time is not None and not (one.timestep.to(chain.time) == chain.time[k]).all():
            raise ValueError(_refusal(name, f"at step {k} it is at another timestep than its scheduler"))
        x, outside = one.sample.to(chain.std), (one.sample - data)[:, ~free]
        apart = (x - expected)[:, free].abs().max() / x.abs().max().clamp(min=1.0)
        if apart > _ROUNDING.get(data.dtype, 0.1) or (outside.numel() and bool(outside.any())):
            raise ValueError(
                _refusal(
                    name, f"at step {k} its state differs by {float(apart):.2g} from the scheduler's chain"
                )
            )
        step = torch.full((len(x),), k, device=x.device)
        prediction = chain.predict(x, one.output.to(x), step)
        expected = chain.mean(x, prediction, step, previous) + chain.std[k] * draw()
        previous = remember(chain, prediction, previous)


def _same_conditions(shown: list[Tensor], given: list[Tensor]) -> bool:
    if len(shown) != len(given):
        return False
    return all(
        a.shape == b.shape and torch.allclose(a.float(), b.float()) for a, b in zip(shown, given, strict=True)
    )


def _refusal(name: str, what: str) -> str:
    return (
        f"{name} is not the loop it looks like: {what}; plan with the policy as it is, or give trace=False if you "
        "know that its law is the scheduler's"
    )


@contextmanager
def _in_place_of(model: Any, name: str, other: nn.Module) -> Iterator[None]:
    """The model with another network for a while."""
    held = next(d for d in (vars(model).get("_modules", {}), vars(model)) if name in d)
    mine, held[name] = held[name], other
    try:
        yield
    finally:
        held[name] = mine
