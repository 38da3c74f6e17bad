"""The check that a chain explains another library's loop.

`accelerate` reads a chain off another library's loop. Before a sample of that chain is returned, the untouched loop is
watched. Each of its states must be the chain's mean at the loop's own state and network output, plus the chain's std
times the loop's own noise, up to rounding. A loop that does something else is refused.

* A policy's method, or a package's loop, is run once with a known seed while its network is watched
  (`require_explained`). The network runs at three steps at most; the other outputs are made up, which costs nothing.
* A pipeline is watched for three steps, and its scheduler's `step` is replayed over the whole chain on made-up answers
  (`diffusers.watch`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from threading import RLock
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from foresample.chains import Chain
from foresample.chains.chain import per_row
from foresample.contracts import no_history, remember
from foresample.faults import broken, fault_error

STEPS = 3
"""Steps at which the network itself runs while its loop is watched; later outputs are made up."""
_SEED = 20  # arbitrary


class ChainBeside:
    """A chain that is walked beside a loop, on the loop's own states, network outputs and noise."""

    def __init__(self, chain: Chain, start: Tensor) -> None:
        self.chain = chain.to(start.device, torch.float64)
        self.previous = no_history(self.chain, start.double())

    def after(self, k: int | Tensor, sample: Tensor, output: Tensor, noise: Tensor | None) -> Tensor:
        """The chain's state after step k from `sample`, [R, *shape]; infinite if the noise does not fit.

        A chain that needs no earlier predictions may be at another step for each state: `k` is then a tensor, [R].
        """
        chain, x = self.chain, sample.double()
        step = torch.as_tensor(k, device=x.device).expand(len(x))
        wrong = broken(output.unsqueeze(1)).flatten().nonzero().flatten().tolist()
        if wrong:
            raise fault_error(int(step[wrong[0]]), wrong[0])
        learned = chain.low_variance is not None  # the loop adds all noise at once: there is no extra noise
        prediction = chain.predict(x, (output.chunk(2, 1)[0] if learned else output).double(), step)
        mean = chain.mean(x, prediction, step, self.previous)
        self.previous = remember(chain, prediction, self.previous)
        std = per_row(chain.std, step, x)
        if not (std > 0).any():
            return mean
        if noise is None or noise.shape != sample.shape:
            return torch.full_like(mean, torch.inf)
        if learned:
            std = torch.where(std > 0, chain.variance(output.double(), step).sqrt(), 0.0)
        return mean + std * noise.to(x)


def largest(values: Tensor, least: float = 1e-30) -> Tensor:
    """The largest absolute value, at least `least`: the scale of relative differences."""
    return values.abs().max().clamp(min=least)


def difference(ours: Tensor, theirs: Tensor, scale: Callable[[Tensor], Tensor] = largest) -> float:
    """The largest difference, relative to the scale of their values."""
    ours, theirs = ours.double(), theirs.double()
    apart = (ours - theirs).abs().nan_to_num(nan=torch.inf, posinf=torch.inf)
    return float((apart / scale(theirs)).max())


def made_up(x: Tensor, learned: bool, wide: bool = False) -> Tensor:
    """A made-up network output; the estimates of a wide one leave ±1, so that clipping shows."""
    output = 1.5 * torch.sin(3 * x) if wide else torch.tanh(0.7 * x + 0.2) - 0.1 * x.roll(1, -1)
    return torch.cat([output, 0.9 * (torch.cos(2 * x) if wide else torch.sin(x))], 1) if learned else output


# ---------------------------------------------------------------- a loop run once with a known seed


torchs_generators = RLock()
"""Lock held while torch's own generators are seeded for a comparison: other threads must not draw from them then."""


@contextmanager
def same_noise(device: torch.device) -> Iterator[torch.Generator]:
    """Seed torch's own generators of the CPU and of a device; yield a generator that draws the same numbers there.

    Afterwards torch's generators continue as before. Those of other devices are not touched.
    """
    cuda = device.type == "cuda"
    with torchs_generators, torch.random.fork_rng([device] if cuda else []):
        torch.default_generator.manual_seed(_SEED)
        if device.type != "cpu":
            with torch.cuda.device(device) if cuda else nullcontext():
                torch.get_device_module(device).manual_seed(_SEED)
        yield torch.Generator(device).manual_seed(_SEED)


@dataclass(frozen=True)
class Standard:
    """The rounding that a loop is allowed, and the message of its refusal, with `{what}` for the difference found.

    `rounding` has the largest difference allowed for each dtype of the states, relative to `scale`; `coarse` is that of
    all other dtypes.
    """

    sentence: str
    rounding: Mapping[torch.dtype, float]
    coarse: float
    scale: Callable[[Tensor], Tensor]

    def refuse(self, what: str) -> NoReturn:
        raise ValueError(self.sentence.format(what=what))

    def explains(self, size: float, dtype: torch.dtype) -> bool:
        return size <= self.rounding.get(dtype, self.coarse)


@dataclass(frozen=True)
class Call:
    """One call of a loop's network."""

    sample: Tensor
    timestep: Tensor
    conditions: list[Tensor]
    output: Tensor


class _WatchedNetwork(nn.Module):
    """A network that records its calls; after `STEPS` of them, or without a network, its outputs are made up."""

    def __init__(self, network: Callable[..., Tensor] | None, learned: bool) -> None:
        super().__init__()
        self.network, self.learned, self.seen = network, learned, list[Call]()

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        sample, timestep, *others = [v for v in (*args, *kwargs.values()) if v is not None]
        given = sample.clone()
        if self.network is not None and len(self.seen) < STEPS:
            output = self.network(*args, **kwargs)
        else:
            output = made_up(given, self.learned, wide=self.network is None)
        conditions = [v.clone() for v in others if isinstance(v, Tensor)]
        self.seen.append(Call(given, torch.as_tensor(timestep), conditions, output.clone()))
        return output


@dataclass(frozen=True)
class Rerun:
    """A way to run an untouched loop once more.

    Args:
        standard: the rounding allowed, and the message of a refusal.
        run: runs the loop, with this generator if it takes one.
        instead: replaces the loop's network.
        device: the device of the states.
        network: the network as the loop calls it; by default all outputs are made up.
        conditions: the network's inputs besides state and timestep.
        start: [R, *shape], the first state, for a loop that does not draw it.
        data: [R, *shape], values of the coordinates that are not drawn, in the dtype of the states.
        free: [*shape], the coordinates that are drawn; all by default.
        whole: True if the loop returns its last state itself.
        begin: makes the loop's first state from its first noise.
    """

    standard: Standard
    run: Callable[[torch.Generator], Any]
    instead: Callable[[nn.Module], AbstractContextManager[Any]]
    device: torch.device
    network: Callable[..., Tensor] | None = None
    conditions: Sequence[Tensor] = ()
    start: Tensor | None = None
    data: Tensor | None = None
    free: Tensor | None = None
    whole: bool = False
    begin: Callable[[Tensor], Tensor] = lambda noise: noise


def require_explained(loop: Rerun, chain: Chain) -> list[Call]:
    """Refuse a loop whose states are not the chain's; return the calls of its network."""
    watch = _WatchedNetwork(loop.network, chain.low_variance is not None)
    with same_noise(loop.device) as noise, torch.no_grad(), loop.instead(watch):
        result = loop.run(noise)
    steps, seen = len(chain.std), watch.seen
    last = _compared(loop, chain, seen[:steps]) if seen else None
    if last is None or len(seen) != steps:
        loop.standard.refuse(f"it calls its network {len(seen)} times instead of {steps}")
    if loop.whole:
        if not isinstance(result, Tensor) or result.shape != last.shape:
            loop.standard.refuse("it does not return a plan")
        _require_state(loop, "what it returns", result, last)
    return seen


def _compared(loop: Rerun, chain: Chain, seen: list[Call]) -> Tensor:
    """Require the chain's states, timesteps and conditions; return the state that the loop must end in."""
    refuse, like = loop.standard.refuse, seen[0].sample if loop.data is None else loop.data
    noise = torch.Generator(loop.device).manual_seed(_SEED)

    def draw() -> Tensor:
        return torch.randn(like.shape, generator=noise, dtype=like.dtype, device=like.device)

    expected = (loop.begin(draw()) if loop.start is None else loop.start).double()
    beside = ChainBeside(chain, expected)
    times = beside.chain.time
    for k, call in enumerate(seen):
        passed, given = (
            [(v.shape, v.float()) for v in values] for values in (call.conditions, loop.conditions)
        )
        if len(passed) != len(given) or not all(
            a == b and torch.allclose(v, w) for (a, v), (b, w) in zip(passed, given, strict=True)
        ):
            refuse(f"at step {k} it passes its network other conditions than it was given")
        if times is not None and not (call.timestep.to(times) == times[k]).all():
            refuse(f"at step {k} its timestep is not the scheduler's")
        if call.sample.shape != like.shape:
            shapes = f"{tuple(call.sample.shape)} instead of {tuple(like.shape)}"
            refuse(f"at step {k} its state has shape {shapes}")
        _require_state(loop, f"at step {k} its state", call.sample, expected)
        expected = beside.after(k, call.sample, call.output, draw())
    return expected


def _require_state(loop: Rerun, what: str, state: Tensor, expected: Tensor) -> None:
    """Require the expected state: up to rounding where coordinates are drawn, exactly the data elsewhere."""
    exact, dtype = True, state.dtype
    if loop.data is not None and loop.free is not None:
        given, dtype = loop.data[:, ~loop.free], loop.data.dtype
        exact, expected = torch.equal(state[:, ~loop.free], given), expected.clone()
        expected[:, ~loop.free] = given.double()
    size = difference(expected, state, loop.standard.scale)
    if not exact or not loop.standard.explains(size, dtype):
        loop.standard.refuse(f"{what} differs by {size:.2g} from the scheduler's chain")
