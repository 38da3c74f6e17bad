"""Output of the commands: errors in one sentence, tables, bars. Nothing else in `cli` prints.

Text from elsewhere (a shard's error, a class's name, a path) goes through `printable` here, so that a terminal executes
no control character in it.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from traceback import format_exception
from typing import Any, cast

import typer
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.segment import Segment
from rich.table import Table
from tqdm import tqdm
from typer.core import TyperGroup

from foresample.cli.errors import user_frame, with_place
from foresample.provenance import install
from foresample.text import printable

OPTIONAL = {name: name for name in ("diffusers", "safetensors", "matplotlib", "ray")} | {"PIL": "pillow"}
"""Modules that commands may need, and the packages that bring them."""

_WORD = 9  # least width of a column with words

_REFUSALS = (ImportError, OSError, ValueError, TypeError, RuntimeError, ArithmeticError, MemoryError)
_UsageError = cast(type[Exception], typer.BadParameter.__bases__[0])  # the kind that Typer reports itself


class Commands(TyperGroup):
    """Commands that report an error in one sentence, with exit status 2, or 3 if the network returns NaN.

    Status 1 is an answer ("not exact"), so no error may end with it. If nobody reads the output any more, the status is
    141, as if SIGPIPE had ended the process.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Accept `--traceback` behind a command's name as well."""
        end = args.index("--") if "--" in args else len(args)
        if "--traceback" in args[:end]:
            args = ["--traceback", *(a for a in args[:end] if a != "--traceback"), *args[end:]]
        return super().parse_args(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except (typer.Exit, typer.Abort, _UsageError):  # Typer handles these
            raise
        except BrokenPipeError:  # as `| head` causes; Typer would exit with 1
            raise typer.Exit(141) from None
        except KeyboardInterrupt:
            echo("interrupted", error=True)
            raise typer.Exit(130) from None
        except Exception as error:
            raise _report(error, in_full=ctx.params.get("traceback", False)) from None


def _report(error: Exception, *, in_full: bool) -> typer.Exit:
    """Print an error: one sentence with its place in the user's code, or the whole traceback."""
    status = 3 if isinstance(error, FloatingPointError) else 2
    own = user_frame(error)
    if isinstance(error, ModuleNotFoundError) and error.name in OPTIONAL and own is None:
        return fail(missing(error.name))
    if in_full or (own is None and not isinstance(error, _REFUSALS)):  # the latter is a bug of the package
        echo("".join(format_exception(error)).rstrip("\n"), error=True)
        return typer.Exit(status)
    sentence = _out_of_memory(error) or with_place(error)
    return fail(sentence if own is None else f"{sentence}; --traceback shows every frame", status)


def echo(text: object, *, error: bool = False) -> None:
    """Print a text, with control characters escaped."""
    lines = str(text).split("\n")
    print("\n".join(map(printable, lines)), file=sys.stderr if error else sys.stdout, flush=True)


def show(*tables: Table) -> None:
    """Print tables."""
    _Printing().print(*tables)


class _Printing(Console):
    """A console that escapes control characters in text; its own styles are separate segments."""

    def __init__(self, **options: Any) -> None:
        super().__init__(emoji=False, **options)

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError  # rich would exit with 1

    def render(self, *given: Any, **named: Any) -> Iterator[Segment]:
        for segment in super().render(*given, **named):
            if segment.control is None:
                text = "\n".join(map(printable, segment.text.split("\n")))
                segment = Segment(text, segment.style)
            yield segment


def fail(sentence: str, status: int = 2) -> typer.Exit:
    """Print an error on stderr, in one line, and return the exit to raise."""
    line = f"[red]error:[/] {escape(printable(sentence))}"
    _Printing(stderr=True, highlight=False).print(line, soft_wrap=True)
    return typer.Exit(status)


def _out_of_memory(error: Exception) -> str | None:
    """The sentence for running out of memory, None for other errors."""
    text = str(error).strip() or "none is left"
    if not isinstance(error, MemoryError) and "allocate" not in text and "out of memory" not in text:
        return None
    remedy = "ask for fewer samples or slots at a time, or a smaller window"
    return f"there is not enough memory ({text.splitlines()[0]}): {remedy}"


def require_modules(*names: str) -> None:
    """Refuse a command before its work if a module that it needs is not installed."""
    lacking = [name for name in names if find_spec(name) is None]
    if lacking:
        raise ImportError(missing(*lacking))


def missing(*names: str) -> str:
    """The sentence about modules that are not installed."""
    these = f"{', '.join(names)}, which {'is' if len(names) == 1 else 'are'} not installed"
    return f"this needs {these}: {install(*(OPTIONAL[name] for name in names))}"


def require_folder(out: Path, *names: str, option: str = "folder") -> None:
    """Make the folder and check that it and its files of these names can be written, before any work."""
    remedy = f"name another {option} with --out"
    try:
        out.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=out).close()
    except OSError as error:
        raise OSError(f"cannot write to {out} ({error.strerror}): {remedy}") from None
    for file in (out / name for name in names):
        if file.is_dir() or (file.exists() and not os.access(file, os.W_OK)):
            raise OSError(f"cannot write {file}: {remedy}")


def require_file(out: Path) -> None:
    """Make the folder of a file and check that the file can be written, before any work."""
    require_folder(out.parent, out.name, option="file")


def plain_table(*columns: str, left: int = 0, **options: Any) -> Table:
    """A table whose first `left` columns are flush left; the others are flush right. Cells may wrap."""
    table = Table(
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        pad_edge=False,
        title_justify="left",
        caption_justify="left",
        **options,
    )
    for i, column in enumerate(columns):
        table.add_column(column, justify="left" if i < left else "right", min_width=_WORD if i < left else None)
    return table


@contextmanager
def wait_line(*, quiet: bool) -> Iterator[Any]:
    """A temporary line with the current task and its duration; call its value with the name of each task."""
    with tqdm(disable=quiet or None, leave=False, bar_format="{desc} {elapsed}") as bar:
        yield bar.set_description
