"""Options that commands have in common: each means the same everywhere."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

_TARGET, _EXECUTION = "What to sample", "How to run it"


def _is_window(text: str) -> bool:
    return text == "auto" or (text.isdecimal() and len(text) < 100 and int(text) >= 1)


def _require_window(text: str) -> str:
    if not _is_window(text) and not (text.endswith(".json") and Path(text).is_file()):
        raise typer.BadParameter(
            f"{text!r} is neither a whole number of at least 1 nor auto, nor a file of foresample tune --out"
        )
    return text


def _require_windows(texts: list[str]) -> list[str]:
    for text in texts:
        if not _is_window(text):
            raise typer.BadParameter(f"{text!r} is neither a whole number of at least 1 nor auto")
    return texts


def steps_option(default: int) -> Any:
    """The chain's length; what is right depends on the command."""
    shown = f"{default}; 16 for mixtures"
    return typer.Option(
        min=1, max=10**6, help="Transitions of the chain.", show_default=shown, rich_help_panel=_TARGET
    )


def slots_option(default: str | None = None, more: str = "") -> Any:
    """How many samples at a time; what is right depends on the command."""
    shown = True if default is None else default
    return typer.Option(
        min=1, help=f"Samples under way at a time{more}.", show_default=shown, rich_help_panel=_EXECUTION
    )


Model = Annotated[
    Path | None,
    typer.Option(
        help="A diffusers DDPM folder.",
        show_default="the embedded Fashion-MNIST model",
        rich_help_panel=_TARGET,
    ),
]
TargetName = Annotated[
    str | None,
    typer.Option(
        "--target",
        help="Instead of a model your own target, an object or a function that makes it: 'package.module:name'. "
        "Or a built-in one: flow, vp, langevin (mixtures in 2-D), embedded.",
        rich_help_panel=_TARGET,
    ),
]
Label = Annotated[
    str | None,
    typer.Option(
        help="Class of the model, by name or number.", show_default="all in turn", rich_help_panel=_TARGET
    ),
]
Reuse = Annotated[
    str | None,
    typer.Option(
        help="Prediction of the model that is reused: x0, v or eps.", show_default="x0", rich_help_panel=_TARGET
    ),
]
Device = Annotated[
    str | None, typer.Option(help="cpu, cuda or cuda:N.", show_default="cpu", rich_help_panel=_EXECUTION)
]
Half = Annotated[
    bool, typer.Option("--half", help="Run the model's network in bfloat16.", rich_help_panel=_EXECUTION)
]
Compiled = Annotated[
    bool, typer.Option("--compiled", help="Compile the model's network.", rich_help_panel=_EXECUTION)
]
Graph = Annotated[
    bool, typer.Option("--graph", help="Replay rounds as a CUDA graph.", rich_help_panel=_EXECUTION)
]
Window = Annotated[
    str,
    typer.Option(
        metavar="N|auto|FILE",
        callback=_require_window,
        help="Transitions drafted in a round; auto measures which is fastest here, a file of tune --out has it.",
        rich_help_panel=_EXECUTION,
    ),
]
Windows = Annotated[
    list[str],
    typer.Option(
        "--window",
        metavar="N|auto",
        callback=_require_windows,
        help="Window to try; may be given several times.",
        show_default="auto: 2, 4, 8 … 64",
        rich_help_panel=_EXECUTION,
    ),
]
Seed = Annotated[int, typer.Option(min=0, help="Fixes every random number.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
OutFile = Annotated[Path | None, typer.Option(help="Also write the findings to this file, as JSON.")]
