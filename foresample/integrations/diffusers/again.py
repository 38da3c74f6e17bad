"""Asking again: the same state must get the same answer in every turn of a pipeline's loop.

In each turn one state of the turn before goes along, with the arguments it had. A network that keeps a cache, draws
random numbers or was changed in between answers otherwise, and is refused.

Rounding is told from change as in `core.look`, by calls of one size, since libraries take other algorithms for calls
of other sizes. Where the answers of two turns differ by more than 1e-4 of their size, the state is asked a third time,
in a call of the size that first answered it and in the same place, among other mates. If it gets its first answer
there, the difference is the network's rounding, and up to twice as much is allowed from then on.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from foresample.core.look import DIFFERS, dependence
from foresample.integrations.refusal import REMEDY, Refused

if TYPE_CHECKING:
    from foresample.integrations.diffusers.turns import Recorded, Session

Path = tuple[Any, ...]
"""Where a tensor is in the arguments or in the answer of a network."""
MATES = ((3.0, 0), (-2.0, -1))
"""What the states of batch-mates are multiplied with, before 1 is added, and the step they are told."""


@dataclass
class Kept:
    """One state of a network call, to be asked for again in the next."""

    turn: int
    number: int
    """Which of the turn's drafted states it was."""
    states: Tensor
    """[copies, 1, …]: the network's input, with a copy for each row that guidance makes of a state."""
    step: Tensor
    """[1]"""
    image: Tensor
    """[1]: whose prompt and other arguments it has."""
    rows: int
    """States in the call that answered it."""
    place: int
    """Which of them it was: of two networks that share a turn's states, each has a call of its own."""
    side: dict[Path, Tensor] = field(default_factory=dict)
    """Arguments that another network made of this state, [copies, 1, …]."""
    answers: dict[Path, Tensor] = field(default_factory=dict)
    """[copies, 1, …], for each tensor returned."""


@dataclass(frozen=True)
class Answered:
    """A network call that the untouched loop made, copied: loops may write into what they get."""

    states: Tensor
    answers: dict[Path, Tensor]

    @classmethod
    def of(cls, states: Tensor, output: Any) -> Answered:
        answers = _batched(output, output, len(states))
        return cls(states, {path: answer.clone() for path, answer in answers.items()})


class AskAgain:
    """Keeps one state of each turn of a session, and asks for it again in the next."""

    def __init__(self, session: Session, rounding: dict[str, float], new: bool) -> None:
        """`rounding`: the difference allowed for each network, from earlier runs of this configuration. `new`: there
        were none."""
        self.session, self.rounding, self.new = session, rounding, new
        self.since_watched: dict[str, float] = {}
        self.first: dict[tuple[int, bool], tuple[Recorded, Kept]] = {}
        """The first state kept of each call of the loop; where two networks share its steps, one of each."""
        self.beside: Kept | None = None
        """A state of the call under way that the other of two networks answers."""

    def as_watched(self, name: str, watched: Answered, states: Tensor, output: Any) -> None:
        """The untouched loop was watched from the same noise: its first call is this run's first once more."""
        if watched.states.shape == states.shape and torch.equal(watched.states, states):
            now = _batched(output, output, len(states))
            self.since_watched[name] = _largest_change(watched.answers, now)

    def keep_first(self, recorded: Recorded) -> None:
        """Keep the first image's state of turn 0."""
        session = self.session
        zero = torch.zeros(1, dtype=torch.int64, device=session.first.device)
        states = recorded.states.unflatten(0, (recorded.copies, session.images))[:, :1]
        recorded.kept = Kept(0, 0, states, zero, zero, session.images, 0)
        self._keep(recorded, recorded.kept, recorded.output)
        found = self.since_watched.pop(recorded.name, 0.0)
        if found > DIFFERS:
            self._require_law(recorded)
            raise self._changed(recorded, recorded.kept, "in three steps of the untouched loop", found)

    def going_along(self, recorded: Recorded, states: Tensor, step: Tensor) -> Tensor:
        """Choose which of a call's states, [copies, drafted, …], to keep; return the steps of all in the call."""
        session, asked = self.session, recorded.asked
        # Another place in each turn, spread over the window.
        number = int(session.turn * 0.6180339887 % 1 * session.drafted)
        if asked is not None:
            step = torch.cat([step, asked.step])
        later = self._later(recorded, step)

        def kept(number: int) -> Kept:
            together = later == later[number]
            rows, place = int(together.sum()), int(together[:number].sum())
            given = states[:, [number]], step[[number]], session.row[[number]]
            return Kept(session.turn, number, *given, rows, place)

        recorded.kept = kept(number)
        others = (later[: session.drafted] != later[number]).nonzero().flatten()
        self.beside = kept(int(others[0])) if len(others) else None
        return step

    def compare(self, recorded: Recorded, output: Any) -> None:
        """Keep an answer for the next turn; that of the state asked again, the last, must be the one it had."""
        for kept in (recorded.kept, self.beside):
            if kept is not None:
                self._keep(recorded, kept, output)
        if recorded.asked is not None:
            self._require_alike(recorded, recorded.asked, self._answers(recorded, output, -1))

    def at_the_end(self) -> None:
        """The loop is over: does each network still answer as it did first?

        Its last turns needed no network, and a callback may come after them. Asked at the first use of a configuration
        and wherever there is a callback: one call on one state.
        """
        session = self.session
        if not self.new and session.callback is None:
            return
        for recorded, kept in self.first.values():
            session.report.look_calls += 1
            self._require_alike(recorded, kept, self._once_more(recorded, kept, 1, 0))

    def _keep(self, recorded: Recorded, kept: Kept, output: Any) -> None:
        kept.answers = self._answers(recorded, output, kept.number)
        self.first.setdefault((id(recorded), bool(self._later(recorded, kept.step))), (recorded, kept))

    def _later(self, recorded: Recorded, step: Tensor) -> Tensor:
        """Whether the second of two networks serves these steps, on the CPU."""
        route = self.session.routes.get(recorded.name)
        if route is None:
            return torch.zeros(len(step), dtype=torch.bool)
        return self.session.timesteps.cpu()[step.cpu()] < route.boundary

    def _answers(self, recorded: Recorded, output: Any, number: int) -> dict[Path, Tensor]:
        """One state's answers, [copies, 1, …]."""
        found = _batched(recorded.output, output, recorded.copies * self.session.images)
        return {k: v.unflatten(0, (recorded.copies, -1))[:, [number]] for k, v in found.items()}

    def _require_alike(self, recorded: Recorded, kept: Kept, now: dict[Path, Tensor]) -> None:
        evidence = self.session.report.evidence
        found = _largest_change(kept.answers, now)
        evidence.asked_again += 1
        if found > max(DIFFERS, self.rounding.get(recorded.name, 0.0)):
            straddled = set(self.session.straddled)
            self._require_rounding(recorded, kept, found)
            self.session.straddled = straddled
            self.rounding[recorded.name] = 2 * found
        evidence.largest_change = max(evidence.largest_change, found)

    def _require_rounding(self, recorded: Recorded, kept: Kept, found: float) -> None:
        """Refuse unless it was the size of the call that made the difference."""
        session = self.session
        again = self._once_more(recorded, kept, kept.rows, kept.place)
        same = _largest_change(kept.answers, again) <= DIFFERS
        session.report.look_calls += 1
        if same and recorded.name in self.rounding:  # rows are by themselves: that was found before
            return
        self._require_law(recorded)
        if not same:
            between = f"between step {kept.turn} and step {session.turn} of its loop"
            raise self._changed(recorded, kept, between, found)
        session.report.look_calls += len(MATES)

    def _require_law(self, recorded: Recorded) -> None:
        """Refuse a network that draws random numbers, mixes rows or keeps state between calls: two calls."""
        session = self.session
        _, cause = dependence(partial(session._asked, recorded), partial(session._shift, recorded))
        if cause is not None:
            what = str(cause).replace("the target", f"the pipeline's {recorded.name}", 1)
            raise Refused(f"{what} (look=False draws with it all the same, inexactly)")

    def _changed(self, recorded: Recorded, kept: Kept, between: str, found: float) -> Refused:
        route = self.session.routes.get(recorded.name)
        name = route.later if route is not None and self._later(recorded, kept.step) else recorded.name
        return Refused(
            f"the pipeline's {name} was changed {between}: asked the same again, its answer changes by "
            f"{found:.1e} of its size; take out what changes it (a callback, a hook, a cache), or {REMEDY}"
        )

    def _once_more(self, recorded: Recorded, kept: Kept, rows: int, place: int) -> dict[Path, Tensor]:
        """A kept state's answers in a call of so many states, in this place among others."""
        session, copies = self.session, recorded.copies

        def had(path: Path, old: Any) -> Any:
            if not isinstance(old, Tensor):
                return old
            frames = session._frames(recorded, old)
            apart = old.unflatten(0, (len(old) // frames, frames)) if frames > 1 else old
            if not session._batched(recorded, path, apart):
                return old.clone()
            own = session._had(recorded, kept, path, apart)
            value = own.repeat(1, rows, *[1] * (own.ndim - 2)).flatten(0, 1)
            return value.flatten(0, 1) if frames > 1 else value

        states = (MATES[0][0] * kept.states + 1).repeat(1, rows, *[1] * (kept.states.ndim - 2))
        states[:, place] = kept.states[:, 0]
        step = kept.step.repeat(copies * rows)
        arguments = {k: _walked(had, (k,), v) for k, v in recorded.arguments.items()}
        arguments[recorded.names[0]], arguments[recorded.names[1]] = states.flatten(0, 1), session._times(step)
        return self._answers(recorded, session._routed(recorded.name, arguments, step), place)


def _batched(old: Any, new: Any, batch: int, path: Path = ()) -> dict[Path, Tensor]:
    """The tensors of a network's answer that had `batch` rows in turn 0, by their place in it."""
    if isinstance(old, dict):
        parts = [_batched(v, new[k], batch, (*path, k)) for k, v in old.items()]
    elif isinstance(old, (list, tuple)):
        parts = [_batched(v, new[i], batch, (*path, i)) for i, v in enumerate(old)]
    else:
        has_rows = isinstance(old, Tensor) and old.ndim > 0 and len(old) == batch
        return {path: new.as_subclass(Tensor)} if has_rows else {}
    return {k: v for part in parts for k, v in part.items()}


def _walked(change: Callable[[Path, Any], Any], path: Path, tree: Any) -> Any:
    """The same containers of changed things, which `change` is told the place of."""
    if isinstance(tree, dict):
        return {k: _walked(change, (*path, k), v) for k, v in tree.items()}
    if type(tree) in (list, tuple):
        return type(tree)(_walked(change, (*path, i), v) for i, v in enumerate(tree))
    return change(path, tree)


def _largest_change(before: dict[Path, Tensor], now: dict[Path, Tensor]) -> float:
    """The largest distance of two answers relative to the first; those that are not finite are skipped (`faults`)."""
    changes = [_change(answer, now[path]) for path, answer in before.items()]
    return float(torch.stack(changes).max()) if changes else 0.0


def _change(one: Tensor, two: Tensor) -> Tensor:
    """As `core.look.change`, on the device: 0 if the first is not finite, infinite if only the second is not."""
    one, two = one.float(), two.float()
    size = one.norm()
    change = ((two - one).norm() / (size + 1e-30)).nan_to_num(torch.inf)
    return torch.where(size.isfinite(), change, 0.0)
