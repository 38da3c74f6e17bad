"""Robot diffusion policies, drawn speculatively: LeRobot's `DiffusionPolicy` and the `diffusion_policy` family.

Both families draw a plan of actions in one method, `conditional_sample`, which walks a diffusers scheduler
with a network. `accelerate` puts another one in its place on that one instance, which draws from the
same law with fewer sequential network calls. Nothing is imported from either project: a policy is known by
its method's arguments and the attributes it walks with. A method that is the library's own function is watched at the
first plan of a kind and does not run from then on; any other runs along with every plan (`loops`, which also has the
families whose method does more than draw).

    LeRobot            conditional_sample(batch_size, global_cond, generator, noise), unet, config
    diffusion_policy   conditional_sample(condition_data, condition_mask, local_cond, global_cond, generator,
                       **kwargs of scheduler.step), model

`diffusion_policy` overwrites conditioned coordinates before each network call and at the end. What noise does
to them in between never reaches anything, so the chain here runs on the free coordinates alone: given the
conditions, those follow a Gaussian chain with isotropic noise, and the result has the sequential law.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

import torch
from torch import Tensor

from foresample.chains import Chain, scheduler_chain
from foresample.contracts import Drafter, at_least_one, require_drafter
from foresample.core.report import Report
from foresample.drafters import Prior
from foresample.integrations.loops import Loop, NothingGains, SpeculativeLoop, Walk, find_loop
from foresample.integrations.networks import require_fixed_variance
from foresample.integrations.plans import (
    Planner,
    Plans,
    PlanSettings,
    Request,
    kind_of,
    require_eval,
    require_fixed_network,
    require_own_scheduler,
    require_unscaled,
    seeds_from,
)
from foresample.integrations.policy_trace import require_same_chain, standing_in
from foresample.integrations.replaced import REPORT, Replaced
from foresample.integrations.trusted import library_name, require_current

_TRUSTED = {
    "lerobot.policies.diffusion.modeling_diffusion.DiffusionModel.conditional_sample": "LeRobot's own",
    "lerobot.common.policies.diffusion.modeling_diffusion.DiffusionModel.conditional_sample": "LeRobot's own",
    "foresample.pretrained.policy.DiffusionModel.conditional_sample": "foresample's own",
}
"""Loops that are known to be the same for every observation: watched once for each kind of plan, not at each plan."""
_STEP_OPTIONS = {"eta", "use_clipped_model_output"}  # of scheduler.step, known to `scheduler_chain`


def is_policy(served: Any) -> bool:
    """Whether this is a policy of a family known here."""
    return _find_model(served) is not None or find_loop(served) is not None


def misread_policy(served: Any) -> str | None:
    """What is not understood of an object that has all of a policy but the arguments of its method."""
    models: tuple[Any, Any] = (served, getattr(served, "diffusion", None))
    for model in models:
        if _walks_with(model, "unet", "config") or _walks_with(model, "model"):
            signature = inspect.signature(model.conditional_sample)
            return (
                f"{type(model).__name__}.conditional_sample{signature} does not have the arguments foresample reads a "
                "plan from: name them as LeRobot does (batch_size, global_cond, generator, noise) or as "
                "diffusion_policy does (condition_data, condition_mask, …, generator), or make a target with "
                "foresample.targets"
            )
    return None


def accelerate_policy(
    policy: Any,
    window: int | Literal["auto"],
    drafter: Drafter | None,
    block: int | None,
    recycle: bool,
    batch_pad: bool | int,
    graph: bool,
    prior: Prior | str | Path | None,
    warm: bool,
    executed: int | None,
    pilots: int | None,
    trace: bool,
    look: bool,
) -> AcceleratedPolicy:
    """See `foresample.accelerate`."""
    if drafter is not None:
        require_drafter(drafter)
        if warm or prior is not None or pilots is not None:
            raise ValueError("prior, pilots and warm=True are Replay's: leave the drafter out, or them")
    if prior is not None and pilots is not None:
        raise ValueError(
            "a prior is given and another to be fitted on the first plans: leave prior or pilots out"
        )
    if batch_pad is not True and batch_pad is not False:
        at_least_one("batch_pad", batch_pad)
    model, loop = _find_model(policy), find_loop(policy)
    walked = model if loop is None else loop.network
    require_eval(walked)
    if graph and next(iter(_parameters(walked)), torch.empty(0)).device.type != "cuda":
        raise ValueError(
            "graph=True needs a policy on a CUDA device: move it there first, or leave graph=True out"
        )
    executed = _executed(policy, model) if executed is None else at_least_one("executed", executed)
    how = PlanSettings(
        window,
        drafter,
        block,
        recycle,
        batch_pad,
        graph,
        warm=warm,
        executed=executed,
        pilots=0 if pilots is None else max(2, at_least_one("pilots", pilots)),
        trace=trace,
        look=look,
    )
    plans = Plans(how, Prior.load(prior) if isinstance(prior, (str, Path)) else prior)
    restore_policy(policy)
    replaced = Replaced()
    if loop is None:
        _refuse_early(model.noise_scheduler, model.num_inference_steps, model)
        own = model.conditional_sample
        replaced.put(model, "conditional_sample", SpeculativeMethod(model, policy, own, plans, replaced))
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
    owner, name = (_model_of(policy), "conditional_sample") if loop is None else (loop.owner, loop.method)
    method = vars(owner).get(name)
    if not isinstance(method, (SpeculativeMethod, SpeculativeLoop)):
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

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        restore_policy(self.policy)


@dataclass(frozen=True, eq=False)
class ForgettingReset:
    """A policy's `reset`, which also forgets the last plan."""

    plans: Plans
    original: Callable[..., Any]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.plans.forget()
        return self.original(*args, **kwargs)


@dataclass(frozen=True, eq=False)
class SpeculativeMethod:
    """The method that stands in for a policy's `conditional_sample`, with its arguments and its law."""

    owner: Any
    """What the method belongs to."""
    policy: Any
    """What the user passed: the model itself or what holds it."""
    original: Callable[..., Tensor]
    plans: Plans
    replaced: Replaced

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        with self.plans.turn:
            return self._plan(*args, **kwargs)

    def _plan(self, *args: Any, **kwargs: Any) -> Tensor:
        require_current(self.original, self.owner, "conditional_sample")
        bound = inspect.signature(self.original).bind(*args, **kwargs)
        bound.apply_defaults()
        require_eval(self.owner)
        read = _lerobot_request if _is_lerobot(self.owner) else _diffusion_policy_request
        request = read(self.owner, bound.arguments)
        require_fixed_network(request.network)
        if not request.free.any():
            return request.data.clone()
        own = _TRUSTED.get(library_name(self.original, self.owner) or "")
        vouched = not self.plans.how.trace
        if not vouched:
            require_own_scheduler(self.owner.noise_scheduler)
        run = partial(self._run, bound)
        try:
            if own or vouched:
                plans, report = self._draw(request, run)
                report.evidence.trusted += self._trusted(own)
            else:
                walk = Walk(self._loop, self.plans, run, request)
                plans, report = walk.run(), walk.report
        except NothingGains:
            return self.original(*args, **kwargs)
        for owner in (self.owner, self.policy):
            setattr(owner, REPORT, report)
        return plans

    def _trusted(self, own: str | None) -> list[str]:
        """What is taken on trust where the method does not run along."""
        if not self.plans.how.trace:
            return ["its loop and its scheduler (trace=False)"]
        return [f"{own} conditional_sample", f"diffusers' own {type(self.owner.noise_scheduler).__name__}"]

    @property
    def _loop(self) -> Loop:
        network = "unet" if _is_lerobot(self.owner) else "model"
        owner = self.owner
        return Loop(owner, "conditional_sample", getattr(owner, network), owner.noise_scheduler, network)

    def _run(self, bound: inspect.BoundArguments, generator: torch.Generator | None) -> Tensor:
        """The untouched method on the call at hand, with this generator."""
        given = {**bound.arguments}
        if "generator" in given:
            given["generator"] = generator
        again = inspect.BoundArguments(bound.signature, given)
        return self.original(*again.args, **again.kwargs)

    def _draw(self, request: Request, run: Callable[[torch.Generator], Tensor]) -> tuple[Tensor, Report]:
        """Plans, without running the method."""
        scheduler, free = self.owner.noise_scheduler, request.free
        scheduler.set_timesteps(self.owner.num_inference_steps)  # as the method does
        kind = kind_of(request, free, request.network, scheduler, self.plans.how.graph)
        planner = self.plans.planner(kind, partial(self._make, request, free, run))
        if planner.window is None:
            raise NothingGains
        plans, drawn = self.plans.draw(kind, request, seeds_from(request.generator, len(request.data)))
        return plans, drawn.report

    def _make(
        self,
        request: Request,
        free: Tensor,
        run: Callable[[torch.Generator], Tensor],
        how: PlanSettings,
        prior: Prior | None,
    ) -> Planner:
        chain = self._chain(request)
        if how.trace:
            loop = self._loop
            instead = partial(standing_in, self.owner, loop.attribute)
            require_same_chain(loop.name, run, request.network, instead, request, free, chain)
        return Planner(request, free, chain, how, prior)

    def _chain(self, request: Request) -> Chain:
        scheduler = self.owner.noise_scheduler
        chain = scheduler_chain(
            scheduler,
            eta=request.step_options.get("eta", 0.0),
            use_clipped=request.step_options.get("use_clipped_model_output", False),
        )
        require_unscaled(chain, scheduler)
        return chain


def _model_of(policy: Any) -> Any:
    """The object whose `conditional_sample` walks the scheduler, or an error."""
    model = _find_model(policy)
    if model is None:
        raise TypeError(f"{type(policy).__name__} is no diffusion policy foresample knows")
    return model


def _find_model(policy: Any) -> Any:
    for model in (policy, getattr(policy, "diffusion", None)):
        if _is_lerobot(model) or _is_diffusion_policy(model):
            return model
    return None


def _is_lerobot(model: Any) -> bool:
    return _walks_with(model, "unet", "config") and "batch_size" in _arguments(model)


def _is_diffusion_policy(model: Any) -> bool:
    return _walks_with(model, "model") and {"condition_data", "condition_mask"} <= _arguments(model)


def _walks_with(model: Any, *names: str) -> bool:
    common = ("conditional_sample", "noise_scheduler", "num_inference_steps")
    return all(hasattr(model, name) for name in (*common, *names))


def _arguments(model: Any) -> set[str]:
    method = model.conditional_sample
    method = method.original if isinstance(method, SpeculativeMethod) else method
    return set(inspect.signature(method).parameters)


def _refuse_early(scheduler: Any, steps: int | None, model: Any) -> None:
    """Read the scheduler once, on a copy, so that what cannot work is refused before the first plan."""
    scheduler = copy.deepcopy(scheduler)
    options = getattr(model, "kwargs", None) or {}
    if type(scheduler).__name__ == "DDIMScheduler" and not options.get("eta", 0.0) > 0:
        instead = "use DDPMScheduler"
        if _is_lerobot(model):
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


def _lerobot_request(model: Any, arguments: dict[str, Any]) -> Request:
    """LeRobot: nothing is conditioned but the network; dtype and device are those of its weights."""
    weight = next(model.parameters())
    batch, shape = arguments["batch_size"], (model.config.horizon, _action_dim(model.config))
    noise, condition = arguments.get("noise"), arguments.get("global_cond")
    width = _observed_width(model)
    if condition is not None and width is not None and condition.shape != (batch, width):
        raise ValueError(
            f"the observation comes to {tuple(condition.shape)} numbers, the policy takes ({batch}, {width}): "
            "give the features it was trained with, n_obs_steps of them"
        )
    if noise is not None and noise.shape != (batch, *shape):
        raise ValueError(f"noise has shape {tuple(noise.shape)}: give one start of {shape} for each of {batch}")
    return Request(
        network=model.unet,
        conditions={"global_cond": condition},
        data=weight.new_zeros(batch, *shape),
        mask=None,
        noise=noise,
        generator=arguments.get("generator"),
        step_options={},
    )


def _diffusion_policy_request(model: Any, arguments: dict[str, Any]) -> Request:
    """The diffusion_policy family: U-Nets take local_cond and global_cond, transformers take cond."""
    options, mask = arguments.get("kwargs", {}), arguments["condition_mask"].bool()
    if mask.any() and model.noise_scheduler.config.get("thresholding", False):
        raise ValueError(
            "thresholding looks at all coordinates, conditioned ones included; use a scheduler with clip_sample=True "
            "instead"
        )
    unknown = set(options) - _STEP_OPTIONS
    if unknown:
        raise ValueError(
            f"foresample cannot pass {', '.join(sorted(unknown))} to scheduler.step; leave it out, or "
            "foresample.restore(policy) first"
        )
    named = ("local_cond", "global_cond", "cond")
    return Request(
        network=model.model,
        conditions={name: arguments[name] for name in named if name in arguments},
        data=arguments["condition_data"],
        mask=mask,
        noise=None,
        generator=arguments.get("generator"),
        step_options=options,
    )


def _observed_width(model: Any) -> int | None:
    """Numbers LeRobot's network is conditioned on, where its configuration says so."""
    config = model.config
    state = getattr(config, "robot_state_feature", None)
    if state is None or getattr(config, "image_features", None):
        return None
    scene = getattr(config, "env_state_feature", None)
    return config.n_obs_steps * (state.shape[0] + (0 if scene is None else scene.shape[0]))


def _executed(policy: Any, model: Any) -> int:
    """Actions the policy executes of a plan; 0, nothing known, leaves the last plan where it was."""
    for owner in (model, policy, getattr(policy, "config", None), getattr(model, "config", None)):
        for name in ("n_action_steps", "act_horizon"):
            number = getattr(owner, name, None)
            if isinstance(number, int):
                return number
    return 0


def _parameters(model: Any) -> list[Tensor]:
    return list(model.parameters()) if isinstance(model, torch.nn.Module) else []


def _action_dim(config: Any) -> int:
    """Size of an action in LeRobot's configuration, by its newest name or an older one."""
    feature = getattr(config, "action_feature", None)
    if feature is not None:
        return feature.shape[0]
    outputs = getattr(config, "output_features", None)
    return outputs["action"].shape[0] if outputs is not None else config.output_shapes["action"][0]
