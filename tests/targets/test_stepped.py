"""Targets read off a step function: DDPM's in a package's form, a scheduler's, and steps that are no chain."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import count
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import foresample as fs
from foresample.targets import StepTarget, from_step, step_error, vp
from tests.chains.common import LINEAR, f64
from tests.support.packages import load
from tests.support.small_chains import mixture

ALPHA_BAR = LINEAR[[980, 900, 800, 650, 500, 350, 220, 120, 60, 20, 5]]
STEPS = len(ALPHA_BAR)
THERE = torch.cat([ALPHA_BAR[1:], torch.ones(1, dtype=f64)])


def denoise(x: Tensor, k: Tensor, row: Tensor) -> Tensor:
    level = ALPHA_BAR[k]
    return mixture().denoise(x, level.sqrt(), (1 - level).sqrt())


def p_sample(model: Callable[..., Tensor], x: Tensor, t: int, noise: Tensor) -> Tensor:
    """A package's own step, as improved-diffusion writes it: posterior mean of a clipped estimate, and noise."""
    here, there = ALPHA_BAR[t], THERE[t]
    beta = 1 - here / there
    estimate = model(x, t).clamp(-2, 2)
    mean = beta * there.sqrt() / (1 - here) * estimate + (1 - there) * (here / there).sqrt() / (1 - here) * x
    nonzero_mask = float(t != STEPS - 1)
    return mean + nonzero_mask * (beta * (1 - there) / (1 - here)).sqrt() * noise


def step(prediction: Tensor, x: Tensor, k: int, noise: Tensor) -> Tensor:
    return p_sample(lambda *_: prediction, x, k, noise)


def ddpm(**options: Any) -> StepTarget:
    return from_step(step, denoise, (2,), STEPS, **{"dtype": f64, **options})


def plain_ddpm() -> fs.targets.ChainTarget:
    """The same chain from the library's formulas."""
    return vp(denoise, ALPHA_BAR, (2,), time=torch.arange(STEPS), predicts="x0", clip=2.0, dtype=f64)


def test_the_whole_chain_with_the_same_noise() -> None:
    target = ddpm(start_scale=1.2)
    noise = torch.randn(STEPS + 1, 5, 2, dtype=f64, generator=torch.Generator().manual_seed(0))
    row = torch.arange(5)
    ours, theirs = target.start(noise[-1], row), 1.2 * noise[-1]
    for k in range(STEPS):
        at = torch.full_like(row, k)
        theirs = p_sample(lambda x, t: denoise(x, torch.full_like(row, t), row), theirs, k, noise[k])
        ours = target.mean(ours, target.predict(ours, at, row), at) + target.std[k] * noise[k]
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
    assert target.std[-1] == 0


def test_rows_at_different_steps_share_a_call_and_a_mean() -> None:
    x = torch.randn(7, 2, dtype=f64, generator=torch.Generator().manual_seed(1))
    at, row = torch.tensor([3, 0, 10, 3, 7, 1, 0]), torch.arange(7)
    means = [each.mean(x, each.predict(x, at, row).clamp(-2, 2), at) for each in (ddpm(), plain_ddpm())]
    torch.testing.assert_close(*means)
    torch.testing.assert_close(ddpm().std, plain_ddpm().std)


def test_samples_start_at_given_states() -> None:
    start = torch.arange(6.0, dtype=f64).view(3, 2)
    target = ddpm(start=start)
    assert torch.equal(target.start(torch.ones(2, 2, dtype=f64), torch.tensor([2, 0])), start[[2, 0]])
    with pytest.raises(ValueError, match="sample 3 has no start"):
        fs.sample(target, 4, window=2)


def test_a_step_that_draws_its_own_noise_receives_ours() -> None:
    """A scheduler of diffusers, whose step draws from a generator."""
    diffusers = pytest.importorskip("diffusers")
    scheduler = diffusers.DDPMScheduler(clip_sample=True)
    scheduler.set_timesteps(12)

    def drawing(prediction: Tensor, x: Tensor, k: int, noise: Tensor) -> Tensor:
        with mock.patch(f"{diffusers.DDPMScheduler.__module__}.randn_tensor", return_value=noise):
            return scheduler.step(prediction, scheduler.timesteps[k], x).prev_sample

    target = from_step(drawing, lambda x, k, row: 0.3 * x.sin(), (3,), 12, dtype=f64)
    known = fs.targets.from_scheduler(scheduler, lambda x, t, row: 0.3 * x.sin(), (3,), dtype=f64)
    torch.testing.assert_close(target.std, known.std, rtol=1e-4, atol=1e-6)
    runs = [fs.sequential(each, 3, seed=2).samples for each in (target, known)]
    torch.testing.assert_close(*runs, rtol=1e-3, atol=1e-3)


class Noise(nn.Module):
    """A network of denoising-diffusion-pytorch's kind."""

    channels, out_dim, self_condition = 1, 1, False

    def forward(self, x: Tensor, time: Tensor, condition: Tensor | None = None) -> Tensor:
        return torch.tanh(x) + 0.01 * time.view(-1, 1, 1, 1)


def test_a_real_package_s_loop_with_the_same_noise() -> None:
    """denoising-diffusion-pytorch's `p_sample`, which calls its model, clips and draws inside."""
    unused = (
        "denoising_diffusion_pytorch.fid_evaluation",
        "torchvision",
        "ema_pytorch",
        "accelerate",
        "tqdm",
        "tqdm.auto",
    )
    package = load(
        "denoising_diffusion_pytorch.denoising_diffusion_pytorch",
        without=(*unused, "scipy", "scipy.optimize", "PIL"),
    )
    model = Noise()
    diffusion = package.GaussianDiffusion(model, image_size=(2, 2), timesteps=12, objective="pred_noise").eval()
    times = list(reversed(range(12)))

    def own(prediction: Tensor, x: Tensor, k: int, noise: Tensor) -> Tensor:
        given = mock.patch.object(model, "forward", return_value=prediction)
        with given, mock.patch("torch.randn_like", return_value=noise):
            return diffusion.p_sample(x, times[k])[0]

    target = from_step(own, lambda x, k, row: model(x, 11 - k), (1, 2, 2), 12)
    noise = torch.randn(13, 3, 1, 2, 2, generator=torch.Generator().manual_seed(0))
    row, ours, theirs = torch.arange(3), noise[-1], noise[-1]
    for k, t in enumerate(times):
        with mock.patch("torch.randn_like", return_value=noise[k]):
            theirs = diffusion.p_sample(theirs, t)[0]
        at = torch.full_like(row, k)
        ours = target.mean(ours, target.predict(ours, at, row), at) + target.std[k] * noise[k]
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    assert fs.check(target, window=4, samples=200).findings[-1].passed
    assert fs.sample(target, 20, window=6).speedup > 1.2


@pytest.mark.law
def test_speculation_is_exact() -> None:
    target = ddpm()
    result = fs.check(target, window=5, samples=2000, slots=2000)
    assert result.passed, str(result)
    assert "step is the target's" in str(result)
    assert fs.sample(target, 100, window=5).speedup > 1.3


def test_a_target_that_is_not_the_step_s_is_found() -> None:
    """The broken twin: the larger of DDPM's two variances."""
    assert step_error(ddpm(), step).max() < 1e-13
    beta = torch.where(torch.arange(STEPS) < STEPS - 1, 1 - ALPHA_BAR / THERE, 0.0)
    twin = replace(ddpm(), std=beta.sqrt())
    assert step_error(twin, step).max() > 0.01
    result = fs.check(twin, window=4, samples=200)
    assert [f.passed for f in result.findings if f.question == "step is the target's"] == [False]


def test_any_target_can_be_compared_with_a_step() -> None:
    def with_x0(prediction: Tensor, x: Tensor, k: int, noise: Tensor) -> Tensor:
        return step(prediction, x, k, noise)

    assert step_error(plain_ddpm(), with_x0).max() < 1e-13
    wrong = vp(denoise, ALPHA_BAR, (2,), time=torch.arange(STEPS), predicts="x0", eta=0.9, dtype=f64)
    assert step_error(wrong, with_x0).max() > 0.01
    two_noises = fs.targets.from_chain(denoise, fs.chains.dpmpp_sde_chain([3.0, 1.0, 0.0]), (2,))
    with pytest.raises(ValueError, match="extra noise"):
        step_error(two_noises, step)


# ------------------------------------------------------------------ steps that are no chain


def with_noise(change: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Callable[..., Tensor]:
    """A step whose noise is replaced by a function of (prediction, x, noise)."""
    return lambda p, x, k, z: step(p, x, k, change(p, x, z))


DRAWN = count()


class Remembers:
    """A multistep solver: it extrapolates from the prediction of its last call."""

    last: Tensor | float = 0.0

    def __call__(self, prediction: Tensor, x: Tensor, k: int, noise: Tensor) -> Tensor:
        both, self.last = prediction + 0.1 * (prediction - self.last), prediction
        return step(both, x, k, noise)


REFUSED: dict[str, tuple[Callable[..., Any], str]] = {
    "a std of the state's": (with_noise(lambda p, x, z: z * (1 + 1e-3 * x.abs())), "with one number std"),
    "a std of the prediction's": (
        with_noise(lambda p, x, z: z * (1 + 0.1 * torch.tanh(p))),
        "with one number std",
    ),
    "a std of each element": (with_noise(lambda p, x, z: z * torch.tensor([1.0, 2.0])), "with one number std"),
    "clipped noise": (lambda p, x, k, z: step(p, x, k, z).clamp(-4, 4), "with one number std"),
    "normalised noise": (with_noise(lambda p, x, z: z / (z.norm() + 1)), "with one number std"),
    "mixed elements": (with_noise(lambda p, x, z: (z + z.flip(1)) / 2**0.5), "with one number std"),
    "mixed rows": (with_noise(lambda p, x, z: (z + z.flip(0)) / 2**0.5), "with one number std"),
    "noise of its own": (
        lambda p, x, k, z: step(p, x, k, z + 1e-6 * torch.randn_like(z)),
        "draws noise of its own",
    ),
    "noise of its own alone": (
        lambda p, x, k, z: step(p, x, k, 0 * z + next(DRAWN)),
        "draws noise of its own",
    ),
    "a memory": (Remembers(), "remembers earlier calls"),
    "rows of a mean": (lambda p, x, k, z: step(p - p.mean(0), x, k, z), "rows must not be mixed"),
    "a network inside": (lambda p, x, k, z: step(x.sin(), x, k, z), "instead of the model"),
    "no noise": (with_noise(lambda p, x, z: 0 * z), "adds no noise"),
    "noise subtracted": (with_noise(lambda p, x, z: -z), "not below 0"),
    "NaN": (lambda p, x, k, z: step(p, x, k, z) / (x * 0), "must be finite"),
    "another shape": (lambda p, x, k, z: x[:, :1], r"must return the next states, \(4, 2\) here, not \(4, 1\)"),
    "nothing": (lambda p, x, k, z: None, "not NoneType"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_steps_that_are_no_chain_are_refused(name: str) -> None:
    bad, sentence = REFUSED[name]
    with pytest.raises(ValueError, match=sentence):
        from_step(bad, denoise, (2,), STEPS, dtype=f64)


def test_a_step_that_divides_by_the_size_of_its_prediction() -> None:
    def normalised(p: Tensor, x: Tensor, k: int, z: Tensor) -> Tensor:
        return x - 0.1 * p / p.norm(dim=1, keepdim=True) + 0.1 * (k + 1) * z  # NaN where the prediction is 0

    target = from_step(normalised, lambda x, k, row: x, (2,), 3)
    assert torch.allclose(target.std, torch.tensor([0.1, 0.2, 0.3]), rtol=1e-6)


def test_a_chain_needs_at_least_one_step() -> None:
    with pytest.raises(ValueError, match="steps must be at least 1"):
        from_step(step, denoise, (2,), 0)


def test_a_step_may_write_into_its_noise() -> None:
    def writes(prediction: Tensor, x: Tensor, k: int, noise: Tensor) -> Tensor:
        return noise.mul_(0.1).add_(0.9 * x + 0.1 * prediction)

    target = from_step(writes, lambda x, k, row: 0.5 * x, (2,), 5)
    assert target.std.tolist() == pytest.approx([0.1] * 5)
    assert step_error(target, writes).max() < 1e-6
