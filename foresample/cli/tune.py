"""`foresample tune`: which window is fastest here, and whether speculation pays at all."""

from __future__ import annotations

import json
from typing import Annotated

from rich.console import Console
from rich.table import Table

from foresample.cli import options
from foresample.cli.console import plain_table, require_file, wait_line
from foresample.cli.targets import can_draft, choose_source, require_room
from foresample.engine.tuning import WINDOWS, Tuning, tune
from foresample.results import make_result, result_json, write_result


def tune_command(
    model: options.Model = None,
    target: options.TargetName = None,
    steps: Annotated[int | None, options.steps_option(100)] = None,
    window: options.Windows = ["auto"],  # noqa: B006
    slots: Annotated[int, options.slots_option(more="; 1 asks for latency")] = 1,
    label: options.Label = None,
    reuse: options.Reuse = None,
    device: options.Device = None,
    half: options.Half = False,
    compiled: options.Compiled = False,
    graph: options.Graph = False,
    out: options.OutFile = None,
    as_json: options.AsJson = False,
) -> None:
    """Measure which window is fastest here, and whether speculation pays at all."""
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
    windows = [w for text in window for w in (WINDOWS if text == "auto" else [int(text)])]
    chain = source()
    if not can_draft(chain):
        steps_are = "step" if len(chain.std) == 1 else "steps"
        raise ValueError(
            f"a chain of {len(chain.std)} {steps_are} without a transition that can be drafted has no window to "
            "measure: sample it sequentially, or ask for more --steps"
        )
    widest = min(max(windows), len(chain.std) - 1)
    require_room(chain, samples=4 * slots, slots=slots, window=widest)
    with wait_line(quiet=as_json) as say:
        tuning = tune(chain, slots=slots, windows=windows, graph=graph, progress=say)
    settings = {
        **source.about(),
        "steps": len(chain.std),
        "slots": slots,
        "windows": sorted(set(windows)),
        "label": label,
        "device": str(chain.std.device),
        "compiled": compiled,
        "graph": graph,
    }
    result = make_result("tune", settings, **json.loads(tuning.to_json()))
    if out is not None:
        write_result(out, result)
    if as_json:
        print(result_json(result))
        return
    Console().print(_table(tuning))
    print(tuning.advice + ".")
    if out is not None:
        print(f"wrote {out}")


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
