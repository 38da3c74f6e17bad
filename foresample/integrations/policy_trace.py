"""Is this method the loop it looks like? Watch it for a few steps, and require that the chain explains them.

A policy is known by its method's arguments and attributes. A subclass may do something else behind them (guidance,
a temperature, another order), which the chain read from the scheduler knows nothing of. So before the first plan the
untouched method runs a few steps with known noise, on the observation at hand; what its network was shown must be what
the chain says, to rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from foresample.chains import Chain
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
    name: str,
    run: Callable[[torch.Generator], object],
    network: Callable[..., Tensor],
    instead: Callable[[nn.Module], AbstractContextManager[Any]],
    request: Request,
    free: Tensor,
    chain: Chain,
) -> None:
    """Refuse a method whose first steps are not the chain's.

    Args:
        name: of the method.
        run: the untouched method on the call at hand, with this generator where it takes one.
        network: as the method calls it.
        instead: puts another in its place.
        request: the same call as read here.
        free: [*shape]: the coordinates drawn.
        chain: as read from the scheduler.
    """
    data, transitions = request.data, min(STEPS, len(chain.std) - 1)
    watch = _Watch(network, transitions + 1)
    devices = [data.device] if data.is_cuda else []
    with torch.random.fork_rng(devices), torch.no_grad(), instead(watch):
        torch.manual_seed(_SEED)  # the same numbers for a method that draws from the global generator
        with suppress(_SeenEnough):
            run(torch.Generator(data.device).manual_seed(_SEED))
    if len(watch.seen) <= transitions:
        raise ValueError(
            _refusal(name, f"it calls its network {len(watch.seen)} times instead of {len(chain.std)}")
        )
    chain = chain.to(data.device, torch.promote_types(data.dtype, torch.float32))
    _compare(name, watch.seen, request, free, chain)
    _compare_together(name, watch.seen, request, chain)


def _compare(name: str, seen: list[_Seen], request: Request, free: Tensor, chain: Chain) -> None:
    data = request.data
    noise = torch.Generator(data.device).manual_seed(_SEED)

    def draw() -> Tensor:
        return torch.randn(data.shape, generator=noise, dtype=data.dtype, device=data.device).to(chain.std)

    given = [v for v in request.conditions.values() if v is not None]
    if not _same_conditions(seen[0].conditions, given):
        raise ValueError(_refusal(name, "it shows its network other conditions than it was given"))
    expected = draw() if request.noise is None else request.noise.to(chain.std)
    previous = torch.zeros_like(expected)
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
        previous = prediction


def _compare_together(name: str, seen: list[_Seen], request: Request, chain: Chain) -> None:
    """One call on states at different steps, as rounds make them, must answer what the single ones did."""
    if chain.time is None:
        return
    times = chain.time[: len(seen)].to(request.data.device)
    conditions = {
        n: v if v is None else v[:1].expand(len(seen), *v.shape[1:]) for n, v in request.conditions.items()
    }
    with torch.no_grad():
        together = request.network(torch.cat([one.sample[:1] for one in seen]), times, **conditions)
    for k, one in enumerate(seen):
        apart = (together[k] - one.output[0]).abs().max() / one.output[0].abs().max().clamp(min=1e-6)
        if not apart <= _ROUNDING.get(request.data.dtype, 0.1):
            what = f"where states of a call are at different steps its network's answer changes by {float(apart):.2g}"
            raise ValueError(_refusal(name, what))


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
def standing_in(owner: Any, name: str, other: Any) -> Iterator[None]:
    """The owner with another attribute of this name for a while; a module's part or any."""
    held = next((d for d in (vars(owner).get("_modules", {}), vars(owner)) if name in d), None)
    if held is None:  # the class's
        setattr(owner, name, other)
        try:
            yield
        finally:
            delattr(owner, name)
        return
    mine, held[name] = held[name], other
    try:
        yield
    finally:
        held[name] = mine
