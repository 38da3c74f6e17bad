"""Temporary replacement of attributes of other libraries' objects."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

REPORT = "foresample_report"
_ABSENT = object()


@dataclass(eq=False)
class Replaced:
    """Attributes replaced on instances, and the values to restore.

    Copies and pickles of such an instance are plain objects: a `__getstate__` on the instance leaves the replaced
    attributes out.
    """

    places: list[tuple[Any, str, Any, Any]] = field(default_factory=list)
    """Owner, name, the value put there, and the instance's own value."""

    def put(self, owner: Any, name: str, ours: Any) -> None:
        """Replace an attribute of an instance, its own or its class's."""
        if not any(known is owner for known, *_ in self.places):
            self._replace(owner, "__getstate__", _PlainState(owner, self))
        self._replace(owner, name, ours)

    def _replace(self, owner: Any, name: str, ours: Any) -> None:
        self.places.append((owner, name, ours, vars(owner).get(name, _ABSENT)))
        setattr(owner, name, ours)

    def remove(self) -> None:
        """Undo every `put`, except of attributes that were replaced again since."""
        for owner, name, ours, own in reversed(self.places):
            if vars(owner).get(name) is ours:
                delattr(owner, name)
                if own is not _ABSENT:
                    setattr(owner, name, own)
            vars(owner).pop(REPORT, None)
        self.places.clear()


@dataclass(frozen=True, eq=False)
class _PlainState:
    """The `__getstate__` of an instance with replaced attributes."""

    owner: Any
    replaced: Replaced = field(repr=False)

    def __call__(self) -> Any:
        own: Any = type(self.owner).__getstate__
        state = own(self.owner)
        if not isinstance(state, dict):
            return state
        state = dict(state)
        state.pop(REPORT, None)
        for owner, name, ours, value in reversed(self.replaced.places):
            if owner is self.owner and state.get(name) is ours:
                del state[name]
                if value is not _ABSENT:
                    state[name] = value
        return state


@contextmanager
def standing_in(owner: Any, name: str, other: Any) -> Iterator[None]:
    """Replace an attribute of `owner`, a submodule or any other, inside a `with` block."""
    held = next((d for d in (vars(owner).get("_modules", {}), vars(owner)) if name in d), vars(owner))
    own, held[name] = held.get(name, _ABSENT), other
    try:
        yield
    finally:
        if own is _ABSENT:  # it was the class's
            del held[name]
        else:
            held[name] = own


class _ByThread:
    """A function that is `own`, except in the threads that have another one in its place."""

    def __init__(self, own: Callable[..., Any]) -> None:
        self.own, self.others, self.removal = own, dict[int, Callable[..., Any]](), ExitStack()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.others.get(threading.get_ident(), self.own)(*args, **kwargs)


_changing = threading.Lock()
"""Lock held while a thread's function comes or goes."""


@contextmanager
def standing_in_here(owner: Any, name: str, other: Callable[..., Any]) -> Iterator[None]:
    """Replace a function of `owner` for this thread only, inside a `with` block.

    Several threads may be inside at a time, each with its own function. The last to leave restores the attribute.
    """
    thread = threading.get_ident()
    with _changing:
        shared = getattr(owner, name)
        if not isinstance(shared, _ByThread):
            shared = _ByThread(shared)
            shared.removal.enter_context(standing_in(owner, name, shared))
        outer = shared.others.get(thread)
        shared.others[thread] = other
    try:
        yield
    finally:
        with _changing:
            if outer is not None:
                shared.others[thread] = outer
            else:
                del shared.others[thread]
            if not shared.others:
                shared.removal.close()


def own_function(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function of the object itself, where other threads have replaced it for themselves."""
    return function.own if isinstance(function, _ByThread) else function
