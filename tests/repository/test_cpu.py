"""`benchmarks.cpu` and the overhead of datasets, at a tiny size."""

from __future__ import annotations

from pathlib import Path

import pytest
import typer
from torch import Tensor

from benchmarks import cpu, generate
from benchmarks.kinds.clock import CpuClock
from benchmarks.kinds.datasets import GenerateOverhead
from benchmarks.results import load
from foresample.core.noise import seeds_of


def test_both_samplers_are_timed_on_other_samples_than_those_that_choose_the_window(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[int] = []

    def noted(seed: int, count: int, first: int) -> Tensor:
        drawn.append(seed)
        return seeds_of(seed, count, first)

    monkeypatch.setattr(cpu, "seeds_of", noted)
    cpu.main(cases="wells,langevin-25", windows=[4, 8, 10**6], seconds=0.1, seed=5, out=tmp_path)
    assert set(drawn) == {cpu.PILOT_SEED, 5}
    one, many = load(CpuClock, "cpu", tmp_path).rows
    assert (one.steps, one.together, many.steps, many.together) == (100, 1, 200, 25)
    for row in (one, many):
        assert row.window in (4, 8)
        assert row.calls < row.steps
        assert row.ratio.ratio == pytest.approx(row.sequential_ms / row.ms)


def test_a_case_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    with pytest.raises(typer.BadParameter, match="--cases names 'springs'"):
        cpu.main(cases="springs", windows=[4], seconds=1, seed=5, out=tmp_path)


def test_a_dataset_and_its_engine_take_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = {"count": 20, "window": 3, "slots": 10}
    monkeypatch.setattr(generate, "TARGETS", [("small", lambda: generate.mixture(2, 5), small)])
    generate.overhead(turns=2, seconds=1.0, shard=10, out=tmp_path)
    (row,) = load(GenerateOverhead, "generate-overhead", tmp_path).rows
    assert (row.count, row.shard, row.turns) == (20, 4, 2)
    assert row.beside_error is not None
    assert row.inside > 0
