"""Is this method the loop it looks like? Watch it once, and require that the chain explains all it does.

A policy is known by its method's arguments and attributes. A subclass may do something else behind them (guidance,
a temperature, another order), which the chain read from the scheduler knows nothing of. So before the first plan the
untouched method runs once with known noise, on the observation at hand: what its network is shown at every step, and
what comes out, must be what the chain says, to rounding. Its network answers at three steps, and then at a state of
each together, as it will be called in rounds; answers at later steps are made up, which costs nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
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


@dataclass(frozen=True)
class _Seen:
    """One call of the network."""

    sample: Tensor
    timestep: Tensor
    conditions: list[Tensor]
    output: Tensor


class _Watch(nn.Module):
    """The network, noting what it is shown; after some calls its answers are made up."""

    def __init__(self, network: Callable[..., Tensor]) -> None:
        super().__init__()
        self.network, self.seen = network, list[_Seen]()

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        sample, timestep, *others = [v for v in (*args, *kwargs.values()) if v is not None]
        given = sample.clone()
        if len(self.seen) < STEPS:
            output = self.network(*args, **kwargs)
        else:
            output = torch.tanh(0.7 * given + 0.2) - 0.1 * given.roll(1, -1)
        conditions = [v.clone() for v in others if isinstance(v, Tensor)]
        self.seen.append(_Seen(given, torch.as_tensor(timestep), conditions, output.clone()))
        return output


def require_same_chain(
    name: str,
    run: Callable[[torch.Generator], Any],
    network: Callable[..., Tensor],
    instead: Callable[[nn.Module], AbstractContextManager[Any]],
    request: Request,
    free: Tensor,
    chain: Chain,
    *,
    whole: bool = True,
) -> None:
    """Refuse a method that does something else than the chain.

    Args:
        name: of the method.
        run: the untouched method on the call at hand, with this generator where it takes one.
        network: as the method calls it.
        instead: puts another in its place.
        request: the same call as read here.
        free: [*shape]: the coordinates drawn.
        chain: as read from the scheduler.
        whole: the method returns the plan, not something made of it.
    """
    data, watch = request.data, _Watch(network)
    devices = [data.device] if data.is_cuda else []
    with torch.random.fork_rng(devices), torch.no_grad(), instead(watch):
        torch.manual_seed(_SEED)  # the same numbers for a method that draws from the global generator
        result = run(torch.Generator(data.device).manual_seed(_SEED))
    chain = chain.to(data.device, torch.promote_types(data.dtype, torch.float32))
    expected = _compare(name, watch.seen, request, free, chain)
    if whole:
        if not isinstance(result, Tensor) or result.shape != data.shape:
            raise ValueError(refusal(name, "it returns something else than a plan"))
        _require_same(name, "what it returns", result, expected, request, free)
    _compare_together(name, watch.seen[:STEPS], request, chain)


def _compare(name: str, seen: list[_Seen], request: Request, free: Tensor, chain: Chain) -> Tensor:
    """What the network was shown must be the chain's states; the plan that must come out."""
    data, steps = request.data, len(chain.std)
    noise = torch.Generator(data.device).manual_seed(_SEED)

    def draw() -> Tensor:
        return torch.randn(data.shape, generator=noise, dtype=data.dtype, device=data.device).to(chain.std)

    given = [v for v in request.conditions.values() if v is not None]
    expected = draw() if request.noise is None else request.noise.to(chain.std)
    previous = no_history(chain, expected)
    for k, one in enumerate(seen[:steps]):
        if not _same_conditions(one.conditions, given):
            what = f"at step {k} it shows its network other conditions than it was given"
            raise ValueError(refusal(name, what))
        if chain.time is not None and not (one.timestep.to(chain.time) == chain.time[k]).all():
            raise ValueError(refusal(name, f"at step {k} it is at another timestep than its scheduler"))
        if one.sample.shape != data.shape:
            what = f"at step {k} its state has shape {tuple(one.sample.shape)} instead of {tuple(data.shape)}"
            raise ValueError(refusal(name, what))
        _require_same(name, f"at step {k} its state", one.sample, expected, request, free)
        x, step = one.sample.to(chain.std), torch.full((len(data),), k, device=data.device)
        prediction = chain.predict(x, one.output.to(x), step)
        expected = chain.mean(x, prediction, step, previous) + chain.std[k] * draw()
        previous = remember(chain, prediction, previous)
    if len(seen) != steps:
        raise ValueError(refusal(name, f"it calls its network {len(seen)} times instead of {steps}"))
    return expected


def _require_same(
    name: str, what: str, state: Tensor, expected: Tensor, request: Request, free: Tensor
) -> None:
    """Equal to rounding where it is free, exactly the data's elsewhere."""
    data = request.data
    apart = (state.to(expected) - expected).abs().nan_to_num(torch.inf)
    apart[:, ~free] = (state - data).abs()[:, ~free].to(apart)
    size = float(apart.max() / state.abs().max().clamp(min=1.0))
    if size > _ROUNDING.get(data.dtype, 0.1) or bool(apart[:, ~free].any()):
        raise ValueError(refusal(name, f"{what} differs by {size:.2g} from the scheduler's chain"))


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
            raise ValueError(refusal(name, what))


def _same_conditions(shown: list[Tensor], given: list[Tensor]) -> bool:
    if len(shown) != len(given):
        return False
    return all(
        a.shape == b.shape and torch.allclose(a.float(), b.float()) for a, b in zip(shown, given, strict=True)
    )


def refusal(name: str, what: str) -> str:
    """The sentence for a method that does something else, with the ways out."""
    return (
        f"{name} is not the loop it looks like: {what}; plan with the policy as it is (foresample.restore), make a "
        "target with foresample.targets, or give trace=False if you know that its distribution is the scheduler's"
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
