"""Datasets: what the orchestration costs, what memory a run takes, and the distribution of a large one.

python -m benchmarks.generate overhead
python -m benchmarks.generate memory
python -m benchmarks.generate law
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from statistics import median
from time import perf_counter, process_time, thread_time
from typing import Annotated, Any

import typer

import foresample as fs
from benchmarks.kinds.datasets import GenerateLawSettings, GenerateMemoryRow, OverheadRow
from benchmarks.results import RESULTS, save
from benchmarks.timing import take_turns
from foresample import pretrained
from foresample.core.noise import seeds_of
from foresample.targets import ChainTarget

app = typer.Typer(add_completion=False, help=__doc__)
Out = Annotated[Path, typer.Option(help="Folder for the result file.")]


def mixture(dim: int, steps: int) -> ChainTarget:
    """The closed-form chain of the draft-tree papers."""
    return fs.GaussianMixture.of_draft_trees(dim).flow(steps, 0.1)


TARGETS: list[tuple[str, Callable[[], ChainTarget], dict[str, Any]]] = [
    ("mixture, d = 2, 16 steps", lambda: mixture(2, 16), {"count": 10_000, "window": 8, "slots": 256}),
    ("mixture, d = 500, 30 steps", lambda: mixture(500, 30), {"count": 500, "window": 8, "slots": 64}),
    ("Fashion-MNIST, 25 steps", lambda: pretrained.load().target(25), {"count": 20, "window": 6, "slots": 10}),
]


class Clock:
    """Seconds inside the engine while a dataset is drawn: those of its generator, minus those of its input.

    Wall-clock seconds, and processor seconds of this thread.
    """

    def __init__(self, draw: Callable[..., Iterator[Any]]) -> None:
        self.original, self.seconds, self.cpu_seconds = draw, 0.0, 0.0

    def draw(self, engine: fs.Engine, parts: Iterable[Any], *more: Any, **named: Any) -> Iterator[Any]:
        yield from self._clocked(self.original(engine, self._clocked(iter(parts), -1), *more, **named), 1)

    def _clocked(self, iterator: Iterator[Any], sign: int) -> Iterator[Any]:
        while True:
            started, cpu = perf_counter(), thread_time()
            try:
                value = next(iterator)
            except StopIteration:
                return
            finally:
                self.seconds += sign * (perf_counter() - started)
                self.cpu_seconds += sign * (thread_time() - cpu)
            yield value


@app.command()
def overhead(
    turns: Annotated[int, typer.Option(min=2, help="At most, of each target.")] = 30,
    seconds: Annotated[float, typer.Option(help="Time limit of each target.")] = 60.0,
    shard: int = 1000,
    out: Out = RESULTS,
) -> None:
    """Time a dataset drawn by one worker beyond the engine's own work on the same samples, in two ways.

    Inside: seconds of a run that are not the engine's, over those that are, in wall-clock time and in processor time
    (which counts the thread that writes, too); the median of all turns. Beside: a dataset against the engine alone,
    in turns.
    """
    rows: list[OverheadRow] = []
    for name, make, settings in TARGETS:
        rows.append(
            row := _overhead(name, make(), settings, min(shard, settings["count"] // 5), turns, seconds)
        )
        share = f"{row.inside:.2%} inside ({row.inside_cpu:.2%} of the processor)"
        print(f"{name}: {share}, {row.beside:+.2%} ± {row.beside_error:.2%} beside", flush=True)
        save(out / "generate-overhead.json", "generate-overhead", {"turns": turns}, rows=rows)


def _overhead(
    name: str, target: ChainTarget, settings: dict[str, Any], shard: int, turns: int, seconds: float
) -> OverheadRow:
    inside, inside_cpu = [], []
    engine = fs.Engine(target, window=settings["window"], slots=settings["slots"])

    def alone(turn: int) -> None:
        for _ in engine.draw(seeds_of(0, settings["count"])):
            pass

    def dataset(turn: int) -> None:
        original = fs.Engine.draw
        clock = Clock(original)
        fs.Engine.draw = lambda *a, **n: clock.draw(*a, **n)  # type: ignore[method-assign]
        started, cpu = perf_counter(), process_time()
        try:
            with tempfile.TemporaryDirectory() as folder:
                fs.generate(target, out=folder, shard=shard, progress=lambda status: None, **settings)
                wall, processor = perf_counter() - started, process_time() - cpu
        finally:
            fs.Engine.draw = original  # type: ignore[method-assign]
        inside.append(wall / clock.seconds - 1)
        inside_cpu.append(processor / clock.cpu_seconds - 1)

    timing = take_turns(
        {"dataset": dataset, "engine": alone}, least=min(8, turns), most=turns, seconds=seconds, error=0.002
    )
    ratio = timing.ratio("engine")
    return OverheadRow(
        target=name,
        **settings,
        shard=shard,
        engine_seconds=timing.median("engine"),
        dataset_seconds=timing.median("dataset"),
        beside=ratio.ratio - 1,
        beside_error=ratio.error,
        turns=ratio.turns,
        inside=median(inside[1:]),  # the first is the warm-up
        inside_cpu=median(inside_cpu[1:]),
    )


@app.command()
def draw(folder: Path, dim: int, steps: int, count: int, window: int, slots: int, law: int) -> None:
    """One dataset of the mixture, its manifest on stdout: a process whose memory is its own."""
    dataset = fs.generate(
        mixture(dim, steps), count, out=folder, window=window, slots=slots, law=law, about={"dim": dim}
    )
    print(json.dumps(dataset.manifest))


def _drawn(dim: int, steps: int, count: int, window: int, slots: int, law: int) -> dict[str, Any]:
    """The manifest of a dataset drawn in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        numbers = [str(n) for n in (dim, steps, count, window, slots, law)]
        command = [sys.executable, "-m", "benchmarks.generate", "draw", folder, *numbers]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=os.environ)
    return json.loads(done.stdout)


@app.command()
def memory(steps: int = 8, window: int = 6, slots: int = 128, out: Out = RESULTS) -> None:
    """Peak resident memory over the size of the dataset, for small samples and large ones."""
    settings = {"steps": steps, "window": window, "slots": slots, "shard": 1000}
    rows: list[GenerateMemoryRow] = []
    for dim, count in ((2, 20_000), (2, 160_000), (512, 8_000), (512, 40_000)):
        (run,) = _drawn(dim, steps, count, window, slots, 0)["runs"]
        peak, seconds = run["peak_mib"], run["seconds"]
        mib = count * dim * 8 / 2**20
        row = GenerateMemoryRow(dim=dim, count=count, samples_mib=mib, peak_mib=peak, seconds=seconds)
        rows.append(row)
        print(row, flush=True)
        save(out / "generate-memory.json", "generate-memory", settings, rows=rows)


@app.command()
def law(
    count: int = 100_000,
    sequential: int = 20_000,
    dim: int = 2,
    steps: int = 16,
    window: int = 8,
    slots: int = 256,
    out: Out = RESULTS,
) -> None:
    """A large dataset of a closed-form target in one run, its distribution tested against sequential samples."""
    manifest = _drawn(dim, steps, count, window, slots, sequential)
    (run,) = manifest["runs"]
    settings = GenerateLawSettings(dim=dim, steps=steps, window=window, slots=slots, count=count)
    result = {
        "law": manifest["law"],
        "costs": manifest["costs"],
        "failures": manifest["failures"],
        "shards": len(manifest["shards"]),
        "seconds": run["seconds"],
        "peak_mib": run["peak_mib"],
    }
    print(result)
    save(out / "generate-law.json", "generate-law", settings, **result)


if __name__ == "__main__":
    app()
