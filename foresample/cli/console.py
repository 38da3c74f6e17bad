"""What commands say: refusals in one sentence, tables, bars. Nothing else in `cli` prints.

Texts from elsewhere (a shard's words, a class's name, a path) go through `printable` here: a terminal obeys none.
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

from foresample.text import printable

EXTRAS = {"diffusers": "models", "safetensors": "models", "PIL": "models", "matplotlib": "cli", "ray": "ray"}
"""Packages that commands may need, and the extra that brings them."""

_REFUSALS = (ImportError, OSError, ValueError, TypeError, RuntimeError, ArithmeticError, MemoryError)
_UsageError = cast(type[Exception], typer.BadParameter.__bases__[0])  # the kind that Typer reports itself


class Commands(TyperGroup):
    """Commands that refuse what they cannot do in one sentence, with exit status 2.

    Status 1 is an answer ("not exact"), so no exception may end with it.
    """

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except (typer.Exit, typer.Abort, _UsageError, BrokenPipeError):  # Typer handles these
            raise
        except KeyboardInterrupt:
            echo("interrupted", error=True)
            raise typer.Exit(130) from None
        except ModuleNotFoundError as error:
            raise fail(_missing(error.name) if error.name in EXTRAS else str(error)) from None
        except _REFUSALS as error:
            raise fail(_out_of_memory(error) or str(error)) from None
        except Exception as error:  # an error in a target's code, or in ours, is found by its traceback
            echo("".join(format_exception(error)).rstrip("\n"), error=True)
            raise typer.Exit(2) from None


def echo(text: object, *, error: bool = False) -> None:
    """Print a text, line by line made printable."""
    lines = str(text).split("\n")
    print("\n".join(map(printable, lines)), file=sys.stderr if error else sys.stdout, flush=True)


def show(*tables: Table) -> None:
    """Print tables."""
    _Printing().print(*tables)


class _Printing(Console):
    """A console that gives the terminal no control characters but its own: styles are apart from the text here."""

    def render(self, *given: Any, **named: Any) -> Iterator[Segment]:
        for segment in super().render(*given, **named):
            if segment.control is None:
                text = "\n".join(map(printable, segment.text.split("\n")))
                segment = Segment(text, segment.style)
            yield segment


def fail(sentence: str) -> typer.Exit:
    """Say it on stderr, in one line; to be raised."""
    told = f"[red]error:[/] {escape(printable(sentence))}"
    _Printing(stderr=True, highlight=False).print(told, soft_wrap=True)
    return typer.Exit(2)


def _out_of_memory(error: Exception) -> str | None:
    """The sentence for what no estimate foresaw."""
    text = str(error).strip() or "none is left"
    if not isinstance(error, MemoryError) and "allocate" not in text and "out of memory" not in text:
        return None
    remedy = "ask for fewer samples or slots at a time, or a smaller window"
    return f"there is not enough memory ({text.splitlines()[0]}): {remedy}"


def require_modules(*names: str) -> None:
    """Refuse before the work what would fail after it."""
    for name in names:
        if find_spec(name) is None:
            raise ImportError(_missing(name))


def _missing(name: str) -> str:
    return f"this needs {name}, which is not installed: pip install 'foresample[{EXTRAS[name]}]'"


def require_folder(out: Path) -> None:
    """Make the folder and see that it can be written, before any work."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=out).close()
    except OSError as error:
        raise OSError(f"cannot write to {out} ({error.strerror}): name another folder with --out") from None


def require_file(out: Path) -> None:
    """Make the folder of a file and see that the file can be written, before any work."""
    require_folder(out.parent)
    if out.is_dir() or (out.exists() and not os.access(out, os.W_OK)):
        raise OSError(f"cannot write {out}: name another file with --out")


def plain_table(*columns: str, left: int = 0, **options: Any) -> Table:
    """A table with the first `left` columns flush left and, where room is short, wrapped; the others flush right."""
    table = Table(
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        pad_edge=False,
        title_justify="left",
        caption_justify="left",
        **options,
    )
    for i, column in enumerate(columns):
        table.add_column(column, justify="left" if i < left else "right", no_wrap=i >= left)
    return table


@contextmanager
def wait_line(*, quiet: bool) -> Iterator[Any]:
    """What is being done and for how long, on one line that goes away; call it with what is being done."""
    with tqdm(disable=quiet or None, leave=False, bar_format="{desc} {elapsed}") as bar:
        yield bar.set_description
