"""The free look: does a target's answer at a state depend on that state alone, and does it stay the same?

A network that mixes the rows of its call, draws random numbers or keeps state between calls has no transition
distribution, and no sampler can draw it exactly. So an engine evaluates a few states twice. At calls 1, 4, 16, 64 and
then every 128th, it makes a small call on two states:

    one of this call       must get the answer that it just got among other batch-mates
    one of the last look   must get the answer that it got then, with the same step, row and extra noise

Each is the other's batch-mate. In the first look, which has no earlier state, the mate is another first state of the
same sample. So the network only sees states that its chain can visit; elsewhere its answers may be arbitrary.

Libraries choose other algorithms for calls of other sizes, so the answer at a state of this call may differ a little.
Then the state is evaluated once more, beside a copy of itself. The target is refused only if the answer differs from
the one beside the mate, which had the same place in a call of the same size, or if the two copies get different ones. A
state of an earlier look is compared with its answer in an equally large call. So an answer that depends on the size of
its call alone passes; the distribution tests of `foresample.check` are for that. NaN and infinity are not compared.

A clipped answer reveals little about the network, so the next call is checked as well. The two states have a call of
their own, because one more state in the sampler's call would change the last bits of its other answers.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from foresample.contracts import Target, extra_shape, no_history, predict, start_states, transition_mean
from foresample.core.report import Evidence

STATES = 4  # in a call that compares batch-mates in `foresample.check` and in pipelines
EVERY = 128  # calls between two looks, once an engine has made half as many
RUNS = 16  # runs between two looks where rounds are replayed as CUDA graphs, once an engine has made that many
DIFFERS = 1e-4  # relative change of an answer, in two calls of one size, that rounding cannot explain
PLACED = 1e-2  # the same between two places of one call: some libraries sum in another order there
_CLIPPED = 16  # consecutive calls that are checked while answers are clipped, at most
_SEED = 2**60  # of the mates in first looks

Cause = Literal["random", "state", "mixes", "place", "changed"]
Part = Literal["prediction", "mean", "start"]
Ask = Callable[[int], Tensor]
"""A function that returns the answer at one state among mates of kind 0 or 1, in calls of one size."""
Shift = Callable[[Tensor, Tensor], tuple[int, float | None]]
"""A function from two answers to a step, and the distance of its two means in std of that step."""

_SENTENCES: dict[Cause, tuple[str, str, str]] = {
    "random": (
        "draws random numbers",
        "evaluated twice at one state",
        "put the network in eval mode (dropout), and take random numbers out of it",
    ),
    "state": (
        "keeps state between calls",
        "evaluated twice at one state",
        "take caches and running statistics out of the network",
    ),
    "mixes": (
        "mixes rows",
        "evaluated with other batch-mates",
        "let the network use each row's own time, put batch normalisation in eval mode, and take attention over the "
        "batch and batch statistics out of it",
    ),
    "place": (
        "depends on a row's place in its call",
        "evaluated twice in one call",
        "let the network look up what belongs to a sample by `row`, and use each row's own time",
    ),
    "changed": (
        "changed between two calls",
        "evaluated again later",
        "take caches and counters out of the network, leave its weights, mode and conditions alone while an engine "
        "uses it, and make a new engine after you change them",
    ),
}
_BY_ITSELF = "compute it for each row from that row alone, without random numbers or state"


@dataclass(frozen=True)
class Difference:
    """Two different answers at one state, in calls of one size."""

    cause: Cause
    change: float  # relative change of the answer
    step: int  # the first step with noise, from the state's own step on
    shift: float | None  # change of that step's mean, in its std; None if there is no such step
    part: Part = "prediction"  # the target's method that gave the answers

    def __str__(self) -> str:
        what, when, remedy = _SENTENCES[self.cause]
        who, answer = "the target", f"a {self.part}"
        if self.part != "prediction":
            who, remedy = f"the target's {self.part}", _BY_ITSELF
            answer = "it" if self.part == "mean" else "a first state"
        moves = "" if self.shift is None else f", the mean of step {self.step} by {self.shift:.2g} std"
        return f"{who} {what}: {when}, {answer} changes by {self.change:.1e} of its size{moves}; {remedy}"


@dataclass(frozen=True)
class State:
    """A state with the arguments of `target.predict`."""

    x: Tensor  # [1, *shape]
    step: Tensor  # [1]
    row: Tensor  # [1]
    extra: Tensor | None  # [1, *extra], for a target with extra noise


@dataclass(frozen=True)
class Answered:
    """A state that was checked: its answer, and its place in the call on two states that returned it."""

    state: State
    place: int
    answer: Tensor  # [*shape]


@dataclass
class _Memory:
    """State shared by all draws of an engine."""

    seen: int = 0  # calls made
    due: int = 1
    runs: int = 1
    runs_due: int = 2
    kept: Answered | None = None
    unclipped: bool = False  # whether an answer that was not clipped has been compared


class FreeLook:
    """Makes an engine's calls and checks some of them, as the module describes.

    Nothing is checked while a CUDA graph is captured: the runs that warm it up come before, and `look_back` is for the
    runs that replay it.
    """

    def __init__(self, instead: Target | None = None) -> None:
        """`instead`: the target to evaluate in looks, instead of the sampled one."""
        self.instead, self.evidence, self._memory = instead, Evidence(), _Memory()
        self.calls = 0  # calls of looks, each on two states

    def of_one_draw(self) -> FreeLook:
        """A look for one draw that shares this one's state, but counts its own calls and evidence."""
        look = copy(self)
        look.evidence, look.calls = Evidence(), 0
        return look

    def forget(self) -> None:
        """Compare nothing with earlier answers: the target's conditions are about to change."""
        self._memory.kept = None

    def predict(
        self, target: Target, x: Tensor, step: Tensor, row: Tensor, extra: Tensor | None = None
    ) -> Tensor:
        """The target's prediction; refuses a target whose answers depend on more than the state."""
        memory = self._memory
        memory.seen += 1
        if memory.seen < memory.due or (x.is_cuda and torch.cuda.is_current_stream_capturing()):
            return predict(target, x, step, row, extra)
        given = x.clone(), step.clone(), row.clone()
        # A copy, because a captured network writes its next answer into the same memory.
        prediction = predict(target, x, step, row, extra).clone()
        require_unedited(given[1:], (step, row))
        i, clipped = _state_to_check(prediction, memory.seen)
        if i is not None:
            one_x, one_step, one_row = (v[i : i + 1].clone() for v in given)
            state = State(one_x, one_step, one_row, None if extra is None else extra[i : i + 1].clone())
            self._look(self.instead or target, state, prediction[i])
            memory.unclipped |= not clipped
            often = not memory.unclipped and memory.seen < _CLIPPED
            memory.due = memory.seen + (1 if often else min(3 * memory.seen, EVERY))
        return prediction

    def look_back(self, target: Target) -> None:
        """Evaluate the kept state again at the start of a run of captured rounds: runs 2, 4, 8, 16, then every 16th."""
        memory = self._memory
        memory.runs += 1
        if memory.runs < memory.runs_due or memory.kept is None:
            return
        kept, target = memory.kept, self.instead or target
        mate = first_state(target, kept.state.row, 0)
        self._compare_kept(target, kept, mate, self._pair(target, kept.place, kept.state, mate)[kept.place])
        memory.runs_due = memory.runs + min(memory.runs, RUNS)

    def _look(self, target: Target, state: State, prediction: Tensor) -> None:
        """Evaluate a state of this call, which got `prediction`, and the state kept from the last look, in one call."""
        kept = self._memory.kept
        place = 0 if kept is None else 1 - kept.place
        mate = first_state(target, state.row, 0) if kept is None else kept.state
        answers = self._pair(target, place, state, mate)
        there = answers[place]
        if kept is not None:
            self._compare_kept(target, kept, state, answers[kept.place])
        if not there.isfinite().all():
            return
        if not self._same(prediction, there):
            ask, shift = partial(self._among, target, place, state, mate), shift_at(target, state)
            copies = self._pair(target, 0, state, state)
            if copies.isfinite().all():
                if not self._same(there, copies[place]):
                    raise _refused(explain(ask, shift, there, copies[place]))
                if (difference := placed(copies, shift)) is not None:
                    raise _refused(difference)
        self._memory.kept = Answered(state, place, there)

    def _compare_kept(self, target: Target, kept: Answered, mate: State, now: Tensor) -> None:
        if not now.isfinite().all() or self._same(kept.answer, now):
            return
        ask, shift = partial(self._among, target, kept.place, kept.state, mate), shift_at(target, kept.state)
        elsewhere = ask(1)
        if change(now, elsewhere) <= DIFFERS:
            raise _refused(Difference("changed", change(kept.answer, now), *shift(kept.answer, now)))
        raise _refused(explain(ask, shift, now, elsewhere))

    def _same(self, before: Tensor, again: Tensor) -> bool:
        """Compare two answers, and record it as evidence."""
        found = change(before, again)
        self.evidence.asked_again += 1
        self.evidence.largest_change = max(self.evidence.largest_change, found)
        return found <= DIFFERS

    def _among(self, target: Target, place: int, state: State, mate: State, kind: int) -> Tensor:
        """The answer at a state beside that mate (kind 0) or a copy of itself (kind 1): an `Ask`."""
        return self._pair(target, place, state, mate if kind == 0 else state)[place]

    def _pair(self, target: Target, place: int, state: State, mate: State) -> Tensor:
        """The answers at a state and its mate, [2, *shape], the state standing at `place`."""
        self.calls += 1
        first, second = (mate, state) if place else (state, mate)
        extra = None if first.extra is None or second.extra is None else torch.cat([first.extra, second.extra])
        x, step, row = (torch.cat([getattr(v, name) for v in (first, second)]) for name in ("x", "step", "row"))
        return predict(target, x, step, row, extra).clone()


def first_state(target: Target, row: Tensor, draw: int) -> State:
    """A first state of the sample `row`, [1], from noise that no sample uses."""
    generator, std, shape = torch.Generator().manual_seed(_SEED + draw), target.std, extra_shape(target)

    def noise(shape: torch.Size) -> Tensor:
        return torch.randn((1, *shape), generator=generator, dtype=torch.float64).to(std)

    x = start_states(target, noise(target.shape), row)
    return State(x, torch.zeros_like(row), row, None if shape is None else noise(shape))


def placed(copies: Tensor, shift: Shift, allowed: float = PLACED) -> Difference | None:
    """The difference of the answers at copies of one state in one call, [n, *shape], if rounding cannot explain it."""
    found = change(copies[0], copies[-1])
    return None if found <= allowed else Difference("place", found, *shift(copies[0], copies[-1]))


def _refused(found: Difference) -> ValueError:
    return ValueError(f"{found} (with look=False it is sampled nevertheless, inexactly)")


def dependence(ask: Ask, shift: Shift, allowed: float = DIFFERS) -> tuple[float, Difference | None]:
    """The relative change of an answer with its mates, and its cause if it is too large; two calls."""
    there, elsewhere = ask(0), ask(1)
    found = change(there, elsewhere)
    return found, None if found <= allowed else explain(ask, shift, there, elsewhere, allowed)


def explain(ask: Ask, shift: Shift, there: Tensor, elsewhere: Tensor, allowed: float = DIFFERS) -> Difference:
    """The cause of an answer that was `there` among mates of kind 0 and `elsewhere` among mates of kind 1."""
    cause: Cause = "mixes"
    others = [again for again in (ask(0), ask(0)) if not change(there, again) <= allowed]
    if others:
        elsewhere, seeded = others[0], [_seeded(ask), _seeded(ask)]
        ask(1)  # another state, for a network that remembers
        seeded.append(_seeded(ask))
        cause = "random" if all(change(seeded[0], other) <= allowed for other in seeded) else "state"
    return Difference(cause, change(there, elsewhere), *shift(there, elsewhere))


def _state_to_check(prediction: Tensor, turn: int) -> tuple[int | None, bool]:
    """The index of a state to evaluate again, another one at each turn, and whether its answer is clipped.

    None if all answers are NaN or infinite, which `faults` reports. Denoised estimates of noisy states lie far outside
    the data, so a chain that clips them returns ±1, whatever the network returned: then most of an answer lies on one
    bound.
    """
    size = prediction.flatten(1).abs()
    finite, most = size.isfinite().all(1), size.amax(1, keepdim=True)
    if size.shape[1] == 1:
        clipped = (size == 1).all(1)
    else:
        clipped = (most[:, 0] > 0) & (2 * (size == most).sum(1) > size.shape[1])
    for chosen in (finite & ~clipped, finite):
        index = chosen.nonzero().flatten()
        if len(index):
            i = int(index[turn * 7919 % len(index)])
            return i, bool(clipped[i])
    return None, False


def change(one: Tensor, two: Tensor) -> float:
    """The distance of two answers relative to the first; NaN if one of them is."""
    return float((one - two).norm() / (one.norm() + 1e-30))


def require_unedited(before: tuple[Tensor, Tensor], after: tuple[Tensor, Tensor]) -> None:
    """Refuse a target that wrote into the steps or rows of its call, which the sampler reads again."""
    for name, old, new in zip(("step", "row"), before, after, strict=True):
        if not torch.equal(old, new[: len(old)]):
            raise ValueError(
                f"target.predict(x, step, row) writes into {name}, which the sampler goes on using: work on a copy"
            )


def shift_at(target: Target, state: State) -> Shift:
    """A function from two predictions at a state to the distance of their means, at the first step with noise."""

    def shift(one: Tensor, two: Tensor) -> tuple[int, float | None]:
        first = int(state.step)
        noisy = (target.std[first:] > 0).nonzero().flatten()
        if not len(noisy):
            return first, None
        k = first + int(noisy[0])
        at, none = torch.full_like(state.step, k), no_history(target, state.x)
        means = [transition_mean(target, state.x, p[None], at, none, state.extra) for p in (one, two)]
        return k, float((means[0] - means[1]).norm() / target.std[k])

    return shift


def _seeded(ask: Ask) -> Tensor:
    """The answer under a fixed global seed; the state of the random numbers is restored afterwards."""
    devices = list(range(torch.cuda.device_count())) if torch.cuda.is_initialized() else []
    with torch.random.fork_rng(devices):
        torch.manual_seed(0)
        return ask(0)
