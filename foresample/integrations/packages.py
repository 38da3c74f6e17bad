"""Packages with a sampling loop of their own, drawn speculatively: denoising-diffusion-pytorch, MONAI, boltz.

    denoising-diffusion-pytorch   GaussianDiffusion, its 1-D twin and the one with learned variances: sample()
    MONAI                         DiffusionInferer.sample() with a DDPMScheduler
    boltz                         AtomDiffusion.sample() of either version, without steering

`accelerate` puts another loop in the place of theirs, on that one instance. Nothing is imported from any: an object
is known by the attributes it walks with. At every sample its loop, and each function of it that the loop calls, must be
the package's own, neither overridden nor patched, and everything the loop reads is read again. GaussianDiffusion's own
loop is also walked, with a stand-in for its network, and compared with the chain read off it: at first, and again
whenever the object holds other numbers.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import redirect_stderr
from dataclasses import dataclass
from functools import partial
from io import StringIO
from typing import Any

import torch
from torch import Tensor, nn

from foresample.chains import Chain, Kind, vp
from foresample.chains.chain import Clip, Levels, denoising_chain
from foresample.chains.schedulers import LEARNED_BASE
from foresample.contracts import Drafter, require_drafter
from foresample.core.report import Commit
from foresample.engine import sample
from foresample.integrations.networks import for_rows, require_fixed
from foresample.integrations.replaced import REPORT, Replaced
from foresample.integrations.trusted import foreign_part, held, library_name, require_current
from foresample.targets import ChainTarget, from_chain, structures

_OBJECTIVES: dict[str, Kind] = {"pred_noise": "eps", "pred_x0": "x0", "pred_v": "v"}
_MONAI_KINDS: dict[str, Kind] = {"epsilon": "eps", "sample": "x0", "v_prediction": "v"}
_GAUSSIAN_STEPS = (
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
_INFERER = ("monai.inferers.inferer.DiffusionInferer.sample",)
_ATOM_DIFFUSION = tuple(f"boltz.model.modules.{m}.AtomDiffusion.sample" for m in ("diffusion", "diffusionv2"))
_AGREES = 1e-3  # of its size, between a package's mean and the chain's


def is_package(served: Any) -> bool:
    """Whether this is an object of a package known here."""
    return _is_gaussian_diffusion(served) or _is_inferer(served) or _is_atom_diffusion(served)


def accelerate_package(
    served: Any, window: int, drafter: Drafter | None, block: int | None, recycle: bool, look: bool
) -> AcceleratedPackage:
    """See `foresample.accelerate`."""
    if drafter is not None:
        require_drafter(drafter)
    restore_package(served)
    how = {"window": window, "drafter": drafter, "block": block, "recycle": recycle, "look": look}
    replaced = Replaced()
    if _is_inferer(served):
        _require_own(served, "sample", served.sample, _INFERER)
        _monai_chain(served.scheduler)  # refuses what cannot work before anything is drawn
        replaced.put(served, "sample", InfererSample(served, served.sample, how, replaced))
    elif _is_atom_diffusion(served):
        _require_own(served, "sample", served.sample, _ATOM_DIFFUSION)
        replaced.put(served, "sample", AtomSample(served, served.sample, how, replaced))
    else:
        name = _loop_name(served)
        loop = GaussianLoop(served, name, getattr(served, name), how, replaced)
        loop.checked_chain()
        replaced.put(served, name, loop)
    return AcceleratedPackage(served)


def restore_package(served: Any) -> None:
    """Give it its own loop back."""
    for name in ("sample", "p_sample_loop", "ddim_sample"):
        ours = vars(served).get(name)
        if isinstance(ours, (GaussianLoop, InfererSample, AtomSample)):
            ours.replaced.remove()


@dataclass(frozen=True)
class AcceleratedPackage:
    """What `accelerate` put in place; a context manager that hands out the object."""

    served: Any

    def __enter__(self) -> Any:
        return self.served

    def __exit__(self, *error: object) -> None:
        restore_package(self.served)


def _require_own(served: Any, name: str, method: Any, known: tuple[str, ...]) -> None:
    """Refuse a method that is not one of these functions of its package."""
    if library_name(method, served) not in known:
        raise ValueError(
            f"{type(served).__name__}.{name} is not {known[0]}, the function foresample knows: it is overridden or "
            "patched, and may do something else at any sample; use the package's own class, or make a target with "
            "foresample.targets"
        )


# ---------------------------------------------------------------- denoising-diffusion-pytorch


@dataclass(eq=False)
class GaussianLoop:
    """Stands in for `p_sample_loop` or `ddim_sample`, with their arguments and their law."""

    diffusion: Any
    name: str
    original: Callable[..., Any]
    how: dict[str, Any]
    replaced: Replaced
    walked: tuple | None = None
    """What the object held when its own loop was walked."""
    unreported: int = 0
    """Steps that were walked, until a report says so."""

    def checked_chain(self) -> Chain:
        """The chain of its loop as it is now; walked again where anything it holds has changed."""
        diffusion, package = self.diffusion, "denoising_diffusion_pytorch"
        if _loop_name(diffusion) != self.name:
            raise ValueError(f"{self.name} is not the loop that sample takes any more: accelerate it again")
        for name in _GAUSSIAN_STEPS:
            method = self.original if name == self.name else getattr(diffusion, name, None)
            own = library_name(method, diffusion)
            if method is not None and (own is None or not own.startswith(f"{package}.")):
                raise ValueError(
                    f"{type(diffusion).__name__}.{name} is not {package}'s own function: it is overridden or patched, "
                    "and may step in another way at any sample; make a target with foresample.targets"
                )
        chain = _gaussian_chain(diffusion)
        now = (diffusion.__class__, held(diffusion), tuple(tuple(b.tolist()) for b in _tables(diffusion)))
        if now != self.walked:
            _require_its_steps(diffusion, chain, self)
            self.walked, self.unreported = now, len(chain.std)
        return chain

    @torch.inference_mode()
    def __call__(self, *args: Any, **kwargs: Any) -> Tensor | tuple[Tensor, Tensor]:
        bound = inspect.signature(self.original).bind(*args, **kwargs)
        bound.apply_defaults()
        asked = bound.arguments
        require_current(self.original, self.diffusion, self.name)
        diffusion, shape, every = self.diffusion, asked["shape"], asked.get("return_all_timesteps", False)
        known = {"shape", "return_all_timesteps", "return_noise", "model_forward_kwargs"}
        others = [p for p in bound.signature.parameters.values() if p.name not in known]
        unknown = [p.name for p in others if asked[p.name] is not p.default]
        if unknown:
            raise ValueError(f"an accelerated loop cannot take {', '.join(unknown)}: restore it first")
        require_fixed(diffusion.model)
        start = torch.randn(shape, device=diffusion.betas.device)
        conditions = asked.get("model_forward_kwargs", {})
        target = _gaussian_target(diffusion, self.checked_chain(), start, conditions)
        states = start.new_empty(shape[0], len(target.std) + 1, *shape[1:]) if every else None
        if states is not None:
            states[:, 0] = start
        seeds = torch.randint(2**62, (shape[0],))
        run = sample(
            target, seeds=seeds, observe=None if states is None else partial(_keep, states), **self.how
        )
        run.report.evidence.steps_replayed, self.unreported = self.unreported, 0
        run.report.evidence.trusted.append(f"denoising-diffusion-pytorch's own {self.name}")
        setattr(diffusion, REPORT, run.report)
        samples = diffusion.unnormalize(run.samples if states is None else states)
        return (samples, start) if asked.get("return_noise", False) else samples


def _keep(states: Tensor, commit: Commit) -> None:
    """All states of a run as they are committed, [R, N + 1, *shape]."""
    for r, (image, first, count) in enumerate(
        zip(commit.sample.tolist(), commit.step.tolist(), commit.committed.tolist(), strict=True)
    ):
        states[image, first + 1 : first + 1 + count] = commit.states[r, :count]


def _is_gaussian_diffusion(served: Any) -> bool:
    names = ("p_sample_loop", "p_mean_variance", "posterior_mean_coef1", "alphas_cumprod", "objective", "model")
    return all(hasattr(served, name) for name in names)


def _loop_name(diffusion: Any) -> str:
    return "ddim_sample" if diffusion.is_ddim_sampling else "p_sample_loop"


def _gaussian_target(
    diffusion: Any, chain: Chain, start: Tensor, conditions: dict[str, Any] | None = None
) -> ChainTarget:
    network, given = diffusion.model, conditions or {}

    def denoiser(x: Tensor, time: Tensor, row: Tensor) -> Tensor:
        return network(x, time, **for_rows(given, row, len(start)))

    return from_chain(denoiser, chain, start.shape[1:], start=start, device=start.device)


def _gaussian_chain(diffusion: Any) -> Chain:
    """The chain of its loop, read off its buffers."""
    if getattr(diffusion, "self_condition", False):
        raise ValueError(
            "self-conditioning hands the last estimate to the network, so that states alone make no chain; train with "
            "self_condition=False"
        )
    predicts = _OBJECTIVES[diffusion.objective]
    if diffusion.is_ddim_sampling:
        return _gaussian_ddim(diffusion, predicts)

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


def _gaussian_ddim(diffusion: Any, predicts: Kind) -> Chain:
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


class _Waves(nn.Module):
    """Stands in for a network while a loop is watched: cheap, and its estimates leave ±1, so that clipping shows."""

    def __init__(self, learns: bool) -> None:
        super().__init__()
        self.learns = learns
        self.seen: list[tuple[Tensor, Tensor, Tensor]] = []
        """State, time and output of each call."""

    def forward(self, x: Tensor, time: Tensor, *others: Any, **more: Any) -> Tensor:
        output = 1.5 * torch.sin(3 * x)
        output = torch.cat([output, 0.9 * torch.cos(2 * x)], 1) if self.learns else output
        self.seen.append((x.clone(), time, output.clone()))
        return output


def _tables(diffusion: Any) -> list[Tensor]:
    """The tables of its schedule; `held` has only what is no buffer."""
    return [table for _, table in diffusion.named_buffers(recurse=False)]


@torch.inference_mode()
def _require_its_steps(diffusion: Any, chain: Chain, loop: GaussianLoop) -> None:
    """Walk its own loop once, with another network and known noise, and compare every step of it with the chain's."""
    name = type(diffusion).__name__
    needed = [p.name for p in inspect.signature(diffusion.sample).parameters.values() if p.default is p.empty]
    if needed:
        raise ValueError(f"{name}.sample needs {', '.join(needed)}: make a target with foresample.targets")
    network, device = diffusion.model, diffusion.betas.device
    ours = vars(diffusion).pop(loop.name, None)
    diffusion.model = waves = _Waves(chain.low_variance is not None)
    try:
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            with redirect_stderr(StringIO()):  # its progress bar
                torch.manual_seed(0)
                diffusion.sample(batch_size=1)
            torch.manual_seed(0)
            same = len(waves.seen) == len(chain.std) and _steps_as(chain, waves)
    finally:
        diffusion.model = network
        if ours is not None:
            setattr(diffusion, loop.name, ours)
    if not same:
        raise ValueError(
            f"{name} has steps of its own, which are not DDPM's or DDIM's with x0 clipped to ±1; make a target with "
            "foresample.targets"
        )


def _steps_as(chain: Chain, waves: _Waves) -> bool:
    """Whether the states seen are those of the chain, with noise of torch's generator as it is."""
    first = waves.seen[0][0]
    chain = chain.to(first.device, first.dtype)
    assert chain.time is not None
    expected, zero = torch.randn_like(first), torch.zeros_like(first)
    for k, (x, time, output) in enumerate(waves.seen):
        if int(time) != int(chain.time[k]) or not torch.allclose(expected, x, rtol=_AGREES, atol=_AGREES):
            return False
        step = torch.tensor([k], device=x.device)
        expected = chain.mean(x, chain.predict(x, output, step, zero), step, None, zero)
        if chain.std[k] > 0:  # without extra noise, a learned variance is all in one
            std = chain.variance(output, step).sqrt() if waves.learns else chain.std[k]
            expected = expected + std * torch.randn_like(x)
    return True


# ---------------------------------------------------------------- MONAI


@dataclass(frozen=True, eq=False)
class InfererSample:
    """Stands in for `DiffusionInferer.sample`, with its arguments and its law."""

    inferer: Any
    original: Callable[..., Any]
    how: dict[str, Any]
    replaced: Replaced

    @torch.no_grad()
    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        require_current(self.original, self.inferer, "sample")
        bound = inspect.signature(self.original).bind(*args, **kwargs)
        bound.apply_defaults()
        asked = bound.arguments
        if asked["save_intermediates"]:
            raise ValueError("an accelerated inferer keeps no intermediates: leave save_intermediates out")
        if asked["mode"] not in ("crossattn", "concat") or (
            asked["mode"] == "concat" and asked["conditioning"] is None
        ):
            return self.original(*args, **kwargs)  # which says what is wrong
        noise, network = asked["input_noise"], asked["diffusion_model"]
        require_fixed(network)
        chain = _monai_chain(asked["scheduler"] or self.inferer.scheduler)
        denoiser = partial(_monai_network, network, asked, len(noise))
        dtype = torch.promote_types(noise.dtype, torch.float32)
        target = from_chain(denoiser, chain, noise.shape[1:], start=noise, dtype=dtype, device=noise.device)
        run = sample(target, seeds=torch.randint(2**62, (len(noise),)), **self.how)
        run.report.evidence.trusted += ["MONAI's own DiffusionInferer.sample", "MONAI's own DDPMScheduler"]
        setattr(self.inferer, REPORT, run.report)
        return run.samples.to(noise.dtype)


def _monai_network(
    network: Any, asked: dict[str, Any], count: int, x: Tensor, time: Tensor, row: Tensor
) -> Tensor:
    """The network's output as `sample` makes it: condition, guidance, segmentation."""
    given = {name: for_rows(asked[name], row, count) for name in ("conditioning", "seg")}
    condition, x = given["conditioning"], x.to(asked["input_noise"].dtype)
    guided = asked["cfg"] is not None
    if guided:
        x, time = torch.cat([x, x]), torch.cat([time, time])
        if condition is not None:
            condition = torch.cat([torch.full_like(condition, asked["cfg_fill_value"]), condition])
    if asked["mode"] == "concat":
        x, condition = torch.cat([x, condition], dim=1), None
    more = {} if given["seg"] is None else {"seg": torch.cat([given["seg"]] * 2) if guided else given["seg"]}
    output = network(x, timesteps=time.to(x.dtype), context=condition, **more)
    if not guided:
        return output
    without, with_condition = output.chunk(2)
    return without + asked["cfg"] * (with_condition - without)


def _is_inferer(served: Any) -> bool:
    scheduler = getattr(served, "scheduler", None)
    method = getattr(served, "sample", None)
    method = method.original if isinstance(method, InfererSample) else method
    if scheduler is None or not callable(method):
        return False
    return {"input_noise", "diffusion_model", "scheduler"} <= _parameters(method)


def _monai_chain(scheduler: Any) -> Chain:
    """MONAI's DDPM: on a coarser grid, too, each step goes to the training timestep just below its own."""
    name = type(scheduler).__name__
    if name != "DDPMScheduler":
        raise ValueError(
            f"MONAI's {name} adds no noise in an inferer, so there is nothing to speculate on; use its DDPMScheduler"
        )
    foreign = foreign_part(scheduler, "monai")
    if foreign is not None:
        raise ValueError(
            f"the inferer's scheduler is not as MONAI made it ({foreign}), so its steps may be others than the ones "
            "foresample reads off its tables: use MONAI's DDPMScheduler, or make a target with foresample.targets"
        )
    if scheduler.variance_type not in ("fixed_small", "fixed_large"):
        raise ValueError(
            f"MONAI's DDPMScheduler(variance_type={str(scheduler.variance_type)!r}) has a state-dependent std; use "
            "'fixed_small' or 'fixed_large'"
        )
    time = scheduler.timesteps.cpu().long()
    levels, betas = (v.double().cpu() for v in (scheduler.alphas_cumprod, scheduler.betas))
    here, beta = levels[time], betas[time]
    there = torch.where(time > 0, levels[(time - 1).clamp(min=0)], 1.0)
    small = ((1 - there) / (1 - here) * beta).clamp(min=1e-20)
    variance = beta if scheduler.variance_type == "fixed_large" else small
    low, high = scheduler.clip_sample_values
    return denoising_chain(
        vp.levels(here),
        state_weight=(1 - beta).sqrt() * (1 - there) / (1 - here),
        x0_weight=there.sqrt() * beta / (1 - here),
        std=torch.where(time > 0, variance.sqrt(), 0.0),
        predicts=_MONAI_KINDS[str(scheduler.prediction_type)],
        reuse="x0",
        time=time,
        limit=partial(torch.clamp, min=low, max=high) if scheduler.clip_sample else None,
    )


# ---------------------------------------------------------------- boltz


@dataclass(frozen=True, eq=False)
class AtomSample:
    """Stands in for `AtomDiffusion.sample`, with its arguments and its law."""

    diffusion: Any
    original: Callable[..., Any]
    how: dict[str, Any]
    replaced: Replaced

    @torch.no_grad()
    def __call__(self, atom_mask: Tensor, **asked: Any) -> dict[str, Any]:
        diffusion = self.diffusion
        require_current(self.original, diffusion, "sample")
        steps, count = asked.pop("num_sampling_steps", None), asked.pop("multiplicity", 1)
        steering = asked.pop("steering_args", None) or {}
        at_most = asked.pop("max_parallel_samples", None)
        asked.pop("train_accumulate_token_repr", None)
        guided = [name for name, given in steering.items() if name.endswith(("steering", "update")) and given]
        if guided:
            raise ValueError(f"steering ({', '.join(guided)}) couples samples or moves estimates: leave it out")
        if getattr(diffusion, "accumulate_token_repr", False):
            raise ValueError("an accelerated AtomDiffusion accumulates no token representation along the path")
        if len(atom_mask) != 1:
            raise ValueError(
                f"give one structure at a time, in as many samples as you like, not {len(atom_mask)}"
            )
        require_fixed(diffusion)
        if diffusion.training and getattr(diffusion, "step_scale_random", None) is not None:
            raise ValueError(
                "step_scale_random draws a step scale in training mode: call eval() before sampling"
            )

        def network(x: Tensor, sigma: Tensor, row: Tensor) -> Tensor:
            states, levels = (v.split(at_most or len(x)) for v in (x, sigma))
            return torch.cat([self._denoised(a, b, asked) for a, b in zip(states, levels, strict=True)])

        target = structures(
            network,
            diffusion.sample_schedule(steps),
            atom_mask.shape[1],
            gamma=diffusion.gamma_0,
            gamma_min=diffusion.gamma_min,
            noise_scale=diffusion.noise_scale,
            step_scale=diffusion.step_scale,
            align=diffusion.alignment_reverse_diff,
            mask=atom_mask[0],
            device=diffusion.device,
        )
        run = sample(target, seeds=torch.randint(2**62, (count,)), **self.how)
        run.report.evidence.trusted.append("boltz's own AtomDiffusion.sample")
        setattr(diffusion, REPORT, run.report)
        return {"sample_atom_coords": run.samples, "diff_token_repr": None}

    def _denoised(self, x: Tensor, sigma: Tensor, conditions: dict[str, Any]) -> Tensor:
        """The denoised positions of states at different levels; the first version also returns a representation."""
        diffusion = self.diffusion
        given = {"multiplicity": len(x), **conditions}
        if hasattr(diffusion, "use_inference_model_cache"):
            given["model_cache"] = None  # which is for one number of states
        options = (
            {"training": False} if "training" in _parameters(diffusion.preconditioned_network_forward) else {}
        )
        output = diffusion.preconditioned_network_forward(x, sigma, network_condition_kwargs=given, **options)
        return output[0] if isinstance(output, tuple) else output


def _is_atom_diffusion(served: Any) -> bool:
    names = (
        "sample_schedule",
        "preconditioned_network_forward",
        "gamma_0",
        "noise_scale",
        "alignment_reverse_diff",
    )
    return all(hasattr(served, name) for name in names)


def _parameters(method: Callable[..., Any]) -> set[str]:
    return set(inspect.signature(method).parameters)
