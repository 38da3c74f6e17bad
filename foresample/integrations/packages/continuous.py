"""denoising-diffusion-pytorch's diffusions in continuous time, drawn speculatively.

    ContinuousTimeGaussianDiffusion, VParamContinuousTimeGaussianDiffusion     DDPM between levels of the log SNR λ
    ElucidatedDiffusion                                                        EDM's churned Heun steps (`chains.edm`)

With α² = sigmoid(λ), σ² = sigmoid(−λ), a step of the former goes from level s to t with c = 1 − exp(λ_s − λ_t):

    mean = α_t ((1 − c) x/α_s + c x0),     std = σ_t √c,     none at the last.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, redirect_stderr
from io import StringIO
from typing import Any

import torch
from torch import Tensor, nn

from foresample.chains import Chain, edm_chain
from foresample.chains.chain import Clip, Levels, denoising_chain
from foresample.integrations.packages.gaussian import as_picture
from foresample.integrations.packages.loop import Drawing, PackageLoop, states_dtype
from foresample.integrations.replaced import standing_in
from foresample.integrations.trusted import held
from foresample.targets import from_chain


class ContinuousLoop(PackageLoop):
    """Stands in for `p_sample_loop`."""

    package, kind = "denoising-diffusion-pytorch", "ContinuousTimeGaussianDiffusion"
    attributes = (
        "p_sample_loop",
        "p_mean_variance",
        "log_snr",
        "num_sample_steps",
        "clip_sample_denoised",
        "model",
    )
    replaces = ("p_sample_loop",)
    owners, steps = ("denoising_diffusion_pytorch",), ("p_sample", "p_mean_variance")

    def refuse(self) -> None:
        self.checked_chain()

    def checked_chain(self) -> Chain:
        """The chain of the loop with its present values; the loop is run again if any of them changed."""
        diffusion = self.served
        device = diffusion.device
        shape = (1, diffusion.channels, diffusion.image_size, diffusion.image_size)

        def run(generator: torch.Generator) -> Any:
            with redirect_stderr(StringIO()):  # its progress bar
                return self.original(shape)

        def instead(network: nn.Module) -> AbstractContextManager[Any]:
            network.register_parameter("device", nn.Parameter(torch.zeros(1, device=device)))
            return standing_in(diffusion, "model", network)

        chain = continuous_chain(diffusion)
        assert chain.time is not None
        now = type(diffusion), held(diffusion), tuple(chain.time.tolist()), device
        self.compare(chain, now, run, instead, device)
        return chain

    def drawing(self, asked: dict[str, Any]) -> Drawing:
        network, shape = self.served.model, asked["shape"]
        target = from_chain(
            lambda x, log_snr, row: network(x, log_snr),
            self.checked_chain(),
            shape[1:],
            dtype=states_dtype(),
            device=self.served.device,
        )
        return Drawing(target, shape[0], network, _clamped)


class ElucidatedLoop(PackageLoop):
    """Stands in for `sample`; its network is the object's own `preconditioned_network_forward`."""

    package, kind, replaces = "denoising-diffusion-pytorch", "ElucidatedDiffusion", ("sample",)
    attributes = "sample", "sample_schedule", "preconditioned_network_forward", "S_churn", "S_noise", "net"
    owners = ("denoising_diffusion_pytorch",)

    def refuse(self) -> None:
        if self.served.self_condition:
            raise ValueError(
                "self-conditioning passes the last estimate to the network, so its states are not a chain; train "
                "with self_condition=False"
            )
        self.chain(None)

    def chain(self, steps: int | None) -> Chain:
        """The chain of the loop with its present values."""
        own = self.served
        if not own.S_churn > 0:
            raise ValueError(
                "with S_churn=0 the sampler adds no noise, so there is nothing to speculate on: use S_churn=80"
            )
        levels = {"churn": own.S_churn, "s_min": own.S_tmin, "s_max": own.S_tmax, "s_noise": own.S_noise}
        return edm_chain(own.sample_schedule(steps), **levels, steps="heun")

    def drawing(self, asked: dict[str, Any]) -> Drawing:
        own = self.served
        self.refuse()

        def network(x: Tensor, sigma: Tensor, row: Tensor) -> Tensor:
            return own.preconditioned_network_forward(x, sigma, None, clamp=asked["clamp"])

        shape = (own.channels, own.image_size, own.image_size)
        chain = self.chain(asked["num_sample_steps"])
        target = from_chain(network, chain, shape, dtype=states_dtype(), device=own.device)
        return Drawing(target, asked["batch_size"], own.net, _clamped)


def continuous_chain(diffusion: Any) -> Chain:
    """The chain of the loop, each level computed as in the loop, to the same bits."""
    times = torch.linspace(1.0, 0.0, diffusion.num_sample_steps + 1, device=diffusion.device)
    with torch.no_grad():
        log_snr = torch.stack([diffusion.log_snr(time) for time in times]).cpu()
    level = log_snr.double()
    alpha, sigma = level.sigmoid().sqrt(), (-level).sigmoid().sqrt()
    c = -torch.expm1(level[:-1] - level[1:])
    std = sigma[1:] * c.sqrt()
    std[-1] = 0.0
    return denoising_chain(
        Levels(alpha[:-1], sigma[:-1]),
        state_weight=alpha[1:] * (1 - c) / alpha[:-1],
        x0_weight=alpha[1:] * c,
        std=std,
        predicts="v" if any(kind.__name__.startswith("VParam") for kind in type(diffusion).__mro__) else "eps",
        reuse="x0",
        time=log_snr[:-1],
        limit=Clip(1.0) if diffusion.clip_sample_denoised else None,
    )


def _clamped(samples: Tensor) -> Tensor:
    return as_picture(samples.clamp(-1, 1))
