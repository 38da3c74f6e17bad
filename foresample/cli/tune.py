"""`foresample tune`: which window is fastest here, whether speculation pays at all, and how many samples at a time."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated

import typer
from rich.table import Table

from foresample.cli import options
from foresample.cli.console import echo, plain_table, require_file, show, wait_line
from foresample.cli.targets import choose_source, require_room
from foresample.core.round import can_draft
from foresample.engine.tuning import WINDOWS, Frontier, Tuning, tune
from foresample.provenance import make_result, result_json, write_result


def tune_command(
    model: options.Model = None,
    target: options.TargetName = None,
    steps: Annotated[int | None, options.steps_option(100)] = None,
    window: options.Windows = ["auto"],  # noqa: B006
    slots: Annotated[
        list[int], options.slots_option(more="; 1 asks for latency; several for throughput against latency")
    ] = [1],  # noqa: B006
    within: Annotated[
        float | None,
        typer.Option(min=0.0, help="Milliseconds that 95 in 100 samples may take, with several --slots."),
    ] = None,
    label: options.Label = None,
    reuse: options.Reuse = None,
    device: options.Device = None,
    half: options.Half = False,
    compiled: options.Compiled = False,
    graph: options.Graph = False,
    out: options.OutFile = None,
    as_json: options.AsJson = False,
) -> None:
    """Measure which window is fastest here, and whether speculation pays at all.

    With several --slots, how many samples to have under way: throughput against latency.
    """
    several = len(set(slots)) > 1
    if within is not None and not several:
        raise ValueError(
            "--within chooses between several --slots: name at least two, as in --slots 1 --slots 16"
        )
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
    if out is not None:
        require_file(out)
    windows = None
    if set(window) != {"auto"}:
        windows = sorted({w for text in window for w in (WINDOWS if text == "auto" else [int(text)])})
    chain = source()
    if not can_draft(chain):
        steps_are = "step" if len(chain.std) == 1 else "steps"
        raise ValueError(
            f"a chain of {len(chain.std)} {steps_are} without a transition that can be drafted has no window to "
            "measure: sample it sequentially, or ask for more --steps"
        )
    widest = min(max(windows or WINDOWS), len(chain.std) - 1)
    require_room(chain, samples=4 * max(slots), slots=max(slots), window=widest)
    with wait_line(quiet=as_json) as say:
        measured = tune(chain, slots=slots if several else slots[0], windows=windows, graph=graph, progress=say)
    settings = {
        **source.about(),
        "steps": len(chain.std),
        "slots": sorted(set(slots)) if several else slots[0],
        "windows": windows or "auto",
        "label": label,
        "device": str(chain.std.device),
        "compiled": compiled,
        "graph": graph,
    }
    if isinstance(measured, Frontier):
        result = make_result("frontier", settings, **asdict(measured))
    else:
        result = make_result("tune", settings, **json.loads(measured.to_json()))
    if out is not None:
        write_result(out, result)
    if as_json:
        echo(result_json(result))
        return
    if isinstance(measured, Frontier):
        show(_frontier_table(measured))
        echo(f"Take {measured.best(None if within is None else within / 1e3)}.")
    else:
        show(_table(measured))
        echo(measured.advice + ".")
    if out is not None:
        echo(f"wrote {out}")


def _frontier_table(frontier: Frontier) -> Table:
    table = plain_table(
        *("at a time", "window", "samples a second", "ms a sample"),
        title=f"{frontier.tunings[0].steps} steps",
        caption="window –: sequential\nms a sample: of 95 in 100",
    )
    for point in frontier.points:
        window = "–" if point.window is None else str(point.window)
        table.add_row(
            str(point.slots), window, f"{point.samples_per_second:.4g}", f"{1e3 * point.p95_seconds:.4g}"
        )
    return table


def _table(tuning: Tuning) -> Table:
    table = plain_table(
        *("window", "states", "ms a call", "ms a round", "calls", "gain"),
        title=f"{tuning.steps} steps, {tuning.slots} at a time",
        caption="states: in a call, at most\ngain: on the clock, predicted",
    )
    table.add_row("–", str(tuning.slots), "", f"{1e3 * tuning.step_seconds:.2f}", str(tuning.steps), "1.00×")
    for trial in tuning.trials:
        table.add_row(
            str(trial.window),
            str(trial.states),
            f"{1e3 * trial.call_seconds:.2f}",
            f"{1e3 * trial.round_seconds:.2f}",
            f"{trial.calls:.1f}",
            f"{trial.gain:.2f}×",
            style="bold" if trial.window == tuning.window else "",
        )
    return table
