"""MONAI's DiffusionInferer, drawn speculatively."""

from __future__ import annotations

import inspect
import sys
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from foresample.chains import Chain, Kind, vp
from foresample.chains.chain import denoising_chain
from foresample.integrations.networks import for_rows
from foresample.integrations.packages.loop import Drawing, PackageLoop
from foresample.integrations.replaced import standing_in
from foresample.integrations.trusted import foreign_part, held
from foresample.targets import from_chain

_MODULE = "monai.inferers.inferer"
_KINDS: dict[str, Kind] = {"epsilon": "eps", "sample": "x0", "v_prediction": "v"}


class InfererLoop(PackageLoop):
    """Stands in for `DiffusionInferer.sample`."""

    package, kind, replaces = "MONAI", "DiffusionInferer", ("sample",)
    attributes = "sample", "scheduler"
    owners = (f"{_MODULE}.DiffusionInferer",)

    @classmethod
    def functions(cls, served: Any) -> tuple[str, ...]:
        found = super().functions(served)
        if not found or served.scheduler is None or not callable(served.sample):
            return ()
        arguments = {"input_noise", "diffusion_model", "scheduler"}
        return found if arguments <= set(inspect.signature(served.sample).parameters) else ()

    def refuse(self) -> None:
        self.checked_chain(self.served.scheduler)

    def checked_chain(self, scheduler: Any) -> Chain:
        """The chain of the loop with this scheduler; the loop is run again if the scheduler's values changed."""
        chain, own = _chain(scheduler), SimpleNamespace(network=None)
        start = torch.linspace(-2, 2, 8, device=scheduler.alphas_cumprod.device).view(1, 1, 8)

        def run(generator: torch.Generator) -> Any:
            return self.original(start, own.network, scheduler=scheduler, verbose=False)

        instead = partial(standing_in, own, "network")
        self.compare(chain, held(scheduler), run, instead, start.device, start=start, whole=True)
        return chain

    def drawing(self, asked: dict[str, Any]) -> Drawing:
        if asked["save_intermediates"]:
            raise ValueError("an accelerated inferer keeps no intermediates: leave save_intermediates out")
        if asked["mode"] != "crossattn" and (asked["mode"] != "concat" or asked["conditioning"] is None):
            raise ValueError(f"mode={asked['mode']!r} is neither 'crossattn' nor 'concat' with a conditioning")
        noise, network = asked["input_noise"], asked["diffusion_model"]
        chain = self.checked_chain(asked["scheduler"] or self.served.scheduler)
        if not isinstance(network, sys.modules[_MODULE].SPADEDiffusionModelUNet):
            asked = asked | {"seg": None}  # as its own loop
        denoiser = partial(_network, network, asked, len(noise))
        dtype = torch.promote_types(noise.dtype, torch.float32)
        target = from_chain(denoiser, chain, noise.shape[1:], start=noise, dtype=dtype, device=noise.device)

        def result(samples: Tensor) -> Tensor:
            return samples.to(noise.dtype)

        return Drawing(target, len(noise), network, result, trusted=("MONAI's own DDPMScheduler",))


def _network(network: Any, asked: dict[str, Any], count: int, x: Tensor, time: Tensor, row: Tensor) -> Tensor:
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
    output = network(x, timesteps=time.to(torch.get_default_dtype()), context=condition, **more)
    if not guided:
        return output
    without, with_condition = output.chunk(2)
    return without + asked["cfg"] * (with_condition - without)


def _chain(scheduler: Any) -> Chain:
    """MONAI's DDPM, whose steps go to the training timestep just below their own, also on a coarser grid."""
    name = type(scheduler).__name__
    if name != "DDPMScheduler":
        raise ValueError(
            f"MONAI's {name} adds no noise in an inferer, so there is nothing to speculate on; use its DDPMScheduler"
        )
    foreign = foreign_part(scheduler, "monai")
    if foreign is not None:
        raise ValueError(
            f"the inferer's scheduler is not MONAI's own ({foreign}), so its steps may differ from those that "
            "foresample reads off its tables: use MONAI's DDPMScheduler, or make a target with foresample.targets"
        )
    if scheduler.variance_type not in ("fixed_small", "fixed_large"):
        raise ValueError(
            f"MONAI's DDPMScheduler(variance_type={str(scheduler.variance_type)!r}) has a state-dependent std; use "
            "'fixed_small' or 'fixed_large'"
        )
    time = scheduler.timesteps.cpu().long()
    tables = scheduler.alphas_cumprod, scheduler.alphas, scheduler.betas
    levels, alphas, betas = (table.double().cpu() for table in tables)
    here, alpha, beta = levels[time], alphas[time], betas[time]
    there = torch.where(time > 0, levels[(time - 1).clamp(min=0)], 1.0)
    small = ((1 - there) / (1 - here) * beta).clamp(min=1e-20)
    variance = beta if scheduler.variance_type == "fixed_large" else small
    low, high = scheduler.clip_sample_values
    return denoising_chain(
        vp.levels(here),
        state_weight=alpha.sqrt() * (1 - there) / (1 - here),
        x0_weight=there.sqrt() * beta / (1 - here),
        std=torch.where(time > 0, variance.sqrt(), 0.0),
        predicts=_KINDS[str(scheduler.prediction_type)],
        reuse="x0",
        time=time,
        limit=partial(torch.clamp, min=low, max=high) if scheduler.clip_sample else None,
    )
