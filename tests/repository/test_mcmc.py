"""Effective samples a second: the count is right, and whole paths of both samplers are used."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import foresample as fs
from benchmarks import mcmc
from benchmarks.kinds.clock import Mcmc
from benchmarks.results import load
from tests.support.small_chains import CHAINS


@pytest.mark.parametrize("keep", [0.0, 0.5, 0.9])
def test_effective_samples_of_an_autoregressive_chain_are_known(keep: float) -> None:
    """x' = keep · x + noise has τ = (1 + keep)/(1 − keep)."""
    generator = torch.Generator().manual_seed(0)
    length, x = 4_000, torch.zeros(40, 1, dtype=torch.float64)
    states = []
    for noise in torch.randn(length + 200, 40, 1, generator=generator, dtype=torch.float64):
        states.append(x := keep * x + noise)
    found, error = mcmc.effective(torch.stack(states[200:], 1))
    known = length * (1 - keep) / (1 + keep)
    assert error < 0.1 * known
    assert abs(found - known) < 4 * error + 0.02 * known  # the monotone sequence cuts a little early or late


@pytest.mark.parametrize("window", [0, 4])
def test_a_path_holds_every_state_up_to_the_sample(window: int) -> None:
    target = CHAINS["langevin"]()
    states, calls = mcmc.path(target, 3, window, seed=5)
    run = fs.sample(target, 3, seed=5, window=window) if window else fs.sequential(target, 3, seed=5)
    assert torch.equal(states[:, -1], run.samples)
    assert states.isfinite().all()
    assert len(torch.unique(states[0], dim=0)) == len(target.std)
    assert calls == run.report.calls_mean


@pytest.mark.slow
def test_effective_samples_a_second_at_a_tiny_size(tmp_path: Path) -> None:
    mcmc.main(steps=40, burn=8, windows="4,8", together=2, seconds=0.0, seed=1_000, out=tmp_path)
    saved = load(Mcmc, "mcmc", tmp_path)
    assert len(saved.chains) == len(mcmc.CHAINS)
    assert [(row.chains, row.window) for row in saved.rows] == 2 * [
        (1, 0),
        (1, 4),
        (1, 8),
        (2, 0),
        (2, 4),
        (2, 8),
    ]
    assert [row.gain is None for row in saved.rows] == [not row.window for row in saved.rows]
    first = saved.rows[0]
    assert first.effective_a_second == pytest.approx(saved.chains[0].effective / first.ms * 1e3)
