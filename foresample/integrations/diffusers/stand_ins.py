"""Stand-ins that replace a pipeline's parts while it draws, and are put back afterwards.

Everything here lasts for one run of the loop, however it ends. Between calls a pipeline's networks and its scheduler
are the untouched objects: they can be copied, pickled, saved and shared with other pipelines.
"""

from __future__ import annotations

import copyreg
import functools
import threading
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from foresample.integrations.diffusers.trees import mapped
from foresample.integrations.diffusers.watch import Enough
from foresample.integrations.refusal import REMEDY, Refused

SENTENCES = (Refused, FloatingPointError, torch.OutOfMemoryError, Enough)
"""Exceptions that already name their cause."""
_taken: dict[int, int] = {}  # id of a pipeline's part: the thread that draws with it
_taking = threading.Lock()


# ------------------------------------------------------------------ classes


def disguised(kind: Any, call: Callable[..., Any], hidden: Collection[str] = ()) -> type:
    """A subclass under its parent's name with a `__call__` of its own; copies and pickles are of the parent class.

    `hidden`: attributes of the instance that a copy does not get.
    """
    plain = getattr(kind, "_foresample_plain", kind)

    def __reduce_ex__(thing: Any, protocol: Any) -> Any:
        with reclassed(thing, plain):
            made, arguments, *rest = thing.__reduce_ex__(protocol)
        if made is copyreg.__newobj__:  # type: ignore[attr-defined]
            # pickle wants the class of the instance there, which ours is not.
            made, arguments = copyreg._reconstructor, (plain, object, None)  # type: ignore[attr-defined]
        if rest and isinstance(rest[0], dict):
            rest[0] = {name: value for name, value in rest[0].items() if name not in hidden}
        return (made, arguments, *rest)

    own = {"__call__": call, "__reduce_ex__": __reduce_ex__, "_foresample_plain": plain}
    if hasattr(kind, "__deepcopy__"):

        def __deepcopy__(thing: Any, memo: dict[int, Any]) -> Any:
            with reclassed(thing, plain):
                return thing.__deepcopy__(memo)

        own["__deepcopy__"] = __deepcopy__
    about = {name: getattr(plain, name) for name in ("__module__", "__qualname__", "__doc__")}
    return type(plain.__name__, (kind,), about | own)


def timesteps_class(turns: Callable[[Tensor], Iterator[Tensor]]) -> type[Tensor]:
    """Timesteps whose iteration drives the loop, as does that of a part of them. Copies, and results of operations with
    other tensors, are plain tensors."""

    def __torch_function__(kind: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        others = False

        def plain(value: Any) -> Any:
            nonlocal others
            if not isinstance(value, kind):
                others |= isinstance(value, Tensor)
                return value
            return value.as_subclass(Tensor)

        with torch._C.DisableTorchFunctionSubclass():
            args, kwargs = mapped(plain, (args, kwargs or {}))
        result = func(*args, **kwargs)
        alone = (
            isinstance(result, Tensor) and result.ndim == 1 and not others and func is not Tensor.as_subclass
        )
        return result.as_subclass(kind) if alone else result

    own = {
        "__iter__": turns,
        "__torch_function__": classmethod(__torch_function__),
        "__reduce_ex__": lambda timesteps, protocol: timesteps.as_subclass(Tensor).__reduce_ex__(protocol),
        "__deepcopy__": lambda timesteps, memo: timesteps.as_subclass(Tensor).clone(),
    }
    return type("SpeculativeTimesteps", (Tensor,), own)


def states_class(among_states: Callable[..., Any]) -> type[Tensor]:
    """The class of drafted states, by which the loop's operations recognise them."""
    own = {
        "__torch_function__": classmethod(among_states),
        "__deepcopy__": lambda states, memo: states.clone(),
    }
    return type("DraftedStates", (Tensor,), own)


# ------------------------------------------------------------------ for the time of one run


@contextmanager
def reclassed(thing: Any, kind: type) -> Iterator[None]:
    """Give an instance another class inside."""
    before = type(thing)
    object.__setattr__(thing, "__class__", kind)
    try:
        yield
    finally:
        if type(thing) is kind:
            object.__setattr__(thing, "__class__", before)


@contextmanager
def settings_kept(networks: Iterable[nn.Module]) -> Iterator[None]:
    """Restore the networks' attention processors and switches if the loop is cut short.

    A pipeline that sets them for its loop restores them afterwards, but not after an exception. Private attributes stay
    as they are: transformers records there which hooks it has installed.
    """

    def public(held: dict[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in held.items() if name[0] != "_"}

    modules = [module for network in networks for module in network.modules()]
    before = [(held, public(held)) for module in modules for held in (vars(module), module._modules)]
    try:
        yield
    except BaseException:
        for held, then in before:
            for name in public(held).keys() - then.keys():
                del held[name]
            held.update(then)
        raise


@contextmanager
def taken(parts: dict[str, Any]) -> Iterator[None]:
    """Keep a pipeline's parts to this thread; refuse those that another thread's accelerated pipeline draws with."""
    here = threading.get_ident()
    with _taking:
        for name, part in parts.items():
            if _taken.get(id(part), here) != here:
                raise Refused(
                    f"another accelerated pipeline is drawing with this pipeline's {name} in another thread: call one "
                    "after the other, or give each thread parts of its own (copy.deepcopy(pipe))"
                )
        added = [id(part) for part in parts.values() if id(part) not in _taken]
        _taken.update(dict.fromkeys(added, here))
    try:
        yield
    finally:
        with _taking:
            for part in added:
                del _taken[part]


# ------------------------------------------------------------------ whose exception it is


class Guard:
    """Distinguishes exceptions of our own code from those of networks, schedulers and the user's code."""

    foreign: BaseException | None = None
    """The last exception that came out of foreign code."""
    whose = ""
    """The part that raised it."""

    def theirs(self, whose: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The same function, with its exceptions marked as foreign."""

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            try:
                return function(*args, **kwargs)
            except BaseException as error:
                self.foreign, self.whose = error, whose
                raise

        return call

    @contextmanager
    def ours(self, session: Any) -> Iterator[None]:
        """Turn an exception that is raised inside, and not by foreign code, into a refusal."""
        try:
            yield
        except SENTENCES:
            raise
        except Exception as error:
            if error is self.foreign or getattr(session, "calling_back", False):
                raise
            raise Refused(
                f"foresample cannot follow this pipeline's loop at step {max(session.loop_turn, 0)} "
                f"({type(error).__name__}: {one_line(error)}); {REMEDY}"
            ) from error


def one_line(error: BaseException) -> str:
    """The first line of an exception's message."""
    return next(iter(str(error).splitlines()), "")
