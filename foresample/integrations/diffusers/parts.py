"""A loop that changes at a few of its steps is drawn in parts, one `Session` after the other.

Some loops end their guidance early, skip a network or change its arguments. But drafted states belong to many steps at
once, so all turns of a part must be alike. A part begins where the loop changes, with the images that the part before
it has finished, and with noise of its own. Since each part is exact, so is the whole.

The steps at which a loop changes are found by a rehearsal: after the first turn of each part the loop is given made-up
states only, so it costs one call of each network in each part. The run must then do what the rehearsal did with other
states: a loop whose changes depend on its states is refused.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from foresample.core.report import Evidence, Report
from foresample.integrations.diffusers.session import Session
from foresample.integrations.diffusers.trees import Path, close, leaves, same
from foresample.integrations.diffusers.watch import Trace
from foresample.integrations.refusal import require

MOST = 4
"""A loop that changes more often is refused: short parts leave little to draft."""
SHORTEST = 2
"""Steps of every part after the first: one turn alone would not show what the loop does to its states."""


@dataclass(frozen=True)
class Parts:
    """The turns at which the parts of a loop begin, and a record of each part's rehearsal."""

    begins: tuple[int, ...] = (0,)
    records: tuple[Any, ...] = ()

    def split_at(self, turn: int) -> Parts | None:
        """The parts with one more, which begins at this turn; None where they would be too many or too short."""
        begins = sorted({*self.begins, turn})
        short = any(end - begin < SHORTEST for begin, end in itertools.pairwise(begins[1:]))
        return None if short or turn in self.begins or len(begins) > MOST else Parts(tuple(begins))

    def rehearsed(self, sessions: list[Session]) -> Parts:
        """The parts with a record of each; a single part if the last is too short."""
        if len(sessions) == 1 or sessions[-1].clock.steps < SHORTEST:
            return Parts()
        return Parts(self.begins, tuple(session.record() for session in sessions))

    def require_as_rehearsed(self, sessions: list[Session]) -> None:
        """Refuse a loop that did something else in a run than in the rehearsal."""
        for session, before in zip(sessions, self.records, strict=False):
            require(
                _alike(leaves(session.record()), leaves(before)),
                f"from step {session.clock.first} on the pipeline's loop depends on the states of earlier steps, which "
                "differ when they are drafted",
            )


def _alike(one: dict[Path, Any], two: dict[Path, Any]) -> bool:
    """Whether two trees have the same leaves, tensors up to rounding."""

    def equal(a: Any, b: Any) -> bool:
        numbers = all(isinstance(v, Tensor) and v.is_floating_point() for v in (a, b))
        return close(a, b) if numbers else same(a, b)

    return one.keys() == two.keys() and all(equal(value, two[path]) for path, value in one.items())


@dataclass
class Known:
    """Results of earlier calls of one configuration."""

    trace: Trace | None = None
    begins: tuple[int, ...] = (0,)
    """The steps at which the parts of the loop begin."""
    rehearsed: Any = None
    """The numbers in the arguments of the call that found these steps. With the same numbers, a call with a callback
    needs no rehearsal."""
    rounding: dict[str, float] | None = None
    """How far the answers of its networks may differ; None before its first run."""
    replayed: list[Any] | None = None
    """The scheduler whose `step` was replayed: its values, its code, and the arguments of `step`."""
    windows: list[int | None] = field(default_factory=list)
    """The choice of `window="auto"`, if it was made; None: no window is faster than the pipeline itself."""


class Run:
    """One run of a loop: its sessions, one for each part."""

    def __init__(self, parts: Parts, make: Callable[[bool], Session]) -> None:
        """`make(first)` returns a new session; `first` is true for the loop's first."""
        self.parts, self.make = parts, make
        self.sessions = [make(True)]

    @property
    def session(self) -> Session:
        """The session of the part under way."""
        return self.sessions[-1]

    def turns(self, timesteps: Tensor, begun: Callable[[Session], None]) -> Iterator[Tensor]:
        """The timesteps that the loop iterates over; `begun` is called with the session of each later part."""
        begins = self.parts.begins
        for first, end in zip(begins, (*begins[1:], None), strict=True):
            if first:
                self.sessions.append(self.make(False))
                begun(self.session)
            yield from self.session.turns(timesteps, first, end)
            if self.session.turn < 0:  # not the loop: something else goes through the timesteps
                return

    def close(self) -> None:
        """After the pipeline returned, refuse a loop that was cut short or differed from its rehearsal."""
        for session in self.sessions:
            session.close()
        require(len(self.sessions) == len(self.parts.begins), "the pipeline left its loop before its end")
        self.parts.require_as_rehearsed(self.sessions)

    @property
    def report(self) -> Report:
        """The report of all parts."""
        return joined([session.report for session in self.sessions])


def joined(reports: list[Report]) -> Report:
    """The report of a run, from the reports of its parts."""
    if len(reports) == 1:
        return reports[0]
    sums = (
        "steps",
        "rounds",
        "evaluations",
        "drafted",
        "accepted",
        "calls_mean",
        "evaluations_mean",
        "look_calls",
    )
    total: dict[str, Any] = {
        name: sum(getattr(report, name) for report in reports)
        for name in (*sums, "seconds", "target_seconds", "preparation_seconds")
    }
    lengths = [sum(counts) for counts in zip(*(report.accepted_lengths for report in reports), strict=True)]
    evidence = Evidence(
        sum(report.evidence.asked_again for report in reports),
        max(report.evidence.largest_change for report in reports),
    )
    return replace(
        reports[0],
        **total,
        accepted_lengths=lengths,
        mismatch=[value for report in reports for value in report.mismatch],
        calls_error=math.hypot(*(report.calls_error for report in reports)),
        speedup=total["steps"] / total["calls_mean"],
        evidence=evidence,
    )
