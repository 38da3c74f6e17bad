"""The benchmark of packages times both sides in turns and saves what it measured."""

from __future__ import annotations

from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import foresample as fs
from benchmarks import packages
from benchmarks.kinds.packages import PackageCounts, Packages
from benchmarks.results import load
from benchmarks.tables import clock, headlines
from foresample.core.noise import seeds_of
from tests.support.openai import Net, copies
from tests.support.small_chains import ddpm


def test_rows_have_both_loops_for_each_number_of_samples(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packages, "COUNTS", (1, 40))
    monkeypatch.setattr(packages, "SECONDS", 0.0)
    diffusion = copies()[0].make(steps=30)
    network, seeds = Net(diffusion), []

    def sample(served: Any, count: int) -> Tensor:
        seeds.append(torch.initial_seed())
        return served.p_sample_loop(network, (count, 1, 2))

    file = tmp_path / "packages-small.json"
    packages.by_count("small", partial(deepcopy, diffusion), sample, [4, 8], file, updates=0)
    saved = load(PackageCounts, "packages-small", tmp_path)
    assert [row.count for row in saved.rows] == [1, 40]
    assert all(row.window in (4, 8) and row.calls < saved.steps == 30 for row in saved.rows)
    assert all(row.evaluations >= row.calls and row.faster.turns == 4 for row in saved.rows)
    assert saved.law.passed
    assert (saved.law.samples, saved.law.sequential) == (160, 160)
    assert set(seeds) == {
        *range(packages.PILOT, packages.PILOT + 5),
        0,
        1,
        2,
        3,
    }  # no reported sample is one of a pilot's


@pytest.fixture
def pictures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> packages.Sampler:
    """An untrained U-Net's sampler with few steps."""
    monkeypatch.setattr(packages, "STEPS", 16)
    network = tmp_path / "network.pt"
    torch.save(packages.make_diffusion(steps=16).state_dict(), network)
    return packages.small_pictures("cpu", network, 0, None)


def test_the_accelerated_loop_draws_the_chain_that_is_captured(pictures: packages.Sampler) -> None:
    chain, report = packages._run(fs.Engine(pictures.target, window=4, slots=8), 8, seed=1)
    pixels, accelerated = pictures.ours(8, 4)(2)
    assert report.steps == accelerated.steps == 16
    assert pixels.shape == chain.shape == (8, 1, 28, 28)
    assert abs(float(pixels.mean() - chain.mean())) < 0.05  # of 6272 pixels, in the same units
    assert abs(float(pixels.std() - chain.std())) < 0.05


def test_rows_of_a_gpu_have_both_baselines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pictures: packages.Sampler
) -> None:
    seeds: list[int] = []

    def noted(seed: int, count: int) -> Tensor:
        seeds.append(seed)
        return seeds_of(seed, count)

    monkeypatch.setattr(packages, "seeds_of", noted)
    packages.on_device([("pictures", pictures)], (1, 2), [4, 8], 0.0, tmp_path, updates=0)
    rows = load(Packages, "packages", tmp_path).rows
    assert [(row.count, row.captured) for row in rows] == [(1, True), (1, False), (2, True), (2, False)]
    assert all(row.window in (4, 8) and row.calls < row.steps == 16 and row.law.passed for row in rows)
    assert {row.law.sequential for row in rows} == {3 * 1 + 3 * 2}  # every captured sequential sample
    assert [row.law.samples for row in rows] == [3 * 8, 3 * 4, 3 * 4 * 2, 3 * 2 * 2]
    assert all(row.law.level == rows[0].law.level for row in rows)
    reported = [seed for seed in seeds if seed % packages.PILOT < packages.PILOT // 2]
    assert len(reported) == len(set(reported)) < len(seeds)  # none is drawn twice; pilots have other seeds
    assert (tmp_path / "packages-pictures.png").exists()
    monkeypatch.setattr(clock, "load", lambda kind, name: load(kind, name, tmp_path))
    monkeypatch.setattr(headlines, "load", lambda kind, name: load(kind, name, tmp_path))
    assert clock.other_packages().count("\n| denoising-diffusion-pytorch, DDPM | ") == 4
    (one, two) = headlines._packages()
    assert "1 at a time" in one[0]
    assert "2 at a time" in two[0]
    assert "its own loop, eager, takes" in one[-1]


def test_a_loop_with_fewer_steps_counts_for_a_whole_one() -> None:
    def ours(turn: int) -> tuple[Tensor, fs.Report]:
        return torch.zeros(1, 1), fs.sequential(ddpm(), 1).report

    own = torch.zeros(1, 1)
    timed = packages._in_turns(lambda turn: own, ours, 1, 4, seconds=0.0, repeats=3, share=10)
    assert timed.row.faster.ratio == pytest.approx(timed.row.own_seconds / timed.row.seconds)
    assert len(timed.ours) == 3 * len(timed.own) == 12
