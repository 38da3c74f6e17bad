"""Strict reading of files: plain files only, JSON of bounded depth, and every value of the expected type.

A dataclass is the schema: its annotations are the types, `Annotated[..., Rule]` adds conditions. A value that does not
fit raises `Unfit`, half a sentence with the place and the value; the caller adds the file's name and the remedy.
Result files, a dataset's manifest and shards, and model folders are all read by this module.
"""

from __future__ import annotations

import errno
import json
import os
import stat
from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from pathlib import Path
from reprlib import repr as shortened
from types import UnionType
from typing import Annotated, Any, NamedTuple, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from foresample.text import printable

MOST_BYTES = 2**29
"""The largest JSON file; a manifest of a million shards has a third of this."""
_DEEPEST = 32  # nested lists and objects, at most; deeper ones cannot be written again


class Unfit(ValueError):
    """An error in a file's content, with its place."""


# ---------------------------------------------------------------- files


def open_plain(path: Path, flags: int = os.O_RDONLY, *, follow: bool = True, folder: int | None = None) -> int:
    """A descriptor of a plain file. Anything else is refused, without waiting for a pipe.

    `follow`: whether the path may be a link. `folder`: descriptor of the directory that the path begins at.
    """
    flags |= os.O_NONBLOCK | os.O_CLOEXEC | (0 if follow else os.O_NOFOLLOW)
    try:
        file = os.open(path, flags, 0o666, dir_fd=folder)
    except ValueError as error:  # a null byte in its name
        raise OSError(errno.EINVAL, str(error), str(path)) from None
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.EMLINK) and not follow:
            raise OSError(error.errno, "it is a link, not a file", str(path)) from None
        if error.errno in (errno.ENXIO, errno.EISDIR):
            raise OSError(error.errno, "it is not a plain file", str(path)) from None
        raise
    if not stat.S_ISREG(os.fstat(file).st_mode):
        os.close(file)
        raise OSError(errno.EINVAL, "it is not a plain file", str(path))
    return file


def read_plain(path: Path, *, most: int = MOST_BYTES, follow: bool = True) -> bytes:
    """The bytes of a plain file, of at most `most`."""
    with open(open_plain(path, follow=follow), "rb") as file:
        data = file.read(most + 1)
    if len(data) > most:
        raise OSError(errno.EFBIG, f"it has more than {most} bytes", str(path))
    return data


def parse_json(text: str) -> Any:
    """The value of a JSON text; NaN and infinity are refused."""
    constants: list[str] = []
    try:
        data = json.loads(text, parse_constant=constants.append)
    except (ValueError, RecursionError) as error:
        raise Unfit(f"cannot be read as JSON ({error})") from None
    if constants:
        raise Unfit(f"{constants[0]} is no JSON number")
    inside, depth = [data], 0
    while inside:
        if (depth := depth + 1) > _DEEPEST:
            raise Unfit(f"cannot be read as JSON (nested more than {_DEEPEST} deep)")
        inside = [
            part
            for value in inside
            if isinstance(value, (dict, list))
            for part in (value.values() if isinstance(value, dict) else value)
        ]
    return data


# ---------------------------------------------------------------- values


class Rule(NamedTuple):
    """A condition on a value beyond its type."""

    name: str
    holds: Callable[[Any], bool]


MOST = 1e100
"""The largest number, so that ratios and products of numbers read are finite as well."""
T = TypeVar("T")
Positive = Annotated[float, Rule("a positive number", lambda value: value > 1 / MOST)]
NotNegative = Annotated[float, Rule("a number from 0 on", lambda value: value >= 0)]
Count = Annotated[int, Rule("a whole number from 0 on", lambda value: value >= 0)]
AtLeastOne = Annotated[int, Rule("a whole number from 1 on", lambda value: value >= 1)]
Some = Annotated[list[T], Rule("a list with something in it", bool)]


def read_object(kind: type[T], data: Any, where: str = "", *, given: Mapping[str, Any] | None = None) -> T:
    """A JSON object as a dataclass; further entries are ignored.

    `where`: the object's place, in front of the names of fields. `given`: fields that come from elsewhere.
    """
    if not isinstance(data, dict):
        raise Unfit(f"{printable(where.rstrip('.')) or 'it'} is {shortened(data)}, not an object")
    values = dict(given or {})
    for one in fields(kind):  # type: ignore[arg-type]
        if one.name in values:
            continue
        if one.name in data:
            values[one.name] = _value(_types(cast(Any, kind))[one.name], data[one.name], where + one.name)
        elif one.default is MISSING and one.default_factory is MISSING:
            raise Unfit(f"{printable(where)}{one.name} is missing")
    return kind(**values)


_KINDS: dict[Any, tuple[str, Callable[[Any], bool]]] = {  # to Python, true is a number as well
    str: ("a text", lambda value: type(value) is str),
    bool: ("true or false", lambda value: type(value) is bool),
    int: ("a whole number", lambda value: type(value) is int and abs(value) <= MOST),
    float: ("a finite number", lambda value: type(value) in (int, float) and abs(value) <= MOST),
    list: ("a list", lambda value: isinstance(value, list)),
    dict: ("an object", lambda value: isinstance(value, dict)),
}


def _value(kind: Any, value: Any, where: str) -> Any:
    """A JSON value as one of this type."""
    origin, parts = get_origin(kind), get_args(kind)
    if kind is Any:
        return value
    if origin is Annotated:
        value, (name, holds) = _value(parts[0], value, where), parts[1]
    elif origin in (Union, UnionType):  # X | None
        return None if value is None else _value(parts[0], value, where)
    elif is_dataclass(kind):
        return read_object(kind, value, f"{where}.")  # type: ignore[arg-type]
    else:
        name, holds = _KINDS[origin or kind]
    if not holds(value):
        raise Unfit(f"{printable(where)} is {shortened(value)}, not {name}")
    if origin is list:
        return [_value(parts[0], part, f"{where}[{i}]") for i, part in enumerate(value)]
    if origin is dict:
        return {key: _value(parts[1], part, f"{where}.{key}") for key, part in value.items()}
    return value


@cache
def _types(kind: Any) -> dict[str, Any]:
    return get_type_hints(kind, include_extras=True)
