"""`foresample tune`: measures which window, if any, is fastest here, and throughput and latency by slots."""

from __future__ import annotations

import json
from dataclasses import asdict

from rich.table import Table

from foresample.cli.console import echo, plain_table, show, wait_line
from foresample.cli.options import Tune
from foresample.cli.targets import described, make_source, require_room
from foresample.core.round import can_draft
from foresample.engine.tuning import WINDOWS, Frontier, Tuning, tune
from foresample.provenance import make_result, result_json, write_result
from foresample.text import duration


def run(options: Tune) -> None:
    source, slots, windows = make_source(options), sorted(set(options.slots)), None
    if set(options.window) != {"auto"}:
        windows = sorted({w for text in options.window for w in (WINDOWS if text == "auto" else [int(text)])})
    chain = source()
    if not can_draft(chain):
        steps_are = "step" if len(chain.std) == 1 else "steps"
        raise ValueError(
            f"a chain of {len(chain.std)} {steps_are} without a transition that can be drafted has no window to "
            "measure: sample it sequentially, or ask for more --steps"
        )
    widest = min(max(windows or WINDOWS), len(chain.std) - 1)
    require_room(chain, samples=4 * slots[-1], slots=slots[-1], window=widest)
    chosen = slots if len(slots) > 1 else slots[0]
    with wait_line(quiet=options.as_json) as say:
        measured = tune(chain, slots=chosen, windows=windows, graph=options.graph, progress=say)
    settings = {**described(options, source, chain), "slots": chosen, "windows": windows or "auto"}
    best = refusal = None
    if isinstance(measured, Frontier):
        try:
            best = measured.best(None if options.within is None else options.within / 1e3)
        except ValueError as error:  # what was measured is not lost
            refusal = error
        result = make_result("frontier", settings, **asdict(measured), best=best and asdict(best))
    else:
        result = make_result("tune", settings, **json.loads(measured.to_json()))
    if options.out is not None:
        write_result(options.out, result)
    if options.as_json:
        echo(result_json(result))
    elif isinstance(measured, Frontier):
        show(_frontier_table(measured))
        if best is not None:
            echo(f"Take {best}.")
    else:
        show(_table(measured))
        echo(measured.advice + ".")
    if options.out is not None and not options.as_json:
        echo(f"wrote {options.out}")
    if refusal is not None:
        raise refusal


def _frontier_table(frontier: Frontier) -> Table:
    table = plain_table(
        *("at a time", "window", "samples a second", "a sample"),
        title=f"{frontier.tunings[0].steps} steps",
        caption="window –: sequential\na sample: 95 in 100 take this time or less",
    )
    for point in frontier.points:
        window = "–" if point.window is None else str(point.window)
        table.add_row(str(point.slots), window, f"{point.samples_per_second:.4g}", duration(point.p95_seconds))
    return table


def _table(tuning: Tuning) -> Table:
    table = plain_table(
        *("window", "states", "a call", "a round", "calls", "gain"),
        title=f"{tuning.steps} steps, {tuning.slots} at a time",
        caption="states: most in a call\ngain: predicted speed-up in time",
    )
    table.add_row("–", str(tuning.slots), "", duration(tuning.step_seconds), str(tuning.steps), "1.00×")
    for trial in tuning.trials:
        table.add_row(
            str(trial.window),
            str(trial.states),
            duration(trial.call_seconds),
            duration(trial.round_seconds),
            f"{trial.calls:.1f}",
            f"{trial.gain:.2f}×",
            style="bold" if trial.window == tuning.window else "",
        )
    return table
