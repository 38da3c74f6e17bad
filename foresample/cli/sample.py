"""`foresample sample`: draws samples and saves them with the report of the run.

The output folder receives the raw samples (`samples.safetensors`, with seeds and labels), the report (`report.json`), a
picture of the run (`run.png`) and, if the samples are pictures, a grid of them (`samples.png`).

If a run of a chain of N steps is interrupted, it writes the samples begun at least N rounds ago. Those that finish
first are not a fair sample; but when a sample is begun is decided before it is drawn, and a round commits at least one
transition, so all of these are finished (theory, "Finishing first is not fair"). If a sample breaks, nothing is
written: the samples finished by then would be selected by not having broken.

A run that begins to write removes the files of an earlier one, so that the folder shows one run.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
import typer
from rich.table import Table
from safetensors.torch import save
from torch import Tensor
from tqdm import tqdm

from foresample.baseline import Sequential
from foresample.cli.console import echo, plain_table, show, wait_line
from foresample.cli.options import Sample
from foresample.cli.pictures import History, are_pictures, grid, run_picture, side_by_side
from foresample.cli.targets import choose_window, described, make_source
from foresample.contracts import Target, resolve_slots
from foresample.core.noise import seeds_of
from foresample.core.report import Commit, Report, Run
from foresample.engine.clock import Comparison, time_in_turns
from foresample.engine.engine import Engine
from foresample.engine.tuning import call_seconds
from foresample.provenance import make_result, result_json, write_result
from foresample.text import duration

_TURNS, _ENOUGH_SECONDS = 7, 10.0  # turns of a comparison, and the time after which no more than two are begun


def run(options: Sample) -> None:
    count, out, graph, quiet = options.count, options.out, options.graph, options.as_json
    source = make_source(options)
    chain, classes = source(), source.labels()
    slots, steps = resolve_slots(options.slots, count), len(chain.std)
    window, gains = choose_window(options, chain, samples=count, slots=slots)
    window = window if gains else 0
    seeds = seeds_of(options.seed, count)
    saved = {"seeds": seeds}
    if classes is not None:
        saved["labels"] = torch.tensor(classes)[torch.arange(count) % len(classes)]
    finished, history = Finished(count, chain), History()
    in_turn = partial(Sequential, chain, slots, graph=graph)
    sampler = Engine(chain, window=window, slots=slots, graph=graph) if window else in_turn()
    baseline = in_turn() if options.compare and window else None
    with RunBars(count * steps, quiet=quiet) as bars:

        def observe(commit: Commit) -> None:
            finished(commit)
            history(commit)
            bars.update("speculative" if window else "sequential", commit)

        try:  # replayed rounds call no observer
            drawn = sampler.sample(seeds, None if graph and window else observe)
        except KeyboardInterrupt:
            kept = finished.fair().nonzero().flatten()
            write_samples(out, finished.samples[kept], {name: value[kept] for name, value in saved.items()})
            echo(f"interrupted: {_kept(int(finished.done.sum()), len(kept), count, out)}", error=True)
            raise typer.Exit(130) from None
        files = write_samples(out, drawn.samples.cpu(), saved)
        if graph and window:
            Engine(chain, window=window).sample(seeds[:1], history)
        settings = {
            **described(options, source, chain),
            "count": count,
            "window": window,
            "slots": slots,
            "seed": options.seed,
            "labels": source.names(),
            "compare": options.compare,
        }
        plain, compared = None if window else drawn, None
        result = _report(out, settings, drawn, plain, compared)
        if window:
            files += paint(out, drawn, history)
        try:
            if baseline is not None:
                plain = baseline.sample(seeds, partial(bars.update, "sequential"))
                files += paint_both(out, drawn, plain)
                bars.close()
                with wait_line(quiet=quiet) as say:  # both are warm now
                    say("both samplers in turns, for their times")
                    compared = _compare(baseline, sampler, seeds, graph=graph)
                result = _report(out, settings, drawn, plain, compared)
        except KeyboardInterrupt:
            echo(f"interrupted: the samples are in {out}, and the comparison was not finished", error=True)
            raise typer.Exit(130) from None
    if quiet:
        echo(result_json(result))
        return
    took = f"{duration(drawn.report.seconds)} for all {count}"
    if not window:
        echo(f"Sampled sequentially: {steps} calls a sample, {took}.")
    else:
        show(_table(drawn.report, compared))
        if compared is None:
            echo(f"Drawn in {took}. Add --compare to time both samplers in turns.")
    echo("wrote " + ", ".join(str(path) for path in [*files, out / "report.json"]))


def _report(
    out: Path, settings: dict[str, Any], drawn: Run, plain: Run | None, compared: Comparison | None
) -> dict[str, Any]:
    """Write the report; without a baseline it has the sequential sampler's calls only."""
    result = make_result(
        "sample",
        settings,
        speculative=json.loads(drawn.report.to_json()),
        sequential=json.loads(plain.report.to_json()) if plain else {"calls_mean": drawn.report.steps},
        turns=compared and asdict(compared),
    )
    write_result(out / "report.json", result)
    return result


def _compare(
    plain: Engine | Sequential, ours: Engine | Sequential, seeds: Tensor, *, graph: bool
) -> Comparison:
    """Time both samplers on all samples, in turns."""
    last: dict[str, Report] = {}

    def run(name: str, sampler: Engine | Sequential) -> Report:
        last[name] = sampler.sample(seeds).report
        return last[name]

    found = time_in_turns(
        partial(run, "plain", plain),
        partial(run, "ours", ours),
        turns=_TURNS,
        at_least=2,
        seconds=_ENOUGH_SECONDS,
    )
    if ours.target.std.is_cuda:  # a run times only the launch of a call: time calls separately
        for report, times in ((last["plain"], found.plain), (last["ours"], found.ours)):
            call = call_seconds(ours.target, report.slots * (report.window + 1), graph=graph)
            times.network = [call * report.rounds / (report.occupancy * report.slots)] * len(times.seconds)
    return found


def _kept(finished: int, kept: int, count: int, out: Path) -> str:
    """The sentence about the samples that an interrupted run leaves."""
    ended = f"{finished} of {count} samples were finished"
    if finished == kept:
        return f"{ended}, saved in {out}" if finished else ended
    saved = f"the first {kept} are saved in {out}" if kept else "none is saved"
    return f"{ended}; {saved}: the samples that finish first are not a fair sample. With fewer --slots more are saved"


def _table(report: Report, compared: Comparison | None) -> Table:
    table = plain_table("per sample", "sequential", "speculative", "", left=1)
    evaluations = report.evaluations_mean / report.steps
    table.add_row(
        "network calls", f"{report.steps}", f"{report.calls_mean:.1f}", f"{report.speedup:.2f}× fewer"
    )
    table.add_row(
        "states evaluated", f"{report.steps}", f"{report.evaluations_mean:.1f}", f"{evaluations:.2f}× as many"
    )
    if compared is not None:
        before, now = compared.plain.medians[0], compared.ours.medians[0]
        table.add_row(f"time, all {report.count}", before, now, compared.verdict)
        turns = f"time: median of {len(compared.plain.seconds)} runs each, in turns, after a warm-up"
        table.caption = turns + (f"\n{compared.detail.replace(', ', chr(10))}" if compared.detail else "")
    return table


class Finished:
    """An observer that keeps finished samples."""

    def __init__(self, count: int, target: Target) -> None:
        self.steps, self.rounds = len(target.std), 0
        self.samples = torch.zeros(count, *target.shape, dtype=target.std.dtype)
        self.done = torch.zeros(count, dtype=torch.bool)
        self.begun = torch.zeros(count, dtype=torch.int64)  # the round of each, from 1 on

    def fair(self) -> Tensor:
        """Whether each sample was begun at least as many rounds ago as the chain has steps, [count]."""
        return (self.begun > 0) & (self.begun <= self.rounds + 1 - self.steps)

    def __call__(self, commit: Commit) -> None:
        self.rounds += 1
        self.begun[commit.sample[commit.step == 0].cpu()] = self.rounds
        end = (commit.step + commit.committed == self.steps).nonzero().flatten()
        if len(end):
            which = commit.sample[end].cpu()
            self.samples[which] = commit.x[end].cpu()
            self.done[which] = True


def write_samples(out: Path, samples: Tensor, more: dict[str, Tensor]) -> list[Path]:
    """Save the samples in place of an earlier run's files, and paint them if they are pictures."""
    if not len(samples):
        return []
    for name in Sample.files:
        (out / name).unlink(missing_ok=True)
    tensors = {"samples": samples.contiguous(), **more}
    (out / "samples.safetensors").write_bytes(save(tensors))  # with the umask's permissions
    if not are_pictures(samples.shape[1:]):
        return [out / "samples.safetensors"]
    grid(samples).save(out / "samples.png")
    return [out / "samples.png", out / "samples.safetensors"]


def paint(out: Path, run: Run, history: History) -> list[Path]:
    """Paint the rounds of a run."""
    run_picture(out / "run.png", run.report, history)
    return [out / "run.png"]


def paint_both(out: Path, run: Run, plain: Run) -> list[Path]:
    """Paint both samplers' samples side by side, if they are pictures."""
    if not are_pictures(run.samples.shape[1:]):
        return []
    sides = [
        (f"{name}: {one.report.calls_mean:.4g} calls a sample", grid(one.samples))
        for name, one in (("sequential", plain), ("speculative", run))
    ]
    side_by_side(*sides).save(out / "compare.png")
    return [out / "compare.png"]


class RunBars:
    """A live bar per sampler: transitions committed, calls, and drafts kept per round."""

    def __init__(self, total: int, *, quiet: bool) -> None:
        self.total, self.disable, self.name = total, quiet or None, ""
        self.bar: tqdm | None = None

    def __enter__(self) -> RunBars:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        if self.bar is not None:
            self.bar.close()

    def update(self, name: str, commit: Commit) -> None:
        if self.bar is None or name != self.name:
            self.close()
            self.bar = tqdm(total=self.total, desc=name, unit="step", disable=self.disable)
            self.name, self.calls, self.rounds, self.kept = name, 0, 0, 0
        committed, rounds = int(commit.committed.sum()), len(commit.committed)
        self.calls += 1
        self.rounds += rounds
        self.kept += committed - rounds
        kept = f"{self.calls} calls, {self.kept / self.rounds:.2f} kept a round"
        self.bar.set_postfix_str(kept, refresh=False)
        self.bar.update(committed)
