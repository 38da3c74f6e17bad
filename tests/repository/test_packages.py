"""The benchmark of packages times both loops in turns and saves what it measured."""

from __future__ import annotations

from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks import packages
from benchmarks.results import PackageCounts, load
from tests.support.openai import Net, copies


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
