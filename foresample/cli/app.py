"""The commands and their names. Torch is imported only after a command's options have been checked."""

from __future__ import annotations

import inspect
from importlib import import_module
from typing import Annotated, Any

import typer

from foresample.cli import interrupts, options
from foresample.cli.console import Commands, echo
from foresample.provenance import __version__

app = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    pretty_exceptions_show_locals=False,
    epilog="Start with `foresample demo`: in less than a minute it draws a plan and a picture both ways.",
)


def _add(name: str, options_of: type[options.Options]) -> None:
    """Add a command whose options are the fields of a dataclass; the module of the same name runs it."""

    def command(**given: Any) -> None:
        chosen = options_of(**given)
        chosen.check()
        work = import_module(f"foresample.cli.{name.replace('-', '_')}")
        interrupts.expect()
        work.run(chosen)

    command.__doc__ = options_of.__doc__
    command.__signature__ = inspect.signature(options_of)  # type: ignore[attr-defined]
    app.command(name)(command)


for _name, _options in options.COMMANDS.items():
    _add(_name, _options)


def _show_version(wanted: bool) -> None:
    if wanted:
        echo(f"foresample {__version__}")
        raise typer.Exit


@app.callback()
def about(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version."),
    ] = False,
    traceback: Annotated[
        bool,
        typer.Option("--traceback", help="Print the whole traceback of an error; may also follow the command."),
    ] = False,
) -> None:
    """Exact speculative sampling for diffusion models."""
