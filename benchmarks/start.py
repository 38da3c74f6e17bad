"""Seconds from a new process to its first sample, and processor seconds of commands that only print something.

    python -m benchmarks.clock start

Every measurement is a process of its own. Ways to run the network: as it is (eager) and compiled; on a GPU also
captured. What compilers cache is kept in folders of each way, empty at first, so that the rows say what a first use
costs and what later ones do.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from time import time
from typing import Annotated, Any

import torch
import typer

from benchmarks.kinds.clock import StartCommand, StartRow, StartSettings
from benchmarks.results import RESULTS, save
from foresample.pretrained import EMBEDDED

_SAMPLE = """
import json, os, sys
from time import perf_counter, time
model, steps, window, device, compiled, graph = json.loads(sys.argv[1])
import torch
torch.set_num_threads(1)
import foresample as fs
imported = time()
from torch._dynamo.utils import counters
half = torch.bfloat16 if device == "cuda" else torch.float32
target = fs.pretrained.load(model, device, half, compiled=compiled).target(steps)
engine = fs.Engine(target, window=window, graph=graph)
first = engine.sample([1]).report
ready, began = time(), perf_counter()
engine.sample([2])
begun = float(os.environ["BEGUN"])
print(json.dumps({
    "import_seconds": imported - begun,
    "seconds": ready - begun,
    "preparation_seconds": first.preparation_seconds,
    "next_seconds": perf_counter() - began,
    "compilations": counters["stats"]["unique_graphs"],
}))
"""
COMMANDS = (
    ("--help",),
    ("sample", "--help"),
    ("sample", "--device", "abacus"),
    ("sample", "--model", "/nowhere"),
    ("tune", "--nonsense"),
)
"""Help, and errors in what the user typed."""
CACHES = ("NUMBA_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")
"""Where compilers keep what they compiled."""


def start(
    model: Annotated[Path, typer.Argument(help="A diffusers DDPM folder.")] = EMBEDDED,
    steps: int = 100,
    window: int = 16,
    device: str = "cpu",
    repeats: Annotated[int, typer.Option(help="Of each command.")] = 5,
    out: Annotated[Path, typer.Option(help="Folder for the result file.")] = RESULTS,
) -> None:
    """Seconds to the first sample in a new process; processor seconds of help and of usage errors."""
    cuda = torch.device(device).type == "cuda"
    settings = StartSettings(
        model=model.resolve().name, steps=steps, window=window, device=device, repeats=repeats
    )
    path = out / f"start-{torch.device(device).type}.json"
    ways = [("eager", False, False), ("compiled", True, False)]
    if cuda:
        ways = [("eager", False, False), ("captured", False, True), ("compiled and captured", True, True)]
    commands = [_command(arguments, repeats) for arguments in COMMANDS]
    rows: list[StartRow] = []
    for way, compiled, graph in ways:
        given = json.dumps([str(model.resolve()), steps, window, device, compiled, graph])
        with tempfile.TemporaryDirectory() as folder:
            caches = {name: f"{folder}/{name}" for name in CACHES}
            for cached in (False, True):
                found, processor = _run([sys.executable, "-c", _SAMPLE, given], caches)
                told = json.loads(found.stdout.splitlines()[-1])
                rows.append(StartRow(way=way, cached=cached, processor_seconds=processor, **told))
                print(rows[-1], flush=True)
                save(path, "start", settings, rows=rows, commands=commands)


def _command(arguments: tuple[str, ...], repeats: int) -> StartCommand:
    """A command's processor seconds, the median of several runs after one that is not counted."""
    line = [sys.executable, "-m", "foresample", *arguments]
    done = [_run(line, {}) for _ in range(repeats + 1)][1:]
    row = StartCommand(
        arguments=list(arguments),
        status=done[0][0].returncode,
        processor_seconds=median(seconds for _, seconds in done),
    )
    print(row, flush=True)
    return row


def _run(line: list[str], more: dict[str, Any]) -> tuple[subprocess.CompletedProcess[str], float]:
    """A process that has ended, and its processor seconds."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        line, capture_output=True, text=True, env={**os.environ, **more, "BEGUN": str(time())}
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode not in (0, 2):
        raise RuntimeError(f"{line[:3]} failed: {done.stderr[-2000:]}")
    return done, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
