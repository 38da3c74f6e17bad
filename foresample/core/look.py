"""The free look: is a target's answer at a state a function of that state alone?

A network that looks at the other rows of its call, draws random numbers or keeps state between calls has no transition
law, and what is sampled from it is not exact, whatever the sampler. So the first call of an engine is looked at: one of
its states is evaluated again, among other batch-mates, in a call on at most four states. Where both answers agree that
is all it costs.

Where they do not it may be rounding alone, since libraries take other algorithms for calls of other sizes. So nobody is
blamed for it: the state is evaluated once more, in the same place of a call of the same size, among yet other mates.
Only if those two answers differ, too, the target is refused, and one to four calls more find out why. An answer that
was clipped says nothing about the network's: then two such calls are made halfway through the chain instead.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from foresample.contracts import Target, no_history, predict, transition_mean

STATES = 4
"""In a call that looks, at most."""
DIFFERS = 1e-4
"""Relative change of an answer that no arithmetic explains, in two calls of one size."""
_MATES = (3.0, -2.0)  # what other batch-mates are multiplied with, before 1 is added

Cause = Literal["random", "state", "mixes"]
Ask = Callable[[int], Tensor]
"""The answer at one state among mates of kind 0 or 1, in calls of one size."""
Shift = Callable[[Tensor, Tensor], tuple[int, float | None]]
"""Two answers → a step, and how far its mean moves from one to the other, in std of that step."""

_SAID: dict[Cause, tuple[str, str, str]] = {
    "random": (
        "draws random numbers",
        "asked the same twice",
        "put the network in eval mode (dropout), and take random numbers out of it",
    ),
    "state": (
        "keeps state between calls",
        "asked the same twice",
        "take caches and running statistics out of the network",
    ),
    "mixes": (
        "mixes rows",
        "with other batch-mates",
        "put batch normalisation in eval mode, and take attention over the batch and batch statistics out of the "
        "network",
    ),
}


@dataclass(frozen=True)
class Difference:
    """Two answers to one state, in calls of one size."""

    cause: Cause
    change: float
    """Of the answer, relative to its size."""
    step: int
    """At which a transition's mean was made of it: the first with noise from the state's on."""
    shift: float | None
    """Of that mean, in std of the step; None if no step from there on adds noise."""

    def __str__(self) -> str:
        what, when, remedy = _SAID[self.cause]
        moves = ""
        if self.shift is not None:
            moves = f", the mean of step {self.step} by {self.shift:.2g} std ({_in_words(self.shift)})"
        return (
            f"the target {what}: {when}, a prediction changes by {self.change:.1e} of its size{moves}; {remedy}"
        )


class FreeLook:
    """Looks once, at the first call made through it, and is a plain `predict` from then on.

    A look that found something looks again at the next call. Nothing is looked at while a CUDA graph is captured; the
    runs that warm it up come before.
    """

    def __init__(self, most: int, asked: Target | None = None) -> None:
        """`most`: states of the largest call to come; a look is not larger. `asked`: whom to ask, if another."""
        self.states, self.calls, self.done = min(STATES, most), 0, False
        self.asked = asked

    def predict(
        self, target: Target, x: Tensor, step: Tensor, row: Tensor, extra: Tensor | None = None
    ) -> Tensor:
        """The target's prediction, or a sentence why it has no law."""
        if self.done or (x.is_cuda and torch.cuda.is_current_stream_capturing()):
            return predict(target, x, step, row, extra)
        few_x, few_step, few_row = (values[: self.states].clone() for values in (x, step, row))
        prediction = predict(target, x, step, row, extra)
        prediction = prediction.clone()  # a captured network answers into the same memory again
        few_extra = None if extra is None else extra[: self.states]
        require_unedited((few_step, few_row), (step, row))
        few = few_x, few_step, few_row, prediction[0], few_extra
        self.calls += look(self.asked or target, *few, states=self.states)
        self.done = True
        return prediction


def look(
    target: Target,
    x: Tensor,
    step: Tensor,
    row: Tensor,
    prediction: Tensor,
    extra: Tensor | None = None,
    *,
    states: int = STATES,
) -> int:
    """Refuse a target that answered `prediction`, [*shape], at x[0] and would not in another call; say what that cost.

    Args:
        target: whose `predict` is asked; `mean` and `std` say how much a difference matters.
        x: states of the call, [B, *shape], as they were before it; `states` of them are enough.
        step: of these, [B].
        row: sample of each, [B]: no other is asked for.
        prediction: the call's answer at x[0]; one that is NaN or infinite is not compared: `faults` has it.
        extra: the extra noise of these states, for a target that has some.
        states: how many to ask for at a time.
    """
    if not torch.isfinite(prediction).all():
        return 0
    place = torch.arange(states, device=x.device).clamp(max=len(x) - 1)
    few = x[place], step[place], row[place], None if extra is None else extra[place]
    clipped = _clipped(prediction)
    if clipped:
        few = few[0], torch.full_like(few[1], len(target.std) // 2), *few[2:]
    ask = partial(_among, target, *few)
    there = ask(0)
    if not clipped and change(prediction, there) <= DIFFERS:
        return 1
    elsewhere = ask(1)
    if change(there, elsewhere) <= DIFFERS:
        return 2
    found = explain(ask, partial(_shift, target, *few), there, elsewhere)
    raise ValueError(f"{found} (look=False samples it all the same, inexactly)")


def compare(
    target: Target, x: Tensor, step: Tensor, row: Tensor, extra: Tensor | None = None
) -> tuple[float, Difference | None]:
    """How much the answer at x[0] changes with its mates, and what is wrong if that is too much: two calls."""
    given = target, x, step, row, extra
    return dependence(partial(_among, *given), partial(_shift, *given))


def dependence(ask: Ask, shift: Shift) -> tuple[float, Difference | None]:
    """How much an answer changes with its mates, and what else than its own state it depends on: two calls."""
    there, elsewhere = ask(0), ask(1)
    found = change(there, elsewhere)
    return found, None if found <= DIFFERS else explain(ask, shift, there, elsewhere)


def explain(ask: Ask, shift: Shift, there: Tensor, elsewhere: Tensor) -> Difference:
    """Why the answer was `there` among mates of the first kind, and then `elsewhere` among others."""
    again = ask(0)
    cause: Cause = "mixes"
    if not change(there, again) <= DIFFERS:
        elsewhere, seeded = again, _seeded(ask)
        ask(1)  # something else for it to remember
        cause = "random" if change(seeded, _seeded(ask)) <= DIFFERS else "state"
    return Difference(cause, change(there, elsewhere), *shift(there, elsewhere))


def _clipped(prediction: Tensor) -> bool:
    """Whether most of an answer lies on one bound, whatever the network said.

    Noisy states have denoised estimates far outside of where data are, so a chain that clips them answers ±1.
    """
    size = prediction.abs()
    return bool(
        (size == 1).all()
        if size.numel() == 1
        else size.max() > 0 and (size == size.max()).sum() > size.numel() / 2
    )


def change(one: Tensor, two: Tensor) -> float:
    """The distance of two answers relative to the first; NaN if one of them is."""
    return float((one - two).norm() / (one.norm() + 1e-30))


def require_unedited(before: tuple[Tensor, Tensor], after: tuple[Tensor, Tensor]) -> None:
    """Refuse a target that wrote into the steps or rows of its call: others read them. States are copies."""
    for name, old, new in zip(("step", "row"), before, after, strict=True):
        if not torch.equal(old, new[: len(old)]):
            raise ValueError(
                f"target.predict(x, step, row) writes into {name}, which the sampler goes on using: work on a copy"
            )


def _among(target: Target, x: Tensor, step: Tensor, row: Tensor, extra: Tensor | None, kind: int) -> Tensor:
    """The answer at x[0] in a call whose other states are others: an `Ask`."""
    states = torch.cat([x[:1], _MATES[kind] * x[1:] + 1])
    return predict(target, states, step.clone(), row.clone(), extra)[0].clone()


def _shift(
    target: Target, x: Tensor, step: Tensor, row: Tensor, extra: Tensor | None, one: Tensor, two: Tensor
) -> tuple[int, float | None]:
    """A `Shift`: at the first step with noise from the state's on."""
    noisy = (target.std[step[0] :] > 0).nonzero().flatten()
    if not len(noisy):
        return int(step[0]), None
    k = int(step[0]) + int(noisy[0])
    at = torch.full_like(step[:1], k)
    none, first = no_history(target, x[:1]), None if extra is None else extra[:1]
    means = [transition_mean(target, x[:1], p[None], at, none, first) for p in (one, two)]
    return k, float((means[0] - means[1]).norm() / target.std[k])


def _seeded(ask: Ask) -> Tensor:
    """The answer with the global random numbers of one seed, which are put back afterwards."""
    devices = list(range(torch.cuda.device_count())) if torch.cuda.is_initialized() else []
    with torch.random.fork_rng(devices):
        torch.manual_seed(0)
        return ask(0)


def _in_words(shift: float) -> str:
    """A mean that moved by so many std."""
    if shift >= 1:
        return "more than the step's own noise"
    if shift >= 0.1:
        return "a good part of the step's own noise"
    return (
        "a small part of the step's own noise, at every step"
        if shift >= 1e-3
        else "next to nothing in one step"
    )
