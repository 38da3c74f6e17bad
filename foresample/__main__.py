"""The command `foresample`, also as `python -m foresample`."""

from __future__ import annotations

import signal
import sys


def main() -> None:
    """Run the command line, or say which extra it needs."""
    from foresample.cli import interrupts

    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # a job in the background ignores Ctrl-C
        signal.signal(signal.SIGINT, interrupts.leave)
    try:
        from foresample.cli.app import app
    except ModuleNotFoundError as error:
        if error.name not in ("typer", "rich", "tqdm"):
            raise
        print(f"error: the command line needs {error.name}: pip install 'foresample[cli]'", file=sys.stderr)
        raise SystemExit(2) from None
    try:
        app(prog_name="foresample")
    except SystemExit as left:
        if left.code == 130:  # while Python ends, a second Ctrl-C would kill the process
            signal.signal(signal.SIGINT, signal.SIG_IGN)
        raise


if __name__ == "__main__":
    sys.argv[0] = "foresample"  # results say which command made them
    main()
