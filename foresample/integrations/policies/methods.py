"""Policies that draw a plan in one method, `conditional_sample`: LeRobot's and the `diffusion_policy` family.

Both families walk a diffusers scheduler with a network there. Nothing is imported from either project: a policy is
known by its method's arguments and the attributes it walks with. A method that is the library's own function is watched
at the first plan of a kind and does not run from then on; any other runs along with every plan (`loops`).

    LeRobot            conditional_sample(batch_size, global_cond, generator, noise), unet, config
    diffusion_policy   conditional_sample(condition_data, condition_mask, local_cond, global_cond, generator,
                       **kwargs of scheduler.step), model

`diffusion_policy` overwrites conditioned coordinates before each network call and at the end. What noise does
to them in between never reaches anything, so the chain here runs on the free coordinates alone: given the
conditions, those follow a Gaussian chain with isotropic noise, and the result has the sequential distribution.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from foresample.core.report import Report
from foresample.drafters import Prior
from foresample.integrations.policies.loops import Loop, SpeculativeLoop, Walk
from foresample.integrations.policies.plans import (
    Planner,
    PlanSettings,
    Request,
    kind_of,
    policy_chain,
    require_eval,
    require_fixed_network,
    require_own_scheduler,
)
from foresample.integrations.policies.watch import require_same_chain
from foresample.integrations.replaced import standing_in
from foresample.integrations.trusted import library_name

_TRUSTED = {
    "lerobot.policies.diffusion.modeling_diffusion.DiffusionModel.conditional_sample": "LeRobot's own",
    "lerobot.common.policies.diffusion.modeling_diffusion.DiffusionModel.conditional_sample": "LeRobot's own",
    "foresample.pretrained.policy.DiffusionModel.conditional_sample": "foresample's own",
}
"""Loops that are known to be the same for every observation: watched once for each kind of plan, not at each plan."""
_STEP_OPTIONS = {"eta", "use_clipped_model_output"}  # of scheduler.step, known to `scheduler_chain`


class SpeculativeMethod(SpeculativeLoop):
    """The method that stands in for a policy's `conditional_sample`, with its arguments and its distribution."""

    def _plan(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Report | None]:
        bound = inspect.signature(self.original).bind(*args, **kwargs)
        bound.apply_defaults()
        require_eval(self.owner)
        read = _lerobot_request if is_lerobot(self.owner) else _diffusion_policy_request
        request = read(self.owner, bound.arguments)
        require_fixed_network(request.network)
        if not request.free.any():
            return request.data.clone(), None
        own = _TRUSTED.get(library_name(self.original, self.owner) or "")
        vouched = not self.plans.how.trace
        if not vouched:
            require_own_scheduler(self.owner.noise_scheduler)
        run = partial(self._run, bound)
        if own or vouched:
            plans, report = self._draw(request, run)
            report.evidence.trusted += self._trusted(own)
            return plans, report
        walk = Walk(find_method(self.owner), self.plans, run, request)
        return walk.run(), walk.report

    def _trusted(self, own: str | None) -> list[str]:
        """What is taken on trust where the method does not run along."""
        if not self.plans.how.trace:
            return ["its loop and its scheduler (trace=False)"]
        return [f"{own} conditional_sample", f"diffusers' own {type(self.owner.noise_scheduler).__name__}"]

    def _run(self, bound: inspect.BoundArguments, generator: torch.Generator | None) -> Tensor:
        """The untouched method on the call at hand, with this generator."""
        given = {**bound.arguments}
        if "generator" in given:
            given["generator"] = generator
        again = inspect.BoundArguments(bound.signature, given)
        return self.original(*again.args, **again.kwargs)

    def _draw(self, request: Request, run: Callable[[torch.Generator], Tensor]) -> tuple[Tensor, Report]:
        """Plans, without running the method."""
        scheduler = self.owner.noise_scheduler
        scheduler.set_timesteps(self.owner.num_inference_steps)  # as the method does
        kind = kind_of(request, request.network, scheduler, self.plans.settings.graph)
        _, plans, drawn = self.plans.draw(kind, request, partial(self._make, request, run))
        return plans, drawn.report

    def _make(
        self, request: Request, run: Callable[[torch.Generator], Tensor], how: PlanSettings, prior: Prior | None
    ) -> Planner:
        chain = policy_chain(self.owner.noise_scheduler, request.step_options)
        if how.trace:
            loop = find_method(self.owner)
            instead = partial(standing_in, self.owner, loop.attribute)
            require_same_chain(loop.name, run, request.network, instead, request, chain)
        return Planner(request, chain, self.plans.settings, how, prior)


def find_method(model: Any) -> Loop:
    """The method of a model of these families, as it is now."""
    network = "unet" if is_lerobot(model) else "model"
    return Loop(model, "conditional_sample", getattr(model, network), model.noise_scheduler, network)


def find_model(policy: Any) -> Any:
    for model in (policy, getattr(policy, "diffusion", None)):
        if is_lerobot(model) or _is_diffusion_policy(model):
            return model
    return None


def is_lerobot(model: Any) -> bool:
    return walks_with(model, "unet", "config") and "batch_size" in _arguments(model)


def _is_diffusion_policy(model: Any) -> bool:
    return walks_with(model, "model") and {"condition_data", "condition_mask"} <= _arguments(model)


def walks_with(model: Any, *names: str) -> bool:
    common = ("conditional_sample", "noise_scheduler", "num_inference_steps")
    return all(hasattr(model, name) for name in (*common, *names))


def _arguments(model: Any) -> set[str]:
    method = model.conditional_sample
    method = method.original if isinstance(method, SpeculativeMethod) else method
    return set(inspect.signature(method).parameters)


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


def _action_dim(config: Any) -> int:
    """Size of an action in LeRobot's configuration, by its newest name or an older one."""
    feature = getattr(config, "action_feature", None)
    if feature is not None:
        return feature.shape[0]
    outputs = getattr(config, "output_features", None)
    return outputs["action"].shape[0] if outputs is not None else config.output_shapes["action"][0]
