"""Commands as a user types them."""

from __future__ import annotations

from typing import Any

from typer.testing import CliRunner

from foresample.cli.app import app


def invoke(*arguments: object) -> Any:
    """The result of `foresample …`, in this process."""
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def succeeds(*arguments: object) -> str:
    """The output of a command that must succeed."""
    result = invoke(*arguments)
    assert result.exit_code == 0, (result.output, result.exception)
    return result.output


def refuses(sentence: str, *arguments: object) -> None:
    """One sentence and exit status 2; no traceback."""
    result = invoke(*arguments)
    assert result.exit_code == 2, (result.output, result.exception)
    assert sentence in " ".join(result.output.replace("│", " ").split()), result.output
    assert "Traceback" not in result.output
    assert "╭" in result.output or len(result.stderr.strip().splitlines()) == 1
