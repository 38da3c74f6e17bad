"""`foresample report`: what other commands wrote, as one web page."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from foresample.cli.console import echo, require_file


def report_command(
    folder: Annotated[
        Path, typer.Argument(metavar="DIR", help="What sample, bench, tune, check or generate wrote.")
    ],
    out: Annotated[Path, typer.Option(help="The page to write.")] = Path("report.html"),
) -> None:
    """Turn saved results into one self-contained web page."""
    from foresample import webpage  # which no other command needs

    require_file(out)
    webpage.write(out, folder)
    echo(f"wrote {out}")
