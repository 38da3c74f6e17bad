"""The command line, a file a command; `foresample.__main__` starts it.

    sample, generate, inspect, tune, check, policy-server, doctor, demo    the commands
    options     what they take in common
    targets     the target those options ask for, and its window
    console     what they say: refusals, tables, bars
    pictures    what they paint

Exit status: 1 the answer is no (the distribution test failed, a dataset is not complete), 2 wrong input or an error, 3
samples broke, 130 interrupted.
"""

from __future__ import annotations

from typing import Annotated

import typer

from foresample.cli import check, demo, doctor, generate, inspect, policy_server, sample, tune
from foresample.cli.console import Commands, echo
from foresample.provenance import __version__

app = typer.Typer(cls=Commands, no_args_is_help=True, pretty_exceptions_show_locals=False)
app.command("sample")(sample.sample_command)
app.command("generate")(generate.generate_command)
app.command("inspect")(inspect.inspect_command)
app.command("tune")(tune.tune_command)
app.command("check")(check.check_command)
app.command("policy-server", context_settings={"allow_extra_args": True})(policy_server.policy_server_command)
app.command("doctor")(doctor.doctor_command)
app.command("demo")(demo.demo_command)


def _show_version(wanted: bool) -> None:
    if wanted:
        echo(f"foresample {__version__}")
        raise typer.Exit


@app.callback()
def about(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Say which version this is."),
    ] = False,
) -> None:
    """Exact speculative sampling for diffusion models."""
