"""`callback_on_step_end`: called once for each step, in order, when all images have committed it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from foresample.core.report import Commit
from foresample.integrations.diffusers.networks import Networks
from foresample.integrations.diffusers.trees import copied, same
from foresample.integrations.refusal import REMEDY, Refused, require

CALLBACK = "callback_on_step_end"
TENSORS = "callback_on_step_end_tensor_inputs"


def take_callback(bound: inspect.BoundArguments) -> Callable[..., Any] | None:
    """Remove the callback from a pipeline's arguments; request the tensors that it names, as pipelines do."""
    arguments = bound.arguments
    if arguments.pop("callback", None) is not None:
        instead = f"use {CALLBACK}" if CALLBACK in bound.signature.parameters else "leave it out"
        raise ValueError(f"`callback` is not supported by an accelerated pipeline: {instead}, or {REMEDY}")
    callback = arguments.pop(CALLBACK, None)
    if hasattr(callback, "tensor_inputs"):
        arguments[TENSORS] = list(callback.tensor_inputs)
    return callback


def wanted_tensors(bound: inspect.BoundArguments) -> list[str]:
    """Names of the tensors that the callback gets."""
    default = bound.signature.parameters[TENSORS].default if TENSORS in bound.signature.parameters else None
    wanted = bound.arguments.get(TENSORS, default)
    return ["latents"] if wanted is None or wanted is inspect.Parameter.empty else list(wanted)


class InOrder:
    """Collects the states that are committed, and calls the user's callback for every step that all images took."""

    def __init__(
        self,
        pipe: Any,
        callback: Callable[..., Any] | None,
        wanted: list[str],
        networks: Networks,
        wrap: type[Tensor],
    ) -> None:
        """`wrap`: the class of drafted states."""
        self.pipe, self.callback, self.wanted, self.wrap = pipe, callback, wanted, wrap
        self.networks, self.clock = networks, networks.clock
        self.needs_loop = callback is not None and wanted != ["latents"]
        """Whether the callback wants other tensors than latents, which only the loop can hand out."""
        self.calling = False
        """Whether the callback is running."""
        self.overwritten = False
        """Whether the loop overwrites a part of the latents."""
        self.next = 0
        self._tensors: dict[str, Any] | None = (
            None if self.needs_loop else {}
        )  # None: not yet known in this turn
        self._waiting: dict[int, Tensor] = {}
        self._committed = torch.empty(0)
        self._dtype = torch.float32

    def begin(self, images: int, dtype: torch.dtype) -> None:
        """`dtype`: that of the loop's latents, which the callback gets; the chain's states are float32."""
        self._committed, self._dtype = torch.zeros(images, dtype=torch.int64), dtype

    def observe(self, commit: Commit) -> None:
        """Keep the states of a round."""
        if self.callback is None:
            return
        shape = (len(self._committed), *commit.states.shape[2:])
        for r, image in enumerate(commit.sample.tolist()):
            first, count = int(commit.step[r]), int(commit.committed[r])
            for j in range(count):
                states = self._waiting.setdefault(first + j, commit.states.new_empty(shape))
                states[image] = commit.states[r, j]
            self._committed[image] = first + count
        if self._tensors is not None:
            self._call_back()

    def end_of_turn(self, pipe: Any, step: int, timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
        """Called by the loop with its tensors: call the user's callback for the steps committed."""
        self._tensors = {name: value for name, value in tensors.items() if name != "latents"}
        for name, value in self._tensors.items():
            if isinstance(value, self.wrap):
                raise Refused(
                    f"{name} follows the drafted states, so {CALLBACK} cannot be given it: leave {name} out of "
                    f"{TENSORS}"
                )
        self._call_back()
        self._tensors = None
        return {}

    def require_all(self) -> None:
        """Refuse a pipeline that did not call back after its last step."""
        if self.callback is not None and self.next < self.clock.steps:
            raise Refused(
                f"the pipeline did not call {CALLBACK} after step {self.clock.first + self.next}: leave the callback "
                f"out, or {REMEDY}"
            )

    def _call_back(self) -> None:
        committed = int(self._committed.min()) if len(self._committed) else 0
        while self.next < min(committed, self.clock.steps):
            self.next += 1
            self._report(self.clock.first + self.next - 1, self._waiting.pop(self.next - 1))

    def _report(self, step: int, latents: Tensor) -> None:
        pipe, callback = self.pipe, self.callback
        assert callback is not None
        if self.overwritten:
            raise Refused(
                f"{CALLBACK} would be handed latents whose known region is not yet overwritten: leave it out, or "
                f"{REMEDY}"
            )
        self.networks.unchanged.require(self.clock.loop_turn)
        tensors = {**(self._tensors or {}), "latents": latents.to(self._dtype, copy=True)}
        given = {name: tensors[name] for name in self.wanted}
        kept, before = copied(given), dict(vars(pipe))
        self.calling = True
        with self.index_after(step):
            answer = callback(pipe, step, self.clock.timesteps[step - self.clock.first], dict(given)) or {}
        self.calling = False
        who = f"{CALLBACK} ({getattr(callback, '__name__', type(callback).__name__)})"
        beyond = (
            f"which an accelerated pipeline has already stepped beyond: leave the callback out, or {REMEDY}"
        )
        for name in {**given, **answer}:  # the loop would also take tensors that were not handed out
            value = given.get(name)
            if name not in given or not (same(answer.get(name, value), kept[name]) and same(value, kept[name])):
                raise Refused(f"{who} changed the {name} after step {step}, {beyond}")
        changed = self.networks.unchanged.change()
        if changed is not None:
            raise Refused(f"{who} changes the pipeline: {changed} at step {step}, {beyond}")
        after = vars(pipe)
        other = [k for k in {*before, *after} if not same(before.get(k), after.get(k))]
        require(
            not other,
            f"{who} changed pipe.{''.join(other[:1])}, while an accelerated pipeline has already stepped beyond step "
            f"{step}",
        )

    @contextmanager
    def index_after(self, step: int) -> Iterator[None]:
        """Inside, the scheduler's index is that of the untouched loop; otherwise it stays at the part's first step."""
        own = vars(self.pipe.scheduler)
        index = self.clock.start + step - self.clock.first + 1
        before = own.get("_step_index")
        if "_step_index" in own:
            own["_step_index"] = index
        try:
            yield
        finally:
            if own.get("_step_index") == index:  # else the callback changed it: refused
                own["_step_index"] = before
