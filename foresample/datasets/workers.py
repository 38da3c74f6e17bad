"""The worker that draws a dataset in this process; `cluster` has many on Ray."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Literal

import torch
from torch import Tensor

from foresample.baseline import sequential
from foresample.checks.samples import SamplesLaw, samples_law
from foresample.contracts import Target, require_target
from foresample.core.noise import seeds_of
from foresample.core.round import can_draft
from foresample.datasets.dataset import read_sound
from foresample.datasets.drawing import Progress, draw_shards
from foresample.datasets.fingerprint import Fingerprint, difference, fingerprint
from foresample.datasets.shards import Plan
from foresample.engine import Engine
from foresample.engine.sequential import SequentialDraws
from foresample.engine.tuning import Tuning, measure
from foresample.settings import Settings, Window
from foresample.sizes import require_memory, round_bytes, state_bytes
from foresample.text import printable

Factory = Callable[[], Target]
"""Makes the target where it is needed; it can be pickled, so that a worker can do so."""
Stop = Callable[[], bool]
"""Called before samples are begun; once it is true, no more are."""


@dataclass(frozen=True)
class Description:
    """A target and how it is drawn, found before anything is written; `choice` is why this window, if measured."""

    settings: dict[str, Any]
    fingerprint: Fingerprint
    choice: str | None


class LocalWorker:
    """One process with one target: all there is in a plain run, and each worker of a cluster.

    The window of `settings` does not count: a dataset's plan names it.
    """

    def __init__(self, target: Target | Factory, settings: Settings) -> None:
        made = target if isinstance(target, Target) or not callable(target) else target()
        require_target(made)
        self.target, self.settings, self.slots = made, settings, settings.slots or 1
        self.fingerprint = cache(lambda count: fingerprint(made, count))
        self._draws = cache(self._made)

    def describe(
        self, window: Window, count: int, say: Callable[[str], None] = lambda what: None
    ) -> Description:
        """Describe the target; "auto" measures the window here, and `say` is called with what is measured."""
        std, choice = self.target.std, None
        if not isinstance(window, int):
            window, choice = self._choose(window, say)
        settings = {
            "shape": list(self.target.shape),
            "steps": len(std),
            "dtype": str(std.dtype).removeprefix("torch."),
            "std": hashlib.sha256(std.cpu().view(torch.uint8).numpy().data).hexdigest()[:16],
            "method": re.sub(r" at 0x[0-9a-f]+", "", self._draws(window).method),
            "window": window,  # as asked for: the engine cuts it to the chain
        }
        return Description(settings, self.fingerprint(count), choice)

    def draw(
        self, plan: Plan, numbers: Iterable[int], stop: Stop | None = None, worker: int = 0
    ) -> Iterator[Progress]:
        """Draw these shards, or as much of them as is begun before `stop`."""
        self._require_target_of(plan)
        return draw_shards(self._draws(plan.window), plan, iter(numbers), worker, stop)

    def law(self, plan: Plan, count: int) -> SamplesLaw:
        """Compare the whole dataset with so many sequential samples; refused while any sample is missing."""
        self._require_target_of(plan)
        seeds = seeds_of(plan.seed, count, plan.count)  # those behind the dataset's
        return samples_law(sequential(self.target, seeds=seeds, slots=self.slots).samples, _whole(plan))

    def _choose(self, window: Literal["auto"] | Tuning, say: Callable[[str], None]) -> tuple[int, str]:
        """The fastest window, 0 if the sequential sampler is faster, and why."""
        if window == "auto":
            if not can_draft(self.target):
                return 0, "Sample sequentially: this chain has no transition that can be drafted"
            self._require_memory(1)
            window = measure(self.target, self.settings, progress=say)
        return window.window_for(len(self.target.std), self.slots) or 0, window.advice

    def _made(self, window: int) -> Engine | SequentialDraws:
        self._require_memory(min(window, max(1, len(self.target.std) - 1)))
        if not window:
            return SequentialDraws(self.target, self.slots, graph=self.settings.graph, look=self.settings.look)
        return Engine(self.target, replace(self.settings, window=window, slots=self.slots))

    def _require_memory(self, window: int) -> None:
        std = self.target.std
        require_memory(
            round_bytes(self.slots, window, state_bytes(self.target.shape, std.dtype)),
            f"{self.slots} samples under way at a time, each with a window of {window},",
            "give fewer slots or a smaller window",
            std.device,
        )

    def _require_target_of(self, plan: Plan) -> None:
        """Refuse to draw for a dataset of another target: workers make their own."""
        if plan.fingerprint and (other := difference(plan.fingerprint, self.fingerprint(plan.count))):
            raise ValueError(
                f"a worker made another target than the dataset's ({other}): give all machines the same code and files"
            )


def _whole(plan: Plan) -> Iterator[Tensor]:
    """All samples of the plan; the check is of all of them, never of a selection."""
    for number in range(plan.shards):
        shard = read_sound(plan, number)
        if shard.entry.samples < plan.size(number):
            missing = number * plan.shard + shard.entry.in_order
            raise ValueError(
                f"sample {missing} is missing in {printable(plan.out)}, and without it the others are a biased "
                "selection, whose law is not checked: run the same command again to complete the dataset"
            )
        yield shard.done.x
