"""The clock of a pipeline's loop: its timesteps, its turn, and the times given to its networks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from foresample.integrations.refusal import require


class Clock:
    """The timesteps that the loop goes through, and the turn it is in: −1 before the loop."""

    def __init__(self) -> None:
        self.turn = -1
        self.first = 0
        """The loop's turn at which this part of it begins."""
        self.start = 0
        """Where this part begins in the scheduler's timesteps."""
        self.timesteps = torch.empty(0)
        self._functions: list[Callable[[Tensor], Tensor]] | None = None
        """Functions of the timestep that explain all times received so far."""

    def begin(self, timesteps: Tensor, everything: Tensor, first: int = 0, end: int | None = None) -> None:
        """Begin a loop over these of all its scheduler's timesteps; this part has the turns from `first` to `end`."""
        require(self.turn < 0, "the pipeline goes through its timesteps more than once")
        count = len(timesteps)
        starts = range(len(everything) - count + 1)
        # The last match: timesteps may repeat near the data, where most loops end.
        begins = next((k for k in reversed(starts) if torch.equal(everything[k : k + count], timesteps)), -1)
        require(begins >= 0, "the pipeline does not take its scheduler's timesteps in their order")
        self.first, self.start, self.timesteps = first, begins + first, timesteps[first:end]

    @property
    def loop_turn(self) -> int:
        """The number of this turn in the whole loop."""
        return self.first + self.turn

    @property
    def steps(self) -> int:
        return len(self.timesteps)

    def timestep(self, later: int = 0) -> Tensor:
        """The loop's own timestep in this turn, or in a later one."""
        return self.timesteps[min(self.turn + later, self.steps - 1)]

    def at(self, step: Tensor, device: torch.device | str) -> Tensor:
        """The timesteps of these steps."""
        return self.timesteps.to(device)[step.to(device)]

    def require_now(self, timestep: Any) -> None:
        """Refuse a scheduler's step at another timestep than the loop's own."""
        now = self.turn >= 0 and torch.equal(_scalar(timestep), _scalar(self.timestep()))
        require(now, "the pipeline stepped its scheduler outside of its loop over timesteps")

    def require_known_time(self, name: str, received: Any, rows: int, dtype: torch.dtype) -> None:
        """Refuse a network call whose time is no known function of the loop's timestep."""
        value = received.as_subclass(Tensor) if isinstance(received, Tensor) else torch.tensor(received)
        flat, now = value.flatten(), self.timestep()
        one = value.ndim <= 1 and len(flat) in (1, rows) and bool((flat == flat[0]).all())
        require(
            one,
            f"the pipeline gives its {name} several timesteps for one state, which foresample does not follow",
        )
        if self._functions is None:
            self._functions = _time_functions(value, now, dtype)
        self._functions = [f for f in self._functions if torch.equal(f(now[None].to(value.device)), flat[:1])]
        require(
            bool(self._functions),
            f"at step {self.loop_turn} the pipeline gives its {name} the time {float(flat[0]):g}, which is no known "
            f"function of the timestep {float(now):g}",
        )

    def times_for(self, step: Tensor) -> Tensor:
        """The times to give to the networks for states at these steps, on the device of the states.

        A network moves a single time to its device by itself, but not one time for each state.
        """
        assert self._functions
        return self._functions[0](self.at(step, step.device))


def _scalar(value: Any) -> Tensor:
    return torch.as_tensor(value).as_subclass(Tensor).detach().cpu().double().flatten()[:1]


def _time_functions(value: Tensor, timestep: Tensor, dtype: torch.dtype) -> list[Callable[[Tensor], Tensor]]:
    """The functions of the timestep that pipelines give to their networks, in the dtype received."""
    kind = value.dtype
    functions: list[Callable[[Tensor], Tensor]] = [lambda t: t.to(kind)]
    for half in dict.fromkeys((kind, dtype, torch.float32)):
        if half.is_floating_point:
            functions.append(lambda t, half=half: (t.to(half) / 1000).to(kind))  # type: ignore[misc]
            functions.append(lambda t, half=half: (1 - t.to(half) / 1000).to(kind))  # type: ignore[misc]
            functions.append(lambda t, half=half: ((1000 - t.to(half)) / 1000).to(kind))  # type: ignore[misc]
    if kind.is_floating_point and float(timestep):
        ratio = float(value.flatten()[0]) / float(timestep)
        functions.append(lambda t: (t * ratio).to(kind))
    return functions
