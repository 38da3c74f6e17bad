"""`foresample generate`: draws a dataset into shards, in one process or many, or resumes one."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import typer
from tqdm import tqdm

from foresample.cli import interrupts
from foresample.cli.console import echo, wait_line
from foresample.cli.inspect import show_dataset
from foresample.cli.options import Generate
from foresample.cli.targets import make_source, read_window
from foresample.datasets.generation import generate
from foresample.datasets.manifest import Status, read_manifest


def run(options: Generate) -> None:
    ray, cpus, quiet = options.ray, options.cpus, options.as_json
    source = make_source(options, elsewhere=ray is not None)
    if ray is not None and options.device in (None, "cpu"):
        cpus = cpus or 1
    try:
        with DatasetBar(options.count, quiet=quiet) as bar, Finishing(bar) as stop:
            dataset = generate(
                source,
                options.count,
                out=options.out,
                window=read_window(options.window),
                slots=options.slots,
                shard=options.shard,
                seed=options.seed,
                labels=source.labels(),
                about={**source.about(), **source.configurations()},
                law=options.law,
                ray=ray,
                cpus=cpus,
                progress=bar.update,
                stop=stop if ray is None else None,
                graph=options.graph,
            )
    except KeyboardInterrupt:
        echo(_interrupted(options.out, law=options.law > 0), error=True)
        raise typer.Exit(130) from None
    show_dataset(dataset, as_json=quiet)
    if stop.requested and not dataset.complete:
        echo("interrupted: run the same command again to resume", error=True)
        raise typer.Exit(130)
    if dataset.failures:
        raise typer.Exit(3)
    if dataset.law is not None and not dataset.law.passed:
        raise typer.Exit(1)


def _interrupted(out: Path, *, law: bool) -> str:
    """The sentence about what an interrupted run leaves, from the folder's manifest."""
    manifest = read_manifest(out)
    samples = 0 if manifest is None else manifest["costs"]["samples"]
    if manifest is None or not samples:
        return "interrupted before any sample was saved: run the same command again"
    if samples < manifest["settings"]["count"]:
        kept = f"interrupted: run the same command again to resume; finished samples are in {out}"
        if manifest.get("fair", 0) == samples:
            return kept
        return (
            f"{kept}, but until the dataset is complete they are a biased selection: those that needed few rounds "
            "finished first"
        )
    complete = f"interrupted: the dataset in {out} is complete"
    if not law or manifest["law"] is not None:
        return complete
    return f"{complete}, but its distribution was not checked: run the same command again to check it"


class Finishing:
    """Handles Ctrl-C while samples are drawn: after the first no more are begun, the second stops at once.

    The finished samples were chosen before they were drawn, so they are a fair sample. Before and after drawing, and on
    Ray, which never calls this object, the first Ctrl-C stops at once.
    """

    def __init__(self, bar: DatasetBar) -> None:
        self.bar, self.drawing, self.requested = bar, False, False

    def __call__(self) -> bool:
        self.drawing = True
        return self.requested

    def __enter__(self) -> Finishing:
        self.before = signal.signal(signal.SIGINT, self._first)
        return self

    def __exit__(self, *error: object) -> None:
        signal.signal(signal.SIGINT, self.before)

    def _first(self, *_: object) -> None:
        signal.signal(signal.SIGINT, interrupts.interrupt)
        if not self.drawing or self.bar.full:
            raise KeyboardInterrupt
        self.requested = True
        line = (
            "\nno more samples are begun; those under way are finished (press Ctrl-C again to stop at once)\n"
        )
        os.write(2, line.encode())  # print is not for signal handlers


class DatasetBar:
    """A progress bar of samples, with calls per sample and drafts kept per round.

    Before the bar, a temporary line names the measurement under way, and a lasting one the choice of the window.
    """

    def __init__(self, count: int, *, quiet: bool) -> None:
        self.count, self.quiet, self.full = count, quiet, False
        self.bar: tqdm | None = None
        self.say: Callable[[str], object] | None = None
        self.shown = ExitStack()

    def __enter__(self) -> DatasetBar:
        return self

    def __exit__(self, *error: object) -> None:
        self.shown.close()

    def update(self, status: Status) -> None:
        if status.doing:
            self.say = self.say or self.shown.enter_context(wait_line(quiet=self.quiet))
            self.say(f"measuring: {status.doing}")
            return
        self.full = status.samples == self.count
        if self.bar is None:
            self.shown.close()
            if status.choice and not self.quiet:
                echo(f"{status.choice}.")
            # It begins at what an earlier run has drawn, so that its rate is its own.
            bar = tqdm(total=self.count, initial=status.samples, unit="sample", disable=self.quiet or None)
            self.bar = self.shown.enter_context(bar)
        if status.samples:
            kept = f"{status.calls_mean:.1f} calls, {status.accepted_mean:.2f} kept a round"
            self.bar.set_postfix_str(kept, refresh=False)
        self.bar.update(status.samples - self.bar.n)
