"""Does the chain explain this loop?

`accelerate` reads a chain off somebody's loop. Before a sample of that chain is handed out, the untouched loop is
watched, and every state it makes must be the chain's: the chain's mean at the loop's own state and network answer, plus
its std times the loop's own noise, to rounding. A loop that does something else is refused, with the step and the size.

* A pipeline is watched for three steps, with copies of its generators (`Watch`). Then its scheduler's own `step` is
  replayed over the whole chain on made-up answers (`replay_scheduler`).
* A policy's method, or a package's loop, is run once with a known seed while its network is watched
  (`require_explained`); answers that are not needed are made up, which costs nothing.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from foresample.chains import Chain
from foresample.contracts import no_history, remember
from foresample.faults import broken, fault_error
from foresample.integrations.diffusers.again import Answered
from foresample.integrations.diffusers.calls import signature_of
from foresample.integrations.diffusers.turns import read_chain, require_shape
from foresample.integrations.diffusers.unchanged import Unchanged
from foresample.integrations.refusal import REMEDY, Refused

STEPS = 3
"""Steps at which a network answers while its loop is watched."""
TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3}
"""Differences from the chain that rounding explains, relative to the state."""
_HALF = 3e-2  # half precision is rounded after every step
_SEED = 20  # any


# ---------------------------------------------------------------- the comparison


@dataclass(frozen=True)
class Subject:
    """A loop as a refusal names it."""

    name: str
    remedy: str
    error: type[Exception] = ValueError

    def refuse(self, what: str) -> NoReturn:
        """Raise: the loop does something that its chain does not contain."""
        raise self.error(f"{self.name} is not the loop it looks like: {what}; {self.remedy}")

    def require_same(self, what: str, ours: Tensor, theirs: Tensor, *dtypes: torch.dtype) -> float:
        """The difference of a loop's state from the chain's; refused if rounding in `dtypes` does not explain it."""
        size = difference(ours, theirs)
        if not size <= max(TOLERANCE.get(dtype, _HALF) for dtype in dtypes or (theirs.dtype,)):
            self.refuse(f"{what} differs by {size:.2g} from the chain's")
        return size


def difference(ours: Tensor, theirs: Tensor) -> float:
    """The largest difference, relative to the largest of their values, which may all be zero."""
    apart = (ours.double() - theirs.double()).abs().nan_to_num(torch.inf)
    return float(apart.max() / theirs.abs().max().double().clamp(min=1e-30))


class ChainBeside:
    """The chain, walked beside a loop on the loop's own states, answers and noise."""

    def __init__(self, subject: Subject, chain: Chain, start: Tensor) -> None:
        self.subject, self.chain = subject, chain.to(start.device, torch.float64)
        self.previous = no_history(self.chain, start.double())

    def after(self, k: int, sample: Tensor, output: Tensor, noise: Tensor | None) -> Tensor:
        """The state that the chain makes of `sample` in step k, [R, *shape]."""
        chain, x = self.chain, sample.double()
        step = torch.full((len(x),), k, device=x.device)
        learned = chain.low_variance is not None  # the loop adds all noise at once, so there is no extra noise
        prediction = chain.predict(x, (output.chunk(2, 1)[0] if learned else output).double(), step)
        mean = chain.mean(x, prediction, step, self.previous)
        self.previous = remember(chain, prediction, self.previous)
        if not chain.std[k] > 0:
            return mean
        if noise is None or noise.shape != sample.shape:
            self.subject.refuse(f"at step {k} it draws other noise than the chain")
        std = chain.variance(output.double(), step).sqrt() if learned else chain.std[k]
        return mean + std * noise.to(x)


def made_up(x: Tensor, learned: bool) -> Tensor:
    """An answer that no network gave; its estimates leave ±1, so that clipping shows."""
    output = 1.5 * torch.sin(3 * x)
    return torch.cat([output, 0.9 * torch.cos(2 * x)], 1) if learned else output


# ---------------------------------------------------------------- a loop run once with a known seed


@dataclass(frozen=True)
class Call:
    """One call of a loop's network."""

    sample: Tensor
    timestep: Tensor
    conditions: list[Tensor]
    output: Tensor


class _WatchedNetwork(nn.Module):
    """A network that notes what it is shown; after some calls, or without a network, answers are made up."""

    def __init__(self, network: Callable[..., Tensor] | None, learned: bool) -> None:
        super().__init__()
        self.network, self.learned, self.seen = network, learned, list[Call]()

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        sample, timestep, *others = [v for v in (*args, *kwargs.values()) if v is not None]
        given = sample.clone()
        if self.network is not None and len(self.seen) < STEPS:
            output = self.network(*args, **kwargs)
        else:
            output = made_up(given, self.learned)
        conditions = [v.clone() for v in others if isinstance(v, Tensor)]
        self.seen.append(Call(given, torch.as_tensor(timestep), conditions, output.clone()))
        return output


@dataclass(frozen=True)
class Rerun:
    """How to run an untouched loop once more."""

    subject: Subject
    run: Callable[[torch.Generator], Any]
    """The loop, with this generator where it takes one."""
    instead: Callable[[nn.Module], AbstractContextManager[Any]]
    """Puts another network in the place of the loop's."""
    device: torch.device
    network: Callable[..., Tensor] | None = None
    """The network as the loop calls it; None: all answers are made up."""
    conditions: Sequence[Tensor] = field(default=())
    """Everything that the network is to be shown besides state and timestep."""
    start: Tensor | None = None
    """[R, *shape]: where the loop starts, if it does not draw its start."""
    data: Tensor | None = None
    """[R, *shape]: values of coordinates that are not drawn, in the shape and dtype of the states."""
    free: Tensor | None = None
    """[*shape]: the coordinates that are drawn; all by default."""
    whole: bool = False
    """The loop returns its last state, not something made of it."""


def require_explained(loop: Rerun, chain: Chain) -> list[Call]:
    """Refuse a loop whose states are not the chain's; the calls of its network."""
    subject, watch = loop.subject, _WatchedNetwork(loop.network, chain.low_variance is not None)
    devices = [loop.device] if loop.device.type == "cuda" else []
    with torch.random.fork_rng(devices), torch.no_grad(), loop.instead(watch):
        torch.manual_seed(_SEED)  # the same numbers for a loop that draws from the global generator
        result = loop.run(torch.Generator(loop.device).manual_seed(_SEED))
    steps, seen = len(chain.std), watch.seen
    if seen:
        last = _compare(loop, chain, seen[:steps])
    if len(seen) != steps:
        subject.refuse(f"it calls its network {len(seen)} times instead of {steps}")
    if loop.whole:
        if not isinstance(result, Tensor) or result.shape != last.shape:
            subject.refuse("it returns something else than a plan")
        _require_state(loop, "what it returns", result, last)
    return seen


def _compare(loop: Rerun, chain: Chain, seen: list[Call]) -> Tensor:
    """Require the chain's states, timesteps and conditions; the state that must come out."""
    subject, like = loop.subject, seen[0].sample if loop.data is None else loop.data
    noise = torch.Generator(loop.device).manual_seed(_SEED)

    def draw() -> Tensor:
        return torch.randn(like.shape, generator=noise, dtype=like.dtype, device=like.device)

    expected = (draw() if loop.start is None else loop.start).double()
    beside = ChainBeside(subject, chain, expected)
    times = beside.chain.time
    for k, call in enumerate(seen):
        if not _same_conditions(call.conditions, loop.conditions):
            subject.refuse(f"at step {k} it shows its network other conditions than it was given")
        if times is not None and not (call.timestep.to(times) == times[k]).all():
            subject.refuse(f"at step {k} it is at another timestep than its scheduler")
        if call.sample.shape != like.shape:
            shapes = f"{tuple(call.sample.shape)} instead of {tuple(like.shape)}"
            subject.refuse(f"at step {k} its state has shape {shapes}")
        _require_state(loop, f"at step {k} its state", call.sample, expected)
        expected = beside.after(k, call.sample, call.output, draw() if chain.std[k] > 0 else None)
    return expected


def _require_state(loop: Rerun, what: str, state: Tensor, expected: Tensor) -> None:
    """Equal to rounding where coordinates are drawn, exactly the data's elsewhere."""
    if loop.free is not None and loop.data is not None and not bool(loop.free.all()):
        given = loop.data[:, ~loop.free]
        if not torch.equal(state[:, ~loop.free], given):
            loop.subject.refuse(
                f"{what} differs by {difference(given, state[:, ~loop.free]):.2g} from the chain's"
            )
        state, expected = state[:, loop.free], expected[:, loop.free]
    loop.subject.require_same(what, expected, state)


def _same_conditions(shown: list[Tensor], given: Sequence[Tensor]) -> bool:
    return len(shown) == len(given) and all(
        a.shape == b.shape and torch.allclose(a.float(), b.float()) for a, b in zip(shown, given, strict=True)
    )


# ---------------------------------------------------------------- a pipeline's loop and its scheduler


@dataclass(frozen=True)
class Trace:
    """What was watched."""

    calls: int
    """Network calls it took, once for this configuration. They are in no report's calls."""
    steps: int
    error: float
    """The largest difference from the chain, relative to the states."""
    loop_seconds: float
    """What the untouched loop takes, from its second and third step."""

    def __str__(self) -> str:
        return (
            f"{self.steps} steps of the untouched loop watched in {self.calls} network calls, once for this "
            f"configuration: the chain explains them to {self.error:.1g}"
        )


class Enough(Exception):
    """Leaves the pipeline when all has been seen."""


@dataclass(frozen=True)
class Seen:
    """One step."""

    sample: Tensor
    output: Tensor
    noise: list[Tensor]
    after: Tensor
    arguments: dict[str, Any]


class Watch:
    """Stands where a `Session` does, and lets everything pass."""

    def __init__(self, pipe: Any, look: bool = True) -> None:
        self.pipe, self.unchanged = pipe, Unchanged(pipe, counters=not look)
        self.seen: list[Seen] = []
        self.calls = 0
        self.timesteps = torch.empty(0)
        self.turning = False
        self.answered: dict[str, Answered] = {}
        """The first call of each network."""
        self.clock: list[float] = []

    @property
    def turn(self) -> int:
        return len(self.seen)

    def turns(self, timesteps: Tensor) -> Iterator[Tensor]:
        self.timesteps, self.turning = timesteps, True
        self.clock = []  # the last timesteps that are iterated over are the loop's
        for timestep in timesteps.unbind():
            self._tick()
            before = len(self.seen)
            yield timestep
            if len(self.seen) > before + 1:
                raise Refused(
                    f"the pipeline stepped its scheduler {len(self.seen) - before} times at step {before}, of several "
                    f"views or parts of its latents, while foresample follows one step; {REMEDY}"
                )
            if len(self.seen) >= STEPS:
                self._tick()
                raise Enough
        self.turning = False

    def _tick(self) -> None:
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        self.clock.append(perf_counter())

    def evaluate(self, name: str, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """A network of the pipeline is called by the loop, which must not have changed one since the last call."""
        self.calls += 1
        found = self.unchanged.change()
        if found is not None:
            raise Refused(
                f"at step {len(self.seen)} the pipeline's loop changes {found}, so its steps are not alike; {REMEDY}"
            )
        self.unchanged.watch(name)
        tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
        states = tensors[0].clone() if tensors and name not in self.answered else None
        output = call(*args, **kwargs)
        if states is not None:
            self.answered[name] = Answered.of(states, output)
        found = self.unchanged.accept({size for tensor in tensors for size in tensor.shape})
        if found is not None:
            raise Refused(found)
        return output

    def step(self, original: Callable[..., Any], bound: dict[str, Any]) -> Any:
        sample, output = bound["sample"].clone(), bound["model_output"].clone()
        with drawn_noise() as noise:
            result = original(**bound)
        noise += path_noise(self.pipe.scheduler)
        after = result[0] if isinstance(result, tuple) else result.prev_sample
        self.seen.append(Seen(sample, output, noise, after.clone(), dict(bound)))
        return result

    def conclude(self) -> Trace:
        """Does the chain explain what was seen?"""
        if not self.seen:
            raise Refused(f"the pipeline did not go through its scheduler's timesteps; {REMEDY}")
        scheduler, first = self.pipe.scheduler, self.seen[0]
        everything = scheduler.timesteps.as_subclass(Tensor)
        start = int((everything == self.timesteps[0]).nonzero().flatten()[0]) if len(self.timesteps) else 0
        eta = first.arguments.get("eta") or 0.0
        clipped = bool(first.arguments.get("use_clipped_model_output"))
        chain = read_chain(scheduler, eta=eta, use_clipped=clipped, start=start)
        subject = _pipeline_subject(scheduler)
        beside, worst, before = ChainBeside(subject, chain, first.sample), 0.0, first.sample
        for k, seen in enumerate(self.seen):
            require_shape(chain, seen.output, seen.sample)
            wrong = broken(seen.output.unsqueeze(1)).flatten().nonzero().flatten().tolist()
            if wrong:
                raise fault_error(k, wrong[0])
            before = before.to(seen.sample.dtype)  # some loops round them
            untouched = (seen.sample == before).double().mean()
            if not untouched > 0:
                size = float((seen.sample - before).abs().max() / before.abs().max())
                raise Refused(
                    f"the pipeline changes the latents between step {k - 1} and step {k} (by up to {size:.2g} of "
                    f"their size), which the scheduler's chain does not contain; {REMEDY}"
                )
            ours = beside.after(k, seen.sample, seen.output, last_draw(seen.noise, seen.sample))
            dtypes = (seen.sample.dtype, seen.output.dtype, seen.after.dtype)
            size = subject.require_same(f"at step {k} its state", ours, seen.after, *dtypes)
            worst, before = max(worst, size), seen.after
        each = [after - before for before, after in itertools.pairwise(self.clock)] or [0.0]
        return Trace(self.calls, len(self.seen), worst, min(each) * len(self.timesteps))


def replay_scheduler(
    scheduler: Any,
    methods: dict[str, Callable[..., Any]],
    chain: Chain,
    timesteps: Tensor,
    x: Tensor,
    arguments: dict[str, Any],
    start: int,
    follows: Container[str],
) -> None:
    """The scheduler's own `step` and `scale_model_input` (`methods`, by name) over the whole chain, from latents x
    [1, *shape], on made-up outputs; `arguments` are those that `step` is given in every turn."""
    step, scale = methods["step"], methods.get("scale_model_input")
    kept = {k: list(v) if isinstance(v, list) else v for k, v in vars(scheduler).items()}
    subject = _pipeline_subject(scheduler)
    beside, old = ChainBeside(subject, chain, x), None
    try:
        for k, timestep in enumerate(timesteps.unbind()):
            output = made_up(x, chain.low_variance is not None)
            own = {name: v for name, v in following(scheduler, start + k, old).items() if name in follows}
            if scale is not None:
                factor = 1.0 if chain.scale is None else float(chain.scale[k])
                scaled = scale(x, timestep)
                subject.require_same(f"at step {k} its scaled state", factor * x.double(), scaled, x.dtype)
            with drawn_noise() as noise, torch.random.fork_rng(devices=_devices(x)):
                result = step(model_output=output, timestep=timestep, sample=x, **arguments, **own)
            noise += path_noise(scheduler)
            after, old = (result if isinstance(result, tuple) else (result.prev_sample, None))[:2]
            ours = beside.after(k, x, output, last_draw(noise, x))
            subject.require_same(f"at step {k} its state", ours, after)
            x = after
    finally:
        vars(scheduler).clear()
        vars(scheduler).update(kept)


def following(scheduler: Any, k: int, old: Tensor | None) -> dict[str, Any]:
    """Arguments of `step` at step k that follow the loop, for the schedulers whose `step` asks for them."""
    names, times = signature_of(scheduler, "step").parameters, scheduler.timesteps.as_subclass(Tensor)
    told = {
        "prev_timestep": times[k + 1] if k + 1 < len(times) else None,
        "timestep_back": times[k - 1] if k > 0 else None,
        "old_pred_original_sample": old,
    }
    return {name: value for name, value in told.items() if name in names}


def _pipeline_subject(scheduler: Any) -> Subject:
    return Subject(f"the {type(scheduler).__name__} of this pipeline", REMEDY, Refused)


def last_draw(noise: list[Tensor], sample: Tensor) -> Tensor | None:
    """The noise of a step, [R, *shape], of all that was drawn in it: some draw twice, and use the last."""
    rows = [draw for draw in noise if draw.shape[1:] == sample.shape[1:]]
    return torch.cat(rows)[-len(sample) :] if rows else None


@contextmanager
def drawn_noise() -> Iterator[list[Tensor]]:
    """All normal noise that is drawn inside."""
    draws: list[Tensor] = []

    class Draws(TorchFunctionMode):
        def __torch_function__(
            self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
        ) -> Any:
            result = func(*args, **(kwargs or {}))
            if func in (torch.randn, torch.randn_like, torch.normal, Tensor.normal_):
                draws.append(result)
            return result

    with Draws():
        yield draws


def path_noise(scheduler: Any) -> list[Tensor]:
    """The noise of the step just taken, where it is an increment of a Brownian path: asked again, it is the same."""
    path, k = getattr(scheduler, "noise_sampler", None), getattr(scheduler, "step_index", None)
    if path is None or k is None or scheduler.sigmas[k] == 0:
        return []
    return [path(scheduler.sigmas[k - 1], scheduler.sigmas[k])]


def _devices(x: Tensor) -> list[int]:
    return [x.device.index or 0] if x.is_cuda else []
