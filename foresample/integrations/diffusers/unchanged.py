"""Checks that nothing changes a network or a scheduler during a loop, and that no network uses a cache.

Drafted states of many steps share a call, so a network must be the same in all turns of a pipeline's loop. A
`Snapshot` remembers what decides a network's answers and can be read without calling it: every attribute of its
modules and of their attention processors (training mode, hooks, scales, FreeU's factors, …), and the address and
version of each tensor.

An attribute that changes outside of the network's own call was changed by the loop or by a callback. A call may change
some by itself: offloading moves weights. But a number that each call changes is a counter, and the answers may depend
on it.

Caches of diffusers (MagCache, TaylorSeer, FasterCache, …) are refused by name before any work is done. They sit in
diffusers' hook registries and say there that they keep state. Hooks that do not (offloading, casting) are served.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from foresample.integrations.diffusers.trees import same
from foresample.integrations.refusal import REMEDY, Refused, require

_FUNCTIONS = (types.FunctionType, types.MethodType, types.BuiltinFunctionType, functools.partial, type)
_OWN = ("_parameters", "_buffers", "_modules")
_UNSET = "unset"


@dataclass(frozen=True)
class Change:
    """One attribute that is not what it was."""

    name: str
    before: Any
    after: Any

    @property
    def counts(self) -> bool:
        """Whether a number changed."""
        return type(self.before) in (int, float) and type(self.after) in (int, float)

    def __str__(self) -> str:
        if isinstance(self.after, Tensor):
            return f"the values of {self.name}"
        return f"{self.name} from {_short(self.before)} to {_short(self.after)}"


class _Part:
    """One module, or another object with attributes."""

    def __init__(self, name: str, thing: Any) -> None:
        self.prefix, self.now = f"{name}." if name else "", vars(thing)
        self.remember()

    def remember(self) -> None:
        self.before = _copied(self.now)
        self.tensors = [(name, tensor, *_edition(tensor)) for name, tensor in _tensors(self.now)]

    def changes(self) -> Iterator[Change]:
        try:
            unlike = self.now != self.before  # identical objects are not compared any further
        except Exception:  # whether two tensors are equal is not one truth value
            unlike = True
        before, now = (dict(_flat(values)) if unlike else {} for values in (self.before, self.now))
        for name in dict.fromkeys([*before, *now]):
            one, two = before.get(name, _UNSET), now.get(name, _UNSET)
            if not same(one, two):
                yield Change(self.prefix + name, one, two)
        for name, tensor, address, version in self.tensors:
            if (address, version) != _edition(tensor):
                yield Change(self.prefix + name, tensor, tensor)


class Snapshot:
    """A module with everything in it, or one other object, as it was."""

    def __init__(self, thing: Any) -> None:
        modules = thing.named_modules() if isinstance(thing, nn.Module) else [("", thing)]
        self.parts = [part for name, module in modules for part in _parts(name, module)]

    def change(self) -> Change | None:
        """The first attribute found that is not what it was."""
        return next((change for part in self.parts for change in part.changes()), None)

    def accept(self, sizes: set[int]) -> Change | None:
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
        """The first change in the parts with these names, or in any, that no call of a network made."""
        for name in names or self.snapshots:
            found = self.snapshots[name].change() if name in self.snapshots else None
            if found is not None:
                return f"its {name} ({found})"
        return None

    def require(self, turn: int, *names: str) -> None:
        """Refuse a loop that changed one of these parts, or any."""
        found = self.change(*names)
        sentence = f"at step {turn} the pipeline's loop changes {found}, while the states are of other steps"
        require(found is None, sentence)

    def accept(self, arguments: Iterable[Tensor]) -> None:
        """A network was called with these tensors: take its own changes; refuse one that counts."""
        sizes = {size for tensor in arguments for size in tensor.shape}
        for name, snapshot in self.snapshots.items():
            found = None if name == "scheduler" else snapshot.accept(sizes)
            if found is not None and not self.counters:
                raise Refused(
                    f"the pipeline's {name} keeps a number between calls ({found}), on which its output may depend; "
                    f"take it out of the network, or {REMEDY} (look=False draws with it nevertheless)"
                )


def require_no_cache(networks: dict[str, Any]) -> None:
    """Refuse networks that answer from a cache, with the call that disables it."""
    for name, network in networks.items():
        network = getattr(network, "_orig_mod", network)
        registries = [vars(module).get("_diffusers_hook") for module in network.modules()]
        hooks = [hook for registry in registries if registry is not None for hook in registry.hooks.items()]
        found = [
            (hook, f"_diffusers_hook.remove_hook({hook!r}, recurse=True)")
            for hook, itself in hooks
            if getattr(itself, "_is_stateful", False)
        ]
        config = getattr(network, "_cache_config", None)
        if config is not None:
            found = [(type(config).__name__.removesuffix("Config"), "disable_cache()")]
        for kind, remedy in found:
            raise ValueError(
                f"the pipeline's {name} has a cache ({kind}), so its answers depend on earlier calls and cannot be "
                f"drafted exactly: call pipe.{name}.{remedy} first"
            )


def values_of(thing: Any) -> dict[str, Any]:
    """The attributes of an object, its tensors copied."""
    return {k: v.clone() if isinstance(v, Tensor) else _copied(v) for k, v in vars(thing).items()}


def _copied(value: Any) -> Any:
    """Containers copied, everything else as it is."""
    if type(value) is list:
        return [_copied(v) for v in value] if value else []
    if isinstance(value, dict) and type(value).__module__ in ("builtins", "collections"):
        return {k: _copied(v) for k, v in value.items()} if value else {}
    return set(value) if type(value) is set else value


def _parts(name: str, thing: Any) -> Iterator[_Part]:
    """An object, and the public objects that it has if it is a module: an attention processor, say."""
    yield _Part(name, thing)
    for attribute, value in vars(thing).items() if isinstance(thing, nn.Module) else ():
        if attribute[0] != "_" and hasattr(value, "__dict__") and not isinstance(value, (Tensor, *_FUNCTIONS)):
            yield _Part(f"{name}.{attribute}" if name else attribute, value)


def _flat(values: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Attributes by name, and the entries of dictionaries one by one."""
    for name, value in values.items():
        if isinstance(value, dict):
            yield from ((str(k) if name in _OWN else f"{name}.{k}", v) for k, v in value.items())
        elif name != "_diffusers_hook":  # a registry has no effect by itself: its hooks act through `forward`
            yield name, value


def _tensors(values: dict[str, Any]) -> Iterator[tuple[str, Tensor]]:
    for name, value in values.items():
        if isinstance(value, Tensor):
            yield name, value
        elif type(value) in (list, tuple):
            yield from ((name, v) for v in value if isinstance(v, Tensor))
        elif name in ("_parameters", "_buffers"):
            yield from ((k, v) for k, v in value.items() if v is not None)


def _edition(tensor: Tensor) -> tuple[int, int]:
    """The address of a tensor's values and its version; wrapped tensors and those of inference mode do not
    know both."""
    try:
        return tensor.data_ptr(), 0 if tensor.is_inference() else tensor._version
    except RuntimeError:
        return 0, 0


def _short(value: Any) -> str:
    """A number or a word as it is, and anything else as its type."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return f"{value:g}" if isinstance(value, float) else str(value)
    if type(value) in (list, tuple) and len(value) <= 4:
        return f"[{', '.join(map(_short, value))}]"
    return f"one {type(value).__name__}"
