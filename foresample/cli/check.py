"""`foresample check`: is speculative sampling of this target exact?"""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer
from tqdm import tqdm

from foresample.checks.exactness import check
from foresample.checks.findings import LEVEL, require_level
from foresample.cli import options
from foresample.cli.console import echo, require_file
from foresample.cli.targets import choose_source, choose_window, require_room
from foresample.contracts import Drafter
from foresample.drafters import Frozen, Replay
from foresample.provenance import make_result, result_json, write_result

DRAFTERS: dict[str, Drafter] = {
    "replay": Replay(),
    "replay-plain": Replay(secant=False),
    "head": Frozen("head"),
    "parent": Frozen("parent"),
    "nearest": Frozen("nearest"),
}


def check_command(
    name: Annotated[str | None, typer.Argument(metavar="TARGET", help="As --target; flow by default.")] = None,
    model: options.Model = None,
    target: options.TargetName = None,
    steps: Annotated[int | None, options.steps_option(20)] = None,
    window: options.Window = "16",
    drafter: Annotated[str, typer.Option(help=", ".join(DRAFTERS))] = "replay",
    block: Annotated[int | None, typer.Option(min=1, help="Block length; the whole window by default.")] = None,
    recycle: Annotated[bool, typer.Option(help="Recycle rejected noise, or draw fresh noise.")] = True,
    samples: Annotated[int, typer.Option(min=10, help="Speculative ones, and as many sequential ones.")] = 5000,
    slots: Annotated[int, options.slots_option()] = 1000,
    level: Annotated[float, typer.Option(help="False-alarm probability of the law tests.")] = LEVEL,
    label: options.Label = None,
    reuse: options.Reuse = None,
    seed: options.Seed = 0,
    device: options.Device = None,
    half: options.Half = False,
    compiled: options.Compiled = False,
    graph: options.Graph = False,
    out: options.OutFile = None,
    as_json: options.AsJson = False,
) -> None:
    """Test that speculative sampling of a target is exact. Exit status 1 if it is not."""
    if drafter not in DRAFTERS:
        raise ValueError(f"--drafter takes one of {', '.join(DRAFTERS)}, not {drafter!r}")
    require_level(level, "--level")
    if graph:
        raise ValueError(
            "--graph cannot apply to check, which looks at every round: leave it out, or compare the samples of "
            "captured rounds with 'foresample generate --graph --law 1000'"
        )
    if name is not None and target is not None:
        raise ValueError(f"{name!r} and --target {target} both say what to check: give one of them")
    source = choose_source(
        model=model,
        target=name or target or ("flow" if model is None else None),
        steps=steps,
        default_steps=20,
        label=label,
        reuse=reuse,
        device=device,
        half=half,
        compiled=compiled,
    )
    if out is not None:
        require_file(out)
    chain, slots = source(), min(slots, samples)
    require_room(chain, samples=2 * samples, slots=slots)
    drafted = choose_window(window, chain, slots=slots, graph=False, quiet=as_json).number
    require_room(chain, samples=2 * samples, slots=slots, window=drafted)
    how: dict[str, Any] = {"block": block, "recycle": recycle, "samples": samples, "seed": seed, "level": level}
    with tqdm(total=2 * samples * len(chain.std), unit="step", disable=as_json or None, leave=False) as bar:
        found = check(chain, window=drafted, drafter=DRAFTERS[drafter], batch=slots, progress=bar.update, **how)
    settings = {
        **source.about(),
        "steps": len(chain.std),
        "window": drafted,
        "drafter": drafter,
        "slots": slots,
        "label": label,
        "device": str(chain.std.device),
        "compiled": compiled,
        **how,
    }
    result = make_result("check", settings, **json.loads(found.to_json()))
    if out is not None:
        write_result(out, result)
    echo(result_json(result) if as_json else found)
    if out is not None and not as_json:
        echo(f"wrote {out}")
    if not found.passed:
        raise typer.Exit(1)
