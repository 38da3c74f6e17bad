"""The commands that soak the GPU's kernels, tried on a CPU with a handful of samples."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import typer
from torch import Tensor

import foresample as fs
from benchmarks import soak
from benchmarks.kinds.clock import Sanitized, SanitizerRow, Soak
from benchmarks.results import load
from foresample.targets import ChainTarget


def draw(out: Path, samples: int) -> None:
    soak.draw(samples=samples, compared=2, slots=4, pilots=4, device="cpu", out=out)


@pytest.mark.slow
def test_every_variant_is_sampled_and_saved(tmp_path: Path) -> None:
    draw(tmp_path, 3 * len(soak.VARIANTS) * len(soak.DTYPES))
    saved = load(Soak, "gpu-soak", tmp_path)
    assert [(row.variant, row.dtype) for row in saved.rows] == [
        (v, d) for v in soak.VARIANTS for d in soak.DTYPES
    ]
    assert all((row.samples, row.faults, row.compared) == (3, 0, 0) for row in saved.rows)
    assert saved.command
    assert saved.versions["torch"] == torch.__version__


def test_variants_match_their_names() -> None:
    def response(name: str) -> tuple[int, ...]:
        variant = soak.VARIANTS[name]
        target = variant.target("cpu", torch.float64)
        prior = variant.drafter(target, 4).prior
        assert prior is not None
        assert prior.steps == min(variant.table or 0, soak.STEPS - 1) + 1
        assert prior.jacobian is not None
        return tuple(prior.jacobian.shape)

    assert response("matrix") == (soak.STEPS, 3, 3)
    assert response("diagonal") == (soak.STEPS, 1, 16)
    assert (soak.VARIANTS["table shorter than the window"].table or 0) < soak.STEPS - 1
    assert soak.VARIANTS["narrow"].window > soak.STEPS
    chain = soak.VARIANTS["multistep"].target("cpu", torch.float32)
    assert isinstance(chain, ChainTarget)
    assert chain.chain.previous_weight is not None


@dataclass(frozen=True)
class Broken(soak.Variant):
    """A network that is NaN at step 5."""

    def target(self, device: str, dtype: torch.dtype) -> fs.Target:
        whole = soak.wavy(device, dtype)

        def network(x: Tensor, step: Tensor, row: Tensor) -> Tensor:
            return torch.where((step == 5).unsqueeze(1), torch.nan, whole.network(x, step, row))

        return ChainTarget(whole.chain, whole.shape, network)


def test_a_fault_is_counted_and_the_command_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(soak, "VARIANTS", {"broken": Broken()})
    with pytest.raises(typer.Exit):
        draw(tmp_path, 6)
    assert [row.faults for row in load(Soak, "gpu-soak", tmp_path).rows] == [3, 3]


CLEAN = """\
========= COMPUTE-SANITIZER
what the program itself prints
========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)
"""
HAZARD = """\
========= COMPUTE-SANITIZER
========= Error: Race reported between Write access at _decide+0x10 in coupling.py:53
=========     and Write access at _decide+0x10 in coupling.py:53 [32 hazards]
========= RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)
"""


def test_the_output_of_a_sanitizer_is_parsed() -> None:
    assert soak.report("racecheck", 0, CLEAN).clean
    hazard = soak.report("racecheck", 0, HAZARD)
    assert (hazard.findings, hazard.clean) == (1, False)
    assert "coupling.py:53" in hazard.output
    assert not soak.report("memcheck", 1, CLEAN).clean
    stopped = soak.report("memcheck", 0, "========= COMPUTE-SANITIZER\n")
    assert (stopped.findings, stopped.clean) == (None, False)


def stand_in(folder: Path, output: str) -> str:
    """A program with a sanitizer's command line, which runs nothing."""
    program = folder / "sanitizer"
    program.write_text(f"#!{sys.executable}\nimport sys\nassert sys.argv[4:6] == ['-m', 'benchmarks.soak']\n")
    with program.open("a") as file:
        file.write(f"print({output!r})\n")
    program.chmod(0o755)
    return str(program)


def test_the_output_of_the_tools_is_saved(tmp_path: Path) -> None:
    soak.sanitize(tool=list(soak.TOOLS), sanitizer=stand_in(tmp_path, CLEAN), device="cpu", out=tmp_path)
    saved = load(Sanitized, "gpu-sanitizer", tmp_path)
    assert [row.tool for row in saved.rows] == list(soak.TOOLS)
    assert all(isinstance(row, SanitizerRow) and row.clean for row in saved.rows)
    with pytest.raises(typer.Exit):
        soak.sanitize(tool=["racecheck"], sanitizer=stand_in(tmp_path, HAZARD), device="cpu", out=tmp_path)
    with pytest.raises(typer.BadParameter, match=r"no program .*install the CUDA toolkit"):
        soak.sanitize(tool=["racecheck"], sanitizer=str(tmp_path / "none"), device="cpu", out=tmp_path)


@pytest.mark.slow
def test_the_watched_rounds_run() -> None:
    soak.rounds(device="cpu", count=2)
