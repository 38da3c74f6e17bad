"""Robot policies whose method does more than draw: ManiSkill's, robomimic's, and LeRobot's multi-task DiT.

Their method encodes an observation, walks a diffusers scheduler with a network, and cuts the actions to execute out of
the plan. It goes on doing so. Only while it runs, its network and its scheduler's `step` are stood in for: the first
call of the network has the start and the conditions, and the whole plan is drawn there; every later call and every step
just hands that plan on, until the method takes it for the scheduler's last.

    ManiSkill                get_action, with noise_pred_net and noise_scheduler
    robomimic                _get_action_trajectory, with nets["policy"]["noise_pred_net"], or its average, and
                             noise_scheduler
    LeRobot multi_task_dit   objective.conditional_sample, with noise_predictor and objective.noise_scheduler

That is the sequential law if the method does nothing else between its network and its scheduler. It is held to that at
every plan: the network must be shown what `step` gave, untouched, with the conditions of the first call; `step` must be
given what the network answered; and there must be as many of both as the chain has transitions.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from foresample.chains import scheduler_chain
from foresample.drafters import Prior
from foresample.integrations.networks import require_fixed_variance
from foresample.integrations.plans import (
    Planner,
    Plans,
    PlanSettings,
    Request,
    require_eval,
    require_fixed_network,
    seeds_from,
)
from foresample.integrations.policy_trace import require_same_chain, standing_in


@dataclass(frozen=True)
class Loop:
    """A method that walks a scheduler with a network."""

    owner: Any
    """Whose method it is."""
    method: str
    network: nn.Module
    scheduler: Any


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


class _NothingGains(Exception):
    pass


@dataclass(frozen=True, eq=False)
class SpeculativeLoop:
    """The method that stands in for a policy's own, and runs it."""

    loop: Loop
    policy: Any
    """What the user passed."""
    original: Callable[..., Any]
    plans: Plans
    undo: list[tuple[Any, str, Any]] = field(repr=False)
    """Owner, name and own value of every attribute that was replaced."""

    @property
    def owner(self) -> Any:
        return self.loop.owner

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        require_eval(self.loop.network)
        require_fixed_network(self.loop.network)
        walk = _Walk(self, partial(self.original, *args, **kwargs))
        try:
            with torch.no_grad():
                result = walk.run()
        except _NothingGains:
            return self.original(*args, **kwargs)
        for owner in (self.owner, self.policy):
            owner.foresample_report = walk.report
        return result

    @property
    def name(self) -> str:
        return f"{type(self.owner).__name__}.{self.loop.method}"


class _Walk:
    """One run of the method."""

    def __init__(self, method: SpeculativeLoop, original: Callable[[], Any]) -> None:
        self.method, self.loop, self.original = method, method.loop, original
        self.forward, self.own_step = self.loop.network.forward, self.loop.scheduler.step
        self.calls = self.steps = 0
        self.first: dict[str, Any] = {}
        self.plan = self.answer = torch.empty(0)
        self.version = 0
        self.transitions: int | None = None
        self.report: Any = None

    def run(self) -> Any:
        with self._instead(self._network, self._step):
            result = self.original()
        if not self.calls == self.steps == self.transitions:
            self._refuse(
                f"it calls its network {self.calls} times and its scheduler {self.steps} times instead of "
                f"{self.transitions}"
            )
        return result

    def _instead(self, forward: Callable[..., Any], step: Callable[..., Any]) -> ExitStack:
        with ExitStack() as stack:
            stack.enter_context(standing_in(self.loop.network, "forward", forward))
            stack.enter_context(standing_in(self.loop.scheduler, "step", step))
            return stack.pop_all()

    def _network(self, *args: Any, **kwargs: Any) -> Tensor:
        """What the network is called with."""
        given = self._named(args, kwargs)
        (sample, timestep), conditions = list(given.values())[:2], dict(list(given.items())[2:])
        if self.calls == 0:
            self.first = {name: (value, _version(value)) for name, value in conditions.items()}
            self.plan = self._draw(sample, list(given)[:2], conditions)
            self.answer = torch.zeros_like(sample)
        else:
            if sample is not self.plan or _version(sample) != self.version:
                self._refuse("it changes the plan between its scheduler and its network")
            if not self._same(conditions):
                self._refuse("it shows its network other conditions at a later step")
            time = torch.as_tensor(timestep)
            known = self.loop.scheduler.timesteps
            if not time.is_cuda and self.calls < len(known) and not (time == known[self.calls].cpu()).all():
                self._refuse(f"at step {self.calls} it is at another timestep than its scheduler")
        self.calls += 1
        return self.answer

    def _same(self, conditions: dict[str, Any]) -> bool:
        """Whether they are those of the first call, none more and none less, and unwritten since."""
        return conditions.keys() == self.first.keys() and all(
            conditions[name] is value and _version(value) == version
            for name, (value, version) in self.first.items()
        )

    def _step(self, model_output: Any, timestep: Any, sample: Any, *args: Any, **options: Any) -> Any:
        """What the scheduler is asked for."""
        bare = options.pop("return_dict", True) is False
        if args or any(value is not None for value in options.values()):
            self._refuse("it gives its scheduler more than the network's answer")
        if model_output is not self.answer or _version(self.answer) != 0:
            self._refuse("it changes what its network answers")
        self.steps += 1
        self.version = _version(self.plan)
        return (self.plan,) if bare else SimpleNamespace(prev_sample=self.plan, pred_original_sample=None)

    def _draw(self, sample: Tensor, names: list[str], conditions: dict[str, Any]) -> Tensor:
        method, loop, forward, count = self.method, self.loop, self.forward, len(sample)
        rows: dict[str, Any] = {n: v for n, v in conditions.items() if isinstance(v, Tensor)}
        for name, value in rows.items():
            if value.ndim == 0 or len(value) != count:
                self._refuse(f"its network takes {name} of shape {tuple(value.shape)} for {count} plans")
        fixed = {n: v for n, v in conditions.items() if not isinstance(v, Tensor)}

        def network(x: Tensor, time: Tensor, **given: Any) -> Tensor:
            return forward(**{names[0]: x, names[1]: time}, **given, **fixed)

        request = Request(
            network=network,
            conditions=rows,
            data=torch.zeros_like(sample),
            mask=None,
            noise=sample.clone(),
            generator=None,
            step_options={},
        )
        scheduler, how = loop.scheduler, method.plans.how
        kind = (
            id(loop.network),
            tuple(weight.data_ptr() for weight in loop.network.parameters()) if how.graph else None,
            type(scheduler).__name__,
            repr(sorted(scheduler.config.items())),
            tuple(scheduler.timesteps.tolist()),
            repr(sorted(fixed.items())),
            *((n, v.shape, v.dtype, v.device) for n, v in {"sample": sample, **rows}.items()),
        )
        planner = method.plans.planner(kind, partial(self._make, request))
        if planner.window is None:
            raise _NothingGains
        plan, run = method.plans.draw(kind, request, seeds_from(None, count))
        self.transitions, self.report = len(planner.target.std), run.report
        return plan

    def _make(self, request: Request, how: PlanSettings, prior: Prior | None) -> Planner:
        chain = scheduler_chain(self.loop.scheduler)
        require_fixed_variance(chain)
        free = request.free
        if how.trace:
            drawn = Request(**{**vars(request), "noise": None})  # where it starts is watched as well

            def instead(watch: nn.Module) -> ExitStack:
                return self._instead(watch.forward, self.own_step)

            def run(generator: torch.Generator) -> None:
                self.original()

            require_same_chain(self.method.name, run, self.forward, instead, drawn, free, chain, whole=False)
        return Planner(request, free, chain, how, prior)

    def _named(self, args: tuple, kwargs: dict[str, Any]) -> dict[str, Any]:
        """The network's arguments by name, state and timestep first."""
        bound = inspect.signature(self.forward).bind(*args, **kwargs)
        found: dict[str, Any] = {}
        for name, value in bound.arguments.items():
            kind = bound.signature.parameters[name].kind
            if kind is inspect.Parameter.VAR_POSITIONAL:
                self._refuse(f"its network takes *{name}")
            found.update(value if kind is inspect.Parameter.VAR_KEYWORD else {name: value})
        return found

    def _refuse(self, what: str) -> None:
        raise ValueError(
            f"{self.method.name} is not the loop it looks like: {what}; plan with the policy as it is "
            "(foresample.restore)"
        )


def _version(value: Any) -> int:
    """How often a tensor has been written to."""
    return value._version if isinstance(value, Tensor) and not value.is_inference() else 0
