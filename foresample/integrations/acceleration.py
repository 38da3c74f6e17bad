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

    The object is used as before. Its attribute `foresample_report` has the cost of the last call, and what was checked.
    Copies and pickles of the object are not accelerated. `restore`, or the end of a `with` block, undoes everything:

        with foresample.accelerate(policy):
            action = policy.select_action(observation)

    A generator passed to the object (otherwise torch's global one) seeds each image or plan. The samples differ from
    those that the sequential sampler draws with that generator; their distribution is the same.

    Options; one that this kind of object does not have is refused:

    * `window`: transitions drafted in a round; a call evaluates at most window + 1 states of each image or plan.
      "auto" draws with several windows at first and keeps the fastest. A saved `Tuning` needs no such draws, for as
      many steps and samples at a time as it was measured with. Where no window gains, the object's own loop is used.
    * `drafter`, `block`, `recycle`: as for `sample`.
    * `batch_pad`: for policies, always call the network with the same number of states, for torch.compile and CUDA
      graphs: plans × (window + 1) for True, or this number. The results of the padding are dropped.
    * `graph`: for policies on a GPU, replay rounds as CUDA graphs; a new observation needs no new capture.
    * `prior`: for policies, a `Prior` fitted on other plans, a `LearnedPrior`, or the path of a saved one.
    * `warm`: for policies, draft a plan's first window from the last plan (in the same row of the batch), moved on by
      the actions executed since. The plan then also depends on the last one, but its distribution does not. The
      policy's `reset()` forgets the last plan.
    * `executed`: for policies, actions executed between two plans; the policy's `n_action_steps` by default.
    * `pilots`: for policies, fit a prior on this many first plans, from states that they evaluate anyway.
    * `learn`: for policies, keep the latest 4096 plans; `learn()` of the handle returned here trains a prior on them in
      seconds, which drafts each plan from its own observation instead of from the last plan.
    * `trace`: for pipelines and policies, watch the untouched loop and refuse one that the chain does not explain. The
      loop of a pipeline, and LeRobot's own, is watched once per configuration, at three steps. The loop of any other
      policy runs along with every plan, which adds no network calls. With trace=False you vouch that the loop draws
      from its scheduler's chain.
    * `look`: as for `sample`, at the first use of a configuration. For a pipeline, every call also evaluates one state
      of the previous call again, whose output must not change; the report's `evidence` has the outcome.

    Args:
        served: a diffusers pipeline with a `unet` or a `transformer` and a stochastic scheduler; LeRobot's
            DiffusionPolicy (or its `.diffusion`) or multi-task DiT, or a policy of diffusion_policy, robomimic or
            ManiSkill; an object of one of the packages in `foresample.integrations.packages.acceleration`.
        **options: the options above.
    """
    kind, given = _kind(served), dict[str, Any](options)
    _require_options(kind, given)
    plan = PlanSettings(**{name: value for name, value in given.items() if name in _PLAN})
    settings = Settings.of({name: value for name, value in given.items() if name not in _PLAN})
    if kind == "policy":
        primed = plan.warm or plan.learn or plan.prior is not None or plan.pilots is not None
        if primed and given.get("drafter") is not None:
            raise ValueError(
                "prior, pilots, learn and warm=True need the Replay drafter: leave drafter out, or leave these out"
            )
        return accelerate_policy(served, settings, plan)
    if kind == "pipeline":
        return accelerate_pipeline(served, settings, plan.trace)
    return accelerate_package(served, settings)


def _require_options(kind: str, options: dict[str, Any]) -> None:
    """Refuse an unknown option, and one that this kind of object does not have unless it is the default."""
    for name, value in options.items():
        if name not in _DEFAULTS:
            raise TypeError(f"{name} is not an option of accelerate: {remedy(name, list(_DEFAULTS))}")
        if name in _OPTIONS[kind] or value is _DEFAULTS[name]:
            continue
        having = " or ".join(f"a {other}" for other in _OPTIONS if name in _OPTIONS[other])
        raise ValueError(f"{name} is an option of {having}, not of a {kind}: leave {name} out")


def restore(served: Any) -> None:
    """Undo `accelerate`; an object that was not accelerated stays as it is."""
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
    if isinstance(served, type):
        raise TypeError(f"{served.__name__} is a class: pass the object that samples")
    if all(hasattr(served, name) for name in ("shape", "std", "start", "predict", "mean")):
        raise TypeError(
            f"{type(served).__name__} is a target already: draw from it with foresample.sample(target, count, window=…)"
        )
    packages = ", ".join(f"{kind.package}'s {kind.kind}" for kind in PACKAGES)
    raise TypeError(
        misread_policy(served)
        or f"{type(served).__name__} cannot be accelerated: pass a diffusers pipeline (a "
        "scheduler, and a unet or a transformer), LeRobot's DiffusionPolicy or a policy of the diffusion_policy "
        "family (conditional_sample, noise_scheduler, num_inference_steps and a network called unet or model), one of "
        f"robomimic or ManiSkill, {packages}, or make a target with foresample.targets, of a step function with "
        "from_step"
    )
