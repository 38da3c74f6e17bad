"""All plans of one policy: a planner for each kind of request, and priors fitted on or learned from its plans."""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from foresample.chains import Chain, scheduler_chain
from foresample.core.report import Run
from foresample.drafters import LearnedPrior, Prior
from foresample.engine.priors import prior_of_paths
from foresample.integrations.explain import torchs_generators
from foresample.integrations.networks import held_by, require_fixed
from foresample.integrations.policies.learning import MOST, condition_of, learn_prior
from foresample.integrations.policies.planner import Planner, PlanSettings, Request
from foresample.integrations.trusted import foreign_part, held
from foresample.integrations.untouched import NothingGains
from foresample.settings import Settings
from foresample.targets import ChainTarget

KEPT = 4
"""Kinds of requests whose planners are kept: each holds memory, on a GPU that of its captured rounds."""


def kind_of(request: Request, network: Any, scheduler: Any, graph: bool, *more: Any) -> tuple:
    """Key of a planner: another network, scheduler, shape or place in memory needs another planner.

    The key is made for each plan from what the policy holds at that moment, so a planner never uses stale values.
    """
    tensors = {"data": request.data, "noise": request.noise, **request.conditions}
    return (
        weakref.ref(network),  # equal for one living network only
        held_by(network) if graph else None,
        type(scheduler),
        repr(sorted(scheduler.config.items())),
        held(scheduler),
        repr(sorted(request.step_options.items())),
        None if request.mask is None else tuple(request.free.flatten().tolist()),
        *((n, None if v is None else (v.shape, v.dtype, v.device)) for n, v in tensors.items()),
        *more,
    )


@dataclass(eq=False)
class Plans:
    """State kept between the plans of one policy."""

    settings: Settings
    options: PlanSettings
    prior: Prior | LearnedPrior | None
    """The prior: given, fitted on the first plans, or learned from the latest.

    One that was given is refused where it does not fit. The others draft only plans of the size they were made from.
    """
    planners: dict[tuple, Planner] = field(default_factory=dict)
    """One planner for each kind of request, the latest used last; it has the engine, captured rounds and last plans."""
    pilots: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    """Paths of the first plans, until enough of one size are there to fit a prior."""
    seen: deque[tuple[Tensor, Tensor, Tensor]] = field(default_factory=deque)
    """Conditions and paths of the latest plans, to learn from."""
    target: ChainTarget | None = None
    """Chain of the last plan in `seen`."""
    remembered: int = 0
    """Plans in `seen`."""
    known: set[tuple] = field(default_factory=set)
    """Kinds of requests that were planned before, and traced."""
    turn: threading.RLock = field(default_factory=threading.RLock, repr=False)
    """Lock held while a plan is drawn, since planners keep its conditions: threads wait for one another."""

    def draw(
        self,
        kind: tuple,
        request: Request,
        scheduler: Any,
        watch: Callable[[Chain], Any],
        *,
        follow: bool = False,
    ) -> tuple[Planner, Tensor, Run]:
        """Draw plans: the planner, the plans and their cost. Once there are enough pilots, later plans have a prior.

        A planner is made when the first request of its kind comes, after `watch` has compared the policy's method with
        the chain; the one not used for longest makes room.
        """
        if not len(request.data):
            raise NothingGains(steps=0, count=0)  # an empty batch is left to the policy's own method
        started, planner = perf_counter(), self.planners.pop(kind, None)
        if planner is None:
            options = self.options if self.prior is None else replace(self.options, pilots=None)
            options = replace(options, trace=options.trace and kind not in self.known)
            chain = policy_chain(scheduler, request.step_options)
            if options.trace:
                watch(chain)
            planner = Planner(request, chain, self.settings, options, self.prior, follow=follow)
            if planner.window is not None:
                planner.engine.preparation_seconds = perf_counter() - started
            if len(self.planners) >= KEPT:
                self.planners.pop(next(iter(self.planners))).close()
        self.planners[kind] = planner
        if planner.window is None:
            raise NothingGains(len(planner.target.std), len(request.data))
        plans, run = planner.plan(request, seeds_from(request.generator, len(request.data)))
        run.report.evidence.steps_replayed, planner.unreported = planner.unreported, 0
        self.known.add(kind)
        if planner.options.learn:
            self._remember(planner, request)
        if planner.options.pilots:
            self.pilots.append(planner.paths())
            pilots = _like_the_last(self.pilots)
            if sum(len(states) for states, _ in pilots) >= planner.options.pilots:
                self.pilots.clear()
                states, predictions = (torch.cat(parts) for parts in zip(*pilots, strict=True))
                self.prior = prior_of_paths(planner.target, states, predictions, window=planner.window)
                self.clear()
        return planner, plans, run

    def learn(self, network: Any) -> LearnedPrior:
        """Learn a prior from the latest plans of this network and draft the next ones with it; takes seconds."""
        with self.turn:
            if not self.seen:
                raise ValueError(
                    "there is no plan to learn from: give learn=True to accelerate, and plan first"
                )
            assert self.target is not None
            condition, states, predictions = (
                torch.cat(parts) for parts in zip(*_like_the_last(self.seen), strict=True)
            )
            self.prior = learn_prior(self.target, network, condition, states, predictions)
            for kind, planner in list(self.planners.items()):
                if planner.learned is not None and planner.learned.sizes == self.prior.sizes:
                    planner.take(self.prior)
                else:
                    self.planners.pop(kind).close()
            return self.prior

    def _remember(self, planner: Planner, request: Request) -> None:
        self.seen.append((condition_of(request), *planner.paths()))
        self.target = planner.target
        self.remembered += len(request.data)
        while self.remembered > MOST:
            self.remembered -= len(self.seen.popleft()[0])

    def forget(self) -> None:
        with self.turn:
            for planner in self.planners.values():
                planner.forget()

    def clear(self) -> None:
        with self.turn:
            for planner in self.planners.values():
                planner.close()
            self.planners.clear()


def _like_the_last(plans: Sequence[tuple[Tensor, ...]]) -> list[tuple[Tensor, ...]]:
    """The plans whose tensors have the sizes of the last plan's; batches may differ."""
    sizes = [value.shape[1:] for value in plans[-1]]
    return [plan for plan in plans if [value.shape[1:] for value in plan] == sizes]


def seeds_from(generator: torch.Generator | None, count: int) -> Tensor:
    """One seed a plan, from the generator that would have drawn its noise."""
    if generator is not None:
        return torch.randint(2**63 - 1, (count,), generator=generator, device=generator.device)
    with torchs_generators:
        return torch.randint(2**63 - 1, (count,))


def require_own_scheduler(scheduler: Any) -> None:
    """Refuse a scheduler with foreign code: its chain is read off its tables, and its `step` is not run."""
    foreign = foreign_part(scheduler, "diffusers")
    if foreign is not None:
        raise ValueError(
            f"the policy's scheduler is not diffusers' own ({foreign}), so its steps may differ from those that "
            "foresample reads off its tables: use diffusers' scheduler, make a target with foresample.targets, or give "
            "trace=False if you know that the steps are the same"
        )


def policy_chain(scheduler: Any, options: dict[str, Any]) -> Chain:
    """The chain of a policy's scheduler, whose `step` is given these options; its noise has a fixed variance.

    Policies' loops scale no states, and start from unit noise: a scheduler that needs either scaled is refused.
    """
    clipped = options.get("use_clipped_model_output", False)
    chain = scheduler_chain(scheduler, eta=options.get("eta", 0.0), use_clipped=clipped)
    if chain.low_variance is not None:  # whose extra noise is no part of what policies are drawn with
        raise ValueError(
            "a learned variance (variance_type='learned_range') is not served in a policy; use "
            "variance_type='fixed_small', or foresample.targets.from_scheduler with the network"
        )
    if chain.scale is not None or chain.start_scale != 1.0:
        raise ValueError(
            f"a policy's loop starts from unit noise and does not scale its states, but {type(scheduler).__name__} "
            "needs both scaled: use DDPMScheduler"
        )
    return chain


def require_eval(model: Any, network: Any = None) -> None:
    """Refuse a policy in training mode, and a network that draws or mixes rows."""
    if getattr(model, "training", False):
        raise ValueError("the policy is in training mode; call policy.eval() before planning")
    require_fixed(network, "the policy's network", "; call policy.eval()")
