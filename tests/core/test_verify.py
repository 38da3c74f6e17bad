"""Verification of one window, row by row and path by path."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from foresample.core.verify import _levels, verify
from tests.support import reference


def window(seed: int, rows: int, width: int, dim: int = 3, mismatch: float = 0.7) -> dict[str, Any]:
    """A random drafted window, ragged, with mismatches around `mismatch`."""
    generator = torch.Generator().manual_seed(seed)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    std = randn(rows, width).exp()
    draft_mean = randn(rows, width, dim)
    gap = mismatch * randn(rows, width, dim) * std.unsqueeze(2)
    return {
        "noise": randn(rows, width, dim),
        "draft_mean": draft_mean,
        "target_mean": draft_mean + gap,
        "std": std,
        "length": torch.randint(0, width + 1, (rows,), generator=generator),
        "uniforms": torch.rand(rows, width, generator=generator, dtype=torch.float64),
    }


def torn(case: dict[str, Any], seed: int) -> dict[str, Any]:
    """The case with some means that are NaN, infinite or far away."""
    generator = torch.Generator().manual_seed(seed)
    kind = torch.randint(0, 12, case["std"].shape, generator=generator)
    for name, broken, value in (
        ("target_mean", 0, torch.nan),
        ("target_mean", 1, 1e200),
        ("draft_mean", 2, torch.inf),
    ):
        case[name][..., 1][kind == broken] = value
    return case


blocks = st.sampled_from([None, 1, 2, 3, 5])


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10**6), width=st.integers(1, 8), block=blocks, fresh=st.booleans(), tear=st.booleans()
)
def test_agrees_with_the_plain_reference(
    seed: int, width: int, block: int | None, fresh: bool, tear: bool
) -> None:
    case = window(seed, 40, width)
    if tear:
        case = torn(case, seed)
    redrawn = window(seed + 1, 40, width)["noise"] if fresh else None
    ours = verify(**case, block=block, fresh=redrawn)
    theirs = reference.verify(**case, block=block, fresh=redrawn)
    assert torch.equal(ours.accepted, theirs.accepted)
    assert torch.equal(ours.length, theirs.length)
    torch.testing.assert_close(ours.mismatch, theirs.mismatch)
    torch.testing.assert_close(ours.noise, theirs.noise, rtol=1e-6, atol=1e-6)


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10**6), width=st.integers(1, 8))
def test_block_length_one_is_the_reflection_coupling(seed: int, width: int) -> None:
    """Accept with probability min(1, r); else reflect the noise about the plane between the means."""
    case = window(seed, 50, width)
    verdict = verify(**case, block=1)
    gap = case["target_mean"] - case["draft_mean"]
    e = gap / gap.norm(dim=2, keepdim=True)
    delta = gap.norm(dim=2) / case["std"]
    s = (e * case["noise"]).sum(2)
    accept = case["uniforms"] < (delta * s - delta**2 / 2).exp()
    for r in range(50):
        length = int(case["length"][r])
        failures = (~accept[r, :length]).nonzero().flatten().tolist()
        assert int(verdict.accepted[r]) == (failures[0] if failures else length)
        expected = case["noise"][r].clone()
        if failures:
            i = failures[0]
            # draft_mean + std · noise must be the target mean plus the reflected noise
            expected[i] += delta[r, i] * e[r, i] - 2 * s[r, i] * e[r, i]
        torch.testing.assert_close(verdict.noise[r], expected, rtol=1e-12, atol=1e-12)


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10**6), width=st.integers(1, 12), mismatch=st.floats(0.01, 3))
def test_blocks_never_accept_less_than_the_per_step_test(seed: int, width: int, mismatch: float) -> None:
    """Path by path: P(τ ≥ i | first i drafts) is p_i for a block, Π min(1, r_j) ≤ p_i step by step."""
    log_ratio = mismatch * torch.randn(50, width, generator=torch.Generator().manual_seed(seed)).double()
    _, block = _levels(log_ratio, width)
    per_step = log_ratio.clamp(max=0).cumsum(1)
    assert (block >= per_step - 1e-9).all()


@pytest.mark.law
def test_each_level_is_the_probability_of_getting_at_least_that_far() -> None:
    """P(τ ≥ i) = E[p_i] for every i, and blocks keep more on average. False alarm: 5 std, six times."""
    rows, width = 200_000, 6
    generator = torch.Generator().manual_seed(3)
    noise = torch.randn(rows, width, 1, generator=generator, dtype=torch.float64)
    mean, one = torch.zeros_like(noise), torch.ones(rows, width, dtype=torch.float64)
    case: dict[str, Any] = {
        "noise": noise,
        "draft_mean": mean,
        "target_mean": mean + 0.8,
        "std": one,
        "length": torch.full((rows,), width),
        "uniforms": torch.rand(rows, width, generator=generator, dtype=torch.float64),
    }
    block, per_step = verify(**case), verify(**case, block=1)
    level = _levels(0.8 * noise[..., 0] - 0.32, width)[1].exp()
    for i in range(width):
        difference = (block.accepted > i).double() - level[:, i]
        assert abs(difference.mean()) < 5 * difference.std() / rows**0.5
    assert block.accepted.double().mean() > 1.1 * per_step.accepted.double().mean()


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10**6), width=st.integers(1, 6), block=blocks)
def test_a_row_is_verified_by_itself(seed: int, width: int, block: int | None) -> None:
    """A row gives the same bits alone and in a batch, for any values beyond its own length."""
    case = window(seed, 12, width)
    whole = verify(**case, block=block)
    for r in range(12):
        alone = {name: value[r : r + 1].clone() for name, value in case.items()}
        length = int(alone["length"])
        alone["target_mean"][:, length:] = torch.nan
        alone["draft_mean"][:, length:] = torch.inf
        verdict = verify(**alone, block=block)
        assert torch.equal(verdict.accepted[0], whole.accepted[r])
        assert torch.equal(verdict.noise[0], whole.noise[r])


def test_noise_that_was_not_examined_stays() -> None:
    case = window(0, 400, 6)
    verdict = verify(**case, block=2)
    position = torch.arange(6)
    rejected = verdict.accepted < case["length"]
    end = torch.where(rejected, 2 * (verdict.accepted // 2 + 1), case["length"]).unsqueeze(1)
    untouched = (position < verdict.accepted.unsqueeze(1)) | (position >= end)
    assert torch.equal(verdict.noise[untouched], case["noise"][untouched])


def test_recycling_leaves_the_orthogonal_part_alone() -> None:
    case = window(1, 400, 6)
    moved = verify(**case).noise - case["noise"]
    gap = case["target_mean"] - case["draft_mean"]
    e = gap / gap.norm(dim=2, keepdim=True)
    across = moved - (moved * e).sum(2, keepdim=True) * e
    assert across.abs().max() < 1e-12
    assert moved.abs().max() > 0.1


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10**6), width=st.integers(1, 6), block=blocks)
def test_a_window_ends_before_the_first_hopeless_transition(seed: int, width: int, block: int | None) -> None:
    """Later drafts are not examined and keep their noise, as if they had not been drafted."""
    case = torn(window(seed, 60, width), seed)
    verdict = verify(**case, block=block)
    assert (verdict.length <= case["length"]).all()
    shorter = verify(**{**case, "length": verdict.length}, block=block)
    for name, value in vars(verdict).items():
        assert torch.equal(value, getattr(shorter, name)), name
    assert torch.isfinite(verdict.noise).all()
    behind = torch.arange(width) >= verdict.length.unsqueeze(1)
    assert torch.equal(verdict.noise[behind], case["noise"][behind])


@pytest.mark.parametrize("mismatch", [0.0, 1e-12, 1e-6, 50.0, 1e4, 1e200])
@pytest.mark.parametrize("block", [None, 1])
def test_extreme_mismatches_give_finite_noise(mismatch: float, block: int | None) -> None:
    case = window(2, 500, 8, mismatch=mismatch)
    verdict = verify(**case, block=block)
    assert torch.isfinite(verdict.noise).all()
    if mismatch <= 1e-6:
        assert (verdict.accepted == case["length"]).double().mean() > 0.99
    if mismatch >= 1e4:
        assert (verdict.accepted == 0).all()
