"""Robot diffusion policies, drawn speculatively: LeRobot, `diffusion_policy`, robomimic, ManiSkill.

`accelerate` replaces the method that draws plans on one instance (`loops`). The new method draws from the same
distribution with fewer sequential network calls.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from foresample.core.report import Report
from foresample.drafters import LearnedPrior, Prior
from foresample.drafters.learned import load_prior
from foresample.integrations.policies.families import Loop, find_loop
from foresample.integrations.policies.learning import require_learned_for
from foresample.integrations.policies.loops import SpeculativeLoop
from foresample.integrations.policies.planner import PlanSettings
from foresample.integrations.policies.plans import Plans, policy_chain, require_eval
from foresample.integrations.replaced import REPORT, Replaced
from foresample.settings import Settings


def is_policy(served: Any) -> bool:
    """Whether this is a policy of a family known here."""
    return find_loop(served) is not None


def accelerate_policy(policy: Any, settings: Settings, plan: PlanSettings) -> AcceleratedPolicy:
    """See `foresample.accelerate`."""
    loop = find_loop(policy)
    assert loop is not None
    owner = loop.owner
    require_eval(loop.model)
    weights = loop.model.parameters() if isinstance(loop.model, torch.nn.Module) else iter(())
    if settings.graph and next(weights, torch.empty(0)).device.type != "cuda":
        raise ValueError(
            "graph=True needs a policy on a CUDA device: move it there first, or leave graph=True out"
        )
    if plan.executed is None:
        plan = replace(plan, executed=_executed(policy, owner if loop.read is not None else None))
    prior = load_prior(plan.prior) if isinstance(plan.prior, (str, Path)) else plan.prior
    plan = replace(plan, prior=prior)
    if isinstance(prior, LearnedPrior):
        require_learned_for(prior, loop.network)
    plans, replaced = Plans(settings, plan, prior), Replaced()
    restore_policy(policy)
    _refuse_early(loop)
    own = getattr(owner, loop.method)
    ours = SpeculativeLoop(owner, policy, own, plans, replaced)
    names = [n for n, v in vars(owner).items() if n != loop.method and v == own] if loop.read is None else []
    for name in [loop.method, *names]:
        replaced.put(owner, name, ours)
    if callable(getattr(policy, "reset", None)):
        replaced.put(policy, "reset", ForgettingReset(plans, policy.reset))
    empty = Report(settings.method, steps=0, count=0, window=0)
    for holder in (owner, policy):
        setattr(holder, REPORT, empty)
    return AcceleratedPolicy(policy, plans)


def restore_policy(policy: Any) -> None:
    """Restore a policy's own methods; a policy that was not accelerated stays as it is."""
    loop = find_loop(policy)
    if loop is None:
        raise TypeError(f"{type(policy).__name__} is not a diffusion policy that foresample knows")
    method = vars(loop.owner).get(loop.method)
    if not isinstance(method, SpeculativeLoop):
        return
    method.replaced.remove()
    method.plans.clear()
    for owner in (method.owner, method.policy):
        vars(owner).pop(REPORT, None)


@dataclass(frozen=True)
class AcceleratedPolicy:
    """Handle on an accelerated policy; as a context manager it yields the policy and restores it at the end."""

    policy: Any
    plans: Plans

    @property
    def prior(self) -> Prior | LearnedPrior | None:
        """The prior in use: given, fitted on the first plans once they were enough, or learned.

        `prior.save(path)` keeps it, and `accelerate(policy, prior=path)` starts with it.
        """
        return self.plans.prior

    def learn(self) -> LearnedPrior:
        """Learn from the plans drawn so far how plans depend on what is observed, and draft the next ones with it.

        Needs `accelerate(policy, learn=True)` and takes seconds: call it between episodes, and again after more plans.
        A plan that is requested meanwhile waits until it has finished.
        """
        loop = find_loop(self.policy)
        assert loop is not None
        return self.plans.learn(loop.network)

    def forget(self) -> None:
        """Draw the next plan as if it were the first; `policy.reset()` does so, too."""
        self.plans.forget()

    def __enter__(self) -> Any:
        return self.policy

    def __exit__(self, *error: object) -> None:
        restore_policy(self.policy)


@dataclass(frozen=True, eq=False)
class ForgettingReset:
    """A policy's `reset`, which also forgets the last plan."""

    plans: Plans
    original: Callable[..., Any]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.plans.forget()
        return self.original(*args, **kwargs)


def _refuse_early(loop: Loop) -> None:
    """Read a copy of the scheduler, to refuse an unsuitable one before the first plan."""
    scheduler, known = copy.deepcopy(loop.scheduler), loop.read is not None
    options = (getattr(loop.owner, "kwargs", None) if known else None) or {}
    loop.require_noise(options)
    if known:
        scheduler.set_timesteps(loop.owner.num_inference_steps)
    policy_chain(scheduler, options)


def _executed(policy: Any, model: Any) -> int | None:
    """Number of actions the policy executes of a plan; None if it has no such attribute."""
    for owner in (model, policy, getattr(policy, "config", None), getattr(model, "config", None)):
        for name in ("n_action_steps", "act_horizon"):
            number = getattr(owner, name, None)
            if isinstance(number, int):
                return number or None
    return None
