"""The method that stands in for a policy's own, in one of two ways.

A method that is its library's own function with known arguments (`families`) is watched at the first plan of a kind,
and does not run afterwards. Any other method runs along with every plan, with stand-ins for its network and its
scheduler's `step`. The network's first call has the start and the conditions, and there the whole plan is drawn. Then
the method walks along the path of that plan: its network returns the outputs that it had at the states of the path, and
`step` returns the next state. No network call is added.

The result has the sequential distribution if the method does nothing else between its network and its scheduler. This
is checked at every plan, on its own states and outputs. The network must get the state that `step` returned, with the
conditions of the first call and at the scheduler's timestep. `step` must get that state, the network's output and the
same timestep. Both must be called once for each transition of the chain.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from foresample.chains import Chain
from foresample.contracts import times_written
from foresample.core.report import Report
from foresample.integrations.explain import STEPS, Rerun, Standard, difference, largest, require_explained
from foresample.integrations.policies.families import Loop, find_loop
from foresample.integrations.policies.planner import Request
from foresample.integrations.policies.plans import (
    Plans,
    kind_of,
    require_eval,
    require_own_scheduler,
)
from foresample.integrations.replaced import REPORT, Replaced, own_function, standing_in
from foresample.integrations.trusted import library_name, require_current
from foresample.integrations.untouched import NothingGains, kept_random_state

_TRUSTED = {
    "lerobot.policies.diffusion.modeling_diffusion.DiffusionModel.conditional_sample": "LeRobot's own",
    "lerobot.common.policies.diffusion.modeling_diffusion.DiffusionModel.conditional_sample": "LeRobot's own",
    "foresample.pretrained.policy.DiffusionModel.conditional_sample": "foresample's own",
}
"""Loops known to be the same for every observation: watched once for each kind of plan, not at every plan."""


@dataclass(eq=False)
class SpeculativeLoop:
    """The method that stands in for a policy's own, with its arguments and its distribution."""

    owner: Any
    policy: Any
    """The object the user passed: the method's owner or its holder."""
    original: Callable[..., Any]
    plans: Plans
    replaced: Replaced

    def __post_init__(self) -> None:
        functools.update_wrapper(self, self.original)
        self.signature = inspect.signature(self.original)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with self.plans.turn:
            loop = find_loop(self.policy)  # its network and its scheduler as they are now
            if loop is None or loop.owner is not self.owner:
                raise ValueError("the policy's parts were replaced: call foresample.accelerate again")
            require_current(self.original, self.owner, loop.method)
            try:
                result, report = self._plan(loop, self.signature.bind(*args, **kwargs))
            except NothingGains as slower:
                result, report = slower.run(self.original, *args, **kwargs)
            for owner in (self.owner, self.policy) if report is not None else ():
                setattr(owner, REPORT, report)
            return result

    def _plan(self, loop: Loop, bound: inspect.BoundArguments) -> tuple[Any, Report | None]:
        """The method's result, and its cost."""
        plans, owner, trace, request = self.plans, self.owner, self.plans.options.trace, None
        require_eval(loop.model, loop.network)
        if loop.read is not None:
            bound.apply_defaults()
            request = loop.read(owner, bound.arguments)
        if request is not None and not request.free.any():
            return request.data.clone(), None
        loop.require_noise({} if request is None else request.step_options)
        if trace:
            require_own_scheduler(loop.scheduler)

        def run(generator: torch.Generator | None) -> Any:
            """Run the untouched method on this call, with this generator if it takes one."""
            given = dict(bound.arguments)
            if request is not None and "generator" in given:
                given["generator"] = generator
            again = inspect.BoundArguments(bound.signature, given)
            return self.original(*again.args, **again.kwargs)

        own = _TRUSTED.get(library_name(self.original, owner) or "")
        if request is None or (trace and not own):
            walk = Walk(loop, plans, run, request)
            return walk.run(), walk.report
        loop.scheduler.set_timesteps(owner.num_inference_steps)  # as the method does
        instead = partial(standing_in, owner, loop.attribute)
        watch = partial(require_same_chain, loop.name, run, request.network, instead, request)
        kind = kind_of(request, request.network, loop.scheduler, plans.settings.graph)
        _, drawn, cost = plans.draw(kind, request, loop.scheduler, watch)
        scheduler = f"diffusers' own {type(loop.scheduler).__name__}"
        trusted = (
            [f"{own} conditional_sample", scheduler] if trace else ["its loop and its scheduler (trace=False)"]
        )
        cost.report.evidence.trusted += trusted
        return drawn, cost.report


class Walk:
    """One run of a method, along the path of the plan that is drawn at its network's first call.

    Args:
        loop: the method, its network and its scheduler.
        plans: the policy's plans.
        original: runs the untouched method on this call, with this generator if it takes one.
        given: the same call, read from the method's arguments if these are known.
    """

    def __init__(
        self, loop: Loop, plans: Plans, original: Callable[[Any], Any], given: Request | None = None
    ) -> None:
        self.loop, self.plans, self.original, self.given = loop, plans, original, given
        network = loop.network
        self.forward = own_function(network.forward if isinstance(network, nn.Module) else network)
        self.own_step = own_function(loop.scheduler.step)
        self.generator = None if given is None else given.generator
        self.calls = self.steps = 0
        self.first: dict[str, tuple[Any, int]] = {}
        self.states: list[Tensor] = []
        """x_0 … x_N of the plans, conditioned coordinates in place."""
        self.answers: list[Tensor] = []
        self.state: Tensor | None = None
        """The last result of `step`."""
        self.answer: Tensor | None = None
        """The network's last output."""
        self.times: list[Tensor] = []
        self.report: Any = None

    def run(self) -> Any:
        """The method's result."""
        fixed = isinstance(self.plans.settings.window, int)
        put_back = None if fixed else kept_random_state(self.generator)
        try:
            with torch.no_grad(), self.loop.instead(self._network, self._step):
                result = self.original(self.generator)
        except NothingGains:
            if put_back is not None:
                put_back()
            raise
        if self.report is None:
            self._refuse("it does not call its network")
        transitions = len(self.answers)
        if not self.calls == self.steps == transitions:
            self._refuse(
                f"it calls its network {self.calls} times and its scheduler {self.steps} times instead of {transitions}"
            )
        self._require_times()
        self._require_conditioned(result)
        self.report.evidence.steps_replayed += transitions
        scheduler = f"diffusers' own {type(self.loop.scheduler).__name__}"
        self.report.evidence.trusted.append(
            scheduler if self.plans.options.trace else "its scheduler (trace=False)"
        )
        return result

    def _network(self, *args: Any, **kwargs: Any) -> Tensor:
        """Stands in for the network."""
        names, call = self._named(args, kwargs)
        sample, timestep = (call.pop(name) for name in names)
        if self.calls == 0:
            self.first = {name: (value, times_written(value)) for name, value in call.items()}
            self._draw(sample, names, call)
        k = self.calls
        if k >= len(self.answers) or self.steps != k:
            self._refuse(f"it calls its network {k + 1} times before its scheduler's step {self.steps + 1}")
        if not self._is_state(sample):
            self._refuse(f"at step {k} it changes the plan between its scheduler and its network")
        if not self._same(call):
            self._refuse(f"at step {k} it passes its network other conditions")
        self.calls += 1
        self.times.append(torch.as_tensor(timestep))
        self.answer = self.answers[k].clone()
        return self.answer

    def _step(self, model_output: Any, timestep: Any, sample: Any, *args: Any, **options: Any) -> Any:
        """Stands in for the scheduler's `step`."""
        k, bare = self.steps, options.pop("return_dict", True) is False
        generator = options.pop("generator", None)
        wanted = {} if self.given is None else self.given.step_options
        others = {name: value for name, value in options.items() if value is not None}
        if args or others != wanted or generator is not self.generator:
            self._refuse(f"at step {k} it gives its scheduler more than the network's answer")
        if self.calls != k + 1 or not _equal(model_output, self.answers[k], self.answer):
            self._refuse(f"at step {k} it changes what its network answers")
        if not self._is_state(sample):
            self._refuse(f"at step {k} it gives its scheduler another plan than its network")
        self.steps += 1
        self.times.append(torch.as_tensor(timestep))
        self.state = self._beside(self.states[k + 1])
        return (self.state,) if bare else _Stepped(self.state, self._refuse)

    def _beside(self, state: Tensor) -> Tensor:
        """A copy to hand out, with wrong conditioned coordinates, which the method must overwrite."""
        mask = None if self.given is None else self.given.mask
        return state.clone() if mask is None else torch.where(mask, state + 1, state)

    def _is_state(self, sample: Any) -> bool:
        """Whether this is the state at the method's place on the path."""
        conditioned = self.given is not None and self.given.mask is not None
        return _equal(sample, self.states[self.steps], None if conditioned else self.state)

    def _same(self, conditions: dict[str, Any]) -> bool:
        """Whether the conditions are exactly those of the first call, and unwritten since."""
        return conditions.keys() == self.first.keys() and all(
            conditions[name] is value and times_written(value) == version
            for name, (value, version) in self.first.items()
        )

    def _draw(self, sample: Tensor, names: list[str], conditions: dict[str, Any]) -> None:
        """Draw the plan from the start and the conditions of the network's first call."""
        loop, plans, forward, given = self.loop, self.plans, self.forward, self.given
        data = torch.zeros_like(sample) if given is None else given.data
        if sample.shape != data.shape:
            self._refuse(f"its state has shape {tuple(sample.shape)} instead of {tuple(data.shape)}")
        rows: dict[str, Any] = {n: v for n, v in conditions.items() if isinstance(v, Tensor)}
        fixed = {n: v for n, v in conditions.items() if not isinstance(v, Tensor)}
        for name, value in rows.items():
            if value.ndim == 0 or len(value) != len(sample):
                self._refuse(f"its network takes {name} of shape {tuple(value.shape)} for {len(sample)} plans")
        for name, value in fixed.items():
            if not isinstance(value, (bool, int, float, str, type(None))):
                self._refuse(f"its network takes {name}, a {type(value).__name__}")

        def network(x: Tensor, time: Tensor, **given: Any) -> Tensor:
            call = {names[0]: x, names[1]: time, **given, **fixed}
            positional = [call.pop(str(i)) for i in range(sum(name.isdigit() for name in call))]
            return forward(*positional, **call)

        request = Request(
            network=network,
            conditions=rows,
            data=data,
            mask=None if given is None else given.mask,
            noise=sample.clone(),
            generator=self.generator,
            step_options={} if given is None else given.step_options,
        )
        call = (getattr(forward, "__func__", forward), tuple(names), repr(sorted(fixed.items())))
        kind = kind_of(request, loop.network, loop.scheduler, plans.settings.graph, *call)
        # The start is watched as well, unless it was given.
        watched = replace(request, noise=None) if given is None else replace(given, network=forward)

        def instead(watch: nn.Module) -> ExitStack:
            return loop.instead(watch.forward, self.own_step)

        whole = given is not None
        watch = partial(require_same_chain, loop.name, self.original, forward, instead, watched, whole=whole)
        planner, plan, run = plans.draw(kind, request, loop.scheduler, watch, follow=True)
        self.states, self.answers = planner.path()
        self.states.append(plan)
        self.report = run.report

    def _named(self, args: tuple, kwargs: dict[str, Any]) -> tuple[list[str], dict[str, Any]]:
        """The names of state and timestep among the network's arguments, and all arguments; numbers are positions."""
        call = {**{str(i): value for i, value in enumerate(args)}, **kwargs}
        names = list(call)
        if len(args) < 2:
            bound = inspect.signature(self.forward).bind(*args, **kwargs)
            names = [*names[: len(args)], *(name for name in bound.arguments if name in kwargs), *names]
        if len(call) < 2:
            self._refuse("its network takes no timestep")
        return list(dict.fromkeys(names))[:2], call

    def _require_times(self) -> None:
        """Require the scheduler's timesteps, in order, of network and scheduler; one read from the device."""
        known = self.loop.scheduler.timesteps.cpu().repeat_interleave(2)
        sizes = torch.tensor([time.numel() for time in self.times])
        times = torch.cat([time.reshape(-1) for time in self.times]).cpu()
        wrong = (times != known.repeat_interleave(sizes)).nonzero()
        if len(wrong):
            k = int((sizes.cumsum(0) <= wrong[0]).sum()) // 2
            self._refuse(f"at step {k} its timestep is not the scheduler's")

    def _require_conditioned(self, result: Any) -> None:
        """Require the given values at the conditioned coordinates of the result."""
        given = self.given
        if given is None or given.mask is None or not given.mask.any():
            return
        if not isinstance(result, Tensor) or result.shape != given.data.shape:
            self._refuse("it returns something else than a plan")
        if not torch.equal(result[given.mask], given.data[given.mask]):
            self._refuse("it returns other values than the conditioned ones")

    def _refuse(self, what: str) -> NoReturn:
        policy_standard(self.loop.name).refuse(what)


class _Stepped:
    """Result of a scheduler's `step` without its estimates: a loop that reads one is refused."""

    def __init__(self, state: Tensor, refuse: Callable[[str], NoReturn]) -> None:
        self.prev_sample, self._refuse = state, refuse

    def __getitem__(self, place: int) -> Tensor:
        if place != 0:
            self._refuse("it makes use of its scheduler's estimates")
        return self.prev_sample

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        self._refuse(f"it makes use of its scheduler's {name}")


def _equal(one: Any, other: Tensor, handed: Tensor | None) -> bool:
    """Whether two tensors have equal values; one that was handed out and is unwritten is not read from its device."""
    if one is handed and times_written(one) == 0:
        return True
    alike = isinstance(one, Tensor) and (one.shape, one.dtype, one.device) == (
        other.shape,
        other.dtype,
        other.device,
    )
    return alike and torch.equal(one, other)


def policy_standard(name: str) -> Standard:
    """Standard for a method of this name; half precision is rounded after every step."""
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
    """Run a method once, on the current observation, and refuse it if it does something else than the chain.

    A subclass with known arguments may do something else (guidance, a temperature, another order). The network runs at
    three steps, and then at a state of each in one call, as it will be called in rounds.
    """
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
