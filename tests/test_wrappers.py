"""A target that wraps another forwards everything that the other has beside the contract."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import foresample as fs
from foresample.chains import Chain
from foresample.contracts import Wrapper
from foresample.core.report import TimedTarget
from foresample.engine.priors import RecordingTarget
from foresample.integrations.packages.openai import _Path
from foresample.integrations.policies.planner import _FollowedTarget
from foresample.targets import replicated
from foresample.targets.constraints import ConstrainedTarget
from foresample.targets.gradients import _Guided

TRAITS: dict[str, Any] = {
    "multistep": 1,
    "extra": torch.Size([5]),
    "calls_per_step": 2,
    "bands": torch.arange(12) % 3,
    "chain": None,  # another one for each target: see `Full`
    "fault_hint": "; look at its variance",
}
"""Optional attributes of a target, each with a value that no target has by default."""
OWN = {"unrecorded"}
"""Attributes of one wrapper: the target to call when nothing is to be recorded."""


class Full:
    """A target with every trait."""

    shape, std = torch.Size([3, 2, 2]), torch.full((4,), 0.5)

    def __init__(self, **traits: Any) -> None:
        ones = torch.ones(4)
        self.chain = Chain(self.std, 0 * ones, ones, 0 * ones)
        vars(self).update({name: value for name, value in TRAITS.items() if name != "chain"} | traits)

    def start(self, noise: Tensor, row: Tensor) -> Tensor:
        return noise

    def predict(self, x: Tensor, step: Tensor, row: Tensor, **extra: Tensor) -> Tensor:
        return torch.where((step == 2).view(-1, 1, 1, 1), torch.nan, 0.9 * x)

    def mean(self, x: Tensor, prediction: Tensor, step: Tensor, *previous: Tensor, **extra: Tensor) -> Tensor:
        return prediction


WRAPPERS: dict[str, tuple[Callable[[Any], Any], dict[str, Any]]] = {
    "Wrapper": (Wrapper, {}),
    "TimedTarget": (TimedTarget, {}),
    "RecordingTarget": (lambda target: RecordingTarget(target, 2, 4), {}),
    "_Replicated": (lambda target: replicated([target, target]), {}),
    "ConstrainedTarget": (lambda target: ConstrainedTarget(target, lambda x, row: x), {}),
    "_Guided": (lambda target: _Guided(target, lambda x, *_: torch.zeros_like(x), torch.zeros(4)), {}),
    # Its bands are its own, and a basis changes what extra noise means: that is refused.
    "FrequencyTarget": (fs.targets.in_frequencies, {"extra": None}),
}


def kinds_of(kind: type) -> set[str]:
    """The package's classes that derive from one, by name."""
    every: list[type] = kind.__subclasses__()
    found = [k for k in every if k.__module__.startswith("foresample.")]
    return {k.__name__ for k in found}.union(*map(kinds_of, found))


def test_every_wrapper_is_tested_and_every_trait_is_listed() -> None:
    # The first forwards as `RecordingTarget` does; each is made by one integration, whose tests draw with it.
    inner = {_FollowedTarget.__name__, _Path.__name__}
    assert issubclass(_FollowedTarget, RecordingTarget)
    assert kinds_of(Wrapper) | {"Wrapper"} == set(WRAPPERS) | inner
    sources = [path.read_text(encoding="utf-8") for path in Path(fs.__file__).parent.rglob("*.py")]
    read = {name for text in sources for name in re.findall(r'getattr\(\s*(?:self\.)?target, "(\w+)"', text)}
    assert read - {"__dict__"} == set(TRAITS) | OWN


@pytest.mark.parametrize("name", WRAPPERS)
def test_a_wrapper_has_the_traits_of_the_target(name: str) -> None:
    wrap, without = WRAPPERS[name]
    target: Any = Full(**without)
    wrapped = wrap(target)
    assert type(wrapped).__name__ == name
    for trait in TRAITS:
        if (name, trait) == ("FrequencyTarget", "bands"):
            assert not torch.equal(wrapped.bands, target.bands)
        else:
            assert getattr(wrapped, trait) is getattr(target, trait)
    assert (wrapped.shape, wrapped.std) == (target.shape, target.std)


@pytest.mark.parametrize("name", WRAPPERS)
@pytest.mark.parametrize("sampler", [lambda t: fs.sample(t, 2, window=3), lambda t: fs.sequential(t, 2)])
def test_the_error_about_a_nan_ends_with_the_target_s_hint(name: str, sampler: Callable[[Any], object]) -> None:
    target = WRAPPERS[name][0](Full(extra=None))
    with pytest.raises(
        FloatingPointError, match=r"NaN or infinity at step 2 of sample 0; .*; look at its variance$"
    ):
        sampler(target)
