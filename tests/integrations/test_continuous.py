"""Further classes of denoising-diffusion-pytorch: continuous time, EDM's steps, classifier-free guidance."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import foresample as fs
from foresample.checks.kolmogorov import ks_two_sample
from foresample.integrations.packages.loop import PackageLoop
from tests.integrations.test_packages import UNUSED
from tests.support.packages import load

SIZE = 2


class Net(nn.Module):
    """A network that estimates each pixel softly, given the log SNR, a class, or EDM's level."""

    random_or_learned_sinusoidal_cond = True
    self_condition = False
    channels = out_dim = 1

    def __init__(self, returns: str, log_snr: Callable[[Tensor], Tensor] = lambda told: told) -> None:
        super().__init__()
        self.held, self.returns, self.log_snr = nn.Parameter(torch.zeros(1)), returns, log_snr

    def forward(self, x: Tensor, told: Tensor, *shift: Any) -> Tensor:
        level = self.log_snr(told).view(-1, 1, 1, 1)
        alpha, sigma = level.sigmoid().sqrt(), (-level).sigmoid().sqrt()
        moved = 0 if not shift or shift[0] is None else shift[0].view(-1, 1, 1, 1)
        x0 = 0.8 * torch.tanh(alpha * x / (sigma**2 + 0.5)) + 0.3 * moved
        return {
            "noise": (x - alpha * x0) / sigma,
            "v": alpha * (x - alpha * x0) / sigma - sigma * x0,
            "raw": x0,
        }[self.returns]

    def forward_with_cond_scale(
        self, x: Tensor, time: Tensor, classes: Tensor, cond_scale: float, rescaled_phi: float
    ) -> tuple[Tensor, Tensor]:
        given, without = self(x, time, classes), self(x, time)
        return without + (1 + 0.5 * rescaled_phi) * cond_scale * (given - without), without


def made(module: str, name: str, returns: str, **options: Any) -> Any:
    package = load(f"denoising_diffusion_pytorch.{module}", without=UNUSED)
    guided = module == "classifier_free_guidance"
    net = Net(returns)
    net.random_or_learned_sinusoidal_cond = not guided
    more = {} if guided else {"channels": 1}
    diffusion = getattr(package, name)(net, image_size=SIZE, **more, **options).eval()
    if guided:
        net.log_snr = lambda time: diffusion.alphas_cumprod[time].logit()
    return diffusion


CONTINUOUS, V = "continuous_time_gaussian_diffusion", "v_param_continuous_time_gaussian_diffusion"
CASES: list[tuple[str, str, str, dict[str, Any]]] = [
    (CONTINUOUS, "ContinuousTimeGaussianDiffusion", "noise", {"num_sample_steps": 40}),
    (
        CONTINUOUS,
        "ContinuousTimeGaussianDiffusion",
        "noise",
        {"num_sample_steps": 20, "noise_schedule": "cosine"},
    ),
    (
        CONTINUOUS,
        "ContinuousTimeGaussianDiffusion",
        "noise",
        {"num_sample_steps": 20, "clip_sample_denoised": False},
    ),
    (
        CONTINUOUS,
        "ContinuousTimeGaussianDiffusion",
        "noise",
        {"num_sample_steps": 20, "noise_schedule": "learned"},
    ),
    (V, "VParamContinuousTimeGaussianDiffusion", "v", {"num_sample_steps": 20}),
    ("elucidated_diffusion", "ElucidatedDiffusion", "raw", {"num_sample_steps": 16}),
    (
        "elucidated_diffusion",
        "ElucidatedDiffusion",
        "raw",
        {"num_sample_steps": 12, "S_tmin": 0.0, "S_tmax": 1e3},
    ),
    ("classifier_free_guidance", "GaussianDiffusion", "noise", {"timesteps": 20}),
    (
        "classifier_free_guidance",
        "GaussianDiffusion",
        "v",
        {"timesteps": 30, "sampling_timesteps": 9, "ddim_sampling_eta": 1.0, "objective": "pred_v"},
    ),
    (
        "classifier_free_guidance",
        "GaussianDiffusion",
        "noise",
        {"timesteps": 30, "sampling_timesteps": 9, "ddim_sampling_eta": 0.7},
    ),
]
IDS = [f"{name} {options}" for _, name, _, options in CASES]


def sample(diffusion: Any, count: int) -> Tensor:
    if hasattr(diffusion, "use_cfg_plus_plus"):
        return diffusion.sample(torch.arange(count) % 2, cond_scale=1.5)
    return diffusion.sample(batch_size=count)


@pytest.mark.parametrize(("module", "name", "returns", "options"), CASES, ids=IDS)
def test_their_loop_with_the_same_noise(module: str, name: str, returns: str, options: dict[str, Any]) -> None:
    diffusion = made(module, name, returns, **options)
    shape, drawn = (3, 1, SIZE, SIZE), list[Tensor]()

    def noise() -> Tensor:
        drawn.append(torch.randn(shape, generator=torch.Generator().manual_seed(len(drawn))))
        return drawn[-1]

    def walk(loop: PackageLoop, drawing: Any, window: int) -> Tensor:
        target, row = drawing.target, torch.arange(3)
        chain = target.chain
        if name == "ElucidatedDiffusion":  # whose first state may be churned
            x = (chain.start_scale**2 - chain.start_added**2) ** 0.5 * noise() + chain.start_added * noise()
        else:
            x = target.start(noise(), row)
        for k, std in enumerate(target.std):
            step = torch.full_like(row, k)
            x = target.mean(x, target.predict(x, step, row), step) + std * noise()
        return x

    with fs.accelerate(diffusion), mock.patch.object(PackageLoop, "_draw", walk):
        ours = sample(diffusion, 3)
    numbers = iter(drawn)

    def given(*_: Any, **options: Any) -> Tensor:
        return next(numbers)

    with mock.patch("torch.randn", given), mock.patch("torch.randn_like", given):
        theirs = sample(diffusion, 3)
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.law
@pytest.mark.parametrize(
    ("module", "name", "returns", "options"),
    [CASES[1], CASES[4], CASES[6], CASES[7]],
    ids=lambda v: str(v)[:30],
)
def test_one_line_and_the_distribution_is_theirs(
    module: str, name: str, returns: str, options: dict[str, Any]
) -> None:
    diffusion = made(module, name, returns, **options)
    torch.manual_seed(0)
    theirs = sample(diffusion, 4000)
    with fs.accelerate(diffusion, window=6):
        ours = sample(diffusion, 4000)
        report = diffusion.foresample_report
    assert report.calls_mean < report.steps / 1.5
    views = [
        (v[:, 0, 0, 0], v[::2, 0, 1, 0], v.flatten(1).sum(1), (v[:, 0, 0, 0] * v[:, 0, 1, 1]))
        for v in (ours, theirs)
    ]
    assert min(ks_two_sample(a.numpy(), b.numpy()) for a, b in zip(*views, strict=True)) > 1e-3 / 16


def test_classes_go_with_their_rows() -> None:
    diffusion = made("classifier_free_guidance", "GaussianDiffusion", "noise", timesteps=20)
    with fs.accelerate(diffusion, window=6):
        pictures = sample(diffusion, 400).mean((1, 2, 3))
    assert pictures[1::2].mean() > pictures[::2].mean() + 0.1


def test_loops_that_are_no_chain_are_refused() -> None:
    elucidated = made("elucidated_diffusion", "ElucidatedDiffusion", "raw", S_churn=0)
    with pytest.raises(ValueError, match=r"S_churn=0 the sampler adds no noise.*use S_churn=80"):
        fs.accelerate(elucidated)
    elucidated.S_churn, elucidated.self_condition = 80, True
    with pytest.raises(ValueError, match=r"self-conditioning passes the last estimate.*self_condition=False"):
        fs.accelerate(elucidated)
    options = {"timesteps": 30, "sampling_timesteps": 9, "ddim_sampling_eta": 1.0, "objective": "pred_v"}
    plus = made("classifier_free_guidance", "GaussianDiffusion", "v", use_cfg_plus_plus=True, **options)
    with pytest.raises(
        ValueError, match=r"use_cfg_plus_plus=True.*direction.*without classes.*sampling_timesteps=None"
    ):
        fs.accelerate(plus)
    with fs.accelerate(
        made("classifier_free_guidance", "GaussianDiffusion", "v", timesteps=9, use_cfg_plus_plus=True)
    ):
        pass  # all timesteps do not use that direction


@pytest.mark.parametrize("name", ["p_sample", "p_mean_variance"])
def test_a_patch_is_refused(name: str) -> None:
    diffusion = made(V, "VParamContinuousTimeGaussianDiffusion", "v", num_sample_steps=5)
    own = getattr(diffusion, name)
    fs.accelerate(diffusion)
    setattr(diffusion, name, lambda *args, **options: own(*args, **options))
    with pytest.raises(ValueError, match=rf"{name} is not .*own function: it is overridden or patched"):
        diffusion.sample(1)


def test_another_schedule_is_compared_again() -> None:
    diffusion = made(CONTINUOUS, "ContinuousTimeGaussianDiffusion", "noise", num_sample_steps=10)
    with fs.accelerate(diffusion):
        diffusion.sample(1)
        assert diffusion.foresample_report.evidence.steps_replayed == 10
        diffusion.sample(1)
        assert diffusion.foresample_report.evidence.steps_replayed == 0
        diffusion.num_sample_steps = 7
        diffusion.sample(1)
        assert diffusion.foresample_report.evidence.steps_replayed == 7


class Weighed(nn.Module):
    """A network with weights before it, which take states of their own dtype only."""

    def __init__(self, network: Any) -> None:
        super().__init__()
        self.network, self.weights = network, nn.Linear(SIZE, SIZE, bias=False)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("network"), name)

    def forward(self, x: Tensor, *given: Any) -> Tensor:
        return self.network(self.weights(x), *given)

    def forward_with_cond_scale(self, x: Tensor, *given: Any, **more: Any) -> Any:
        return self.network.forward_with_cond_scale(self.weights(x), *given, **more)


@pytest.mark.parametrize(("module", "name", "returns", "options"), CASES[5::2], ids=IDS[5::2])
def test_the_default_dtype_is_that_of_the_states(
    module: str, name: str, returns: str, options: dict[str, Any], request: pytest.FixtureRequest
) -> None:
    request.addfinalizer(partial(torch.set_default_dtype, torch.get_default_dtype()))
    torch.set_default_dtype(torch.float64)
    diffusion = made(module, name, returns, **options)
    held = "net" if hasattr(diffusion, "net") else "model"
    setattr(diffusion, held, Weighed(getattr(diffusion, held)))
    with fs.accelerate(diffusion.double(), window=4):
        assert sample(diffusion, 2).dtype == torch.float64
