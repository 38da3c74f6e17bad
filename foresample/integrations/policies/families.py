"""The known families of policies, and how a plan's request is read from the arguments of their methods.

Nothing is imported from any library: a policy is recognised by its attributes and its method's arguments.

    LeRobot                conditional_sample(batch_size, global_cond, generator, noise), unet, config
    diffusion_policy       conditional_sample(condition_data, condition_mask, local_cond, global_cond, generator,
                           **kwargs of scheduler.step), model
    ManiSkill              get_action, with noise_pred_net and noise_scheduler
    robomimic              _get_action_trajectory, with nets["policy"]["noise_pred_net"], or its average, and
                           noise_scheduler
    LeRobot multi_task_dit objective.conditional_sample, with noise_predictor and objective.noise_scheduler

The first two only draw, so a plan is read off their arguments (`Loop.read`). `diffusion_policy` overwrites conditioned
coordinates before each network call and at the end, so noise on them has no effect. The chain here runs on the free
coordinates alone: given the conditions, those follow a Gaussian chain with isotropic noise, and the result has the
sequential distribution.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from torch import nn

from foresample.integrations.policies.planner import Request
from foresample.integrations.replaced import standing_in_here

_STEP_OPTIONS = {"eta", "use_clipped_model_output"}  # of scheduler.step, known to `scheduler_chain`


@dataclass(frozen=True)
class Loop:
    """A method that walks a scheduler with a network.

    `attribute` is where its owner has the network; `read` makes a request of the arguments of a method that only draws.
    """

    owner: Any
    method: str
    network: Any
    scheduler: Any
    attribute: str = ""
    read: Callable[[Any, dict[str, Any]], Request] | None = None

    @property
    def name(self) -> str:
        return f"{type(self.owner).__name__}.{self.method}"

    @property
    def model(self) -> Any:
        """The module that must be in eval mode."""
        return self.network if self.read is None else self.owner

    def instead(self, network: Callable[..., Any], step: Callable[..., Any]) -> ExitStack:
        """Replace the functions of the network and the scheduler until the stack is closed.

        Only this thread sees the replacements: other policies may share the network.
        """
        module = isinstance(self.network, nn.Module)
        owner, name = (self.network, "forward") if module else (self.owner, self.attribute)
        with ExitStack() as stack:
            stack.enter_context(standing_in_here(owner, name, network))
            stack.enter_context(standing_in_here(self.scheduler, "step", step))
            return stack.pop_all()

    def require_noise(self, options: dict[str, Any]) -> None:
        """Refuse DDIM unless these options of its `step` have an eta above 0: it adds no noise."""
        name = type(self.scheduler).__name__
        if name not in ("DDIMScheduler", "DDIMParallelScheduler") or options.get("eta", 0.0) > 0:
            return
        instead = "use DDPMScheduler"
        if self.read is lerobot_request:
            instead = (
                "set policy.diffusion.noise_scheduler = DDPMScheduler.from_config(policy.diffusion.noise_scheduler"
                ".config)"
            )
        elif self.read is not None:
            instead += ", or give the policy eta=1.0 for scheduler.step"
        raise ValueError(
            f"this policy runs {name} with eta=0, which adds no noise, so there is nothing to speculate on; {instead}"
        )


def find_loop(policy: Any) -> Loop | None:
    """The loop of a policy of these families, with its present network and scheduler; None for anything else."""
    for owner in _with_part(policy, "policy"):  # robomimic hands out a RolloutPolicy
        objective, scheduler = getattr(owner, "objective", None), getattr(owner, "noise_scheduler", None)
        if hasattr(owner, "noise_predictor") and hasattr(objective, "conditional_sample"):
            scheduler = getattr(objective, "noise_scheduler", None)
            if scheduler is None:
                raise ValueError(
                    f"{type(objective).__name__} adds no noise, so there is nothing to speculate on; train with the "
                    "diffusion objective and DDPM"
                )
            return Loop(objective, "conditional_sample", owner.noise_predictor, scheduler)
        if scheduler is None:
            continue
        if hasattr(owner, "_get_action_trajectory") and hasattr(owner, "nets"):
            nets = getattr(getattr(owner, "ema", None), "averaged_model", owner.nets)
            return Loop(owner, "_get_action_trajectory", nets["policy"]["noise_pred_net"], scheduler)
        if hasattr(owner, "noise_pred_net") and hasattr(owner, "get_action"):
            return Loop(owner, "get_action", owner.noise_pred_net, scheduler)
    for model in _with_part(policy, "diffusion"):
        for network, read, wanted in _METHODS:
            if _walks(model, network) and wanted <= set(inspect.signature(model.conditional_sample).parameters):
                own = getattr(model, network)
                return Loop(model, "conditional_sample", own, model.noise_scheduler, network, read)
    return None


def misread_policy(served: Any) -> str | None:
    """The refusal of an object that has a policy's attributes but a method with other arguments."""
    for model in _with_part(served, "diffusion"):
        if any(_walks(model, network) for network, *_ in _METHODS):
            signature = inspect.signature(model.conditional_sample)
            return (
                f"{type(model).__name__}.conditional_sample{signature} does not have the arguments foresample reads a "
                "plan from: name them as LeRobot does (batch_size, global_cond, generator, noise) or as "
                "diffusion_policy does (condition_data, condition_mask, …, generator), or make a target with "
                "foresample.targets"
            )
    return None


def _with_part(served: Any, name: str) -> list[Any]:
    return [served, getattr(served, name, None)]


def _walks(model: Any, network: str) -> bool:
    names = ("conditional_sample", "noise_scheduler", "num_inference_steps", network)
    return all(hasattr(model, name) for name in names) and (network != "unet" or hasattr(model, "config"))


def lerobot_request(model: Any, arguments: dict[str, Any]) -> Request:
    """LeRobot: only the network is conditioned; dtype and device are those of its weights."""
    weight = next(model.parameters())
    batch, shape = arguments["batch_size"], (model.config.horizon, _action_dim(model.config))
    noise, condition = arguments.get("noise"), arguments.get("global_cond")
    width = _observed_width(model.config)
    if condition is not None and width is not None and condition.shape != (batch, width):
        raise ValueError(
            f"the observation has {tuple(condition.shape)} numbers, but the policy takes ({batch}, {width}): "
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


def diffusion_policy_request(model: Any, arguments: dict[str, Any]) -> Request:
    """The diffusion_policy family: U-Nets take local_cond and global_cond, transformers take cond."""
    options, mask = arguments.get("kwargs", {}), arguments["condition_mask"].bool()
    if mask.any() and model.noise_scheduler.config.get("thresholding", False):
        raise ValueError(
            "the scheduler's thresholding uses all coordinates, also conditioned ones; use one with clip_sample=True "
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


def _observed_width(config: Any) -> int | None:
    """Width of the condition of LeRobot's network; None if its configuration does not have it."""
    state = getattr(config, "robot_state_feature", None)
    if state is None or getattr(config, "image_features", None):
        return None
    scene = getattr(config, "env_state_feature", None)
    return config.n_obs_steps * (state.shape[0] + (0 if scene is None else scene.shape[0]))


def _action_dim(config: Any) -> int:
    """Size of an action in LeRobot's configuration, by its newest name or an older one."""
    feature = getattr(config, "action_feature", None) or getattr(config, "output_features", {}).get("action")
    return config.output_shapes["action"][0] if feature is None else feature.shape[0]


_METHODS = (
    ("unet", lerobot_request, {"batch_size"}),
    ("model", diffusion_policy_request, {"condition_data", "condition_mask"}),
)
"""The attribute of a model's network, the reader of its method's arguments, and those that identify it."""
