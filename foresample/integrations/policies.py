"""Robot diffusion policies, drawn speculatively: LeRobot's `DiffusionPolicy` and the `diffusion_policy` family.

Both families draw a plan of actions in one method, `conditional_sample`, which walks a diffusers scheduler
with a network. `accelerate` puts another one in its place on that one instance, which draws from the
same law with fewer sequential network calls. Nothing is imported from either project: a policy is known by
its method's arguments and the attributes it walks with.

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
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from foresample.chains import scheduler_chain
from foresample.contracts import Drafter, at_least_one, require_drafter
from foresample.core.report import Report
from foresample.engine import sample
from foresample.targets import ChainTarget

_STEP_OPTIONS = {"eta", "use_clipped_model_output"}  # of scheduler.step, known to `schedulers.read`


@dataclass(frozen=True)
class Request:
    """One call of `conditional_sample`, whatever the family: R plans of one shape."""

    network: Callable[..., Tensor]
    """network(trajectory, timesteps, **conditions)."""
    conditions: dict[str, Tensor | None]
    """What the network is conditioned on, each [R, …] or None."""
    data: Tensor
    """[R, *shape]: values of the conditioned coordinates; its dtype and device are the network's."""
    mask: Tensor
    """[R, *shape]: which coordinates are conditioned."""
    noise: Tensor | None
    """[R, *shape]: where to start, instead of drawing it."""
    generator: torch.Generator | None
    step_options: dict[str, Any]
    """Keyword arguments the policy would pass to scheduler.step."""


def is_policy(served: Any) -> bool:
    """Whether this is a policy of a family known here."""
    return _find_model(served) is not None


def accelerate_policy(
    policy: Any,
    window: int,
    drafter: Drafter | None,
    block: int | None,
    recycle: bool,
    batch_pad: bool | int,
) -> AcceleratedPolicy:
    """See `foresample.accelerate`."""
    if drafter is not None:
        require_drafter(drafter)
    if batch_pad is not True and batch_pad is not False:
        at_least_one("batch_pad", batch_pad)
    model = _model_of(policy)
    restore_policy(policy)
    _refuse_early(model)
    replaced = vars(model).get("conditional_sample")
    how = {"window": window, "drafter": drafter, "block": block, "recycle": recycle}
    model.conditional_sample = SpeculativeMethod(
        model, policy, model.conditional_sample, replaced, how, batch_pad
    )
    return AcceleratedPolicy(policy)


def restore_policy(policy: Any) -> None:
    """Give a policy its own `conditional_sample` back; nothing happens to one that was not accelerated."""
    model = _model_of(policy)
    method = vars(model).get("conditional_sample")
    if not isinstance(method, SpeculativeMethod):
        return
    del model.conditional_sample
    if method.replaced is not None:
        model.conditional_sample = method.replaced
    for owner in (model, method.policy):
        vars(owner).pop("foresample_report", None)


@dataclass(frozen=True)
class AcceleratedPolicy:
    """What `accelerate` put in place; a context manager that hands out the policy."""

    policy: Any

    def __enter__(self) -> Any:
        return self.policy

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        restore_policy(self.policy)


@dataclass(frozen=True, eq=False)
class SpeculativeMethod:
    """The method that stands in for a policy's `conditional_sample`, with its arguments and its law."""

    model: Any
    """What the method belongs to."""
    policy: Any
    """What the user passed: the model itself or what holds it."""
    original: Callable[..., Tensor]
    replaced: Callable[..., Tensor] | None
    """`original` where it was an attribute of the instance, not of its class."""
    how: dict[str, Any]
    """window, drafter, block, recycle: as for `sample`."""
    batch_pad: bool | int

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        bound = inspect.signature(self.original).bind(*args, **kwargs)
        bound.apply_defaults()
        read = _lerobot_request if _is_lerobot(self.model) else _diffusion_policy_request
        plans, report = self._draw(read(self.model, bound.arguments))
        for owner in (self.model, self.policy):
            owner.foresample_report = report
        return plans

    def _draw(self, request: Request) -> tuple[Tensor, Report | None]:
        """Plans [R, *shape] of the policy's law, in the network's dtype."""
        _require_fixed_network(request.network)
        scheduler = self.model.noise_scheduler
        scheduler.set_timesteps(self.model.num_inference_steps)
        if not (request.mask == request.mask[:1]).all():
            raise ValueError(
                "condition_mask differs between the samples of a batch; call conditional_sample once for each "
                "mask"
            )
        free = ~request.mask[0]
        if not free.any():
            return request.data.clone(), None
        target = self._target(request, free, scheduler)
        run = sample(target, seeds=_seeds(len(request.data), request.generator), **self.how)
        return _filled(request.data, free, run.samples), run.report

    def _target(self, request: Request, free: Tensor, scheduler: Any) -> ChainTarget:
        """The policy's chain on the free coordinates, [F]; float32 around a half-precision network."""
        data = request.data
        if bool(request.mask.any()) and scheduler.config.get("thresholding", False):
            raise ValueError(
                "thresholding looks at all coordinates, conditioned ones included; use a scheduler with "
                "clip_sample=True instead"
            )
        dtype = torch.promote_types(data.dtype, torch.float32)
        chain = scheduler_chain(
            scheduler,
            eta=request.step_options.get("eta", 0.0),
            use_clipped=request.step_options.get("use_clipped_model_output", False),
        ).to(data.device, dtype)
        window = self.how["window"]
        states = len(data) * (window + 1) if self.batch_pad is True else int(self.batch_pad)

        def network(x: Tensor, time: Tensor, row: Tensor) -> Tensor:
            count = len(x)
            if states:
                x, time, row = (_padded(v, states, window) for v in (x, time, row))
            seen = _filled(data[row], free, x)
            conditions = {k: v if v is None else v[row] for k, v in request.conditions.items()}
            return request.network(seen, time, **conditions)[:count, free]

        start = None if request.noise is None else request.noise[:, free].to(data.device, dtype)
        return ChainTarget(chain, torch.Size([int(free.sum())]), network, start)


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


def _refuse_early(model: Any) -> None:
    """Read the scheduler once, on a copy, so that what cannot work is refused before the first plan."""
    scheduler = copy.deepcopy(model.noise_scheduler)
    options = getattr(model, "kwargs", None) or {}
    if type(scheduler).__name__ == "DDIMScheduler" and not options.get("eta", 0.0) > 0:
        instead = (
            "set policy.diffusion.noise_scheduler = DDPMScheduler.from_config(policy.diffusion.noise_scheduler"
            ".config)"
            if _is_lerobot(model)
            else "use DDPMScheduler, or give the policy eta=1.0 for scheduler.step"
        )
        raise ValueError(
            "this policy runs DDIMScheduler with eta=0, which adds no noise, so there is nothing to speculate "
            f"on; {instead}"
        )
    scheduler.set_timesteps(model.num_inference_steps)
    scheduler_chain(scheduler, eta=options.get("eta", 0.0))


def _lerobot_request(model: Any, arguments: dict[str, Any]) -> Request:
    """LeRobot: nothing is conditioned but the network; dtype and device are those of its weights."""
    weight = next(model.parameters())
    batch, shape = arguments["batch_size"], (model.config.horizon, _action_dim(model.config))
    noise = arguments.get("noise")
    if noise is not None and noise.shape != (batch, *shape):
        raise ValueError(f"noise has shape {tuple(noise.shape)}: give one start of {shape} for each of {batch}")
    return Request(
        network=model.unet,
        conditions={"global_cond": arguments["global_cond"]},
        data=weight.new_zeros(batch, *shape),
        mask=torch.zeros(batch, *shape, dtype=torch.bool, device=weight.device),
        noise=noise,
        generator=arguments["generator"],
        step_options={},
    )


def _diffusion_policy_request(model: Any, arguments: dict[str, Any]) -> Request:
    """The diffusion_policy family: U-Nets take local_cond and global_cond, transformers take cond."""
    options = arguments.get("kwargs", {})
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
        mask=arguments["condition_mask"].bool(),
        noise=None,
        generator=arguments["generator"],
        step_options=options,
    )


def _action_dim(config: Any) -> int:
    """Size of an action in LeRobot's configuration, by its newest name or an older one."""
    feature = getattr(config, "action_feature", None)
    if feature is not None:
        return feature.shape[0]
    outputs = getattr(config, "output_features", None)
    return outputs["action"].shape[0] if outputs is not None else config.output_shapes["action"][0]


def _seeds(count: int, generator: torch.Generator | None) -> Tensor:
    """One seed a plan, from the generator that would have drawn its noise."""
    device = "cpu" if generator is None else generator.device
    return torch.randint(2**63 - 1, (count,), generator=generator, device=device)


def _filled(data: Tensor, free: Tensor, x: Tensor) -> Tensor:
    """Whole trajectories: conditioned coordinates from `data`, free ones from the states x, [B, F]."""
    whole = data.clone()
    whole[:, free] = x.to(data.dtype)
    return whole


def _padded(values: Tensor, states: int, window: int) -> Tensor:
    """The same with the last row repeated, up to `states` rows."""
    if len(values) > states:
        raise ValueError(
            f"batch_pad={states} is less than the {len(values)} states of a call; use batch_pad=True, or at "
            f"least {window + 1} for each plan of a batch"
        )
    return torch.cat([values, values[-1:].expand(states - len(values), *values.shape[1:])])


def _require_fixed_network(network: Any) -> None:
    """Refuse a network that draws or mixes rows: its transitions have no law of their own."""
    random = (torch.nn.modules.dropout._DropoutNd, torch.nn.modules.batchnorm._BatchNorm)
    modules = network.modules() if isinstance(network, torch.nn.Module) else ()
    for module in modules:
        if module.training and isinstance(module, random) and getattr(module, "p", 1) > 0:
            raise ValueError(
                f"the policy's network is in training mode and has {type(module).__name__}; call policy.eval()"
            )
