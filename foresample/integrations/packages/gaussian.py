"""denoising-diffusion-pytorch's GaussianDiffusion and its kin, drawn speculatively."""

from __future__ import annotations

import inspect
from contextlib import redirect_stderr
from dataclasses import dataclass
from functools import partial
from io import StringIO
from typing import Any

import torch
from torch import Tensor

from foresample.chains import Chain, Kind, vp
from foresample.chains.chain import Clip, Levels, denoising_chain
from foresample.chains.schedulers import LEARNED_BASE
from foresample.core.report import Commit
from foresample.integrations.explain import Rerun, Standard, require_explained
from foresample.integrations.networks import for_rows, require_fixed
from foresample.integrations.packages.stand_in import StandIn
from foresample.integrations.replaced import standing_in
from foresample.integrations.trusted import held, library_name
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
"""What the loops of denoising-diffusion-pytorch call, where a class has it."""


@dataclass(eq=False)
class GaussianLoop(StandIn):
    """Stands in for `p_sample_loop` or `ddim_sample`, with their arguments and their distribution."""

    walked: tuple | None = None
    """What the object held when its own loop was run."""
    unreported: int = 0
    """Steps that were compared, until a report says so."""

    def refuse_early(self) -> None:
        self.checked_chain()

    def checked_chain(self) -> Chain:
        """The chain of its loop as it is now; walked again where anything it holds has changed."""
        diffusion, package = self.served, "denoising_diffusion_pytorch"
        if loop_name(diffusion) != self.name:
            raise ValueError(f"{self.name} is not the loop that sample takes any more: accelerate it again")
        for name in _STEPS:
            method = self.original if name == self.name else getattr(diffusion, name, None)
            own = library_name(method, diffusion)
            if method is not None and (own is None or not own.startswith(f"{package}.")):
                raise ValueError(
                    f"{type(diffusion).__name__}.{name} is not {package}'s own function: it is overridden or patched, "
                    "and may step in another way at any sample; make a target with foresample.targets"
                )
        chain = gaussian_chain(diffusion)
        tables = tuple(tuple(table.tolist()) for _, table in diffusion.named_buffers(recurse=False))
        now = (diffusion.__class__, held(diffusion), tables)
        if now != self.walked:
            self._require_its_steps(chain)
            self.walked, self.unreported = now, len(chain.std)
        return chain

    def _require_its_steps(self, chain: Chain) -> None:
        """Run its own loop once, with a stand-in for its network, and compare every step with the chain's."""
        diffusion, name = self.served, type(self.served).__name__
        parameters = inspect.signature(diffusion.sample).parameters.values()
        needed = [p.name for p in parameters if p.default is p.empty]
        if needed:
            raise ValueError(f"{name}.sample needs {', '.join(needed)}: make a target with foresample.targets")

        def run(generator: torch.Generator) -> Any:
            own = standing_in(diffusion, self.name, self.original)
            with own, redirect_stderr(StringIO()):  # its progress bar
                return diffusion.sample(batch_size=1)

        sentence = (
            f"{name} has steps of its own, which are not DDPM's or DDIM's with x0 clipped to ±1; make a target with "
            "foresample.targets"
        )
        standard = Standard(sentence, rounding={}, coarse=1e-3, scale=lambda x: 1 + x.abs())
        instead = partial(standing_in, diffusion, "model")
        require_explained(Rerun(standard, run, instead, diffusion.betas.device), chain)

    @torch.inference_mode()
    def __call__(self, *args: Any, **kwargs: Any) -> Tensor | tuple[Tensor, Tensor]:
        bound = self.arguments(*args, **kwargs)
        diffusion, asked = self.served, bound.arguments
        shape, every = asked["shape"], asked.get("return_all_timesteps", False)
        known = {"shape", "return_all_timesteps", "return_noise", "model_forward_kwargs"}
        others = [p for p in bound.signature.parameters.values() if p.name not in known]
        unknown = [p.name for p in others if asked[p.name] is not p.default]
        if unknown:
            raise ValueError(f"an accelerated loop cannot take {', '.join(unknown)}: restore it first")
        require_fixed(diffusion.model)
        start = torch.randn(shape, device=diffusion.betas.device)
        target = gaussian_target(diffusion, self.checked_chain(), start, asked.get("model_forward_kwargs", {}))
        states = start.new_empty(shape[0], len(target.std) + 1, *shape[1:]) if every else None
        if states is not None:
            states[:, 0] = start
        trusted = [f"denoising-diffusion-pytorch's own {self.name}"]
        run = self.draw(target, shape[0], trusted, None if states is None else partial(_keep, states))
        run.report.evidence.steps_replayed, self.unreported = self.unreported, 0
        samples = diffusion.unnormalize(run.samples if states is None else states)
        return (samples, start) if asked.get("return_noise", False) else samples


def _keep(states: Tensor, commit: Commit) -> None:
    """All states of a run as they are committed, [R, N + 1, *shape]."""
    for r, (image, first, count) in enumerate(
        zip(commit.sample.tolist(), commit.step.tolist(), commit.committed.tolist(), strict=True)
    ):
        states[image, first + 1 : first + 1 + count] = commit.states[r, :count]


def is_gaussian_diffusion(served: Any) -> bool:
    """Whether this has what denoising-diffusion-pytorch samples with."""
    names = ("p_sample_loop", "p_mean_variance", "posterior_mean_coef1", "alphas_cumprod", "objective", "model")
    return all(hasattr(served, name) for name in names)


def loop_name(diffusion: Any) -> str:
    """The loop that `sample` takes."""
    return "ddim_sample" if diffusion.is_ddim_sampling else "p_sample_loop"


def gaussian_target(
    diffusion: Any, chain: Chain, start: Tensor, conditions: dict[str, Any] | None = None
) -> ChainTarget:
    """Its network and the chain of its loop."""
    network, given = diffusion.model, conditions or {}

    def denoiser(x: Tensor, time: Tensor, row: Tensor) -> Tensor:
        return network(x, time, **for_rows(given, row, len(start)))

    return from_chain(denoiser, chain, start.shape[1:], start=start, device=start.device)


def gaussian_chain(diffusion: Any) -> Chain:
    """The chain of its loop, read off its buffers."""
    if getattr(diffusion, "self_condition", False):
        raise ValueError(
            "self-conditioning hands the last estimate to the network, so that states alone make no chain; train with "
            "self_condition=False"
        )
    predicts = _OBJECTIVES[diffusion.objective]
    if diffusion.is_ddim_sampling:
        return _ddim(diffusion, predicts)

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


def _ddim(diffusion: Any, predicts: Kind) -> Chain:
    if not diffusion.ddim_sampling_eta > 0:
        raise ValueError(
            "DDIM with ddim_sampling_eta=0 adds no noise, so there is nothing to speculate on; use all timesteps "
            "(sampling_timesteps=None) or ddim_sampling_eta=1.0"
        )
    if _learns_variance(diffusion):
        raise ValueError("DDIM makes no use of a learned variance; use all timesteps (sampling_timesteps=None)")
    steps, total = diffusion.sampling_timesteps, diffusion.num_timesteps
    time = torch.linspace(-1, total - 1, steps=steps + 1).int().long().flip(0)
    table = diffusion.alphas_cumprod.double().cpu()
    here = table[time[:-1]]
    there = torch.where(time[1:] >= 0, table[time[1:].clamp(min=0)], 1.0)
    towards, x0_weight, std = vp.transition(here, there, diffusion.ddim_sampling_eta)
    return denoising_chain(
        vp.levels(here),
        state_weight=towards,
        x0_weight=x0_weight,
        std=std,
        predicts=predicts,
        reuse="x0",
        time=time[:-1],
        limit=Clip(1.0),
    )


def _learns_variance(diffusion: Any) -> bool:
    model = diffusion.model
    return getattr(model, "out_dim", None) == 2 * getattr(model, "channels", 0)
