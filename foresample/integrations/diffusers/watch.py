"""Watching an untouched pipeline: three steps of its own loop, and its scheduler's `step` at all steps.

Before a configuration is drawn speculatively for the first time, the untouched loop is watched for three steps: the
latents, the arguments of the networks and of `step`, and the noise that it draws. The chain must explain every state up
to rounding (`explain`). Then the scheduler's own `step` is replayed once over the whole chain, on made-up outputs,
which takes no network. A difference is refused, with its step and its size.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Container, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from foresample.chains import Chain
from foresample.core.report import Report
from foresample.integrations.diffusers.again import Answered, rows_of
from foresample.integrations.diffusers.calls import signature_of
from foresample.integrations.diffusers.clock import Clock
from foresample.integrations.diffusers.session import copies_of_each, read_chain, require_shape
from foresample.integrations.diffusers.trees import copied
from foresample.integrations.diffusers.unchanged import Unchanged
from foresample.integrations.explain import STEPS, ChainBeside, difference, made_up
from foresample.integrations.refusal import require
from foresample.integrations.untouched import untouched_report


@dataclass(frozen=True)
class Trace:
    """Result of watching three steps."""

    calls: int
    """Network calls it took, once for this configuration. They are in no report's calls."""
    steps: int
    error: float
    """The largest difference from the chain, relative to the states."""
    loop_seconds: float
    """Seconds of the untouched loop, estimated from its second and third step."""
    loop_steps: int
    images: int
    copies: int
    """Rows of the latents for an image: 2 if the pipeline keeps each twice."""

    def __str__(self) -> str:
        return (
            f"{self.steps} steps of the untouched loop watched in {self.calls} network calls, once for this "
            f"configuration: the chain explains them to {self.error:.1g}"
        )


class Untouched:
    """Takes the place of a `Session`, changes nothing and counts the steps."""

    def __init__(self) -> None:
        self.loop_turn = self.rows = 0
        self.seconds = 0.0

    def turns(self, timesteps: Tensor) -> Iterator[Tensor]:
        started = perf_counter()
        yield from timesteps.unbind()
        self.seconds = perf_counter() - started

    def step(self, original: Callable[..., Any], bound: dict[str, Any]) -> Any:
        """The scheduler's own step."""
        self.loop_turn, self.rows = self.loop_turn + 1, len(bound["sample"])
        return original(**bound)

    def report(self, copies: int) -> Report:
        """Every step is a call; `copies`: rows of the latents for an image."""
        return untouched_report(self.loop_turn, self.rows // copies, self.seconds)


class Enough(Exception):
    """Raised to leave the pipeline when nothing more is needed."""


class Seen(NamedTuple):
    """One step of the untouched loop."""

    sample: Tensor
    output: Tensor
    noise: list[Tensor]
    after: Tensor
    arguments: dict[str, Any]


class Watch:
    """Takes the place of a `Session`, changes nothing and records three steps."""

    def __init__(self, pipe: Any, look: bool = True) -> None:
        self.pipe, self.unchanged = pipe, Unchanged(pipe, counters=not look)
        self.seen: list[Seen] = []
        self.calls = 0
        self.timesteps = torch.empty(0)
        self.turning = False
        self.answered: dict[str, Answered] = {}
        """The first call of each network, copied: loops may write into what they get."""
        self.clock: list[float] = []

    @property
    def loop_turn(self) -> int:
        return len(self.seen)

    def turns(self, timesteps: Tensor) -> Iterator[Tensor]:
        self.timesteps, self.turning = timesteps, True
        self.clock = []  # the last timesteps that are iterated over are the loop's
        for timestep in timesteps.unbind():
            self._tick()
            before = self.loop_turn
            yield timestep
            taken = self.loop_turn - before
            require(
                taken <= 1,
                f"the pipeline stepped its scheduler {taken} times at step {before}, of several views or "
                "parts of its latents, while foresample follows one step",
            )
            if self.loop_turn >= STEPS:
                self._tick()
                raise Enough
        self.turning = False

    def _tick(self) -> None:
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        self.clock.append(perf_counter())

    def evaluate(self, name: str, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Call a network for the loop, which must not have changed one since the last call."""
        self.calls += 1
        self.unchanged.require(self.loop_turn)
        self.unchanged.watch(name)
        tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
        states = tensors[0].clone() if tensors and name not in self.answered else None
        output = call(*args, **kwargs)
        if states is not None:
            self.answered[name] = states, copied(rows_of(output, len(states)))
        self.unchanged.accept(tensors)
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
        """Refuse steps that the chain does not explain."""
        require(bool(self.seen), "the pipeline did not go through its scheduler's timesteps")
        scheduler, first = self.pipe.scheduler, self.seen[0]
        clock = Clock()
        clock.begin(self.timesteps, scheduler.timesteps.as_subclass(Tensor))
        chain = read_chain(scheduler, first.arguments, clock.start)
        beside, worst = ChainBeside(chain, first.sample), 0.0
        for k, seen in enumerate(self.seen):
            require_shape(chain, seen.output, seen.sample)
            ours = beside.after(k, seen.sample, seen.output, last_draw(seen.noise, seen.sample))
            error = difference(ours, seen.after)
            dtypes = (seen.sample.dtype, seen.output.dtype, seen.after.dtype)
            require_small(error, k, scheduler, dtypes)
            worst = max(worst, error)
        answers = [answer for _, given in self.answered.values() for answer in given.values()]
        copies = copies_of_each(answers, first.output, first.sample)
        seconds = min([after - before for before, after in itertools.pairwise(self.clock)] or [0.0])
        steps, images = len(self.timesteps), len(first.sample) // copies
        return Trace(self.calls, self.loop_turn, worst, seconds * steps, steps, images, copies)


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
    beside, old = ChainBeside(chain, x), None
    try:
        for k, timestep in enumerate(timesteps.unbind()):
            output = made_up(x, chain.low_variance is not None)
            own = {name: v for name, v in following(scheduler, start + k, old).items() if name in follows}
            if scale is not None:
                factor = 1.0 if chain.scale is None else float(chain.scale[k])
                error = difference(scale(x, timestep), factor * x.double())
                require_small(error, k, scheduler, (x.dtype,), "scales states in another way")
            with drawn_noise() as noise, torch.random.fork_rng(devices=[x.device] if x.is_cuda else []):
                result = step(model_output=output, timestep=timestep, sample=x, **arguments, **own)
            noise += path_noise(scheduler)
            after, old = (result if isinstance(result, tuple) else (result.prev_sample, None))[:2]
            ours = beside.after(k, x, output, last_draw(noise, x))
            require_small(difference(ours, after), k, scheduler, (after.dtype,))
            x = after
    finally:
        vars(scheduler).clear()
        vars(scheduler).update(kept)


def following(scheduler: Any, k: int, old: Tensor | None) -> dict[str, Any]:
    """Arguments of `step` at step k that follow the loop, for schedulers whose `step` takes them."""
    names, times = signature_of(scheduler, "step").parameters, scheduler.timesteps.as_subclass(Tensor)
    arguments = {
        "prev_timestep": times[k + 1] if k + 1 < len(times) else None,
        "timestep_back": times[k - 1] if k > 0 else None,
        "old_pred_original_sample": old,
    }
    return {name: value for name, value in arguments.items() if name in names}


def last_draw(noise: list[Tensor], sample: Tensor) -> Tensor | None:
    """The noise that a step used, [R, *shape]: its last draw, since some schedulers draw twice."""
    rows = [draw for draw in noise if draw.shape[1:] == sample.shape[1:]]
    return torch.cat(rows)[-len(sample) :] if rows else None


def require_small(
    error: float, k: int, scheduler: Any, dtypes: Iterable[torch.dtype], what: str = "makes other states"
) -> None:
    """Refuse a difference from the chain that rounding in one of these dtypes does not explain."""
    precise = all(dtype in (torch.float32, torch.float64) for dtype in dtypes)
    size = f"by {error:.2g} of their size" if error < float("inf") else "with NaN or other draws of noise"
    require(
        error <= (1e-3 if precise else 3e-2),
        f"at step {k} the {type(scheduler).__name__} of this pipeline {what} than the chain read from it, {size}",
    )


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
    """The noise of the step just taken, where it is an increment of a Brownian path, which can be read again."""
    path, k = getattr(scheduler, "noise_sampler", None), getattr(scheduler, "step_index", None)
    if path is None or k is None or scheduler.sigmas[k] == 0:
        return []
    return [path(scheduler.sigmas[k - 1], scheduler.sigmas[k])]
