"""The function that stands in for a package's sampling loop, as far as all packages share it."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from foresample.contracts import Target
from foresample.core.report import Observer, Run
from foresample.engine import Engine
from foresample.integrations.replaced import REPORT, Replaced
from foresample.integrations.trusted import library_name, require_current
from foresample.settings import Settings


@dataclass(eq=False)
class StandIn:
    """Stands in for a sampling function of `served`, with its arguments and its distribution."""

    served: Any
    name: str
    original: Callable[..., Any]
    settings: Settings
    replaced: Replaced

    def refuse_early(self) -> None:
        """Refuse, before anything is replaced, an object that cannot be served."""
        raise NotImplementedError

    def require_own(self, *known: str) -> None:
        """Refuse a function that is none of these functions of its package."""
        if library_name(self.original, self.served) not in known:
            raise ValueError(
                f"{type(self.served).__name__}.{self.name} is not {known[0]}, the function foresample knows: it is "
                "overridden or patched, and may do something else at any sample; use the package's own class, or make "
                "a target with foresample.targets"
            )

    def arguments(self, *args: Any, **kwargs: Any) -> inspect.BoundArguments:
        """The arguments of a call with their defaults; refused where the function was replaced on its class."""
        require_current(self.original, self.served, self.name)
        bound = inspect.signature(self.original).bind(*args, **kwargs)
        bound.apply_defaults()
        return bound

    def draw(self, target: Target, count: int, trusted: list[str], observe: Observer | None = None) -> Run:
        """Samples with seeds of torch's generator; their report says what was taken on trust."""
        run = Engine(target, self.settings.for_count(count)).sample(torch.randint(2**62, (count,)), observe)
        run.report.evidence.trusted += trusted
        setattr(self.served, REPORT, run.report)
        return run
