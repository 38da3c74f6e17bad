"""Has somebody changed a network or a scheduler while a loop goes on?

Drafted states of many steps share a call, so a network must be the same in all turns of a pipeline's loop. A
`Snapshot` remembers what decides a network's answers and can be read without calling it: every attribute of its
modules and of their attention processors (training mode, hooks, scales, FreeU's factors, …), and the address and
version of each tensor.

An attribute that changes outside of the network's own call was changed by the loop or by a callback. A call may change
some by itself: offloading moves weights. But a number that each call changes is a counter, and the answers may depend
on it.
"""

from __future__ import annotations

import functools
import math
import types
from collections.abc import Iterator, Set
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from foresample.integrations.refusal import REMEDY

_FUNCTIONS = (types.FunctionType, types.MethodType, types.BuiltinFunctionType, functools.partial, type)
_NUMBERS = (int, float)
_UNSET = "unset"
_HARMLESS = ("_diffusers_hook",)
"""Attributes that decide nothing by themselves: a registry's hooks act by way of `forward`."""


@dataclass(frozen=True)
class Change:
    """One attribute that is not what it was."""

    name: str
    before: Any
    after: Any

    @property
    def counts(self) -> bool:
        """Whether a number became another."""
        return type(self.before) in _NUMBERS and type(self.after) in _NUMBERS

    def __str__(self) -> str:
        if isinstance(self.after, Tensor):
            return f"the values of {self.name}"
        return f"{self.name} from {_short(self.before)} to {_short(self.after)}"


class _Part:
    """One module, or another object with attributes."""

    __slots__ = ("before", "name", "now", "tensors")

    def __init__(self, name: str, thing: Any) -> None:
        self.name, self.now = name, vars(thing)
        self.remember()

    def remember(self) -> None:
        self.before = {name: _copied(value) for name, value in self.now.items()}
        self.tensors = [(name, tensor, *_edition(tensor)) for name, tensor in _tensors(self.now)]

    def changes(self) -> Iterator[Change]:
        try:
            unlike = self.now != self.before  # identical objects are not compared any further
        except Exception:  # whether two tensors are equal is not one truth value
            unlike = True
        if unlike:
            for name in dict.fromkeys([*self.before, *self.now]):
                if name in _HARMLESS:
                    continue
                before, after = self.before.get(name, _UNSET), self.now.get(name, _UNSET)
                if not alike(before, after):
                    yield from self._inside(name, before, after)
        for name, tensor, address, version in self.tensors:
            if (address, version) != _edition(tensor):
                yield Change(_joined(self.name, name), tensor, tensor)

    def _inside(self, name: str, before: Any, after: Any) -> Iterator[Change]:
        """A change of an attribute, or of one entry of it where it is a dictionary."""
        if not isinstance(before, dict) or not isinstance(after, dict):
            yield Change(_joined(self.name, name), before, after)
            return
        for key in dict.fromkeys([*before, *after]):
            one, two = before.get(key, _UNSET), after.get(key, _UNSET)
            if not alike(one, two):
                where = (
                    self.name if name in ("_parameters", "_buffers", "_modules") else _joined(self.name, name)
                )
                yield Change(_joined(where, str(key)), one, two)


class Snapshot:
    """A module with everything in it, or one other object, as it was."""

    def __init__(self, thing: Any) -> None:
        modules = thing.named_modules() if isinstance(thing, nn.Module) else [("", thing)]
        self.parts = [part for name, module in modules for part in _parts(name, module)]

    def change(self) -> Change | None:
        """The first attribute found that is not what it was."""
        return next((change for part in self.parts for change in part.changes()), None)

    def accept(self, sizes: Set[int]) -> Change | None:
        """After a call: take everything as it is now; return a number that changed and is no size of that call."""
        counted = None
        for part in self.parts:
            changes = list(part.changes())
            if changes:
                part.remember()
            counted = counted or next((c for c in changes if c.counts and c.after not in sizes), None)
        return counted


class Unchanged:
    """The networks and the scheduler of a loop under way: nothing but a network's own call may change them."""

    def __init__(self, pipe: Any, counters: bool = False) -> None:
        """`counters`: allow networks that count their calls."""
        self.pipe, self.counters = pipe, counters
        self.snapshots: dict[str, Snapshot] = {}

    def watch(self, *names: str) -> None:
        """Compare these parts of the pipeline with what they are now; the first time counts."""
        for name in names:
            if name not in self.snapshots:
                self.snapshots[name] = Snapshot(getattr(self.pipe, name))

    def change(self, *names: str) -> str | None:
        """An attribute (of the parts with these names, or of all) that something else than a call changed, as a
        phrase."""
        for name, snapshot in self.snapshots.items():
            found = None if names and name not in names else snapshot.change()
            if found is not None:
                return f"its {name} ({found})"
        return None

    def accept(self, sizes: Set[int]) -> str | None:
        """A network was called with tensors of these sizes: take its own changes; a sentence if it counts."""
        for name, snapshot in self.snapshots.items():
            found = None if name == "scheduler" else snapshot.accept(sizes)
            if found is not None and not self.counters:
                return (
                    f"the pipeline's {name} keeps a number between calls ({found}), on which its answers may depend; "
                    f"take it out of the network, or {REMEDY} (look=False draws with it all the same)"
                )
        return None


def values_of(thing: Any) -> dict[str, Any]:
    """The attributes of an object, its tensors copied."""
    return {k: v.clone() if isinstance(v, Tensor) else _copied(v) for k, v in vars(thing).items()}


def _parts(name: str, thing: Any) -> Iterator[_Part]:
    yield _Part(name, thing)
    if isinstance(thing, nn.Module):
        for attribute, value in vars(thing).items():
            if (
                attribute[0] != "_"
                and hasattr(value, "__dict__")
                and not isinstance(value, (Tensor, *_FUNCTIONS))
            ):
                yield _Part(_joined(name, attribute), value)


def _joined(where: str, name: str) -> str:
    return f"{where}.{name}" if where else name


def _copied(value: Any) -> Any:
    """Containers copied, everything else as it is."""
    if type(value) is list:
        return [_copied(v) for v in value] if value else []
    if isinstance(value, dict) and type(value).__module__ in ("builtins", "collections"):
        return {k: _copied(v) for k, v in value.items()} if value else {}
    return set(value) if type(value) is set else value


def _tensors(values: dict[str, Any]) -> Iterator[tuple[str, Tensor]]:
    for name, value in values.items():
        if isinstance(value, Tensor):
            yield name, value
        elif type(value) in (list, tuple):
            yield from ((name, v) for v in value if isinstance(v, Tensor))
        elif name in ("_parameters", "_buffers"):
            yield from ((k, v) for k, v in value.items() if v is not None)


def _edition(tensor: Tensor) -> tuple[int, int]:
    """Where a tensor's values are, and how often they were written; wrapped tensors and those of inference mode do not
    know both."""
    try:
        return tensor.data_ptr(), 0 if tensor.is_inference() else tensor._version
    except RuntimeError:
        return 0, 0


def alike(one: Any, two: Any) -> bool:
    """Whether two values are equal; numbers but for rounding, since a scale that was taken off and put on rounds."""
    if one is two:
        return True
    if type(one) in _NUMBERS and type(two) in _NUMBERS:
        return math.isclose(one, two, rel_tol=1e-6) or (one != one and two != two)
    if isinstance(one, Tensor) or isinstance(two, Tensor):
        return type(one) is type(two) and one.shape == two.shape and torch.equal(one, two)
    if isinstance(one, dict) and isinstance(two, dict):
        return one.keys() == two.keys() and all(alike(v, two[k]) for k, v in one.items())
    if type(one) in (list, tuple) and type(one) is type(two):
        return len(one) == len(two) and all(map(alike, one, two))
    try:
        return bool(one == two)
    except Exception:
        return False


def _short(value: Any) -> str:
    """A number or a word as it is; of anything else its kind."""
    if value is _UNSET or value is None or isinstance(value, (bool, int, float, str)):
        return f"{value:g}" if isinstance(value, float) else str(value)
    if type(value) in (list, tuple) and len(value) <= 4:
        return f"[{', '.join(map(_short, value))}]"
    return f"one {type(value).__name__}"
