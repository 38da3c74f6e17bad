"""`foresample generate`: a dataset in shards, by one process or many; run the same command again to go on."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

import typer
from tqdm import tqdm

from foresample.cli import options
from foresample.cli.console import echo, require_modules, wait_line
from foresample.cli.inspect import show_dataset
from foresample.cli.targets import choose_source, read_window
from foresample.datasets.generation import generate
from foresample.datasets.manifest import Status


def generate_command(
    count: Annotated[int, typer.Option(min=1, help="Samples of the dataset.")],
    out: Annotated[Path, typer.Option(help="Its folder; run the same command again to go on.")],
    model: options.Model = None,
    target: options.TargetName = None,
    steps: Annotated[int | None, options.steps_option(250)] = None,
    window: options.Window = "auto",
    slots: Annotated[int, options.slots_option(more=", in each worker")] = 64,
    shard: Annotated[int, typer.Option(min=1, help="Samples of a file.")] = 1000,
    label: options.Label = None,
    reuse: options.Reuse = None,
    seed: options.Seed = 0,
    device: options.Device = None,
    half: options.Half = False,
    compiled: options.Compiled = False,
    graph: options.Graph = False,
    law: Annotated[int, typer.Option(min=0, help="Compare with so many sequential samples at the end.")] = 0,
    ray: Annotated[str | None, typer.Option(help="Run on Ray: auto, or a cluster's address.")] = None,
    cpus: Annotated[int | None, typer.Option(min=1, help="On Ray, CPUs of a worker without a GPU.")] = None,
    as_json: options.AsJson = False,
) -> None:
    """Draw a dataset into shards; resumes. Exit status 3 if samples broke, 1 if the law check failed."""
    source = choose_source(
        model=model,
        target=target,
        steps=steps,
        default_steps=250,
        label=label,
        reuse=reuse,
        device=device,
        half=half,
        compiled=compiled,
        elsewhere=ray is not None,
    )
    require_modules("safetensors", *(["ray"] if ray is not None else []))
    if ray is not None and device in (None, "cpu"):
        cpus = cpus or 1
    try:
        with DatasetBar(count, quiet=as_json) as bar, Finishing(bar) as stop:
            dataset = generate(
                source,
                count,
                out=out,
                window=read_window(window),
                slots=slots,
                shard=shard,
                seed=seed,
                labels=source.labels(),
                about={**source.about(), **source.configurations()},
                law=law,
                ray=ray,
                cpus=cpus,
                progress=bar.update,
                stop=stop if ray is None else None,
                graph=graph,
            )
    except KeyboardInterrupt:
        echo(
            f"interrupted: run the same command again to go on; what is finished is in {out}, and until it is "
            "complete it is not a fair selection: the quick ones were done in time",
            error=True,
        )
        raise typer.Exit(130) from None
    show_dataset(dataset, as_json=as_json)
    if stop.asked and not dataset.complete:
        echo("interrupted: run the same command again to go on", error=True)
        raise typer.Exit(130)
    if dataset.failures:
        raise typer.Exit(3)
    if dataset.law is not None and not dataset.law.passed:
        raise typer.Exit(1)


class Finishing:
    """Handles Ctrl-C while samples are drawn: the first begins no more samples, the second stops at once.

    What is finished then was chosen before it was drawn, and is a fair sample. Before and after, and on Ray, where
    nobody asks, the first stops at once.
    """

    def __init__(self, bar: DatasetBar) -> None:
        self.bar, self.drawing, self.asked = bar, False, False

    def __call__(self) -> bool:
        self.drawing = True
        return self.asked

    def __enter__(self) -> Finishing:
        self.before = signal.signal(signal.SIGINT, self._first)
        return self

    def __exit__(self, *error: object) -> None:
        signal.signal(signal.SIGINT, self.before)

    def _first(self, *_: object) -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        if not self.drawing or self.bar.full:
            raise KeyboardInterrupt
        self.asked = True
        told = "\nno more samples are begun; those under way are finished (Ctrl-C again stops at once)\n"
        os.write(2, told.encode())  # print is not for signal handlers


class DatasetBar:
    """Samples, their rate and what is left of the time; calls a sample and drafts kept a round.

    Before that, what is measured, on a line that goes away, and how the samples are drawn.
    """

    def __init__(self, count: int, *, quiet: bool) -> None:
        self.count, self.quiet, self.disable = count, quiet, quiet or None
        self.bar: tqdm | None = None
        self.full = False
        self.measuring = ExitStack()
        self.say: Callable[[str], object] | None = None

    def __enter__(self) -> DatasetBar:
        return self

    def __exit__(self, *error: object) -> None:
        self.measuring.close()
        if self.bar is not None:
            self.bar.close()

    def update(self, status: Status) -> None:
        if status.doing:
            if self.say is None:
                self.say = self.measuring.enter_context(wait_line(quiet=self.quiet))
            self.say(f"measuring: {status.doing}")
            return
        self.full = status.samples == self.count
        if self.bar is None:
            self.measuring.close()
            if status.choice and not self.quiet:
                echo(f"{status.choice}.")
        if self.bar is None:  # what an earlier run has drawn says nothing of this one's rate
            self.bar = tqdm(total=self.count, initial=status.samples, unit="sample", disable=self.disable)
        if status.samples:
            told = f"{status.calls_mean:.1f} calls, {status.accepted_mean:.2f} kept a round"
            self.bar.set_postfix_str(told, refresh=False)
        self.bar.update(status.samples - self.bar.n)
