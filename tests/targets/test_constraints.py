"""Constraints: molecules around their centre, of several sizes, and known coordinates, against loops that project."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import foresample as fs
from foresample.checks.samples import samples_law
from foresample.targets import centred, constrained, fixed, vp
from tests.chains.common import LINEAR, f64

ALPHA_BAR = LINEAR[[980, 850, 700, 500, 320, 180, 80, 30, 8]]
STEPS = len(ALPHA_BAR)


def moving(x: Tensor, k: Tensor, row: Tensor) -> Tensor:
    """A network that knows where things are: a shift of everything changes its output in another way."""
    return torch.tanh(1.5 * x) + 0.3 * x.flip(1) + 0.2 * (1 + k.view(-1, 1, 1) / STEPS)


def remove_mean_with_mask(x: Tensor, mask: Tensor) -> Tensor:
    """e3_diffusion's, for a mask [B, points, 1]."""
    return x - (x.sum(1, keepdim=True) / mask.sum(1, keepdim=True)) * mask


def e3_loop(network: Callable[..., Tensor], start: Tensor, noise: Tensor, mask: Tensor) -> Tensor:
    """e3_diffusion's sampler: `sample_p_zs_given_zt` down to z_0, then the mean of x given z_0.

    Noise comes from `sample_center_gravity_zero_gaussian_with_mask`; the network's own output is centred, as theirs is.
    """
    row = torch.arange(len(start))
    z = remove_mean_with_mask(start * mask, mask)
    for k, here in enumerate(ALPHA_BAR):
        eps = remove_mean_with_mask(network(z, torch.full_like(row, k), row) * mask, mask)
        alpha_t, sigma_t = here.sqrt(), (1 - here).sqrt()
        if k == STEPS - 1:
            return (z - sigma_t * eps) / alpha_t
        there = ALPHA_BAR[k + 1]
        alpha_t_given_s, sigma2_t_given_s = alpha_t / there.sqrt(), 1 - here / there
        mu = z / alpha_t_given_s - sigma2_t_given_s / alpha_t_given_s / sigma_t * eps
        sigma = sigma2_t_given_s.sqrt() * (1 - there).sqrt() / sigma_t
        z = mu + sigma * remove_mean_with_mask(noise[k] * mask, mask)
        z = remove_mean_with_mask(z, mask)
    raise AssertionError


def molecules(points: int = 3, coordinates: int = 2, **how: Any) -> fs.targets.ConstrainedTarget:
    base = vp(moving, ALPHA_BAR, (points, coordinates), time=torch.arange(STEPS), dtype=f64)
    return centred(base, **how)


def walked(target: Any, start: Tensor, noise: Tensor) -> Tensor:
    row = torch.arange(len(start))
    y = target.start(start, row)
    for k, std in enumerate(target.std):
        step = torch.full_like(row, k)
        y = target.mean(y, target.predict(y.clone(), step, row), step) + std * noise[k]
    return target.constrained(y)


@pytest.mark.parametrize("sizes", [False, True], ids=["one size", "sizes of their own"])
def test_molecules_with_the_same_noise(sizes: bool) -> None:
    mask = (
        torch.tensor([[1.0, 1, 1], [1, 1, 0], [1, 0, 1], [1, 1, 1]], dtype=f64)
        if sizes
        else torch.ones(4, 3, dtype=f64)
    )
    draws = torch.randn(STEPS + 1, 4, 3, 2, dtype=f64, generator=torch.Generator().manual_seed(0))
    ours = walked(molecules(mask=mask if sizes else None), draws[-1], draws)
    theirs = e3_loop(moving, draws[-1], draws, mask.unsqueeze(-1))
    torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)
    assert ours.sum(1).abs().max() < 1e-10
    assert (ours[mask == 0] == 0).all()


def test_features_are_not_centred() -> None:
    target = molecules(coordinates=3, **{})
    leading = centred(target.target, coordinates=2)
    x = torch.randn(5, 3, 3, dtype=f64)
    assert target.constrained(x).sum(1).abs().max() < 1e-12
    assert leading.constrained(x)[..., :2].sum(1).abs().max() < 1e-12
    assert torch.equal(leading.constrained(x)[..., 2], x[..., 2])


def drawn_by_their_loop(count: int, shape: tuple[int, ...], mask: Tensor) -> Tensor:
    draws = torch.randn(STEPS + 1, count, *shape, dtype=f64, generator=torch.Generator().manual_seed(5))
    return e3_loop(moving, draws[-1], draws, mask)


@pytest.mark.law
def test_molecules_have_the_distribution_of_the_loop_that_projects() -> None:
    """Two points on a line: all there is is their distance. Broken twins see what drifts, or half of it."""
    target, mask = molecules(2, 1), torch.ones(6000, 2, 1, dtype=f64)
    plain = drawn_by_their_loop(6000, (2, 1), mask)
    result = fs.check(target, window=4, samples=2000, slots=2000)
    assert result.passed, str(result)
    run = fs.sample(target, 6000, window=4, seed=1)
    assert run.speedup > 1.3
    assert samples_law(plain, [target.constrained(run.samples)]).passed
    unseen = target.target  # the network sees the drift
    assert not samples_law(
        plain, [target.constrained(fs.sample(unseen, 6000, window=4, seed=1).samples)]
    ).passed


@pytest.mark.law
def test_every_size_has_its_own_distribution() -> None:
    count = 6000
    mask = torch.tensor([[1.0, 1, 0], [1, 1, 1]], dtype=f64).repeat(count // 2, 1)
    target = molecules(3, 1, mask=mask)
    plain = drawn_by_their_loop(count, (3, 1), mask.unsqueeze(-1))
    samples = target.constrained(fs.sample(target, count, window=4, seed=1).samples)
    for size in (0, 1):
        assert samples_law(plain[size::2], [samples[size::2]]).passed
    wrong = molecules(3, 1)
    samples = wrong.constrained(fs.sample(wrong, count, window=4, seed=1).samples) * mask.unsqueeze(-1)
    assert not samples_law(plain[0::2], [samples[0::2]]).passed


# ------------------------------------------------------------------ known coordinates

VALUES = torch.tensor([[1.5], [0.0]], dtype=f64)
KNOWN = torch.tensor([[True], [False]])


def overwriting_loop(start: Tensor, noise: Tensor, values: Tensor, known: Tensor) -> Tensor:
    """diffusion_policy's `conditional_sample`: condition, predict, step; and condition at the end."""
    plain = vp(moving, ALPHA_BAR, start.shape[1:], time=torch.arange(STEPS), dtype=f64)
    row, trajectory = torch.arange(len(start)), start
    for k, std in enumerate(plain.std):
        step = torch.full_like(row, k)
        trajectory = torch.where(known, values, trajectory)
        trajectory = plain.mean(trajectory, plain.predict(trajectory.clone(), step, row), step) + std * noise[k]
    return torch.where(known, values, trajectory)


def plans(values: Tensor = VALUES, known: Tensor = KNOWN) -> fs.targets.ConstrainedTarget:
    return fixed(vp(moving, ALPHA_BAR, (2, 1), time=torch.arange(STEPS), dtype=f64), values, known)


@pytest.mark.parametrize("own", [False, True], ids=["for all", "for each sample"])
def test_known_coordinates_with_the_same_noise(own: bool) -> None:
    draws = torch.randn(STEPS + 1, 4, 2, 1, dtype=f64, generator=torch.Generator().manual_seed(0))
    values = torch.arange(8.0, dtype=f64).view(4, 2, 1) if own else VALUES
    known = torch.tensor([[1, 0], [0, 1], [1, 1], [0, 0]]).unsqueeze(-1) if own else KNOWN
    ours = walked(plans(values, known), draws[-1], draws)
    theirs = overwriting_loop(draws[-1], draws, values, known != 0)
    torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)


@pytest.mark.law
def test_plans_have_the_distribution_of_the_loop_that_overwrites() -> None:
    target, count = plans(), 6000
    draws = torch.randn(STEPS + 1, count, 2, 1, dtype=f64, generator=torch.Generator().manual_seed(5))
    plain = overwriting_loop(draws[-1], draws, VALUES, KNOWN)
    result = fs.check(target, window=4, samples=2000, slots=2000)
    assert result.passed, str(result)
    run = fs.sample(target, count, window=4, seed=1)
    assert run.speedup > 1.3
    assert samples_law(plain, [target.constrained(run.samples)]).passed
    late = fs.sample(target.target, count, window=4, seed=1).samples  # overwritten at the end alone
    assert not samples_law(plain, [target.constrained(late)]).passed


# ------------------------------------------------------------------ refusals


@pytest.mark.parametrize(
    "constrain",
    [lambda x, row: x / x.norm(), lambda x, row: 0.5 * x, lambda x, row: x.clamp(-1, 1)],
    ids=["a norm", "no projection", "a clip"],
)
def test_a_projection_that_is_not_affine_is_refused(constrain: Callable[..., Tensor]) -> None:
    with pytest.raises(ValueError, match="constrain must be an affine projection"):
        constrained(molecules().target, constrain)


def test_a_mean_that_is_not_affine_is_refused() -> None:
    two = fs.targets.from_chain(moving, fs.chains.dpmpp_sde_chain([3.0, 1.0, 0.0]), (3, 2))
    with pytest.raises(ValueError, match="not known to be affine in state and prediction"):
        centred(two)


def test_a_constraint_around_another_is_refused() -> None:
    """The samples would obey the outer one only."""
    with pytest.raises(ValueError, match="constrained already: put all constraints into one"):
        constrained(molecules(), lambda x, row: 0 * x)


def test_a_chain_of_two_calls_a_step_is_refused() -> None:
    """Its second call would see a state without the constraint."""
    levels = fs.chains.karras_sigmas(6, 0.05, 10.0)
    two = fs.targets.from_edm(moving, levels, (3, 2), churn=40.0, steps="heun")
    with pytest.raises(ValueError, match=r"calls its network twice in a step.*one call a step"):
        centred(two)
    centred(fs.targets.from_edm(moving, levels, (3, 2), churn=40.0, steps="euler"))


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (
            lambda: centred(molecules().target, coordinates=0),
            "coordinates must be a whole number of at least 1",
        ),
        (lambda: molecules(mask=torch.ones(4)), r"states \(3, 2\) and a mask \(4,\)"),
        (lambda: molecules(mask=torch.zeros(3)), "at least one of them 1"),
        (lambda: plans(values=torch.ones(3, 1)), r"values must have shape \(2, 1\)"),
        (lambda: plans(known=torch.ones(1, 1, 2, 1)), r"known must have shape \(2, 1\)"),
        (
            lambda: fs.sample(molecules(mask=torch.ones(2, 3)), 3, window=3),
            "sample 2 has no mask: mask holds 2",
        ),
    ],
)
def test_bad_input_is_refused_with_the_remedy(make: Callable[[], object], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        make()
