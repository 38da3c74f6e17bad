"""denoising-diffusion-pytorch's GaussianDiffusion and its relatives, drawn speculatively."""

from __future__ import annotations

import inspect
from contextlib import AbstractContextManager, redirect_stderr
from functools import partial
from io import StringIO
from typing import Any

import torch
from torch import Tensor, nn

from foresample.chains import Chain, Kind, vp
from foresample.chains.chain import Clip, Levels, denoising_chain
from foresample.chains.schedulers import LEARNED_BASE
from foresample.core.report import Commit
from foresample.integrations.networks import for_rows
from foresample.integrations.packages.loop import Drawing, PackageLoop
from foresample.integrations.replaced import standing_in
from foresample.integrations.trusted import held
from foresample.targets import ChainTarget, from_chain

_OBJECTIVES: dict[str, Kind] = {"pred_noise": "eps", "pred_x0": "x0", "pred_v": "v"}
_STEPS = (
    "p_sample_loop",
    "ddim_sample",
    "p_sample",
    "p_mean_variance",
    "model_predictions",
    "q_posterior",
    "predict_start_from_noise",
    "predict_noise_from_start",
    "predict_start_from_v",
)
"""Methods that the loops of denoising-diffusion-pytorch call, if a class has them."""


_GUIDANCE = "classes", "cond_scale", "rescaled_phi"
"""Arguments of the loops with classifier-free guidance."""


class GaussianLoop(PackageLoop):
    """Stands in for `p_sample_loop` or `ddim_sample`, whichever `sample` takes."""

    package, kind, replaces = (
        "denoising-diffusion-pytorch",
        "GaussianDiffusion",
        ("p_sample_loop", "ddim_sample"),
    )
    attributes = (
        "p_sample_loop",
        "p_mean_variance",
        "posterior_mean_coef1",
        "alphas_cumprod",
        "objective",
        "model",
    )
    owners, steps = ("denoising_diffusion_pytorch",), _STEPS
    rederives = True
    """Whether DDIM takes its direction from the clipped estimate, not from the noise that the network predicts."""

    @classmethod
    def functions(cls, served: Any) -> tuple[str, ...]:
        return tuple(name for name in super().functions(served) if name == _loop_name(served))

    def refuse(self) -> None:
        self.checked_chain()

    def checked_chain(self) -> Chain:
        """The chain of the loop with its present values; the loop is run again if any of them changed."""
        diffusion, name = self.served, type(self.served).__name__
        if _loop_name(diffusion) != self.name:
            raise ValueError(
                f"{self.name} is no longer the loop that sample takes: call foresample.accelerate again"
            )
        parameters = inspect.signature(diffusion.sample).parameters
        if "mask" in parameters:
            raise ValueError(
                f"{name}.sample is RePaint's, which goes back and forth between noise levels: use GaussianDiffusion of "
                "denoising_diffusion_pytorch where there is nothing to paint in"
            )
        needed = [p.name for p in parameters.values() if p.default is p.empty and p.name != "classes"]
        if needed:
            raise ValueError(f"{name}.sample needs {', '.join(needed)}: make a target with foresample.targets")
        one = {"classes": torch.zeros(1, dtype=torch.long)} if "classes" in parameters else {"batch_size": 1}

        def run(generator: torch.Generator) -> Any:
            own = standing_in(diffusion, self.name, self.original)
            with own, redirect_stderr(StringIO()):  # its progress bar
                return diffusion.sample(**one)

        def instead(network: nn.Module) -> AbstractContextManager[Any]:
            other = _Guided(network) if "classes" in parameters else network
            return standing_in(diffusion, "model", other)

        def compared() -> Chain:
            chain = gaussian_chain(diffusion, self.rederives)
            self.compare(chain, (now, self.rederives), run, instead, diffusion.betas.device)
            return chain

        tables = tuple(tuple(table.tolist()) for _, table in diffusion.named_buffers(recurse=False))
        now = (diffusion.__class__, held(diffusion), tables)
        try:
            return compared()
        except ValueError:
            if not diffusion.is_ddim_sampling or diffusion.objective != "pred_noise":
                raise
        self.rederives = not self.rederives  # the classes differ, and so do the package's versions
        return compared()

    def drawing(self, asked: dict[str, Any]) -> Drawing:
        self.refuse_others(
            asked, "shape", "return_all_timesteps", "return_noise", "model_forward_kwargs", *_GUIDANCE
        )
        diffusion, shape = self.served, asked["shape"]
        chain, start = self.checked_chain(), torch.randn(shape, device=self.served.betas.device)
        given = asked.get("model_forward_kwargs", {}) | {n: asked[n] for n in _GUIDANCE if n in asked}
        target = gaussian_target(diffusion, chain, start, given)
        states = None
        if asked.get("return_all_timesteps", False):
            states = start.new_empty(shape[0], len(target.std) + 1, *shape[1:])
            states[:, 0] = start

        def result(samples: Tensor) -> Any:
            samples = samples if states is None else states
            samples = getattr(diffusion, "unnormalize", as_picture)(
                samples
            )  # with guidance, always unnormalised
            return (samples, start) if asked.get("return_noise", False) else samples

        observe = None if states is None else partial(keep_states, states)
        return Drawing(target, shape[0], diffusion.model, result, observe=observe)


def as_picture(samples: Tensor) -> Tensor:
    """From ±1 to 0 … 1."""
    return (samples + 1) * 0.5


class _Guided(nn.Module):
    """A made-up network with guidance; its output without classes differs."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward_with_cond_scale(
        self, x: Tensor, time: Tensor, *conditions: Any, **options: Any
    ) -> tuple[Tensor, Tensor]:
        output = self.network(x, time)
        return output, 0.5 * output


def keep_states(states: Tensor, commit: Commit) -> None:
    """Keep all states of a run, [R, N + 1, *shape], as they are committed."""
    for r, (image, first, count) in enumerate(
        zip(commit.sample.tolist(), commit.step.tolist(), commit.committed.tolist(), strict=True)
    ):
        states[image, first + 1 : first + 1 + count] = commit.states[r, :count]


def _loop_name(diffusion: Any) -> str:
    """The loop that `sample` takes."""
    return "ddim_sample" if diffusion.is_ddim_sampling else "p_sample_loop"


def gaussian_target(
    diffusion: Any, chain: Chain, start: Tensor, conditions: dict[str, Any] | None = None
) -> ChainTarget:
    """Its network and the chain of its loop."""
    given = conditions or {}
    network = diffusion.model.forward_with_cond_scale if "classes" in given else diffusion.model

    def denoiser(x: Tensor, time: Tensor, row: Tensor) -> Tensor:
        output = network(x, time, **for_rows(given, row, len(start)))
        return (
            output[0] if isinstance(output, tuple) else output
        )  # with guidance also the output without classes

    dtype = torch.promote_types(start.dtype, torch.float32)
    return from_chain(denoiser, chain, start.shape[1:], start=start, dtype=dtype, device=start.device)


def gaussian_chain(diffusion: Any, rederives: bool = True) -> Chain:
    """The chain of its loop, read off its buffers; for `rederives` see `GaussianLoop`."""
    if getattr(diffusion, "self_condition", False):
        raise ValueError(
            "self-conditioning passes the last estimate to the network, so its states are not a chain; train with "
            "self_condition=False"
        )
    predicts = _OBJECTIVES[diffusion.objective]
    if diffusion.is_ddim_sampling:
        return _ddim(diffusion, predicts, rederives)

    def table(name: str) -> Tensor:
        return getattr(diffusion, name).double().cpu().flip(0)

    time = torch.arange(diffusion.num_timesteps).flip(0)
    chain = denoising_chain(
        Levels(table("sqrt_alphas_cumprod"), table("sqrt_one_minus_alphas_cumprod")),
        state_weight=table("posterior_mean_coef2"),
        x0_weight=table("posterior_mean_coef1"),
        std=torch.where(time > 0, (0.5 * table("posterior_log_variance_clipped")).exp(), 0.0),
        predicts=predicts,
        reuse="x0",
        time=time,
        limit=Clip(1.0),
    )
    if _learns_variance(diffusion):
        return vp.learned_range(chain, table("betas"), LEARNED_BASE)
    return chain


def _ddim(diffusion: Any, predicts: Kind, rederives: bool) -> Chain:
    if not diffusion.ddim_sampling_eta > 0:
        raise ValueError(
            "DDIM with ddim_sampling_eta=0 adds no noise, so there is nothing to speculate on; use all timesteps "
            "(sampling_timesteps=None) or ddim_sampling_eta=1.0"
        )
    if _learns_variance(diffusion):
        raise ValueError("DDIM makes no use of a learned variance; use all timesteps (sampling_timesteps=None)")
    if getattr(diffusion, "use_cfg_plus_plus", False):
        raise ValueError(
            "DDIM with use_cfg_plus_plus=True takes its direction from the output without classes, a second output for "
            "which there is no chain here; use all timesteps (sampling_timesteps=None) or use_cfg_plus_plus=False"
        )
    steps, total = diffusion.sampling_timesteps, diffusion.num_timesteps
    time = torch.linspace(-1, total - 1, steps=steps + 1).int().long().flip(0)
    table = diffusion.alphas_cumprod.double().cpu()
    here = table[time[:-1]]
    there = torch.where(time[1:] >= 0, table[time[1:].clamp(min=0)], 1.0)
    towards, x0_weight, std = vp.transition(here, there, diffusion.ddim_sampling_eta)
    # The direction, towards·(x − √ᾱ x0), is that of the predicted noise before x0 is clipped, unless it is rederived.
    apart = predicts == "eps" and not rederives
    return denoising_chain(
        vp.levels(here),
        state_weight=towards,
        x0_weight=there.sqrt() if apart else x0_weight,
        unlimited_weight=-towards * here.sqrt() if apart else None,
        std=std,
        predicts=predicts,
        reuse="x0",
        time=time[:-1],
        limit=Clip(1.0),
    )


def _learns_variance(diffusion: Any) -> bool:
    model = diffusion.model
    return getattr(model, "out_dim", None) == 2 * getattr(model, "channels", 0)
