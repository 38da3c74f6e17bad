"""Stand-ins for robot policies of both families, small enough to draw thousands of plans.

They have the attributes and the arguments of LeRobot's `DiffusionModel` (`recipes.lasa` has it, the trained policy
being one) and of diffusion_policy's `DiffusionUnetLowdimPolicy`, with a real DDPMScheduler.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import diffusers
import torch
from torch import Tensor, nn

from foresample.checks.kolmogorov import ks_two_sample
from recipes import lasa

SCHEDULE = {"num_train_timesteps": 20, "beta_schedule": "squaredcos_cap_v2"}


class Small(nn.Module):
    """A bent map of plan, time and conditions, with the network arguments of both families."""

    def __init__(self, horizon: int, width: int, condition: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        size = horizon * width
        self.inner = nn.Parameter(torch.randn(size + 1 + condition, 24, generator=generator) / size**0.5)
        self.outer = nn.Parameter(torch.randn(24, size, generator=generator) / 24**0.5)
        self.shapes: list[tuple[int, ...]] = []

    def forward(
        self,
        sample: Tensor,
        timestep: Tensor,
        local_cond: Tensor | None = None,
        global_cond: Tensor | None = None,
    ) -> Tensor:
        self.shapes.append(tuple(sample.shape))
        time = timestep.expand(len(sample)).to(sample.dtype).unsqueeze(1) / 20
        conditions = [c.flatten(1) for c in (local_cond, global_cond) if c is not None]
        features = torch.cat([sample.flatten(1), time, *conditions], 1)
        # Sums, not matrix products: the same bits for a row whatever batch it is in.
        hidden = torch.tanh((features.unsqueeze(2) * self.inner).sum(1))
        bent = (hidden.unsqueeze(2) * self.outer).sum(1).view_as(sample)
        return 0.6 * sample + 0.8 * bent


class LowdimPolicy(nn.Module):
    """diffusion_policy's low-dimensional U-Net policy: attributes, arguments and inpainting."""

    def __init__(self, scheduler: Any, horizon: int = 4, width: int = 3, condition: int = 2, **kwargs: Any):
        super().__init__()
        self.model = Small(horizon, width, condition)
        self.noise_scheduler = scheduler
        self.num_inference_steps = scheduler.config.num_train_timesteps
        self.kwargs = kwargs

    def conditional_sample(
        self,
        condition_data: Tensor,
        condition_mask: Tensor,
        local_cond: Tensor | None = None,
        global_cond: Tensor | None = None,
        generator: torch.Generator | None = None,
        **kwargs: Any,
    ) -> Tensor:
        shape, dtype = condition_data.shape, condition_data.dtype
        plan = torch.randn(shape, dtype=dtype, device=condition_data.device, generator=generator)
        self.noise_scheduler.set_timesteps(self.num_inference_steps)
        for t in self.noise_scheduler.timesteps:
            plan[condition_mask] = condition_data[condition_mask]
            output = self.model(plan, t, local_cond=local_cond, global_cond=global_cond)
            plan = self.noise_scheduler.step(output, t, plan, generator=generator, **kwargs).prev_sample
        plan[condition_mask] = condition_data[condition_mask]
        return plan

    def predict_action(self, observation: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Inpainting: the first two points of the last coordinate are observed, [B, 2]."""
        data, mask = observed(observation)
        condition = observation + 0.5
        with torch.no_grad():
            return self.conditional_sample(
                data, mask, global_cond=condition, generator=generator, **self.kwargs
            )


def observed(observation: Tensor) -> tuple[Tensor, Tensor]:
    data = torch.zeros(len(observation), 4, 3, dtype=observation.dtype)
    mask = torch.zeros(data.shape, dtype=torch.bool)
    data[:, :2, 2], mask[:, :2, 2] = observation, True
    return data, mask


def lowdim(scheduler: str = "DDPMScheduler", **kwargs: Any) -> LowdimPolicy:
    return LowdimPolicy(getattr(diffusers, scheduler)(**SCHEDULE), **kwargs).eval()


def lerobot() -> SimpleNamespace:
    """A policy whose `diffusion` has LeRobot's names, around the small network."""
    config = lasa.PolicyConfig(horizon=4, num_train_timesteps=20, shapes=("one",))
    return SimpleNamespace(diffusion=lasa.DiffusionModel(config, Small(4, 2, 3)).eval())


def plan_lerobot(policy: Any, count: int, generator: torch.Generator | None = None) -> Tensor:
    condition = torch.tensor([[0.3, -0.5, 1.0]]).expand(count, 3)
    with torch.no_grad():
        return policy.diffusion.conditional_sample(count, global_cond=condition, generator=generator)


def plan_lowdim(policy: Any, count: int, generator: torch.Generator | None = None) -> Tensor:
    return policy.predict_action(torch.tensor([[0.4, -0.8]]).expand(count, 2), generator)


FAMILIES: dict[str, tuple[Callable[[], Any], Callable[..., Tensor]]] = {
    "lerobot": (lerobot, plan_lerobot),
    "diffusion_policy": (lowdim, plan_lowdim),
}


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def law_tests(one: Tensor, two: Tensor) -> list[float]:
    """P-values of two-sample tests: every coordinate, random projections, products, the norm."""
    one, two = one.flatten(1).double(), two.flatten(1).double()
    directions = torch.randn(one.shape[1], 8, dtype=torch.float64, generator=seeded(7))
    views = [
        lambda x: x,
        lambda x: x @ directions,
        lambda x: (x @ directions)[:, :4] * (x @ directions)[:, 4:],
        lambda x: x.norm(dim=1, keepdim=True),
    ]
    pairs = [(a, b) for view in views for a, b in zip(view(one).T, view(two).T, strict=True) if a.std() > 0]
    return [ks_two_sample(a.numpy(), b.numpy()) for a, b in pairs]
