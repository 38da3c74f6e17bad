"""A check in every turn of a pipeline's loop: for the same state a network must return the same output.

In each turn one state of the turn before is evaluated again, with the arguments it had. A network that keeps a cache,
draws random numbers or was changed in between returns something else, and is refused.

Rounding is distinguished from change as in `core.look`, by calls of equal size, since libraries use other algorithms
for calls of other sizes. If the outputs of two turns differ by more than 1e-4 of their size, the state is evaluated a
third time: in a call of the size of its first, in the same place, among other states of the run. If this gives the
first output again, the difference is the network's rounding, and up to twice as much is allowed from then on.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from foresample.core.look import DIFFERS, STATES, Shift, change, dependence
from foresample.core.report import Evidence
from foresample.integrations.diffusers.arguments import Recorded
from foresample.integrations.diffusers.networks import Networks
from foresample.integrations.diffusers.trees import Path, at, plain, rebuilt, tensors
from foresample.integrations.diffusers.witnesses import Batch
from foresample.integrations.refusal import REMEDY, Refused

Answered = tuple[Tensor, dict[Path, Tensor]]
"""The states and the outputs of a network's first call in the untouched loop."""


@dataclass
class Kept:
    """One state of a network call, evaluated again in the next.

    It was state `number` of those drafted in a turn, at `place` among the `rows` states of the call that evaluated it.
    Where two networks share the states of a turn, each has a call of its own.
    """

    turn: int
    number: int
    states: Tensor
    """[copies, 1, …]: the network's input, with a copy for each row that guidance makes of a state."""
    step: Tensor
    image: Tensor
    """[1]: the image whose prompt and other arguments it has."""
    rows: int
    place: int
    side: dict[Path, Tensor] = field(default_factory=dict)
    """Arguments that another network made of this state, [copies, 1, 1, …]."""
    answers: dict[Path, Tensor] = field(default_factory=dict)
    """[copies, 1, …], for each tensor returned."""

    def argument(self, recorded: Recorded, path: Path, frames: int) -> Tensor:
        """The rows of an argument that this state had, [copies, 1, frames, …]."""
        if path in self.side:
            return self.side[path]
        rows = _apart(recorded, at(recorded.arguments, path), frames)
        return rows[:, self.image.to(rows.device)]


class Reevaluation:
    """Keeps one state of each turn of a session, and evaluates it again in the next."""

    def __init__(
        self, networks: Networks, rounding: dict[str, float], new: bool, watched: dict[str, Answered]
    ) -> None:
        """`rounding`: the difference allowed for each network, from earlier runs of this configuration. `new`: there
        were no earlier runs. `watched`: the calls of the untouched loop, if it was watched for this run."""
        self.networks, self.clock, self.rounding, self.new = networks, networks.clock, rounding, new
        self.watched, self.evidence, self.calls = watched, Evidence(), 0
        self._shift: Shift
        self._kept: dict[Recorded, Kept] = {}
        """A state of each call's last turn, to evaluate again."""
        self._first: dict[tuple[Recorded, str], Kept] = {}
        """The first state kept for each call of the loop and each network that serves it."""
        self._latest: dict[Recorded, tuple[Tensor, Tensor]] = {}
        """The states of each call's last turn, [copies, n, …], and their steps."""

    def keep_first(self, recorded: Recorded, shift: Shift) -> None:
        """Keep the first image's state of turn 0."""
        self._shift = shift
        states = recorded.states.unflatten(0, (recorded.copies, recorded.images))
        step = torch.zeros(recorded.images, dtype=torch.int64, device=states.device)
        kept = Kept(self.clock.loop_turn, 0, states[:, :1], step[:1], step[:1], recorded.images, 0)
        self._latest[recorded] = (
            -states,
            step,
        )  # noise of the other sign is as likely; drafted states come later
        self._keep_answers(recorded, kept, recorded.output)
        self._kept[recorded] = kept
        self._require_as_watched(recorded, kept)

    def evaluate(self, recorded: Recorded, batch: Batch, states: Tensor, arguments: dict[str, Any]) -> Any:
        """Evaluate drafted states, [copies, drafted, …], and after them the state kept from the previous call.

        The kept state must get the same output as before. Another one is kept for the next call.
        """
        before, drafted = self._kept[recorded], batch.drafted
        step = torch.cat([batch.step[:drafted], before.step])
        later = self.networks.later(recorded.name, step.cpu())

        def kept(number: int) -> Kept:
            together = later == later[number]
            rows, place = int(together.sum()), int(together[:number].sum())
            side = {p: _apart(recorded, at(arguments, p), 1)[:, [number]] for p in recorded.side}
            own = states[:, [number]], step[[number]], batch.row[[number]]
            return Kept(self.clock.loop_turn, number, *own, rows, place, side)

        def along(path: Path, value: Any) -> Any:
            frames = recorded.frames(path, at(recorded.arguments, path))
            if not frames:
                return value
            again = before.argument(recorded, path, frames)
            return torch.cat([_apart(recorded, value, frames), again], 1).flatten(0, 2)

        # Another place in each turn, spread over the window; of two networks, also a state that the other one serves.
        number = int(self.clock.turn * 0.6180339887 % 1 * drafted)
        others = (later[:drafted] != later[number]).nonzero().flatten()[:1].tolist()
        chosen = [kept(n) for n in (number, *others)]
        self._kept[recorded], self._latest[recorded] = chosen[0], (states, step[:drafted])
        together = torch.cat([states, before.states], 1)
        output = self.networks.evaluate(recorded, together, rebuilt(along, arguments), step)
        for one in chosen:
            self._keep_answers(recorded, one, output)
        self._require_alike(recorded, before, _answers(recorded, output, -1))
        return output

    def at_the_end(self, callback: bool) -> None:
        """After the loop, refuse a network whose output is not what it was at first.

        The last turns call no network, and a callback may follow them. The check is one call on one state, at the first
        use of a configuration and wherever there is a callback.
        """
        if self.new or callback:
            for (recorded, _), kept in self._first.items():
                self._require_alike(recorded, kept, self._once_more(recorded, kept, 1, 0))

    def _keep_answers(self, recorded: Recorded, kept: Kept, output: Any) -> None:
        kept.answers = _answers(recorded, output, kept.number)
        self._first.setdefault((recorded, self.networks.serving(recorded.name, kept.step)), kept)

    def _require_as_watched(self, recorded: Recorded, kept: Kept) -> None:
        """Compare the first call with that of the watched loop, if this had the same noise."""
        states, answers = self.watched.pop(recorded.name, (recorded.states[:0], {}))
        if torch.equal(states, recorded.states):
            found = _largest_change(answers, rows_of(recorded.output, len(states)))
            if found > DIFFERS:
                self._require_row_by_row(recorded, kept)
                raise self._changed(recorded, kept, "in three steps of the untouched loop", found)

    def _require_alike(self, recorded: Recorded, kept: Kept, now: dict[Path, Tensor]) -> None:
        """Refuse outputs that changed, unless the size of the call explains the difference."""
        found, name = _largest_change(kept.answers, now), recorded.name
        self.evidence.asked_again += 1
        if found > max(DIFFERS, self.rounding.get(name, 0.0)):
            again = self._once_more(recorded, kept, kept.rows, kept.place)
            rounding = _largest_change(kept.answers, again) <= DIFFERS
            if not rounding or name not in self.rounding:
                self._require_row_by_row(recorded, kept)
            if not rounding:
                between = f"between step {kept.turn} and step {self.clock.loop_turn} of its loop"
                raise self._changed(recorded, kept, between, found)
            self.rounding[name] = 2 * found
        self.evidence.largest_change = max(self.evidence.largest_change, found)

    def _require_row_by_row(self, recorded: Recorded, kept: Kept) -> None:
        """Refuse a network that draws random numbers, mixes rows or keeps state between calls: two calls."""

        def output(kind: int) -> Tensor:
            answers = self._once_more(recorded, kept, STATES, STATES - 1, first=kind == 0)
            return torch.cat([answer[0, 0].flatten() for answer in answers.values()])

        _, cause = dependence(output, self._shift)
        if cause is not None:
            what = str(cause).replace("the target", f"the pipeline's {recorded.name}", 1)
            raise Refused(f"{what} (look=False draws with it nevertheless, inexactly)")

    def _changed(self, recorded: Recorded, kept: Kept, between: str, found: float) -> Refused:
        return Refused(
            f"the pipeline's {self.networks.serving(recorded.name, kept.step)} was changed {between}: for the same "
            f"state its output differs by {found:.1e} of its size; remove what changes it (a callback, a hook, a "
            f"cache), or {REMEDY}"
        )

    def _once_more(
        self, recorded: Recorded, kept: Kept, rows: int, place: int, first: bool = False
    ) -> dict[Path, Tensor]:
        """The outputs for a kept state in a call of `rows` states, at this place among others of the run.

        The others are the loop's latest states, or its first, as far as the same network serves them.
        """
        self.calls += 1

        def repeated(path: Path, old: Any) -> Any:
            frames = recorded.frames(path, old)
            if not frames:
                return old.clone() if isinstance(old, Tensor) else old
            own = kept.argument(recorded, path, frames)
            return own.repeat(1, rows, *[1] * (own.ndim - 2)).flatten(0, 2)

        states, step = self._latest[recorded]
        if first:
            states = recorded.states.unflatten(0, (recorded.copies, recorded.images))
            step = torch.zeros_like(kept.step).repeat(recorded.images)
        served = self.networks.later(recorded.name, step) == self.networks.later(recorded.name, kept.step)
        index = served.nonzero().flatten()
        if not len(index):
            states, step, index = kept.states, kept.step, torch.zeros_like(kept.step)
        mates = index[torch.arange(rows, device=index.device) % len(index)].to(step.device)
        states, step = states[:, mates], step[mates]
        states[:, place], step[place] = kept.states[:, 0], kept.step[0]
        output = self.networks.evaluate(recorded, states, rebuilt(repeated, recorded.arguments), step)
        return _answers(recorded, output, place)


def rows_of(output: Any, batch: int) -> dict[Path, Tensor]:
    """The tensors of a network's output that have `batch` rows."""
    return {p: plain(v) for p, v in tensors(output).items() if v.ndim > 0 and len(v) == batch}


def _apart(recorded: Recorded, value: Tensor, frames: int) -> Tensor:
    """The rows of an argument, [copies, n, frames, …]."""
    return value.unflatten(0, (recorded.copies, -1, frames))


def _answers(recorded: Recorded, output: Any, number: int) -> dict[Path, Tensor]:
    """The outputs for one state, [copies, 1, …]."""
    paths = rows_of(recorded.output, recorded.copies * recorded.images)
    return {p: plain(at(output, p)).unflatten(0, (recorded.copies, -1))[:, [number]] for p in paths}


def _largest_change(before: dict[Path, Tensor], now: dict[Path, Tensor]) -> float:
    """The largest `change` of the outputs that were finite; infinite if one no longer is."""
    pairs = [(answer.float(), now[path].float()) for path, answer in before.items()]
    changes = [change(one, two) for one, two in pairs if one.norm().isfinite()]
    return max((math.inf if math.isnan(found) else found for found in changes), default=0.0)
