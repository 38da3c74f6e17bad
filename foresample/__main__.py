"""The command `foresample`, also as `python -m foresample`."""

from __future__ import annotations

import atexit
import os
import signal
import sys
from contextlib import suppress
from io import TextIOWrapper


def main() -> None:
    """Run the command line, or name the packages that it needs."""
    from foresample.cli import interrupts

    for stream in (sys.stdout, sys.stderr):  # a character that the terminal does not have is no error
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="replace")
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # a job in the background ignores Ctrl-C
        signal.signal(signal.SIGINT, interrupts.leave)
    try:
        from foresample.cli.app import app
    except ModuleNotFoundError as error:
        if error.name not in ("typer", "rich", "tqdm"):
            raise
        from foresample.provenance import install

        needs = f"error: the command line needs {error.name}, which is not installed"
        print(f"{needs}: {install('typer', 'rich', 'tqdm', 'matplotlib')}", file=sys.stderr)
        raise SystemExit(2) from None
    try:
        app(prog_name="foresample")
    except SystemExit as left:
        if left.code == 130:  # a second Ctrl-C changes nothing
            signal.signal(signal.SIGINT, signal.SIG_IGN)
        _end(left.code if isinstance(left.code, int) else 0)


def _end(status: int) -> None:
    """End the process without Python's finalization, in which Ctrl-C would kill it or print a traceback."""
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(status)


if __name__ == "__main__":
    sys.argv[0] = "foresample"  # results record the command
    main()
