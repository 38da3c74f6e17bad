"""The fused rounds at length: millions of samples of small chains on a GPU, and the kernels under compute-sanitizer.

python -m benchmarks.soak draw
python -m benchmarks.soak sanitize

Every variant that the kernels treat differently is drawn in float32 and in float64. No sample may end in a fault, and
on a fixed part of the samples every fused round must agree with the plain round (`tests.support.agreement`). Both
commands save what they found and exit with status 1 if anything was wrong.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch
import typer
from torch import Tensor

import foresample as fs
from benchmarks.kinds.clock import SanitizerRow, SanitizerSettings, SoakRow, SoakSettings
from benchmarks.results import RESULTS, save
from foresample.backends.rounds import round_for
from foresample.chains import Chain
from foresample.core.noise import seeds_of
from foresample.core.round import Padded
from foresample.faults import NO_FAULT
from foresample.targets import ChainTarget
from tests.backends.fused import assert_agree_along

app = typer.Typer(add_completion=False, help=__doc__)
Device = Annotated[str, typer.Option(help="cuda, or cpu to try the command; kernels run on cuda only.")]
Out = Annotated[Path, typer.Option(help="Folder for the result file.")]
TOOLS = ("memcheck", "racecheck", "initcheck")
STEPS = 12
_SEED = 11
_PART = 200_000  # seeds at a time


def wavy(device: str, dtype: torch.dtype, size: int = 1, *, multistep: bool = False) -> ChainTarget:
    """x' = 0.8 x + p + 0.4 z with p = 0.6 sin(2x + k) in one dimension; in more, 2x becomes x + its neighbour."""

    def network(x: Tensor, step: Tensor, row: Tensor) -> Tensor:
        return 0.6 * torch.sin(x + x.roll(1, 1) + step.to(x.dtype).unsqueeze(1))

    def full(value: float) -> Tensor:
        return torch.full((STEPS,), value, dtype=dtype, device=device)

    previous = None
    if multistep:
        previous = full(-0.3)
        previous[0] = 0
    return ChainTarget(Chain(full(0.4), full(0.8), full(1.0), previous), torch.Size([size]), network)


@dataclass(frozen=True)
class Variant:
    """A chain and how it is sampled."""

    size: int = 1
    window: int = STEPS - 1
    table: int | None = None
    """Window of the prior; None draws without a prior."""
    diagonal: bool = False
    """Pictures in a basis of frequencies, where a prior's response is a diagonal."""
    multistep: bool = False
    block: int | None = None

    def target(self, device: str, dtype: torch.dtype) -> fs.Target:
        if not self.diagonal:
            return wavy(device, dtype, self.size, multistep=self.multistep)
        flat = wavy(device, dtype, self.size)

        def network(x: Tensor, step: Tensor, row: Tensor) -> Tensor:
            return flat.network(x.flatten(1), step, row).view_as(x)

        return fs.targets.in_frequencies(ChainTarget(flat.chain, torch.Size([1, self.size, 1]), network))

    def drafter(self, target: fs.Target, pilots: int) -> fs.Replay:
        if self.table is None:
            return fs.Replay()
        return fs.Replay(prior=fs.fit_prior(target, window=self.table, pilots=pilots))


VARIANTS = {
    "cold": Variant(),
    "table shorter than the window": Variant(table=8),
    "matrix": Variant(size=3, table=STEPS - 1),
    "diagonal": Variant(size=16, table=STEPS - 1, diagonal=True),
    "multistep": Variant(multistep=True),
    "multistep, matrix, blocks of 4": Variant(size=3, table=STEPS - 1, multistep=True, block=4),
    "narrow": Variant(window=2 * STEPS + 1),  # no row can draft the whole window
}
DTYPES = {"float32": torch.float32, "float64": torch.float64}


@app.command()
def draw(
    samples: Annotated[int, typer.Option(min=1, help="Samples in all, in equal parts.")] = 10_000_000,
    compared: Annotated[int, typer.Option(min=1, help="Samples of each part to compare with plain.")] = 500,
    slots: Annotated[int, typer.Option(min=1, help="Samples under way at a time.")] = 20_000,
    pilots: Annotated[int, typer.Option(min=2, help="Pilots of each prior.")] = 200,
    device: Device = "cuda",
    out: Out = RESULTS,
) -> None:
    """Draw all variants, count faults, compare a part with the plain round; save `gpu-soak.json`."""
    each = -(-samples // (len(VARIANTS) * len(DTYPES)))
    settings = SoakSettings(samples=samples, seed=_SEED, slots=slots, pilots=pilots, device=device)
    rows: list[SoakRow] = []
    for name, variant in VARIANTS.items():
        for precision, dtype in DTYPES.items():
            target = variant.target(device, dtype)
            drafter = variant.drafter(target, pilots)
            rows.append(_drawn(name, precision, variant, target, drafter, each, slots, compared))
            print(rows[-1], flush=True)
            save(out / "gpu-soak.json", "gpu-soak", settings, rows=rows)
    if any(row.faults or row.difference for row in rows):
        raise typer.Exit(1)


def _drawn(
    name: str,
    precision: str,
    variant: Variant,
    target: fs.Target,
    drafter: fs.Replay,
    samples: int,
    slots: int,
    compared: int,
) -> SoakRow:
    engine = fs.Engine(target, window=variant.window, block=variant.block, slots=slots, drafter=drafter)
    seeds, done, faults, calls = seeds_of(_SEED, samples), 0, 0, 0
    for part in seeds.split(_PART):
        for finished in engine.draw(part):
            done += len(finished.index)
            finite = finished.x.flatten(1).isfinite().all(1).cpu()
            faults += int(((finished.fault.cpu() != NO_FAULT) | ~finite).sum())
            calls += int(finished.calls.sum())
    fused = _is_fused(target, drafter)
    return SoakRow(
        variant=name,
        dtype=precision,
        samples=done,
        faults=faults,
        calls=calls / done,
        compared=compared if fused else 0,
        difference=difference(variant, target, drafter, compared) if fused else None,
    )


def _is_fused(target: fs.Target, drafter: fs.Replay) -> bool:
    """True if kernels draw this; on a GPU they must."""
    if not target.std.is_cuda:
        return False
    speculation = fs.Engine(target, drafter=drafter, slots=1).speculation
    if round_for(target, speculation).propose.__module__ != "foresample.backends.triton.round":
        raise RuntimeError("the kernels do not serve this variant here: is Triton installed?")
    return True


def difference(variant: Variant, target: fs.Target, drafter: fs.Replay, compared: int) -> str | None:
    """The first disagreement of a fused round with the plain one, along the chains of the first samples, or None."""
    layout = None if variant.window >= STEPS else Padded()
    try:
        assert_agree_along(target, drafter, variant.window, seeds_of(_SEED, compared), variant.block, layout)
    except AssertionError as error:
        return str(error) or "they disagree"
    return None


@app.command()
def rounds(device: Device = "cuda", count: Annotated[int, typer.Option(min=1)] = 4) -> None:
    """Run every kernel in every variant, on a few samples: what `sanitize` watches."""
    for variant in VARIANTS.values():
        for dtype in DTYPES.values():
            target = variant.target(device, dtype)
            drafter, seeds = variant.drafter(target, 2 * count), seeds_of(_SEED, count)
            fs.Engine(target, window=variant.window, block=variant.block, slots=count, drafter=drafter).sample(
                seeds
            )
            fs.sequential(target, seeds=seeds)


@app.command()
def sanitize(
    tool: Annotated[list[str], typer.Option(help="Tools of compute-sanitizer.")] = list(TOOLS),  # noqa: B006
    sanitizer: Annotated[str, typer.Option(help="The program.")] = "compute-sanitizer",
    device: Device = "cuda",
    out: Out = RESULTS,
) -> None:
    """Run `rounds` under compute-sanitizer, once with each tool; save `gpu-sanitizer.json`."""
    if shutil.which(sanitizer) is None:
        raise typer.BadParameter(
            f"there is no program {sanitizer}: install the CUDA toolkit, or give its path",
            param_hint="--sanitizer",
        )
    rows: list[SanitizerRow] = []
    for name in tool:
        # Without a cache every tensor is an allocation of its own, whose bounds and first use the tools see.
        done = subprocess.run(
            [sanitizer, "--tool", name, sys.executable, "-m", "benchmarks.soak", "rounds", "--device", device],
            capture_output=True,
            text=True,
            env=os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},
        )
        rows.append(report(name, done.returncode, done.stdout + done.stderr))
        print(f"{name}: {rows[-1].summary or 'no summary'}, exit status {rows[-1].status}", flush=True)
        settings = SanitizerSettings(tools=tool, variants=list(VARIANTS), dtypes=list(DTYPES), device=device)
        save(out / "gpu-sanitizer.json", "gpu-sanitizer", settings, rows=rows)
    if not all(row.clean for row in rows):
        raise typer.Exit(1)


def report(tool: str, status: int, output: str) -> SanitizerRow:
    """One tool's verdict: its summary, and its findings, which are marked with a row of equals signs."""
    said = [line for line in output.splitlines() if line.startswith("=========")]
    summary = next((line.strip("= ") for line in reversed(said) if "SUMMARY" in line), None)
    found = None if summary is None else re.search(r"SUMMARY: (\d+)", summary)
    return SanitizerRow(
        tool=tool,
        status=status,
        findings=None if found is None else int(found[1]),
        summary=summary,
        output="\n".join(said[:400]),
    )


if __name__ == "__main__":
    app()
