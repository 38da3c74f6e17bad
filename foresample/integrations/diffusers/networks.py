"""The pipeline's networks, each called for the steps that it serves."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from foresample.integrations.diffusers.arguments import Recorded
from foresample.integrations.diffusers.clock import Clock
from foresample.integrations.diffusers.trees import Path, at, mapped, rebuilt, select, tensors
from foresample.integrations.diffusers.unchanged import Unchanged

ROWS_SECOND = ("encoder_hidden_states_llama3",)
"""Arguments whose second dimension is the batch: HiDream's text embeddings, of which it takes several layers."""


def transposed(arguments: dict[str, Any]) -> dict[str, Any]:
    """Arguments of `ROWS_SECOND` with their first two dimensions exchanged; applied twice, the arguments again."""
    swap = {k: v for k, v in arguments.items() if k in ROWS_SECOND and isinstance(v, Tensor) and v.ndim > 1}
    return {**arguments, **{name: value.transpose(0, 1) for name, value in swap.items()}}


class Route(NamedTuple):
    """Two networks share the steps: the later one serves below a timestep."""

    later: str
    boundary: float


class Networks:
    """Calls networks by their names, and refuses what changes them between their calls."""

    def __init__(
        self, pipe: Any, callers: dict[str, Callable[[dict[str, Any]], Any]], clock: Clock, counters: bool
    ) -> None:
        """`counters`: allow networks that count their calls."""
        self.callers, self.clock, self.unchanged = callers, clock, Unchanged(pipe, counters)
        self.routes: dict[str, Route] = {}
        ratio = pipe.config.get("boundary_ratio") if hasattr(pipe, "config") else None
        if ratio is not None and all(
            getattr(pipe, n, None) for n in ("transformer", "transformer_2")
        ):  # Wan 2.2
            boundary = ratio * pipe.scheduler.config.num_train_timesteps
            self.routes["transformer"] = Route("transformer_2", boundary)
        self.evaluating = False
        self.straddled: set[int] = set()
        """Turns in which both networks of a route had to run."""

    def call(self, name: str, arguments: dict[str, Any]) -> Any:
        """Call one network; its own changes to itself are accepted, unless it counts its calls."""
        self.evaluating = True
        try:
            output = self.callers[name](transposed(arguments))
        finally:
            self.evaluating = False
        self.unchanged.accept(tensors(arguments).values())
        return output

    def evaluate(self, recorded: Recorded, states: Tensor, arguments: dict[str, Any], step: Tensor) -> Any:
        """The answer at states [copies, n, …] of these steps [n], each served by the network of its own timestep."""
        name, step = recorded.name, step.repeat(len(states))
        first, time = recorded.names
        arguments = {**arguments, first: states.flatten(0, 1), time: self.clock.times_for(step)}
        later = self.later(name, step)
        if later.all() or not later.any():
            return self.call(self.serving(name, step[:1]), arguments)
        self.straddled.add(self.clock.turn)
        one, two = (
            self.call(network, mapped(partial(select, row=served, batch=len(served)), arguments))
            for network, served in ((name, ~later), (self.routes[name].later, later))
        )

        def whole(path: Path, part: Any) -> Any:
            joined = part.new_empty((len(later), *part.shape[1:]))
            joined[~later], joined[later] = part, at(two, path)
            return joined

        return rebuilt(whole, one)

    def later(self, name: str, step: Tensor) -> Tensor:
        """Whether the second of two networks serves these steps."""
        if name not in self.routes:
            return torch.zeros(len(step), dtype=torch.bool)
        return self.clock.at(step, step.device) < self.routes[name].boundary

    def serving(self, name: str, step: Tensor) -> str:
        """The network that serves this step, [1]."""
        return self.routes[name].later if bool(self.later(name, step)) else name

    def first_of_route(self, name: str) -> str:
        """The first of two networks that share the steps, if the loop calls the one due at its own step."""
        for first, route in self.routes.items():
            if name in (first, route.later):
                due = route.later if bool(self.clock.timestep() < route.boundary) else first
                return first if name == due else name
        return name

    def watch(self, name: str) -> None:
        """Refuse a network that the loop changed since its last call, and watch it from now on."""
        names = (name, self.routes[name].later) if name in self.routes else (name,)
        self.unchanged.require(self.clock.loop_turn, *names)
        self.unchanged.watch(*names)
