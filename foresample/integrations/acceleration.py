"""`accelerate` and `restore`, for pipelines, policies and packages."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import Any, Unpack

from foresample.integrations.diffusers.pipelines import (
    AcceleratedPipeline,
    accelerate_pipeline,
    is_pipeline,
    restore_pipeline,
)
from foresample.integrations.packages.acceleration import (
    PACKAGES,
    AcceleratedPackage,
    accelerate_package,
    is_package,
    restore_package,
)
from foresample.integrations.policies.acceleration import (
    AcceleratedPolicy,
    accelerate_policy,
    is_policy,
    restore_policy,
)
from foresample.integrations.policies.families import misread_policy
from foresample.integrations.policies.planner import PlanKeywords, PlanSettings
from foresample.settings import Settings, SpeculationKeywords, remedy

_COMMON = ("window", "drafter", "block", "recycle", "look")
_OPTIONS = {
    "policy": (*_COMMON, "trace", "batch_pad", "graph", "prior", "warm", "executed", "pilots", "learn"),
    "pipeline": (*_COMMON, "trace"),
    "package's sampler": _COMMON,
}
"""The options each kind of object takes."""
_PLAN = {f.name for f in fields(PlanSettings)}
_DEFAULTS = {f.name: f.default for f in (*fields(Settings), *fields(PlanSettings)) if f.name != "slots"}


class AccelerateKeywords(SpeculationKeywords, PlanKeywords, total=False):
    """All options of `accelerate`."""

    graph: bool
    trace: bool
    look: bool


def accelerate(
    served: Any, **options: Unpack[AccelerateKeywords]
) -> AcceleratedPipeline | AcceleratedPolicy | AcceleratedPackage:
    """Draw from a pipeline, a policy or a package's sampler speculatively: the same distribution, fewer calls.

    It is used as before; its attribute `foresample_report` has the cost of the last call, and what was checked. Copies
    and pickles of it are not accelerated. `restore`, or leaving the `with` block this was used in, undoes everything:

        with foresample.accelerate(policy):
            action = policy.select_action(observation)

    A generator passed to it (torch's global one otherwise) seeds each image or plan; they are other draws than the
    sequential sampler makes with that generator, from the same distribution.

    Options, of which one that an object of that kind does not have is refused by name:

    * `window`: transitions drafted in a round; a call evaluates at most window + 1 states of each image or plan.
      "auto" draws with several at first and keeps the fastest; a saved `Tuning` costs nothing, for as many steps and
      samples at a time as it was measured with. Where no window gains, the object's own loop is used.
    * `drafter`, `block`, `recycle`: as for `sample`.
    * `batch_pad`: for policies, call the network with one number of states always, for torch.compile and CUDA graphs:
      True means plans × (window + 1), a number means that many. The padding's results are dropped.
    * `graph`: for policies on a GPU, replay rounds as CUDA graphs; a new observation needs no new capture.
    * `prior`: for policies, a `Prior` fitted on other plans, a `LearnedPrior`, or the path of a saved one.
    * `warm`: for policies, draft a plan's first window from the last plan (of the same row of the batch), moved on by
      the actions executed since; the plan then also depends on the last one, its distribution does not. `reset()` of
      the policy forgets.
    * `executed`: for policies, actions executed between two plans; the policy's `n_action_steps` by default.
    * `pilots`: for policies, fit a prior on so many first plans, from what they evaluate anyway.
    * `learn`: for policies, keep the latest 4096 plans, so that `learn()` of what this returns can train, in seconds, a
      prior that drafts each plan from its own observation; it takes the place of the last plan's path.
    * `trace`: for pipelines and policies, watch the untouched loop and refuse what the chain does not explain. A
      pipeline's loop, and a policy's that is LeRobot's own function, is watched once per configuration, at three steps;
      any other policy's loop runs along with every plan, which adds no network calls. trace=False means that you vouch
      for the loop: that it draws from its scheduler's chain.
    * `look`: as for `sample`, at the first use of a configuration. For a pipeline, every call evaluates one state of
      the call before again, whose answer must not change; the report's `evidence` tells the outcome.

    Args:
        served: a diffusers pipeline with a `unet` or a `transformer` and a stochastic scheduler; LeRobot's
            DiffusionPolicy (or its `.diffusion`) or multi-task DiT, or a policy of diffusion_policy, robomimic or
            ManiSkill; an object of one of the packages in `foresample.integrations.packages.acceleration`.
        **options: those above.
    """
    kind, given = _kind(served), dict[str, Any](options)
    _require_options(kind, given)
    plan = PlanSettings(**{name: value for name, value in given.items() if name in _PLAN})
    settings = Settings.of({name: value for name, value in given.items() if name not in _PLAN})
    if kind == "policy":
        primed = plan.warm or plan.learn or plan.prior is not None or plan.pilots is not None
        if primed and given.get("drafter") is not None:
            raise ValueError(
                "prior, pilots, learn and warm=True need the Replay drafter: leave drafter out, or them"
            )
        return accelerate_policy(served, settings, plan)
    if kind == "pipeline":
        return accelerate_pipeline(served, settings, plan.trace)
    return accelerate_package(served, settings)


def _require_options(kind: str, options: dict[str, Any]) -> None:
    """Refuse an unknown option, and one that such an object does not have, unless it has its default."""
    for name, value in options.items():
        if name not in _DEFAULTS:
            raise TypeError(f"{name} is not an option of accelerate: {remedy(name, list(_DEFAULTS))}")
        if name in _OPTIONS[kind] or value is _DEFAULTS[name]:
            continue
        having = " or ".join(f"a {other}" for other in _OPTIONS if name in _OPTIONS[other])
        raise ValueError(f"{name} is an option of {having}, not of a {kind}: leave {name} out")


def restore(served: Any) -> None:
    """Undo `accelerate`; does nothing to what was not accelerated."""
    _KINDS[_kind(served)][1](served)


_KINDS: dict[str, tuple[Callable[[Any], bool], Callable[[Any], None]]] = {
    "policy": (is_policy, restore_policy),
    "package's sampler": (is_package, restore_package),
    "pipeline": (is_pipeline, restore_pipeline),
}


def _kind(served: Any) -> str:
    """The kind of this object, a key of `_OPTIONS`; an error for any other object."""
    for kind, (is_one, _) in _KINDS.items():
        if is_one(served):
            return kind
    packages = ", ".join(f"{kind.package}'s {kind.kind}" for kind in PACKAGES)
    raise TypeError(
        misread_policy(served)
        or f"{type(served).__name__} cannot be accelerated: pass a diffusers pipeline (a "
        "scheduler, and a unet or a transformer), LeRobot's DiffusionPolicy or a policy of the diffusion_policy "
        "family (conditional_sample, noise_scheduler, num_inference_steps and a network called unet or model), one of "
        f"robomimic or ManiSkill, {packages}, or make a target with foresample.targets"
    )
