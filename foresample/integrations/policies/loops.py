"""Policies whose own loop runs along with every plan.

These are policies whose method does more than draw, ManiSkill's, robomimic's and LeRobot's multi-task DiT; and every
method that looks like one of a family in `policies` and is not that library's own function.

    ManiSkill                get_action, with noise_pred_net and noise_scheduler
    robomimic                _get_action_trajectory, with nets["policy"]["noise_pred_net"], or its average, and
                             noise_scheduler
    LeRobot multi_task_dit   objective.conditional_sample, with noise_predictor and objective.noise_scheduler

While such a method runs, its network and its scheduler's `step` are stood in for. The network's first call has the
start and the conditions, and the whole plan is drawn there. From then on the method walks along the path of that plan:
its network answers what it answered at each state of the path, and `step` returns the next state. No network call is
added.

That is the sequential distribution if the method does nothing else between its network and its scheduler. Every plan is
held to it, on the very states and answers of that plan: the network must be shown what `step` returned, with the
conditions of the first call and at the scheduler's timestep; `step` must be given that state, what the network answered
and the same timestep; and there must be as many of both as the chain has transitions.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from foresample.contracts import times_written
from foresample.core.report import Report
from foresample.drafters import Prior
from foresample.integrations.policies.plans import (
    Planner,
    Plans,
    PlanSettings,
    Request,
    kind_of,
    policy_chain,
    require_eval,
    require_fixed_network,
    require_own_scheduler,
)
from foresample.integrations.policies.watch import policy_standard, require_same_chain
from foresample.integrations.replaced import REPORT, Replaced, standing_in
from foresample.integrations.trusted import require_current
from foresample.integrations.untouched import NothingGains, kept_random_state


@dataclass(frozen=True)
class Loop:
    """A method that walks a scheduler with a network."""

    owner: Any
    """Whose method it is."""
    method: str
    network: Any
    scheduler: Any
    attribute: str = ""
    """Where the owner has its network, for a network that is no module."""

    @property
    def name(self) -> str:
        return f"{type(self.owner).__name__}.{self.method}"

    def instead(self, network: Callable[..., Any], step: Callable[..., Any]) -> ExitStack:
        """Other functions in place of the network's and the scheduler's, until the stack is closed.

        Only this thread sees them: the network may be another policy's as well.
        """
        module = isinstance(self.network, nn.Module)
        owner, name = (self.network, "forward") if module else (self.owner, self.attribute)
        with ExitStack() as stack:
            stack.enter_context(standing_in(owner, name, _here(network, getattr(owner, name))))
            stack.enter_context(standing_in(self.scheduler, "step", _here(step, self.scheduler.step)))
            return stack.pop_all()


def _here(ours: Callable[..., Any], own: Callable[..., Any]) -> Callable[..., Any]:
    """One function in this thread, another in all others."""
    thread = threading.get_ident()
    return lambda *args, **kwargs: (ours if threading.get_ident() == thread else own)(*args, **kwargs)


def find_loop(policy: Any) -> Loop | None:
    """The loop of a policy of these families, known by its attributes."""
    owners: tuple[Any, Any] = (policy, getattr(policy, "policy", None))  # robomimic hands out a RolloutPolicy
    for owner in owners:
        objective = getattr(owner, "objective", None)
        if hasattr(owner, "noise_predictor") and hasattr(objective, "conditional_sample"):
            scheduler = getattr(objective, "noise_scheduler", None)
            if scheduler is None:
                raise ValueError(
                    f"{type(objective).__name__} adds no noise, so there is nothing to speculate on; train with the "
                    "diffusion objective and DDPM"
                )
            return Loop(objective, "conditional_sample", owner.noise_predictor, scheduler)
        if not hasattr(owner, "noise_scheduler"):
            continue
        if hasattr(owner, "_get_action_trajectory") and hasattr(owner, "nets"):
            nets = getattr(getattr(owner, "ema", None), "averaged_model", owner.nets)
            return Loop(
                owner, "_get_action_trajectory", nets["policy"]["noise_pred_net"], owner.noise_scheduler
            )
        if hasattr(owner, "noise_pred_net") and hasattr(owner, "get_action"):
            return Loop(owner, "get_action", owner.noise_pred_net, owner.noise_scheduler)
    return None


@dataclass(frozen=True, eq=False)
class SpeculativeLoop:
    """The method that stands in for a policy's own, and runs it."""

    loop: Loop
    policy: Any
    """What the user passed: the method's owner or what holds it."""
    original: Callable[..., Any]
    plans: Plans
    replaced: Replaced

    @property
    def owner(self) -> Any:
        return self.loop.owner

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with self.plans.turn:
            require_current(self.original, self.owner, self.loop.method)
            try:
                result, report = self._plan(*args, **kwargs)
            except NothingGains as slower:
                result, report = slower.run(self.original, *args, **kwargs)
            for owner in (self.owner, self.policy) if report is not None else ():
                setattr(owner, REPORT, report)
            return result

    def _plan(self, *args: Any, **kwargs: Any) -> tuple[Any, Report | None]:
        """What the method returns, and what it cost."""
        require_eval(self.loop.network)
        require_fixed_network(self.loop.network)
        if self.plans.how.trace:
            require_own_scheduler(self.loop.scheduler)
        walk = Walk(self.loop, self.plans, lambda generator: self.original(*args, **kwargs))
        return walk.run(), walk.report


class Walk:
    """One run of a method, along the path of the plan that is drawn at its network's first call.

    Args:
        loop: the method and what it walks with.
        plans: of the policy.
        original: the untouched method on the call at hand, with this generator where it takes one.
        given: the same call as read from the method's arguments, for methods whose arguments are known.
    """

    def __init__(
        self, loop: Loop, plans: Plans, original: Callable[[Any], Any], given: Request | None = None
    ) -> None:
        self.loop, self.plans, self.original, self.given = loop, plans, original, given
        network = loop.network
        self.forward = network.forward if isinstance(network, nn.Module) else network
        self.own_step = loop.scheduler.step
        self.generator = None if given is None else given.generator
        self.calls = self.steps = 0
        self.first: dict[str, tuple[Any, int]] = {}
        self.states: list[Tensor] = []
        """x_0 … x_N of the plans, conditioned coordinates in place."""
        self.answers: list[Tensor] = []
        self.state: Tensor | None = None
        """What `step` returned last."""
        self.answer: Tensor | None = None
        """What the network answered last."""
        self.times: list[Tensor] = []
        self.report: Any = None

    def run(self) -> Any:
        """What the method returns."""
        put_back = kept_random_state(self.generator)
        try:
            with torch.no_grad(), self.loop.instead(self._network, self._step):
                result = self.original(self.generator)
        except NothingGains:
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
            scheduler if self.plans.how.trace else "its scheduler (trace=False)"
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
            self._refuse(f"at step {k} it shows its network other conditions")
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
        """A copy to hand out, its conditioned coordinates wrong: it is for the method to overwrite them."""
        mask = None if self.given is None else self.given.mask
        return state.clone() if mask is None else torch.where(mask, state + 1, state)

    def _is_state(self, sample: Any) -> bool:
        """Whether this is the state of the path where the method is."""
        conditioned = self.given is not None and self.given.mask is not None
        return _equal(sample, self.states[self.steps], None if conditioned else self.state)

    def _same(self, conditions: dict[str, Any]) -> bool:
        """Whether they are those of the first call, none more and none less, and unwritten since."""
        return conditions.keys() == self.first.keys() and all(
            conditions[name] is value and times_written(value) == version
            for name, (value, version) in self.first.items()
        )

    def _draw(self, sample: Tensor, names: list[str], conditions: dict[str, Any]) -> None:
        """Draw the plan from the start and the conditions that the network is shown first."""
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
        planner, plan, run = plans.draw(kind, request, partial(self._make, request))
        self.states, self.answers = planner.path()
        self.states.append(plan)
        self.report = run.report

    def _make(self, request: Request, how: PlanSettings, prior: Prior | None) -> Planner:
        chain = policy_chain(self.loop.scheduler, request.step_options)
        if how.trace:
            # Where it starts is watched as well, unless it was given.
            given = self.given
            watched = replace(request, noise=None) if given is None else replace(given, network=request.network)

            def instead(watch: nn.Module) -> ExitStack:
                return self.loop.instead(watch.forward, self.own_step)

            name, whole = self.loop.name, given is not None
            require_same_chain(name, self.original, self.forward, instead, watched, chain, whole=whole)
        return Planner(request, chain, self.plans.settings, how, prior, follow=True)

    def _named(self, args: tuple, kwargs: dict[str, Any]) -> tuple[list[str], dict[str, Any]]:
        """The names of state and timestep among the network's arguments, and all of these; a number is a position."""
        call = {**{str(i): value for i, value in enumerate(args)}, **kwargs}
        names = list(call)
        if len(args) < 2:
            bound = inspect.signature(self.forward).bind(*args, **kwargs)
            names = [*names[: len(args)], *(name for name in bound.arguments if name in kwargs), *names]
        if len(call) < 2:
            self._refuse("its network takes no timestep")
        return list(dict.fromkeys(names))[:2], call

    def _require_times(self) -> None:
        """Network and scheduler were at the scheduler's timesteps, in turn; read from the device once."""
        known = self.loop.scheduler.timesteps.cpu().repeat_interleave(2)
        sizes = torch.tensor([time.numel() for time in self.times])
        times = torch.cat([time.reshape(-1) for time in self.times]).cpu()
        wrong = (times != known.repeat_interleave(sizes)).nonzero()
        if len(wrong):
            k = int((sizes.cumsum(0) <= wrong[0]).sum()) // 2
            self._refuse(f"at step {k} it is at another timestep than its scheduler")

    def _require_conditioned(self, result: Any) -> None:
        """The method overwrote the conditioned coordinates of what it returns."""
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
    """What a scheduler's `step` returns, without estimates: nothing may be made of them."""

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
    """Whether it has the other's values; what was handed out and is unwritten need not be read from its device."""
    if one is handed and times_written(one) == 0:
        return True
    alike = isinstance(one, Tensor) and (one.shape, one.dtype, one.device) == (
        other.shape,
        other.dtype,
        other.device,
    )
    return alike and torch.equal(one, other)
