"""Conditions follow their samples into every call of the network."""

from __future__ import annotations

from collections import OrderedDict, defaultdict, namedtuple
from typing import Any

import numpy as np
import pytest
import torch

from foresample.integrations.networks import for_rows, parts_of

ROW = torch.tensor([2, 0, 2, 1])
Pair = namedtuple("Pair", "values scale")


class Names(dict[str, Any]):
    """A dictionary whose entries are attributes, too."""

    __getattr__ = dict.__getitem__


class Linked(dict[str, Any]):
    """A dictionary that is its own table of attributes."""

    def __init__(self, *given: Any, **more: Any) -> None:
        super().__init__(*given, **more)
        self.__dict__ = self


class Bound(dict[str, Any]):
    """A dictionary that is not made from another."""

    def __init__(self) -> None:
        super().__init__(values=np.array([5, 6, 7]))


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (torch.tensor([5, 6, 7]), [7, 5, 7, 6]),
        (np.array([5, 6, 7]), [7, 5, 7, 6]),
        (["a", "b", "c"], ["c", "a", "c", "b"]),
        (("a", "b", "c"), ("c", "a", "c", "b")),
        ({"y": {"text": ["a", "b", "c"], "scale": 2.0}}, {"y": {"text": ["c", "a", "c", "b"], "scale": 2.0}}),
        (Pair(np.array([5, 6, 7]), 2.0), Pair([7, 5, 7, 6], 2.0)),
        (OrderedDict(values=np.array([5, 6, 7])), {"values": [7, 5, 7, 6]}),
        (defaultdict[str, Any](int, values=np.array([5, 6, 7])), {"values": [7, 5, 7, 6]}),
    ],
    ids=repr,
)
def test_one_entry_for_each_sample_is_indexed(given: Any, expected: Any) -> None:
    found = for_rows(given, ROW, 3)
    assert type(found) is type(given)
    assert plain(found) == plain(expected)


@pytest.mark.parametrize("kind", [Names, Linked])
def test_entries_of_a_dictionary_remain_its_attributes(kind: Any) -> None:
    found = for_rows({"y": kind(shift=torch.tensor([5, 6, 7]), scale=2.0)}, ROW, 3)["y"]
    assert (type(found), found.scale, found.shift.tolist()) == (kind, 2.0, [7, 5, 7, 6])


def test_a_dictionary_that_is_not_made_from_another_is_passed_on_as_a_plain_one() -> None:
    assert plain(for_rows(Bound(), ROW, 3)) == {"values": [7, 5, 7, 6]}


OTHERS = [torch.zeros(2), np.zeros(2), ["a", "b"], "abc", (1, 2, 3), Pair(1, "abc"), None]


@pytest.mark.parametrize("given", OTHERS, ids=repr)
def test_everything_else_is_passed_on(given: Any) -> None:
    found = for_rows(given, ROW, 3)
    assert type(found) is type(given)
    assert plain(found) == plain(given)


def plain(value: Any) -> Any:
    """The same without arrays, which cannot be compared."""
    if isinstance(value, torch.Tensor | np.ndarray):
        return value.tolist()
    if isinstance(value, dict):
        return {name: plain(item) for name, item in value.items()}
    return [plain(item) for item in value] if isinstance(value, list | tuple) else value


def test_parts_are_those_of_torch_in_its_order() -> None:
    shared = torch.nn.Linear(2, 2)
    network = torch.nn.Sequential(shared, torch.nn.Sequential(torch.nn.Mish(), shared), torch.nn.Mish())
    network.register_module("absent", None)
    network[1].add_module("above", network)  # a loop
    assert list(parts_of(network)) == list(network.modules())
    assert not parts_of(lambda x: x)
