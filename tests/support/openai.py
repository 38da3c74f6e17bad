"""A stand-in for OpenAI's diffusion class, and copies of the class itself where their paths are given.

The class is in no registry: guided-diffusion, improved-diffusion, DiT, MDM and many other repositories hold a copy of
`gaussian_diffusion.py` and `respace.py`. The stand-in is written from their interface (names, arguments, formulas);
`python -m tests.openai CHECKOUT…` runs the same tests against real copies.
"""

from __future__ import annotations

import importlib
import os
import sys
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum, auto
from inspect import signature
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from tests.support.packages import Placeholder

CHECKOUT = "FORESAMPLE_OPENAI"
"""The environment variable with the path of a checkout that holds a copy of the class."""


class ModelMeanType(Enum):
    """The quantity that the network returns."""

    PREVIOUS_X = auto()
    START_X = auto()
    EPSILON = auto()


class ModelVarType(Enum):
    """The kinds of variance."""

    LEARNED = auto()
    FIXED_SMALL = auto()
    FIXED_LARGE = auto()
    LEARNED_RANGE = auto()


class LossType(Enum):
    """The loss of training, which nothing here uses."""

    MSE = auto()


class GaussianDiffusion:
    """DDPM with tables in numpy; the network is an argument of every function."""

    def __init__(
        self, *, betas: Any, model_mean_type: Any, model_var_type: Any, loss_type: Any, rescale_timesteps: bool
    ) -> None:
        self.model_mean_type, self.model_var_type, self.loss_type = model_mean_type, model_var_type, loss_type
        self.rescale_timesteps = rescale_timesteps
        self.betas = np.asarray(betas, np.float64)
        self.num_timesteps = len(self.betas)
        here = self.alphas_cumprod = (1 - self.betas).cumprod()
        there = self.alphas_cumprod_prev = np.concatenate([[1.0], here[:-1]])
        self.sqrt_alphas_cumprod, self.sqrt_one_minus_alphas_cumprod = np.sqrt(here), np.sqrt(1 - here)
        self.sqrt_recip_alphas_cumprod, self.sqrt_recipm1_alphas_cumprod = here**-0.5, np.sqrt(1 / here - 1)
        self.posterior_variance = self.betas * (1 - there) / (1 - here)
        clipped = np.concatenate([self.posterior_variance[1:2], self.posterior_variance[1:]])
        self.posterior_log_variance_clipped = np.log(clipped)
        self.posterior_mean_coef1 = self.betas * np.sqrt(there) / (1 - here)
        self.posterior_mean_coef2 = (1 - there) * np.sqrt(1 - self.betas) / (1 - here)

    def q_posterior_mean_variance(self, x_start: Tensor, x_t: Tensor, t: Tensor) -> tuple[Tensor, ...]:
        """Mean, variance and log variance of x_{t−1}, given x_0 and x_t."""
        one, two = (_at(v, t, x_t) for v in (self.posterior_mean_coef1, self.posterior_mean_coef2))
        tables = self.posterior_variance, self.posterior_log_variance_clipped
        return (one * x_start + two * x_t, *(_at(v, t, x_t) for v in tables))

    def _scale_timesteps(self, t: Tensor) -> Tensor:
        return t.float() * (1000.0 / self.num_timesteps) if self.rescale_timesteps else t

    def p_mean_variance(
        self, model: Any, x: Tensor, t: Tensor, clip_denoised: bool = True, denoised_fn: Any = None,
        model_kwargs: Any = None,
    ) -> dict[str, Tensor]:  # fmt: skip
        """Mean and variance of a step, and the estimate of x_0."""
        output = model(x, self._scale_timesteps(t), **(model_kwargs or {}))
        kind = self.model_var_type.name
        if kind.startswith("LEARNED"):
            output, log_variance = output.split(x.shape[1], dim=1)
            if kind == "LEARNED_RANGE":
                low, high = _at(self.posterior_log_variance_clipped, t, x), _at(np.log(self.betas), t, x)
                log_variance = low + (log_variance + 1) / 2 * (high - low)
        elif kind == "FIXED_LARGE":
            large = np.concatenate([self.posterior_variance[1:2], self.betas[1:]])
            log_variance = _at(np.log(large), t, x).expand_as(x)
        else:
            log_variance = _at(self.posterior_log_variance_clipped, t, x).expand_as(x)
        x0 = output
        if self.model_mean_type.name == "EPSILON":
            x0 = (
                _at(self.sqrt_recip_alphas_cumprod, t, x) * x
                - _at(self.sqrt_recipm1_alphas_cumprod, t, x) * output
            )
        if self.model_mean_type.name == "PREVIOUS_X":
            x0 = (output - _at(self.posterior_mean_coef2, t, x) * x) / _at(self.posterior_mean_coef1, t, x)
        x0 = x0 if denoised_fn is None else denoised_fn(x0)
        x0 = x0.clamp(-1, 1) if clip_denoised else x0
        mean = self.q_posterior_mean_variance(x_start=x0, x_t=x, t=t)[0]
        mean = output if self.model_mean_type.name == "PREVIOUS_X" else mean
        return {"mean": mean, "variance": log_variance.exp(), "log_variance": log_variance, "pred_xstart": x0}

    def condition_mean(
        self, cond_fn: Any, p_mean_var: dict[str, Tensor], x: Tensor, t: Tensor, model_kwargs: Any = None
    ) -> Tensor:
        """The mean moved by a gradient."""
        gradient = cond_fn(x, self._scale_timesteps(t), **model_kwargs)
        return p_mean_var["mean"].float() + p_mean_var["variance"] * gradient.float()

    def p_sample(
        self, model: Any, x: Tensor, t: Tensor, clip_denoised: bool = True, denoised_fn: Any = None,
        cond_fn: Any = None, model_kwargs: Any = None, const_noise: bool = False,
    ) -> dict[str, Tensor]:  # fmt: skip
        """One step."""
        options = {"clip_denoised": clip_denoised, "denoised_fn": denoised_fn, "model_kwargs": model_kwargs}
        found = self.p_mean_variance(model, x, t, **options)
        noise = torch.randn_like(x)
        if const_noise:
            noise = noise[:1].expand_as(noise)
        if cond_fn is not None:
            found["mean"] = self.condition_mean(cond_fn, found, x, t, model_kwargs=model_kwargs)
        std = torch.exp(0.5 * found["log_variance"]) * (t != 0).view(-1, *(1,) * (x.ndim - 1))
        return {"sample": found["mean"] + std * noise, "pred_xstart": found["pred_xstart"]}

    def p_sample_loop(
        self, model: Any, shape: Any, noise: Any = None, clip_denoised: bool = True, denoised_fn: Any = None,
        cond_fn: Any = None, model_kwargs: Any = None, device: Any = None, progress: bool = False,
        skip_timesteps: int = 0, dump_steps: Any = None, const_noise: bool = False,
    ) -> Any:  # fmt: skip
        """The last state, or those of `dump_steps`."""
        options = {k: v for k, v in locals().items() if k not in ("self", "model", "shape", "dump_steps")}
        dumped, last = [], None
        for i, last in enumerate(self.p_sample_loop_progressive(model, shape, **options)):
            if dump_steps is not None and i in dump_steps:
                dumped.append(last["sample"].clone())
        assert last is not None
        return last["sample"] if dump_steps is None else dumped

    def p_sample_loop_progressive(
        self, model: Any, shape: Any, noise: Any = None, clip_denoised: bool = True, denoised_fn: Any = None,
        cond_fn: Any = None, model_kwargs: Any = None, device: Any = None, progress: bool = False,
        skip_timesteps: int = 0, const_noise: bool = False,
    ) -> Iterator[dict[str, Tensor]]:  # fmt: skip
        """Every step."""
        options = {"clip_denoised": clip_denoised, "denoised_fn": denoised_fn, "cond_fn": cond_fn}
        options |= {"model_kwargs": model_kwargs, "const_noise": const_noise}
        device = next(model.parameters()).device if device is None else device
        x = torch.randn(*shape, device=device) if noise is None else noise
        for i in reversed(range(self.num_timesteps - skip_timesteps)):
            with torch.no_grad():
                found = self.p_sample(model, x, torch.full((shape[0],), i, device=device), **options)
                yield found
                x = found["sample"]


class SpacedDiffusion(GaussianDiffusion):
    """The same on some of the timesteps; the network is given the original ones."""

    def __init__(self, use_timesteps: Any, **given: Any) -> None:
        kept = sorted(use_timesteps)
        levels = (1 - np.asarray(given["betas"], np.float64)).cumprod()
        before = np.concatenate([[1.0], levels[kept][:-1]])
        self.use_timesteps, self.timestep_map = set(use_timesteps), kept
        self.original_num_steps = len(levels)
        super().__init__(**given | {"betas": 1 - levels[kept] / before})

    def _scale_timesteps(self, t: Tensor) -> Tensor:
        return t

    def _with_original_times(self, function: Any) -> Any:
        def original(x: Tensor, t: Tensor, **given: Any) -> Any:
            t = torch.tensor(self.timestep_map, device=t.device)[t]
            return function(
                x, t.float() * (1000.0 / self.original_num_steps) if self.rescale_timesteps else t, **given
            )

        return original

    def p_mean_variance(self, model: Any, *args: Any, **options: Any) -> dict[str, Tensor]:
        return super().p_mean_variance(self._with_original_times(model), *args, **options)

    def condition_mean(self, cond_fn: Any, *args: Any, **options: Any) -> Tensor:
        return super().condition_mean(self._with_original_times(cond_fn), *args, **options)


def _at(table: Any, t: Tensor, like: Tensor) -> Tensor:
    return torch.from_numpy(table).to(t.device)[t].float().view(-1, *(1,) * (like.ndim - 1))


# ------------------------------------------------------------------ copies, and a network for them


@dataclass(frozen=True)
class Copy:
    """One copy of the class."""

    name: str
    plain: Any
    """The module with GaussianDiffusion."""
    spaced: Any
    """The module with SpacedDiffusion."""

    def __str__(self) -> str:
        return self.name

    def takes(self, argument: str) -> bool:
        """True if p_sample_loop has this argument."""
        return argument in signature(self.plain.GaussianDiffusion.p_sample_loop).parameters

    def make(
        self, predicts: str = "EPSILON", variance: str = "FIXED_SMALL", steps: int = 60, keep: Any = None,
        rescale: bool = False, kind: Any = None,
    ) -> Any:  # fmt: skip
        """A diffusion of `steps` steps, or of those to keep."""
        plain = self.plain
        rescaled = "rescale_timesteps" in signature(plain.GaussianDiffusion.__init__).parameters
        given = {
            "betas": np.linspace(0.1 / steps, 20 / steps, steps),
            "model_mean_type": plain.ModelMeanType[predicts],
            "model_var_type": plain.ModelVarType[variance],
            "loss_type": plain.LossType.MSE,
        } | ({"rescale_timesteps": rescale} if rescaled else {})
        if keep is None:
            return (kind or plain.GaussianDiffusion)(**given)
        return (kind or self.spaced.SpacedDiffusion)(use_timesteps=keep, **given)


class Net(nn.Module):
    """A network that estimates softly, given the original timesteps; `shift` moves a sample's estimate."""

    def __init__(self, diffusion: Any) -> None:
        super().__init__()
        self.held = nn.Parameter(torch.zeros(1))
        self.predicts, self.variance = diffusion.model_mean_type.name, diffusion.model_var_type.name
        self.steps = getattr(diffusion, "original_num_steps", diffusion.num_timesteps)
        self.rescaled = getattr(diffusion, "rescale_timesteps", False)
        kept = getattr(diffusion, "timestep_map", range(self.steps))
        self.place = {step: i for i, step in enumerate(kept)}
        tables = "alphas_cumprod", "posterior_mean_coef1", "posterior_mean_coef2"
        self.tables = [torch.from_numpy(getattr(diffusion, name)).float() for name in tables]
        self.calls = 0

    def forward(self, x: Tensor, t: Tensor, y: dict[str, Any] | None = None) -> Tensor:
        self.calls += 1
        original = (t * (self.steps / 1000.0)).round().long() if self.rescaled else t
        index = torch.tensor([self.place[i] for i in original.tolist()], dtype=torch.long)
        level, one, two = (table[index].view(-1, *(1,) * (x.ndim - 1)) for table in self.tables)
        alpha, sigma = level.sqrt(), (1 - level).sqrt()
        x0 = 0.5 * torch.tanh(alpha * x / (sigma**2 + 0.5)) + (y or {}).get("shift", 0.0)
        output = {"START_X": x0, "EPSILON": (x - alpha * x0) / sigma, "PREVIOUS_X": one * x0 + two * x}[
            self.predicts
        ]
        return torch.cat([output, 0.9 * torch.sin(3 * x)], 1) if self.variance == "LEARNED_RANGE" else output


class Guided(Net):
    """A network with guidance as DiT's: the first channel is guided, and the second half's states are ignored."""

    def forward_with_cfg(self, x: Tensor, t: Tensor, y: dict[str, Any], cfg_scale: float) -> Tensor:
        half = x[: len(x) // 2]
        output = self(torch.cat([half, half]), t, y)
        value, rest = output[:, :1], output[:, 1:]
        given, without = value.chunk(2)
        value = without + cfg_scale * (given - without)
        return torch.cat([torch.cat([value, value]), rest], 1)


def copies() -> list[Copy]:
    """The copy in the checkout that the environment variable names, or else the stand-in."""
    checkout, here = os.environ.get(CHECKOUT), sys.modules[__name__]
    return [_found(Path(checkout)) if checkout else Copy("stand-in", here, here)]


def _found(checkout: Path) -> Copy:
    """The copy in a checkout, imported from its own files."""
    place = min(checkout.rglob("gaussian_diffusion.py"), key=lambda path: len(path.parts)).parent
    motion = "data_loaders.humanml.scripts"
    sys.modules.update({name: Placeholder(name) for name in (motion, f"{motion}.motion_process")})  # MDM's
    sys.path.insert(0, str(place.parent))
    with warnings.catch_warnings(action="ignore"):  # of what their modules import besides
        plain, spaced = (
            importlib.import_module(f"{place.name}.{name}") for name in ("gaussian_diffusion", "respace")
        )
    return Copy(checkout.name, plain, spaced)
