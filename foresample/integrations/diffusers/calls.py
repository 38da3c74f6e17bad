"""Arguments of a pipeline and of its parts: by their names, those that change its loop, and copies with generators."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from foresample.core.noise import seeds_of
from foresample.integrations.diffusers.callbacks import TENSORS
from foresample.integrations.replaced import standing_in
from foresample.integrations.untouched import kept_random_state

NEUTRAL: dict[str, Any] = {
    "control_guidance_start": 0.0,
    "control_guidance_end": 1.0,
    "gligen_scheduled_sampling_beta": 1.0,
    "guidance_scale_2": None,
    "sag_scale": 0.0,
    "skip_guidance_layers": None,
    "pag_adaptive_scale": 0.0,
    "use_dynamic_cfg": False,
}
"""Arguments that change a pipeline's loop, or a part of its steps, and the value that turns each off."""


def signature_of(thing: Any, method: str) -> inspect.Signature:
    """A method's signature; if a patch or a subclass takes *args, that of the parent class, which names them."""

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


def call_by_name(network: Any, arguments: dict[str, Any], positional: int) -> Any:
    """Call a network with arguments by name, the first `positional` of them by position."""
    signature = forward_signature(network)
    others = next((p.name for p in signature.parameters.values() if p.kind is p.VAR_KEYWORD), None)
    ordered = {k: arguments[k] for k in signature.parameters if k in arguments}
    more: dict[str, Any] = ordered.pop(others, {}) if others is not None else {}
    values = list(ordered.values())[:positional]
    return network(*values, **dict(list(ordered.items())[positional:]), **more)


def networks_of(pipe: Any) -> dict[str, torch.nn.Module]:
    """The pipeline's networks, by their names."""
    return {name: part for name, part in pipe.components.items() if isinstance(part, torch.nn.Module)}


def forward_signature(network: Any) -> inspect.Signature:
    """The signature of a network's `forward`, also where the network is compiled."""
    return signature_of(getattr(network, "_orig_mod", network), "forward")


def to_drop(bound: inspect.BoundArguments) -> str:
    """A remark that names the arguments a refusal may be due to, and the values that turn them off."""
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


def configuration(
    scheduler: Any, networks: dict[str, torch.nn.Module], arguments: dict[str, Any], counts: bool
) -> tuple[Any, ...]:
    """A key for one use of a pipeline: numbers, shapes, precision, and which arguments are given.

    `counts`: also how many prompts, pictures and the like are given.
    """

    def summary(value: Any) -> Any:
        if isinstance(value, Tensor):
            return tuple(value.shape[1:]), value.dtype
        if value is None or isinstance(value, (bool, int, float)):
            return value
        return type(value).__name__

    given = tuple((name, summary(value)) for name, value in arguments.items() if name not in ("self", "prompt"))
    several = {name: value for name, value in arguments.items() if counts and isinstance(value, (list, Tensor))}
    lengths = tuple((name, len(v)) for name, v in several.items() if not isinstance(v, Tensor) or v.ndim)
    precision = tuple(getattr(network, "dtype", None) for network in networks.values())
    autocast = tuple(torch.is_autocast_enabled(k) and torch.get_autocast_dtype(k) for k in ("cpu", "cuda"))
    config = repr(sorted(scheduler.config.items(), key=str))
    return type(scheduler).__name__, config, given, lengths, precision, autocast


_FEW = 16  # numbers in a tensor or an array that are compared by value


def numbers_in(value: Any) -> Any:
    """The numbers in arguments, and in the lists and dictionaries among them; None in place of anything else."""
    if isinstance(value, dict):
        return {key: numbers_in(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [numbers_in(one) for one in value]
    if isinstance(value, (Tensor, np.ndarray, np.generic)):
        return value.tolist() if math.prod(value.shape) <= _FEW else None
    return value if isinstance(value, (int, float)) else None


def bound_call(call: Callable[..., Any], /, *args: Any, **kwargs: Any) -> inspect.BoundArguments:
    """The arguments of a pipeline's call, each under its own name, also where a subclass takes **kwargs."""
    signature = inspect.signature(call)
    bound, named = signature.bind(*args, **kwargs), dict(signature.parameters)
    for name, parameter in signature.parameters.items():
        given = bound.arguments.get(name)
        if parameter.kind is parameter.VAR_POSITIONAL and not all(
            v is args[0] or _is_text(v) for v in given or ()
        ):
            raise TypeError(
                f"{type(args[0]).__name__} takes *{name}, which does not name its arguments: pass all but the prompt "
                "by name"
            )
        if parameter.kind is parameter.VAR_KEYWORD:
            del named[name]
            for one in {**(given or {}), TENSORS: None}:
                named.setdefault(one, inspect.Parameter(one, inspect.Parameter.KEYWORD_ONLY, default=None))
    return signature.replace(parameters=list(named.values())).bind(*args, **kwargs)


def _is_text(value: Any) -> bool:
    """Whether this is a prompt: text, a list of it, or None."""
    return all(
        one is None or isinstance(one, str) for one in (value if isinstance(value, (list, tuple)) else [value])
    )


def copied_arguments(bound: inspect.BoundArguments) -> inspect.BoundArguments:
    """A copy of the arguments, in which some may be replaced."""
    return inspect.BoundArguments(bound.signature, dict(bound.arguments))


def random_state(bound: inspect.BoundArguments) -> Callable[[], None]:
    """A function that restores the present random state of torch and of the given generators."""
    given = bound.arguments.get("generator")
    generators = given if isinstance(given, Sequence) else [given]
    put_back = [kept_random_state(), *(kept_random_state(g) for g in generators if g is not None)]

    def all_of_them() -> None:
        for one in put_back:
            one()

    return all_of_them


@contextmanager
def undisturbed(pipe: Any, bound: inspect.BoundArguments) -> Iterator[None]:
    """Run the pipeline without a progress bar inside, and restore the generators afterwards."""
    put_back = random_state(bound)
    bars = {**(getattr(pipe, "_progress_bar_config", None) or {}), "disable": True}
    with standing_in(pipe, "_progress_bar_config", bars):
        try:
            yield
        finally:
            put_back()


def as_generators(given: Any) -> Any:
    """The generators a pipeline was given, or None; each seed becomes a generator."""
    given = given.tolist() if hasattr(given, "tolist") else given
    if given is None:
        return None
    several = isinstance(given, (list, tuple))
    found = [_as_generator(one) for one in (given if several else [given])]
    return found if several else found[0]


def _as_generator(value: Any) -> torch.Generator:
    if isinstance(value, torch.Generator):
        return value
    if not hasattr(value, "__index__"):
        raise TypeError(
            f"generator contains {value!r}: give each image a torch.Generator or a whole number as its seed, or leave "
            "generator out"
        )
    return torch.Generator().manual_seed(int(value))


def stream_seeds(generator: Any) -> Callable[[int], Tensor]:
    """A function that draws seeds for the images' noise, from the generators after the first latents."""

    def drawn(source: torch.Generator | None) -> int:
        return int(
            torch.randint(2**62, (), generator=source, device="cpu" if source is None else source.device)
        )

    def seeds(count: int) -> Tensor:
        if isinstance(generator, Sequence) and len(generator) == count:
            return torch.tensor([drawn(one) for one in generator])
        return seeds_of(drawn(generator[0] if isinstance(generator, Sequence) else generator), count)

    return seeds
