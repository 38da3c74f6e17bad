"""Commands of result files, checked against the programs of today."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from copy import copy
from functools import wraps
from importlib import import_module
from pathlib import Path
from typing import Any

import typer
from typer.testing import CliRunner

ROOT = Path(__file__).parents[2]
FOLDERS = ("benchmarks", "recipes", "tests")


def refusal(command: str) -> str | None:
    """The reason why the command cannot be run today; None if its program exists and takes these arguments.

    The arguments are parsed, and nothing is run.
    """
    program, *arguments = shlex.split(command)
    app = _app(program)
    if app is None:
        return f"{command}: there is no {program} in {', '.join(FOLDERS)}"
    idle = typer.Typer()
    for info in app.registered_commands:
        same = copy(info)
        same.callback = _doing_nothing(info.callback) if info.callback else None
        idle.registered_commands.append(same)
    if len(idle.registered_commands) == 1 and app.registered_callback:
        idle.callback()(lambda: None)  # so that its only command keeps its name
    answer = CliRunner().invoke(idle, arguments)
    if "--out" in answer.output:  # result files name their command without it
        answer = CliRunner().invoke(idle, [*arguments, "--out", "out"])
    return None if answer.exit_code == 0 else f"{command}: {answer.output or answer.exception!r}"


def _app(program: str) -> typer.Typer | None:
    if program == "foresample":
        return import_module("foresample.cli.app").app
    for folder in FOLDERS:
        if program.endswith(".py") and (ROOT / folder / program).exists():
            module = import_module(f"{folder}.{program.removesuffix('.py')}")
            if hasattr(module, "app"):
                return module.app
            app = typer.Typer()
            app.command()(module.main)
            return app
    return None


def _doing_nothing(function: Callable[..., Any]) -> Callable[..., None]:
    """The same signature, nothing done."""

    @wraps(function)
    def idle(*arguments: Any, **keywords: Any) -> None:
        pass

    return idle
