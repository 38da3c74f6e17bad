"""Arguments of a pipeline and of its parts, by their names; those that change its loop."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

NEUTRAL: dict[str, Any] = {
    "control_guidance_start": 0.0,
    "control_guidance_end": 1.0,
    "gligen_scheduled_sampling_beta": 1.0,
    "guidance_scale_2": None,
    "sag_scale": 0.0,
    "skip_guidance_layers": None,
}
"""Arguments that change a pipeline's loop, or a part of its steps, and the value that turns each off."""


def signature_of(thing: Any, method: str) -> inspect.Signature:
    """A method's signature. Where a patch or a subclass takes *args, that of the class below, which names them."""

    def signatures() -> Iterator[inspect.Signature]:
        yield inspect.signature(getattr(thing, method))
        for kind in type(thing).__mro__:
            if method in vars(kind):
                yield inspect.signature(vars(kind)[method].__get__(thing, kind))

    named = (s for s in signatures() if all(p.kind is not p.VAR_POSITIONAL for p in s.parameters.values()))
    return next(named, next(signatures()))


def by_name(thing: Any, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a method's call, by name."""
    signature = signature_of(thing, method)
    bound = dict(signature.bind(*args, **kwargs).arguments)
    more = next((p.name for p in signature.parameters.values() if p.kind is p.VAR_KEYWORD), None)
    return {**bound.pop(more, {}), **bound} if more is not None else bound


def to_drop(bound: inspect.BoundArguments) -> str:
    """Names the arguments that may be why a pipeline is refused, and the values that turn them off."""
    given = bound.signature.bind(*bound.args, **bound.kwargs)
    given.apply_defaults()
    found = [name for name in NEUTRAL if name in given.arguments and not _is_off(name, given.arguments[name])]
    if not found:
        return ""
    values = " and ".join(f"{name}={NEUTRAL[name]}" for name in found)
    return f" (perhaps because of {' and '.join(found)}: {values} turns it off)"


def _is_off(name: str, value: Any) -> bool:
    values = value if isinstance(value, (list, tuple)) else [value]
    return all(one is NEUTRAL[name] or one == NEUTRAL[name] for one in values)
