"""boltz's AtomDiffusion, drawn speculatively."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor

from foresample.integrations.packages.loop import Drawing, PackageLoop, states_dtype
from foresample.targets import structures


class AtomLoop(PackageLoop):
    """Stands in for `AtomDiffusion.sample` of either version."""

    package, kind, replaces = "boltz", "AtomDiffusion", ("sample",)
    attributes = (
        "sample_schedule",
        "preconditioned_network_forward",
        "gamma_0",
        "noise_scale",
        "alignment_reverse_diff",
    )
    owners = tuple(f"boltz.model.modules.{module}.AtomDiffusion" for module in ("diffusion", "diffusionv2"))

    def drawing(self, asked: dict[str, Any]) -> Drawing:
        diffusion, atom_mask = self.served, asked.pop("atom_mask")
        steps, count, at_most = (
            asked.pop(n) for n in ("num_sampling_steps", "multiplicity", "max_parallel_samples")
        )
        steering = asked.pop("steering_args") or {}
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
            dtype=states_dtype(),
            device=diffusion.device,
        )

        def result(samples: Tensor) -> dict[str, Any]:
            return {"sample_atom_coords": samples, "diff_token_repr": None}

        return Drawing(target, count, diffusion, result)

    def _denoised(self, x: Tensor, sigma: Tensor, conditions: dict[str, Any]) -> Tensor:
        """The denoised positions of states at different levels; the first version also returns a representation."""
        diffusion = self.served
        given = {"multiplicity": len(x), **conditions}
        if hasattr(diffusion, "use_inference_model_cache"):
            given["model_cache"] = None  # the cache holds for one number of states
        forward = diffusion.preconditioned_network_forward
        options = {"training": False} if "training" in inspect.signature(forward).parameters else {}
        output = forward(x, sigma, network_condition_kwargs=given, **options)
        return output[0] if isinstance(output, tuple) else output
