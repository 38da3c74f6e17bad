"""`python -m benchmarks.report --out out/report.html`"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from benchmarks.report import PICTURES, RESULTS, write
from benchmarks.result_files import ResultError


def main(
    results: Annotated[Path, typer.Option(help="Folder of result files.")] = RESULTS,
    pictures: Annotated[Path, typer.Option(help="Folder of sample sheets.")] = PICTURES,
    out: Annotated[Path, typer.Option(help="The page to write.")] = Path("out/report.html"),
) -> None:
    """Turn the committed results into one self-contained web page."""
    try:
        write(out, results, pictures)
    except ResultError as error:
        raise SystemExit(f"error: {error}") from None
    print(f"wrote {out}")


if __name__ == "__main__":
    typer.run(main)
