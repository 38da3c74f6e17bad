"""The tests of OpenAI's diffusion class, with real copies of it.

    git clone https://github.com/openai/guided-diffusion && git clone https://github.com/facebookresearch/DiT
    python -m tests.openai guided-diffusion DiT

A checkout holds a `gaussian_diffusion.py` and a `respace.py`. Each is tested in a process of its own, because their
packages have the same names. The result file says which commits passed; `docs/support.md` shows it.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.kinds.packages import CopyRow
from benchmarks.results import RESULTS, save
from tests.support.openai import CHECKOUT

TESTS = Path(__file__).parent / "integrations/test_openai.py"


def tested(checkout: Path) -> CopyRow:
    """The outcome for one checkout."""
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", str(TESTS)]
    found = subprocess.run(
        command,
        env=os.environ | {CHECKOUT: str(checkout.resolve())},
        capture_output=True,
        text=True,
        check=False,
    )
    print(found.stdout, found.stderr, flush=True)
    counts = {
        name: int(number) for number, name in re.findall(r"(\d+) (passed|failed|skipped|error)", found.stdout)
    }
    git = ["git", "-C", str(checkout), "rev-parse", "HEAD"]
    commit = subprocess.run(git, stdout=subprocess.PIPE, text=True, check=True).stdout
    failed = counts.get("failed", 0) + counts.get("error", 0)
    return CopyRow(
        repository=checkout.resolve().name,
        commit=commit.strip(),
        passed=counts.get("passed", 0),
        skipped=counts.get("skipped", 0),
        failed=failed,
    )


def main(
    checkouts: Annotated[list[Path], typer.Argument(help="folders that hold a copy of the class")],
    out: Annotated[Path, typer.Option(help="result file")] = RESULTS / "openai.json",
) -> None:
    """Test copies of OpenAI's diffusion class."""
    rows = [tested(checkout) for checkout in checkouts]
    save(out, "openai", {}, rows=rows)
    raise typer.Exit(any(row.failed or not row.passed for row in rows))


if __name__ == "__main__":
    typer.run(main)
