"""`foresample sample`: draw samples and keep everything about the run.

Into the output folder go the raw samples (`samples.safetensors`, with seeds and labels), the report (`report.json`), a
picture of the run (`run.png`) and, if the samples are pictures, these (`samples.png`).

If the run is interrupted, those samples are written that were begun as many rounds before as the chain has steps.
Whoever finishes first is not a fair sample; whether a sample was begun by then is decided before it is drawn, and a
round commits a transition or more, so all of these are finished (theory, "Finishing first is not fair").
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Annotated

import torch
import typer
from rich.table import Table
from torch import Tensor
from tqdm import tqdm

from foresample.backends import extra_noise
from foresample.baseline import sequential
from foresample.cli import options
from foresample.cli.console import echo, plain_table, require_folder, require_modules, show
from foresample.cli.pictures import History, are_pictures, grid, run_picture, side_by_side
from foresample.cli.targets import choose_source, choose_window, require_room
from foresample.contracts import Target, predict, resolve_slots
from foresample.core.noise import seeds_of
from foresample.core.report import Commit, Report, Run, on_the_clock
from foresample.engine.engine import sample
from foresample.engine.tuning import call_seconds
from foresample.provenance import make_result, result_json, write_result
from foresample.settings import WINDOW

Progress = Callable[[str, Commit], None]


def sample_command(
    count: Annotated[int, typer.Option(min=1, help="Samples to draw.")] = 64,
    model: options.Model = None,
    target: options.TargetName = None,
    steps: Annotated[int | None, options.steps_option(100)] = None,
    window: options.Window = str(WINDOW),
    slots: Annotated[int | None, options.slots_option("all")] = None,
    label: options.Label = None,
    reuse: options.Reuse = None,
    seed: options.Seed = 0,
    compare: Annotated[
        bool, typer.Option("--compare", help="Also run the sequential sampler, and show both.")
    ] = False,
    device: options.Device = None,
    half: options.Half = False,
    compiled: options.Compiled = False,
    graph: options.Graph = False,
    out: Annotated[Path, typer.Option(help="Folder for samples, pictures and report.")] = Path("out"),
    as_json: options.AsJson = False,
) -> None:
    """Draw samples from a diffusion model, exactly, in a few calls."""
    source = choose_source(
        model=model,
        target=target,
        steps=steps,
        default_steps=100,
        label=label,
        reuse=reuse,
        device=device,
        half=half,
        compiled=compiled,
    )
    require_modules("safetensors", "matplotlib")
    require_folder(out)
    chain, classes = source(), source.labels()
    at_a_time, length = resolve_slots(slots, count), len(chain.std)
    require_room(chain, samples=count, slots=at_a_time)
    seeds = seeds_of(seed, count)
    labels = None if classes is None else torch.tensor(classes)[torch.arange(count) % len(classes)]
    chosen = choose_window(window, chain, slots=at_a_time, graph=graph, quiet=as_json)
    drafted = chosen.number if chosen.pays else 0
    require_room(chain, samples=count, slots=at_a_time, window=drafted)
    if compiled:  # now, so that it does not count as sampling
        for states in {at_a_time, at_a_time * (drafted + 1)}:
            call_seconds(chain, states, repeats=1)
    with RunBars(count * length, quiet=as_json) as bars:
        drawn = draw(chain, seeds, window=drafted, slots=at_a_time, graph=graph, progress=bars.update)
        run, kept = drawn.run, drawn.kept
        files = write_samples(out, drawn.samples, seeds[kept], None if labels is None else labels[kept])
        if run is None:
            echo(f"interrupted: {_kept(drawn, count, out)}", error=True)
            raise typer.Exit(130)
        plain = None if drafted else run
        if compare and drafted:
            watch = partial(bars.update, "sequential")
            plain = sequential(chain, seeds=seeds, slots=at_a_time, graph=graph, observe=watch)
    seconds = plain.report.seconds if plain else estimate_sequential(chain, count, at_a_time)
    settings = {
        **source.about(),
        "count": count,
        "steps": length,
        "window": drafted,
        "slots": at_a_time,
        "seed": seed,
        "label": label,
        "labels": source.names(),
        "compare": compare,
        "device": str(chain.std.device),
        "compiled": compiled,
        "graph": graph,
    }
    estimate = {"calls_mean": length, "seconds_estimated": seconds}
    result = make_result(
        "sample",
        settings,
        speculative=json.loads(run.report.to_json()),
        sequential=json.loads(plain.report.to_json()) if plain else estimate,
    )
    write_result(out / "report.json", result)
    if drafted:
        files += paint(out, run, drawn.history, plain)
    if as_json:
        echo(result_json(result))
        return
    if drafted:
        show(_table(run.report, seconds, measured=plain is not None))
    else:
        echo(f"Sampled sequentially: {length} calls a sample, {seconds:.1f} seconds for all {count}.")
    echo("wrote " + ", ".join(str(path) for path in [*files, out / "report.json"]))


def _kept(drawn: Drawn, count: int, out: Path) -> str:
    """What an interrupted run leaves."""
    told = f"{drawn.finished} of {count} samples were finished"
    if drawn.finished == len(drawn.kept):
        return f"{told}, saved in {out}" if drawn.finished else told
    saved = f"the first {len(drawn.kept)} of all are saved in {out}" if len(drawn.kept) else "none is saved"
    return f"{told}; {saved}: whoever finishes first is not a fair sample. Fewer --slots leave more of a run to keep"


def _table(report: Report, sequential_seconds: float, *, measured: bool) -> Table:
    table = plain_table("per sample", "sequential", "speculative", "", left=1)
    evaluations = report.evaluations_mean / report.steps
    table.add_row(
        "network calls", f"{report.steps}", f"{report.calls_mean:.1f}", f"{report.speedup:.2f}× fewer"
    )
    table.add_row(
        "states evaluated", f"{report.steps}", f"{report.evaluations_mean:.1f}", f"{evaluations:.2f}× as many"
    )
    verdict = on_the_clock(sequential_seconds / report.seconds)
    mark = "" if measured else "≈ "
    table.add_row(
        f"seconds, all {report.count}", f"{mark}{sequential_seconds:.1f}", f"{report.seconds:.1f}", verdict
    )
    if verdict.endswith("slower"):
        table.caption = (
            "Fewer calls pay on the clock where a call on more\n"
            "states costs little more: on a GPU not yet full.\n"
            "Here every further state costs its full price."
        )
    return table


# ---------------------------------------------------------------- the work


@dataclass(frozen=True)
class Drawn:
    """What was drawn; of an interrupted run, what of it is a fair sample."""

    samples: Tensor
    kept: Tensor
    """Which of the samples asked for these are."""
    run: Run | None
    """None if it was interrupted."""
    history: History
    finished: int
    """Samples, also those not kept."""


def draw(target: Target, seeds: Tensor, *, window: int, slots: int, graph: bool, progress: Progress) -> Drawn:
    """Samples of these seeds; sequential ones if the window is 0."""
    finished, history = _Finished(len(seeds), target), History()
    name = "speculative" if window else "sequential"

    def observe(commit: Commit) -> None:
        finished(commit)
        history(commit)
        progress(name, commit)

    try:
        if not window:
            run = sequential(target, seeds=seeds, slots=slots, graph=graph, observe=observe)
        elif graph:  # rounds that are watched are not replayed: one sample is drawn again for the picture
            run = sample(target, seeds=seeds, window=window, slots=slots, graph=True)
            sample(target, seeds=seeds[:1], window=window, observe=history)
        else:
            run = sample(target, seeds=seeds, window=window, slots=slots, observe=observe)
    except KeyboardInterrupt:
        kept = finished.fair().nonzero().flatten()
        return Drawn(finished.samples[kept], kept, None, history, int(finished.done.sum()))
    return Drawn(run.samples.cpu(), torch.arange(len(seeds)), run, history, len(seeds))


class _Finished:
    """Holds finished samples as they come: an observer."""

    def __init__(self, count: int, target: Target) -> None:
        self.steps = len(target.std)
        self.samples = torch.zeros(count, *target.shape, dtype=target.std.dtype)
        self.done = torch.zeros(count, dtype=torch.bool)
        self.begun = torch.zeros(count, dtype=torch.int64)  # the round of each, from 1 on
        self.rounds = 0

    def fair(self) -> Tensor:
        """Those begun as many rounds ago as the chain has steps."""
        return (self.begun > 0) & (self.begun <= self.rounds + 1 - self.steps)

    def __call__(self, commit: Commit) -> None:
        self.rounds += 1
        self.begun[commit.sample[commit.step == 0].cpu()] = self.rounds
        end = (commit.step + commit.committed == self.steps).nonzero().flatten()
        if len(end):
            which = commit.sample[end].cpu()
            self.samples[which] = commit.x[end].cpu()
            self.done[which] = True


def write_samples(out: Path, samples: Tensor, seeds: Tensor, labels: Tensor | None) -> list[Path]:
    """Save the samples, and paint them if they are pictures."""
    if not len(samples):
        return []
    from safetensors.torch import save

    tensors = {"samples": samples, "seeds": seeds} | ({} if labels is None else {"labels": labels})
    files = [out / "samples.safetensors"]
    files[0].write_bytes(
        save({name: value.contiguous() for name, value in tensors.items()})
    )  # as the umask has it
    if are_pictures(samples.shape[1:]):
        grid(samples).save(out / "samples.png")
        files.insert(0, out / "samples.png")
    return files


def paint(out: Path, run: Run, history: History, plain: Run | None) -> list[Path]:
    """What the run did and, if they are pictures, its samples beside those of the sequential run."""
    run_picture(out / "run.png", run.report, history)
    if plain is None or not are_pictures(run.samples.shape[1:]):
        return [out / "run.png"]
    sides = [
        (f"{name}: {one.report.calls_mean:.4g} calls a sample", grid(one.samples))
        for name, one in (("sequential", plain), ("speculative", run))
    ]
    side_by_side(*sides).save(out / "compare.png")
    return [out / "run.png", out / "compare.png"]


def estimate_sequential(target: Target, count: int, slots: int, calls: int = 3) -> float:
    """Seconds the sequential sampler would take, from the mean of a few of its calls."""
    std = target.std
    x = torch.randn(slots, *target.shape, dtype=std.dtype, device=std.device)
    row = torch.arange(slots, device=std.device)
    with torch.no_grad():
        zero = torch.zeros_like(row)
        predict(target, x, zero, row, extra_noise(target, row, zero))
        started = perf_counter()
        for k in torch.linspace(0, len(std) - 1, calls).long().tolist():
            step = torch.full_like(row, k)
            float(predict(target, x, step, row, extra_noise(target, row, step)).sum())
    return (perf_counter() - started) / calls * len(std) * -(-count // slots)


class RunBars:
    """A live bar per sampler: transitions committed, calls, drafts kept a round."""

    def __init__(self, total: int, *, quiet: bool) -> None:
        self.total, self.disable = total, quiet or None
        self.bar: tqdm | None = None
        self.name, self.calls, self.rounds, self.kept = "", 0, 0, 0

    def __enter__(self) -> RunBars:
        return self

    def __exit__(self, *error: object) -> None:
        if self.bar is not None:
            self.bar.close()

    def update(self, name: str, commit: Commit) -> None:
        if name != self.name:
            self.__exit__()
            self.bar = tqdm(total=self.total, desc=name, unit="step", disable=self.disable)
            self.name, self.calls, self.rounds, self.kept = name, 0, 0, 0
        self.calls += 1
        self.rounds += len(commit.committed)
        committed = int(commit.committed.sum())
        self.kept += committed - len(commit.committed)
        assert self.bar is not None
        self.bar.set_postfix_str(
            f"{self.calls} calls, {self.kept / self.rounds:.2f} kept a round", refresh=False
        )
        self.bar.update(committed)
