"""Error sentences that name the place in the user's own code."""

from __future__ import annotations

import os
import sysconfig
import traceback
from collections.abc import Iterator
from pathlib import Path

PACKAGE = str(Path(__file__).parents[1])
_INSTALLED = {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")} | {PACKAGE}
_OURS = tuple(os.path.join(folder, "") for folder in _INSTALLED)


def with_place(error: BaseException) -> str:
    """The error's text, with the place in the user's code that it passed through, if there is one.

    The error's type is named unless foresample raised the error, because its own messages need no type.
    """
    if (sentence := _refused_call(error)) is not None:
        return sentence
    frames = _frames(error)
    text = str(error).strip()
    if (frames and not frames[-1].filename.startswith(PACKAGE)) or not text:
        text = f"{type(error).__name__}: {text}".removesuffix(": ")
    own = user_frame(error)
    return text if own is None else f"{text} ({_shown(own.filename)}, line {own.lineno}, in {own.name})"


def user_frame(error: BaseException) -> traceback.FrameSummary | None:
    """The innermost frame outside of foresample, of Python and of installed packages: the user's own code."""
    for one in _causes(error):
        for frame in reversed(_frames(one)):
            if not frame.filename.startswith((*_OURS, "<")):
                return frame
    return None


def _refused_call(error: BaseException) -> str | None:
    """The expected signature, if a network was called with arguments that it does not take."""
    for frame, _ in traceback.walk_tb(error.__traceback__ if isinstance(error, TypeError) else None):
        module, function = frame.f_globals.get("__name__"), frame.f_code.co_name
        if (module, function) == ("foresample.targets.chained", "_answer"):
            # Here, because it imports torch, which the network has imported already.
            from foresample.contracts import accepts, defined

            network = frame.f_locals["self"].network
            if not accepts(network, "x", "time", "row"):
                return (
                    f"a network is called as network(x, time, row), but {defined(network)} does not take that: wrap "
                    "it, for example as lambda x, time, row: network(x, time)"
                )
    return None


def _frames(error: BaseException) -> traceback.StackSummary:
    return traceback.extract_tb(error.__traceback__)


def _causes(error: BaseException) -> Iterator[BaseException]:
    """The error, and each error that led to the one before."""
    seen: set[int] = set()
    found: BaseException | None = error
    while found is not None and id(found) not in seen:
        seen.add(id(found))
        yield found
        found = found.__cause__


def _shown(filename: str) -> str:
    """The path relative to the working directory if it lies below it, else in full."""
    shown = os.path.relpath(filename)
    return filename if shown.startswith(os.pardir) else shown
