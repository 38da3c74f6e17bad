"""Robot diffusion policies, drawn speculatively: LeRobot, `diffusion_policy`, robomimic, ManiSkill.

`accelerate` puts another method in the place of the one that draws plans, on that one instance (`methods`, `loops`); it
draws from the same distribution with fewer sequential network calls.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from foresample.chains import scheduler_chain
from foresample.drafters import Prior
from foresample.integrations.networks import require_fixed_variance
from foresample.integrations.policies.loops import SpeculativeLoop, find_loop
from foresample.integrations.policies.methods import (
    SpeculativeMethod,
    find_method,
    find_model,
    is_lerobot,
    walks_with,
)
from foresample.integrations.policies.plans import Plans, PlanSettings, require_eval
from foresample.integrations.replaced import REPORT, Replaced
from foresample.settings import Settings


def is_policy(served: Any) -> bool:
    """Whether this is a policy of a family known here."""
    return find_model(served) is not None or find_loop(served) is not None


def misread_policy(served: Any) -> str | None:
    """What is not understood of an object that has all of a policy but the arguments of its method."""
    models: tuple[Any, Any] = (served, getattr(served, "diffusion", None))
    for model in models:
        if walks_with(model, "unet", "config") or walks_with(model, "model"):
            signature = inspect.signature(model.conditional_sample)
            return (
                f"{type(model).__name__}.conditional_sample{signature} does not have the arguments foresample reads a "
                "plan from: name them as LeRobot does (batch_size, global_cond, generator, noise) or as "
                "diffusion_policy does (condition_data, condition_mask, …, generator), or make a target with "
                "foresample.targets"
            )
    return None


def accelerate_policy(policy: Any, settings: Settings, plan: PlanSettings) -> AcceleratedPolicy:
    """See `foresample.accelerate`."""
    model, loop = find_model(policy), find_loop(policy)
    walked = model if loop is None else loop.network
    require_eval(walked)
    weights = walked.parameters() if isinstance(walked, torch.nn.Module) else iter(())
    if settings.graph and next(weights, torch.empty(0)).device.type != "cuda":
        raise ValueError(
            "graph=True needs a policy on a CUDA device: move it there first, or leave graph=True out"
        )
    if plan.executed is None:
        plan = replace(plan, executed=_executed(policy, model))
    prior = Prior.load(plan.prior) if isinstance(plan.prior, (str, Path)) else plan.prior
    plans = Plans(settings, plan, prior)
    restore_policy(policy)
    replaced = Replaced()
    if loop is None:
        _refuse_early(model.noise_scheduler, model.num_inference_steps, model)
        own = model.conditional_sample
        ours: SpeculativeLoop = SpeculativeMethod(find_method(model), policy, own, plans, replaced)
        replaced.put(model, "conditional_sample", ours)
    else:
        _refuse_early(loop.scheduler, None, None)
        own = getattr(loop.owner, loop.method)
        ours = SpeculativeLoop(loop, policy, own, plans, replaced)
        for name in [loop.method, *(n for n, v in vars(loop.owner).items() if n != loop.method and v == own)]:
            replaced.put(loop.owner, name, ours)
    if callable(getattr(policy, "reset", None)):
        replaced.put(policy, "reset", ForgettingReset(plans, policy.reset))
    return AcceleratedPolicy(policy, plans)


def restore_policy(policy: Any) -> None:
    """Give a policy its own methods back; nothing happens to one that was not accelerated."""
    loop = find_loop(policy)
    owner, name = (find_model(policy), "conditional_sample") if loop is None else (loop.owner, loop.method)
    if owner is None:
        raise TypeError(f"{type(policy).__name__} is no diffusion policy foresample knows")
    method = vars(owner).get(name)
    if not isinstance(method, SpeculativeLoop):
        return
    method.replaced.remove()
    method.plans.clear()
    for owner in (method.owner, method.policy):
        vars(owner).pop(REPORT, None)


@dataclass(frozen=True)
class AcceleratedPolicy:
    """What `accelerate` put in place; a context manager that hands out the policy."""

    policy: Any
    plans: Plans

    @property
    def prior(self) -> Prior | None:
        """The prior in use: given, or fitted on the first plans once they were enough. `prior.save(path)` keeps it."""
        return self.plans.prior

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


def _refuse_early(scheduler: Any, steps: int | None, model: Any) -> None:
    """Read the scheduler once, on a copy, so that what cannot work is refused before the first plan."""
    scheduler = copy.deepcopy(scheduler)
    options = getattr(model, "kwargs", None) or {}
    if type(scheduler).__name__ == "DDIMScheduler" and not options.get("eta", 0.0) > 0:
        instead = "use DDPMScheduler"
        if is_lerobot(model):
            instead = (
                "set policy.diffusion.noise_scheduler = DDPMScheduler.from_config(policy.diffusion.noise_scheduler"
                ".config)"
            )
        elif model is not None:
            instead += ", or give the policy eta=1.0 for scheduler.step"
        raise ValueError(
            "this policy runs DDIMScheduler with eta=0, which adds no noise, so there is nothing to speculate "
            f"on; {instead}"
        )
    if steps is not None:
        scheduler.set_timesteps(steps)
    require_fixed_variance(scheduler_chain(scheduler, eta=options.get("eta", 0.0)))


def _executed(policy: Any, model: Any) -> int | None:
    """Actions the policy executes of a plan, where it says so."""
    for owner in (model, policy, getattr(policy, "config", None), getattr(model, "config", None)):
        for name in ("n_action_steps", "act_horizon"):
            number = getattr(owner, name, None)
            if isinstance(number, int):
                return number or None
    return None
