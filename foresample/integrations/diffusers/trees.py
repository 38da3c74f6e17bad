"""Containers of tensors: the arguments and the answers of a pipeline's networks, compared and rebuilt."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Path = tuple[Any, ...]
"""Keys and indices that lead to a leaf of a tree."""


def rebuilt(change: Callable[[Path, Any], Any], tree: Any, path: Path = ()) -> Any:
    """The same containers, with `change(path, leaf)` in the place of each leaf."""
    if isinstance(tree, dict):
        items = {k: rebuilt(change, v, (*path, k)) for k, v in tree.items()}
        return items if type(tree) is dict else type(tree)(**items)  # an output class of diffusers
    if type(tree) in (list, tuple):
        return type(tree)(rebuilt(change, v, (*path, i)) for i, v in enumerate(tree))
    return change(path, tree)


def mapped(change: Callable[[Any], Any], tree: Any) -> Any:
    """The same containers, with `change(leaf)` in the place of each leaf."""
    return rebuilt(lambda path, leaf: change(leaf), tree)


def tensors(tree: Any) -> dict[Path, Tensor]:
    """All tensors of a tree, by their paths."""
    return {path: leaf for path, leaf in leaves(tree).items() if isinstance(leaf, Tensor)}


def leaves(tree: Any) -> dict[Path, Any]:
    """All leaves of a tree, by their paths."""
    found: dict[Path, Any] = {}
    rebuilt(lambda path, leaf: found.update({path: leaf}), tree)
    return found


def at(tree: Any, path: Path) -> Any:
    """The part of a tree that a path leads to."""
    for key in path:
        tree = tree[key]
    return tree


def plain(value: Any) -> Any:
    """A tensor as a `torch.Tensor`, whatever its class; anything else as it is."""
    return value.as_subclass(Tensor) if isinstance(value, Tensor) else value


def copied(tree: Any) -> Any:
    """The same containers with copies of the tensors."""
    return mapped(lambda v: plain(v).clone() if isinstance(v, Tensor) else v, tree)


def same(one: Any, two: Any) -> bool:
    """Whether two values are equal; numbers up to rounding, since a scale that was taken off and put on rounds."""
    if one is two:
        return True
    if type(one) in (int, float) and type(two) in (int, float):
        return math.isclose(one, two, rel_tol=1e-6) or (one != one and two != two)
    if isinstance(one, Tensor) or isinstance(two, Tensor):
        return type(one) is type(two) and torch.equal(plain(one), plain(two))
    if isinstance(one, dict) and isinstance(two, dict):
        return one.keys() == two.keys() and all(same(v, two[k]) for k, v in one.items())
    if type(one) in (list, tuple) and type(one) is type(two):
        return len(one) == len(two) and all(map(same, one, two))
    try:
        return bool(one == two)
    except Exception:  # arrays, say, whose comparison is not one truth value
        return False


def close(one: Tensor, two: Tensor) -> bool:
    """Whether two tensors are equal up to rounding."""
    if one.shape != two.shape or torch.equal(one, two):
        return one.shape == two.shape
    tolerance = 1e-4 if two.dtype in (torch.float32, torch.float64) else 3e-2
    return bool((one - two).abs().max() <= tolerance * two.abs().max())


def twins(values: Tensor) -> bool:
    """Whether the second half of the rows repeats the first."""
    half = len(values) // 2
    return len(values) == 2 * half and torch.equal(values[:half], values[half:])


def select(value: Any, row: Tensor, batch: int) -> Any:
    """These rows of a tensor that has `batch` rows; anything else as it is."""
    fits = isinstance(value, Tensor) and value.ndim > 0 and len(value) == batch
    return value[row] if fits else value
