"""A pipeline's denoising loop, put to work: each turn of it is one call of the speculative sampler.

The loop takes all its N turns, with its own counter and timesteps. What is drafted is done after a few of them; in the
turns left over no network runs. So whatever the loop does at one of its steps, it does under our eyes:

    turn 0      the pipeline's own states: what it calls, with which arguments, is recorded
    turn 1 …    drafted states, of many steps at once, and *witnesses*, rows that are never evaluated: their
                network outputs are made up, and the same in all turns
    the last    the finished images are handed out

The law is the sequential pipeline's if what the loop does to a row depends on that row and its image, but not on the
turn. That is what is checked, in every turn, and nothing is taken on trust:

    latents        come back bit by bit as they were handed out, but for coordinates that are overwritten with
                   values of the image and the state's own step (a known region)
    the networks   are called in the same order, with the states and the arguments of turn 0
    guidance       makes the same of the witnesses' outputs in all turns
    modules        and the scheduler are changed by nobody but the networks' own calls (`unchanged`)
    answers        are the same when a state of the turn before is asked again (`again`)

Witnesses are heavy-tailed, so that a clamp or a blend shows at any size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from time import perf_counter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from foresample.chains import Chain, scheduler_chain
from foresample.chains.chain import per_row
from foresample.contracts import Drafter, drafter_for, no_history
from foresample.core import noise as streams
from foresample.core.look import STATES
from foresample.core.report import Commit, Report, Tally
from foresample.core.round import Call, Packed, Speculation, begin, last_draftable
from foresample.engine.slots import HandedRounds
from foresample.integrations.diffusers.again import MATES, Answered, AskAgain, Kept
from foresample.integrations.diffusers.unchanged import Unchanged
from foresample.integrations.refusal import REMEDY, Refused
from foresample.targets import ChainTarget

TIMES = ("timestep", "timesteps", "t")
"""What networks call the argument that tells them the step."""
WITHOUT_ROWS = ("img_ids", "txt_ids", "image_rotary_emb")
"""Arguments whose first dimension is never the batch."""
OWN = (
    "model_output",
    "timestep",
    "sample",
    "prev_timestep",
    "timestep_back",
    "old_pred_original_sample",
    "return_dict",
)
"""Arguments of `step` that follow the loop; the others must stay the same."""


class Step(NamedTuple):
    """What `scheduler.step` returns; pipelines take the first by name or by position."""

    prev_sample: Tensor
    pred_original_sample: Tensor | None


@dataclass(frozen=True)
class Settings:
    """How to speculate."""

    window: int
    drafter: Drafter
    block: int | None
    recycle: bool


@dataclass(frozen=True)
class Route:
    """Two networks share the steps: below a timestep the later one serves."""

    later: str
    boundary: float


@dataclass
class Recorded:
    """One network call of turn 0, to which those of later turns are compared."""

    name: str
    states: Tensor
    """The network's first argument."""
    arguments: dict[str, Any]
    """The others, copied."""
    output: Any
    """As returned."""
    names: tuple[str, str]
    """Of the first argument, and of the one that tells the step."""
    copies: int = 1
    """Rows of the network for a state, as with guidance."""
    dim: int | None = None
    """Where `states` goes on with something else than latents; None if it does not."""
    made_up: dict[tuple[Any, ...], Tensor] = field(default_factory=dict)
    """Outputs of the witnesses, [copies, witnesses, …], for each tensor returned."""
    side: dict[tuple[Any, ...], Tensor] = field(default_factory=dict)
    """Arguments made of other networks' outputs: what they were for the witnesses."""
    asked: Kept | None = None
    """A state of the turn before that goes along in this turn's call."""
    kept: Kept | None = None
    """A state of this turn's call."""


class Session:
    """One call of an accelerated pipeline."""

    def __init__(
        self,
        pipe: Any,
        settings: Settings,
        seeds: Callable[[int], Tensor],
        callback: Callable[..., Any] | None,
        wrap: type[Tensor],
        networks: dict[str, Callable[[dict[str, Any]], Any]],
        look: bool,
        rounding: dict[str, float],
        new: bool = True,
    ) -> None:
        """`rounding`: how far each network's answers may differ, learned in earlier runs. `new`: no run before this one
        had its configuration."""
        self.pipe, self.scheduler, self.settings, self.seeds = pipe, pipe.scheduler, settings, seeds
        self.callback, self.wrap, self.look = callback, wrap, look
        self.wanted = ["latents"]  # by the callback
        self.tensors: dict[str, Any] | None = {}  # those of the loop's own; None: not yet known
        self.networks, self.routes = networks, _routes(pipe)
        self.again = AskAgain(self, rounding, new) if look else None
        self.watched: dict[str, Answered] = {}  # by the untouched loop, before this run
        self.unchanged = Unchanged(pipe, counters=not look)
        self.straddled: set[int] = set()  # turns in which both networks of a route had to run
        self.turn = -1  # of the loop; −1 before it
        self.over = False
        self.answered = False
        self.evaluating = self.calling_back = False
        self.turns_expected = self.start = 0
        self.timesteps = torch.empty(0)
        self.recorded: list[Recorded] = []
        self.called = 0  # networks called in this turn
        self.inputs: list[tuple[Recorded, Tensor]] = []  # and the latents each was given
        self.told: list[Callable[[Tensor], Tensor]] | None = None
        self.step_arguments: dict[str, Any] = {}
        self.step_names: set[str] = set()
        self.explain: Callable[[Chain, Tensor, dict[str, Any]], None] | None = None
        self.chain: Chain
        self.rounds: HandedRounds
        self.report: Report
        self.tally: Tally
        self.in_order: _InOrder
        self.images, self.double = 0, 1
        self.call: Call | None = None
        # Of the rows in the loop's hands: drafted states, then the witnesses.
        self.row = self.step = torch.empty(0)
        self.handed: Tensor | None = None
        self.first: Tensor  # latents of turn 0
        self.first_output: Tensor
        self.stress: Tensor | None = None
        self.stress_given: Tensor | None = None
        self.stress_output: Tensor | None = None
        self.known: Tensor | None = None  # [images, *shape]: coordinates the loop overwrites
        self.ends: dict[int, tuple[Tensor, Tensor]] = {}
        self.started = self.own_seconds = 0.0

    # ------------------------------------------------------------ the loop's turns

    @property
    def inside(self) -> bool:
        """Whether the loop is under way, and in the pipeline's own hands."""
        return self.turn >= 0 and not self.over and not self.evaluating and not self.calling_back

    @property
    def drafted(self) -> int:
        """States in the loop's hands that are no witnesses."""
        return 0 if self.call is None else len(self.call.x)

    @property
    def rows(self) -> int:
        return len(self.row)

    @property
    def witnesses(self) -> int:
        """The first image's first state, and two made-up states for each image."""
        return 1 + 2 * self.images

    def turns(self, timesteps: Tensor) -> Iterator[Tensor]:
        """What the pipeline's loop iterates over: its own timesteps."""
        if self.turn >= 0:
            raise Refused(f"the pipeline goes through its timesteps more than once; {REMEDY}")
        everything = self.scheduler.timesteps.as_subclass(Tensor)
        self.turns_expected, self.timesteps = len(timesteps), timesteps
        self.start = next(
            (
                k
                for k in range(len(everything) - len(timesteps) + 1)
                if torch.equal(everything[k : k + len(timesteps)], timesteps)
            ),
            -1,
        )
        if self.start < 0:
            raise Refused(f"the pipeline does not take its scheduler's timesteps in their order; {REMEDY}")
        turn = 0
        while turn < len(timesteps) or not self.done:
            self.turn, self.called, self.answered, self.inputs = turn, 0, False, []
            yield timesteps[min(turn, len(timesteps) - 1)]
            if not self.answered:
                if turn == 0 and not self.recorded:  # not the loop: `denoising_end` counts timesteps
                    self.turn = -1
                    yield from timesteps[1:].unbind()
                    return
                raise Refused(
                    f"the pipeline skipped step {turn} of its loop (pipe.interrupt was set?), while other states are "
                    f"of that step; {REMEDY}"
                )
            turn += 1
        if self.again is not None:
            self.again.at_the_end()
        self.over = True

    @property
    def finished(self) -> bool:
        """Whether the images themselves were handed out."""
        return self.done and self.turn >= self.turns_expected - 1

    @property
    def done(self) -> bool:
        return self.handed is not None and self.rounds.finished is not None

    def close(self) -> None:
        """The pipeline has returned: was its loop whole?"""
        if self.turn < 0 or not self.done:
            raise Refused(f"the pipeline did not go through its scheduler's timesteps; {REMEDY}")
        if self.turn < self.turns_expected - 1:
            raise Refused(f"the pipeline left its loop at step {self.turn}, before its end; {REMEDY}")
        if self.callback is not None and self.in_order.next < self.turns_expected:
            raise Refused(
                f"the pipeline did not call callback_on_step_end after step {self.in_order.next}: leave the callback "
                f"out, or {REMEDY}"
            )

    # ------------------------------------------------------------ what the loop calls

    def end_of_turn(self, pipe: Any, step: int, timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
        """The loop's callback, with tensors of its own: now the user's can be called for the steps committed."""
        others = {name: value for name, value in tensors.items() if name != "latents"}
        for name, value in others.items():
            if isinstance(value, self.wrap):
                raise Refused(
                    f"{name} follows the drafted states, so callback_on_step_end cannot be given it: leave {name} out "
                    "of callback_on_step_end_tensor_inputs"
                )
        self.tensors = others
        self.in_order.report()
        self.tensors = None
        return {}

    def answer(self, bound: dict[str, Any]) -> Step:
        """`scheduler.step`: take the guided network output, hand out the next states to evaluate."""
        started = perf_counter()
        output, sample = bound["model_output"], bound["sample"]
        if self.answered or self.over:
            raise Refused(f"the pipeline stepped its scheduler twice at step {self.turn}; {REMEDY}")
        self.answered = True
        if self.turn < 0 or not torch.equal(_scalar(bound["timestep"]), _scalar(self.timestep)):
            raise Refused(f"the pipeline stepped its scheduler outside of its loop over timesteps; {REMEDY}")
        with torch.no_grad():
            if self.turn == 0:
                self.unchanged.watch("scheduler")
                states = self._first(_plain(output), _plain(sample), bound)
            else:
                self._require_unchanged("scheduler")
                self._require_same_step(bound)
                states = self._next(_plain(output), _plain(sample))
        self.own_seconds += perf_counter() - started
        return states

    @property
    def timestep(self) -> Tensor:
        return self.timesteps[min(self.turn, self.turns_expected - 1)]

    def _first(self, output: Tensor, sample: Tensor, bound: dict[str, Any]) -> Step:
        if not self.recorded:
            raise Refused(f"the pipeline stepped its scheduler without calling a network of its own; {REMEDY}")
        self.double = 2 if self._doubled(output, sample) else 1
        self.images = len(sample) // self.double
        self.step_arguments, self.step_names = {k: v for k, v in bound.items() if k not in OWN}, set(bound)
        self.first, self.first_output = sample[: self.images], output[: self.images]
        self._read(bound)
        require_shape(self.chain, output, sample)
        if self.explain is not None:
            self.explain(self.chain, self.first[:1].float(), self.step_arguments)
        for recorded in self.recorded:
            self._locate(recorded)
            if self.again is not None:
                self.again.keep_first(recorded)
        x = self.first
        target = ChainTarget(self.chain, x.shape[1:], _unreachable)
        last, how = last_draftable(self.chain.std), self.settings
        drafter = drafter_for(how.drafter, target)
        plan = Speculation(drafter, how.window, how.block, how.recycle, last, Packed())
        seeds = self.seeds(self.images)
        if bound.get("generator") is None:  # the loop's own noise is torch's, however alike the generators are
            seeds = _told_apart(seeds)
        self.seed, steps = seeds.to(x.device), self.turns_expected
        self.report = Report(f"{drafter}", steps, self.images, how.window, slots=self.images)
        self.tally, self.started = Tally(how.window, steps, x.device), perf_counter()
        rows = begin(target, drafter, how.window, self.seed, x=x.float())
        self.in_order = _InOrder(self)
        self.rounds = HandedRounds(target, rows, plan, self.tally, self.in_order)
        self.call = self.rounds.call
        assert self.call is not None
        if len(self.call.x) == self.images:  # else a drafter that needs no warm-up: its drafts come first
            self._settle(self.call.x, self.first_output)
        return self._hand_out()

    def _doubled(self, output: Tensor, sample: Tensor) -> bool:
        """Whether the pipeline keeps each image twice, for guidance: two answers, and one output made of both.

        Images that are alike (generators of one seed, the same `latents`) have the same answers instead.
        """
        answers = [v for recorded in self.recorded for v in _leaves(recorded.output) if isinstance(v, Tensor)]
        apart = any(v.ndim and len(v) == len(sample) and not _twins(_plain(v)) for v in answers)
        return apart and _twins(sample) and _twins(output)

    def _next(self, output: Tensor, sample: Tensor) -> Step:
        assert self.handed is not None
        if self.called < len(self.recorded):
            missing = self.recorded[self.called].name
            raise Refused(
                f"the pipeline does not call its {missing} at step {self.turn} as at step 0; {REMEDY}"
            )
        if len(output) != self.double * self.rows or len(sample) != self.double * self.rows:
            raise Refused(f"the pipeline changes the number of rows inside of its loop; {REMEDY}")
        if self.double == 2:
            if not (_twins(output) and _twins(sample)):
                raise Refused(f"the pipeline keeps each image twice, but not alike; {REMEDY}")
            output, sample = output[: self.rows], sample[: self.rows]
        self._require_same_latents(sample)
        self._require_same_guidance(output)
        if self.drafted:
            assert self.call is not None
            x = self.call.x
            if self.known is not None:
                known = self.known[self.call.row]
                if (self.call.step == 0).any():
                    raise Refused(f"this drafter cannot serve a pipeline that overwrites latents; {REMEDY}")
                x = torch.where(known, sample[: self.drafted].to(x.dtype), x)
            self._settle(x, output[: self.drafted])
        return self._hand_out()

    def _settle(self, x: Tensor, output: Tensor) -> None:
        """The round under way, given the (guided) output at x: the states as the loop had them."""
        call = self.call
        assert call is not None
        prediction = self.chain.predict(x, output, call.step, call.extra)
        if self.known is not None:
            # Coordinates that are overwritten have no part in the law: they are drafted without error.
            for i in (call.step == len(self.chain.std) - 1).nonzero().flatten().tolist():
                self.ends[int(call.row[i])] = x[i], prediction[i]
            prediction = torch.where(self.known[call.row], 0.0, prediction)
        self.rounds.answer(prediction)
        self.call = self.rounds.call
        if self.rounds.finished is not None:
            done, report = self.rounds.finished, self.report
            report.seconds = perf_counter() - self.started
            report.target_seconds = report.seconds - self.own_seconds
            self.tally.close(report, done.x, done.calls, done.evaluations)
            report.calls_mean += len(self.straddled)
            report.speedup = report.steps / report.calls_mean

    def _hand_out(self) -> Step:
        """The next states and the witnesses; in the last turn the images."""
        dtype, device = self.first.dtype, self.first.device
        if self.finished:
            assert self.rounds.finished is not None
            images = self._with_known(self.rounds.finished.x).to(dtype)
            images = torch.cat([images] * self.double)
            return Step(images, images)
        shape = self.first.shape[1:]
        if self.stress is None:
            self.stress = heavy_tailed((2 * self.images, *shape), 0).to(device, dtype)
        call, number = self.call, torch.arange(self.images, device=device)
        parts = [self.first[:1], self.stress]
        row, step = [torch.cat([number[:1], number, number])], torch.ones(self.witnesses, dtype=torch.int64)
        step = step.to(device).clamp(max=len(self.chain.std) - 1)
        self.step = step
        if call is not None:
            parts, row = [call.x.to(dtype), *parts], [call.row, *row]
            self.step = torch.cat([call.step, step])
        self.row, self.handed = torch.cat(row), torch.cat(parts)
        states = torch.cat([self.handed] * self.double).as_subclass(self.wrap)
        return Step(states, None)

    def _with_known(self, x: Tensor) -> Tensor:
        """Finished images: where the loop overwrites, the last transition as the pipeline takes it."""
        if self.known is None:
            return x
        last = torch.full((1,), len(self.chain.std) - 1, device=x.device)
        if any(w is not None and w[-1] != 0 for w in (self.chain.previous_weight, self.chain.older_weight)):
            raise Refused(
                f"the scheduler's last step looks back, which a known region does not allow; {REMEDY}"
            )
        x = x.clone()
        for image, (state, prediction) in self.ends.items():
            mean = self.chain.mean(state[None], prediction[None], last)
            unit = streams.normal(
                self.seed[image : image + 1], x.shape[1:], x.dtype, step=last, draw=last + 2**31
            )
            x[image] = torch.where(self.known[image], (mean + self.chain.std[-1] * unit)[0], x[image])
        return x

    def scale(self, sample: Tensor) -> Tensor:
        """`scale_model_input`, for states at different steps; `sample` may hold several copies of them."""
        if self.chain.scale is None:
            return sample
        copies = len(sample) // self.rows
        plain = _plain(sample)
        scaled = (per_row(self.chain.scale, self.step.repeat(copies), plain) * plain).to(sample.dtype)
        return scaled.as_subclass(self.wrap)

    def aligned(self, tree: Any) -> Any:
        """The arguments of an operation on drafted states: tensors with a row for each image get one for each state."""
        found = {
            (v.ndim, len(v) // self.rows) for v in _leaves(tree) if isinstance(v, self.wrap) and v.ndim > 1
        }

        def fit(value: Any) -> Any:
            if isinstance(value, Tensor) and not isinstance(value, self.wrap) and value.ndim > 1:
                for ndim, copies in found:
                    if ndim == value.ndim and copies and len(value) == copies * self.images:
                        return _plain(value)[_offset(self.row, copies, self.images).to(value.device)]
            return value

        return mapped(fit, tree) if found else tree

    def add_noise(self, original: Callable[..., Tensor], bound: dict[str, Any]) -> Tensor:
        """`add_noise` and `scale_noise` after a step, as inpainting does: to the level of each state's own step."""
        name = next(k for k in ("timesteps", "timestep") if k in bound)
        asked = bound[name]
        following = self.timesteps[min(self.turn + 1, self.turns_expected - 1)]
        if not bool((_plain(asked).cpu() == following.cpu()).all()):
            raise Refused(
                f"the pipeline adds noise of another level than its next step's inside of its loop; {REMEDY}"
            )
        told = {k: _select(_plain(v), self.row, self.images) for k, v in bound.items() if k != name}
        times = self.timesteps.to(asked.device)[self.step.to(asked.device)]
        # With an index, the schedulers would take the level of the loop's own step for all.
        own = vars(self.scheduler)
        index = {k: own[k] for k in ("_step_index", "_begin_index") if k in own}
        own.update(dict.fromkeys(index))
        try:
            return original(**told, **{name: times}).as_subclass(self.wrap)
        finally:
            own.update(index)

    def evaluate(self, name: str, bound: dict[str, Any], parameters: list[str]) -> Any:
        """A network of the pipeline is called by the loop."""
        time_name = next((n for n in TIMES if n in parameters), None)
        states = bound.get(parameters[0])
        if time_name is None or time_name not in bound or not isinstance(states, Tensor):
            raise Refused(
                f"the pipeline calls its {name} inside of its loop, which foresample does not follow; {REMEDY}"
            )
        if self.answered:
            raise Refused(
                f"the pipeline calls its {name} after the scheduler's step {self.turn}, before the next; {REMEDY}"
            )
        self._require_time(name, bound[time_name], len(states), states.dtype)
        name = self._first_of_route(name)
        served_by = name, *(route.later for first, route in self.routes.items() if first == name)
        self._require_unchanged(*served_by)
        self.unchanged.watch(*served_by)
        if self.turn == 0:
            # Copied before the call: some networks empty the lists they are given.
            rest = _copied({k: v for k, v in bound.items() if k not in (parameters[0], time_name)})
            given = states.clone()
            output = self._call(self.networks[name], bound)
            if self.again is not None and name in self.watched:
                self.again.as_watched(name, self.watched.pop(name), given, output)
            names = parameters[0], time_name
            self.recorded.append(Recorded(name, given, rest, output, names))
            self.called += 1
            return output
        if self.called >= len(self.recorded) or self.recorded[self.called].name != name:
            expected = (
                f"its {self.recorded[self.called].name}"
                if self.called < len(self.recorded)
                else "the scheduler"
            )
            raise Refused(
                f"at step {self.turn} the pipeline calls its {name} where at step 0 it called {expected}; {REMEDY}"
            )
        recorded = self.recorded[self.called]
        self.called += 1
        return self._answered(recorded, bound, parameters[0], time_name)

    def _first_of_route(self, name: str) -> str:
        """Of two networks that share the steps, the first; if the loop calls the one due at its own step."""
        for first, route in self.routes.items():
            if name in (first, route.later):
                due = route.later if bool(self.timestep < route.boundary) else first
                return first if name == due else name
        return name

    # ------------------------------------------------------------ a network call of drafted states

    def _answered(self, recorded: Recorded, bound: dict[str, Any], first: str, time: str) -> Any:
        states, copies = _plain(bound[first]), recorded.copies
        if len(states) != copies * self.rows:
            raise Refused(
                f"at step {self.turn} the pipeline gives its {recorded.name} {len(states)} rows, where it was handed "
                f"{self.rows} states of which it makes {copies} rows each: its loop keeps latents of its own; {REMEDY}"
            )
        self._require_states(recorded, states)
        kept, evaluated = self._kept(copies, states.device), None
        if self.drafted:
            recorded.asked, recorded.kept = recorded.kept, None
            real = states[kept].unflatten(0, (copies, self.drafted))
            step = self.step[: self.drafted]
            if self.again is not None:
                step = self.again.going_along(recorded, real, step)
        arguments: dict[str, Any] = {}
        for name, value in bound.items():
            if name not in (first, time):
                old = recorded.arguments.get(name)
                arguments[name] = self._argument(recorded, (name,), value, old)
        if set(arguments) != set(recorded.arguments):
            raise self._other(recorded, ", ".join(sorted(set(arguments) ^ set(recorded.arguments))))
        if self.drafted:
            if recorded.asked is not None:
                real = torch.cat([real, recorded.asked.states], 1)
            arguments[first] = real.flatten(0, 1)
            arguments[time] = self._times(step.repeat(copies))
            evaluated = self._routed(recorded.name, arguments, step.repeat(copies))
            if self.again is not None:
                self.again.compare(recorded, evaluated)
        return self._with_witnesses(recorded, recorded.output, evaluated, ())

    def _kept(self, copies: int, device: torch.device) -> Tensor:
        """Which rows of a network call are drafted states, not witnesses."""
        kept = torch.arange(self.rows, device=device) < self.drafted
        return kept.repeat(copies)

    def _argument(self, recorded: Recorded, path: tuple[Any, ...], value: Any, old: Any) -> Any:
        """An argument as the loop gives it: the same as in turn 0, then that of each state's image."""
        if isinstance(value, dict) and isinstance(old, dict) and value.keys() == old.keys():
            return {k: self._argument(recorded, (*path, k), v, old[k]) for k, v in value.items()}
        if isinstance(value, (list, tuple)) and type(value) is type(old) and len(value) == len(old):
            items = [self._argument(recorded, (*path, i), v, old[i]) for i, v in enumerate(value)]
            return type(value)(items)
        if isinstance(value, Tensor) and isinstance(old, Tensor):
            return self._tensor_argument(recorded, path, value, old)
        if not _same(value, old):
            raise self._other(recorded, path[0])
        return value

    def _tensor_argument(self, recorded: Recorded, path: tuple[Any, ...], value: Tensor, old: Tensor) -> Tensor:
        copies, plain = recorded.copies, _plain(value)
        frames = self._frames(recorded, old)
        if frames > 1:  # a row for each frame of each state
            if not (plain.shape == old.shape and torch.equal(plain, old)):
                raise self._other(recorded, path[0])
            plain = old = old.unflatten(0, (len(old) // frames, frames))
        batched = self._batched(recorded, path, old)
        row = _offset(self.row, copies, self.images)
        chosen = self._kept(copies, plain.device)
        if batched and plain.ndim == old.ndim and len(plain) == copies * self.rows:
            if not isinstance(value, self.wrap):  # made anew for so many rows
                if not torch.equal(plain, old[row]):
                    raise self._other(recorded, path[0])
            else:  # made of the states, by way of another network: the same for witnesses in all turns
                seen = plain.unflatten(0, (copies, self.rows))[:, self.drafted :]
                before = recorded.side.setdefault(path, seen)
                anchor = old.unflatten(0, (copies, self.images))[:, :1]
                if not (close(seen, before) and close(seen[:, :1], anchor)):
                    raise self._other(recorded, path[0])
            result = plain[chosen]
            if recorded.kept is not None and self.drafted and isinstance(value, self.wrap):
                recorded.kept.side[path] = result.unflatten(0, (copies, self.drafted))[
                    :, [recorded.kept.number]
                ]
        else:
            if not (plain.shape == old.shape and torch.equal(plain, old)):
                raise self._other(recorded, path[0])
            if not batched:
                return plain
            result = plain[row[chosen]]
        if recorded.asked is not None and self.drafted:
            again = self._had(recorded, recorded.asked, path, old)
            result = torch.cat([result.unflatten(0, (copies, self.drafted)), again], 1).flatten(0, 1)
        return result.flatten(0, 1) if frames > 1 else result

    def _batched(self, recorded: Recorded, path: tuple[Any, ...], old: Tensor) -> bool:
        """Whether an argument (its frames apart) has a row for each of the network's."""
        return old.ndim > 0 and len(old) == recorded.copies * self.images and path[0] not in WITHOUT_ROWS

    def _had(self, recorded: Recorded, kept: Kept, path: tuple[Any, ...], old: Tensor) -> Tensor:
        """The rows of an argument that a kept state had, [copies, 1, …]; `old` is that argument in turn 0."""
        if path in kept.side:
            return kept.side[path]
        return old.unflatten(0, (recorded.copies, self.images))[:, kept.image.to(old.device)]

    def _frames(self, recorded: Recorded, value: Tensor) -> int:
        """How many rows of an argument belong to one state: some video pipelines give one for each frame."""
        states, rows = recorded.states, recorded.copies * self.images
        frames = len(value) // rows if value.ndim > 1 else 1
        return frames if states.ndim == 5 and frames in states.shape[1:3] and len(value) == rows * frames else 1

    def _with_witnesses(self, recorded: Recorded, old: Any, new: Any, path: tuple[Any, ...]) -> Any:
        """A network's answer for all rows: evaluated for the drafted states, made up for the witnesses."""
        if isinstance(old, dict):  # diffusers' outputs are such
            items = {
                k: self._with_witnesses(recorded, v, None if new is None else new[k], (*path, k))
                for k, v in old.items()
            }
            return type(old)(**items)
        if isinstance(old, (list, tuple)):
            return type(old)(
                self._with_witnesses(recorded, v, None if new is None else new[i], (*path, i))
                for i, v in enumerate(old)
            )
        copies = recorded.copies
        if not isinstance(old, Tensor) or old.ndim == 0 or len(old) != copies * self.images:
            return old if new is None else new
        if path not in recorded.made_up:
            first = old.unflatten(0, (copies, self.images))[:, :1]
            tail = heavy_tailed((copies, 2 * self.images, *old.shape[1:]), 1 + len(recorded.made_up)).to(old)
            recorded.made_up[path] = torch.cat([first, tail], 1)
        parts = [recorded.made_up[path]]
        if new is not None:
            parts = [_plain(new).unflatten(0, (copies, -1))[:, : self.drafted], *parts]
        return torch.cat(parts, 1).flatten(0, 1).as_subclass(self.wrap)

    def _routed(self, name: str, arguments: dict[str, Any], step: Tensor) -> Any:
        """The network's answer, each state served by the network of its own timestep."""
        route = self.routes.get(name)
        if route is None:
            return self._call(self.networks[name], arguments)
        later = self.timesteps.to(step.device)[step] < route.boundary
        if not later.any() or later.all():
            return self._call(self.networks[route.later if later.all() else name], arguments)
        self.straddled.add(self.turn)
        parts = []
        for network, served in ((name, ~later), (route.later, later)):
            own = mapped(partial(_select, row=served, batch=len(served)), arguments)
            parts.append(self._call(self.networks[network], own))

        def joined(one: Any, two: Any) -> Any:
            if isinstance(one, dict):
                return type(one)(**{k: joined(v, two[k]) for k, v in one.items()})
            if isinstance(one, (list, tuple)):
                return type(one)(joined(a, b) for a, b in zip(one, two, strict=True))
            whole = one.new_empty((len(served), *one.shape[1:]))
            whole[~later], whole[later] = one, two
            return whole

        return joined(*parts)

    def _call(self, network: Callable[..., Any], arguments: dict[str, Any]) -> Any:
        self.evaluating = True
        try:
            output = network(arguments)
        finally:
            self.evaluating = False
        found = self.unchanged.accept({n for v in _leaves(arguments) if isinstance(v, Tensor) for n in v.shape})
        if found is not None:
            raise Refused(found)
        return output

    # ------------------------------------------------------------ what must not change from turn to turn

    def _require_same_step(self, bound: dict[str, Any]) -> None:
        for name, value in bound.items():
            if name not in OWN and not _same(value, self.step_arguments.get(name)):
                raise Refused(
                    f"the pipeline gives its scheduler another {name} at step {self.turn} than at step 0; {REMEDY}"
                )

    def _require_same_latents(self, sample: Tensor) -> None:
        """See the module. `known` is what the loop overwrites, found by the witnesses."""
        assert self.handed is not None
        given, stress = sample[self.drafted + 1 :], self.handed[self.drafted + 1 :]
        if self.stress_given is None:
            self.stress_given = given.clone()
            if not torch.equal(sample, self.handed):
                one, two = (given != stress).chunk(2)
                known = one | two
                value, other = given.chunk(2)
                if known.all() or not torch.equal(value[known], other[known]):
                    raise self._changed(sample)
                if torch.equal(value[known], self.first[known]):
                    raise Refused(
                        "the pipeline keeps a part of its latents as they were a step before (as DeepFloyd IF's "
                        f"inpainting does), while the states are of other steps; {REMEDY}"
                    )
                if self.chain.low_variance is not None:
                    raise Refused(
                        "the pipeline overwrites latents, which is not served with a learned variance; use "
                        "variance_type='fixed_small'"
                    )
                self.known = known
        elif not torch.equal(given, self.stress_given):
            if self.known is None:
                raise self._changed(sample)
            raise Refused(
                f"the pipeline overwrites latents with values of its own step {self.turn}, while the states are "
                f"of other steps; {REMEDY}"
            )
        changed = sample != self.handed
        if self.known is not None:
            changed = changed & ~self.known[self.row]
        if changed.any():
            raise self._changed(sample)
        for recorded, given in self.inputs:
            if not torch.equal(given, _plain(self.scale(sample)).to(given.dtype)):
                raise self._unlike(recorded)

    def _changed(self, sample: Tensor) -> Refused:
        assert self.handed is not None
        size = float((sample - self.handed).abs().max() / self.handed.abs().max())
        return Refused(
            f"the pipeline changes the latents between step {self.turn - 1} and step {self.turn} (by up to "
            f"{size:.2g} of their size), which the scheduler's chain does not contain; {REMEDY}"
        )

    def _require_same_guidance(self, output: Tensor) -> None:
        seen = output[self.drafted :]
        if self.stress_output is None:
            self.stress_output = seen[1:].clone()
        same = close(seen[:1], self.first_output[:1]) and close(seen[1:], self.stress_output)
        if not same:
            raise Refused(
                f"what the pipeline makes of its network's output (guidance) is another at step {self.turn} than "
                f"before, while the states are of other steps; {REMEDY}"
            )

    def _require_states(self, recorded: Recorded, states: Tensor) -> None:
        """The network's input is that of turn 0: scaled latents, and beside them the image's conditioning."""
        latents = states
        if recorded.dim is not None:
            size = self.first.shape[recorded.dim]
            latents = states.narrow(recorded.dim, 0, size)
            rest = _beside(states, recorded.dim, size)
            old = _beside(recorded.states, recorded.dim, size)
            if not torch.equal(rest, old[_offset(self.row, recorded.copies, self.images)]):
                raise Refused(
                    f"at step {self.turn} the pipeline gives its {recorded.name} another conditioning beside the "
                    f"latents than at step 0; {REMEDY}"
                )
        one = latents.unflatten(0, (recorded.copies, self.rows))
        if not all(torch.equal(one[0], other) for other in one[1:]):
            raise self._unlike(recorded)
        self.inputs.append((recorded, one[0]))  # compared with the latents when these come back

    def _unlike(self, recorded: Recorded) -> Refused:
        return Refused(
            f"at step {self.turn} the pipeline gives its {recorded.name} something else than the latents it was "
            f"handed; {REMEDY}"
        )

    def _other(self, recorded: Recorded, name: str) -> Refused:
        return Refused(
            f"at step {self.turn} the pipeline calls its {recorded.name} with another {name} than at step 0, while "
            f"the states are of other steps; {REMEDY}"
        )

    def _require_unchanged(self, *names: str) -> None:
        found = self.unchanged.change(*names)
        if found is not None:
            raise Refused(
                f"at step {self.turn} the pipeline's loop changes {found}, while the states are of other steps; "
                f"{REMEDY}"
            )

    def _asked(self, recorded: Recorded, kind: int) -> Tensor:
        """The answer for the first row of turn 0, the last of at most four in a call, flattened."""
        factor, told = MATES[kind]
        place = torch.arange(STATES - 1, -1, -1, device=self.first.device).clamp(max=len(recorded.states) - 1)
        x, step = factor * recorded.states[place] + 1, torch.zeros_like(place)
        x[-1], step[:-1] = recorded.states[0], told % len(self.chain.std)

        def chosen(name: str, value: Any) -> Any:
            if not isinstance(value, Tensor) or name in WITHOUT_ROWS:
                return value
            frames = self._frames(recorded, value)
            if frames > 1:
                return value.unflatten(0, (len(value) // frames, frames))[place].flatten(0, 1)
            return _select(value, place, len(recorded.states))

        arguments = {k: mapped(partial(chosen, k), _copied(v)) for k, v in recorded.arguments.items()}
        arguments[recorded.names[0]], arguments[recorded.names[1]] = x, self._times(step)
        output = self._routed(recorded.name, arguments, step)
        answers = [v for v in _leaves(output) if isinstance(v, Tensor) and v.ndim and len(v) == STATES]
        return torch.cat([_plain(v)[-1].flatten() for v in answers])

    def _shift(self, recorded: Recorded, one: Tensor, two: Tensor) -> tuple[int, float | None]:
        """How far the mean of the first step with noise moves with the network's output, in std."""
        x, noisy = self.first[:1].float(), (self.chain.std > 0).nonzero().flatten()
        if not len(noisy) or one.numel() != x.numel():  # no noise, or an output that is not of latents
            return 0, None
        k = noisy[:1]
        outputs = [output.view_as(x).float() for output in (one, two)]
        before = no_history(self.chain, x)
        means = [self.chain.mean(x, self.chain.predict(x, o, k), k, before) for o in outputs]
        return int(k), float((means[0] - means[1]).norm() / self.chain.std[k])

    # ------------------------------------------------------------ the network is told the step

    def _require_time(self, name: str, received: Any, rows: int, dtype: torch.dtype) -> None:
        """What the loop tells the network of its own step must be one of the known functions of the timestep."""
        value = received.as_subclass(Tensor) if isinstance(received, Tensor) else torch.tensor(received)
        flat = value.flatten()
        if value.ndim > 1 or len(flat) not in (1, rows) or not bool((flat == flat[0]).all()):
            raise Refused(
                f"the pipeline tells its {name} several timesteps for one state, which foresample does not follow; "
                f"{REMEDY}"
            )
        if self.told is None:
            self.told = _ways_to_tell(value, self.timestep, dtype)
        now = self.timestep[None].to(value.device)
        self.told = [way for way in self.told if torch.equal(way(now), flat[:1])]
        if not self.told:
            raise Refused(
                f"at step {self.turn} the pipeline tells its {name} {float(flat[0]):g}, which is no known function of "
                f"the timestep {float(self.timestep):g}; {REMEDY}"
            )

    def _times(self, step: Tensor) -> Tensor:
        """Beside the states: a network moves one time for all of them there by itself, but not one for each."""
        assert self.told
        return self.told[0](self.timesteps.to(self.first.device)[step.to(self.first.device)])

    # ------------------------------------------------------------ turn 0

    def _read(self, bound: dict[str, Any]) -> None:
        eta, clipped = bound.get("eta") or 0.0, bool(bound.get("use_clipped_model_output"))
        chain = read_chain(self.scheduler, eta=eta, use_clipped=clipped, start=self.start)
        # A loop may end early; and what was made of the patched timesteps must not go out to users as such.
        steps = self.turns_expected
        cut: dict[str, Any] = {k: _plain(v)[:steps] for k, v in vars(chain).items() if isinstance(v, Tensor)}
        chain = replace(chain, **cut)
        self.chain = chain.to(self.first.device, torch.float32)

    def _locate(self, recorded: Recorded) -> None:
        """Where the latents are in the network's input."""
        states, x = recorded.states, self.first
        shape = list(states.shape[1:])
        apart = [d for d, (a, b) in enumerate(zip(shape, x.shape[1:], strict=False), 1) if a != b]
        fits = states.ndim == x.ndim and len(states) % self.images == 0 and len(apart) <= 1
        if fits:
            recorded.copies = len(states) // self.images
            recorded.dim = apart[0] if apart else None
            part = states.narrow(apart[0], 0, x.shape[apart[0]]) if apart else states
            scale = 1.0 if self.chain.scale is None else float(self.chain.scale[0])
            fits = part.shape[1:] == x.shape[1:]
            alike = (scale * x).to(part).repeat(recorded.copies, *[1] * (x.ndim - 1))
            if fits and not close(part, alike):
                size = float((part - alike).abs().max() / alike.abs().max())
                raise Refused(
                    f"at step 0 the pipeline gives its {recorded.name} other values than its latents (by up to "
                    f"{size:.2g} of their size: a changed copy, or rows in another order), which foresample does not "
                    f"follow; {REMEDY}"
                )
        if not fits:
            raise Refused(
                f"the pipeline gives its {recorded.name} something else than its latents (shape {tuple(states.shape)} "
                f"for {tuple(x.shape)}), which foresample does not follow; {REMEDY}"
            )


def read_chain(scheduler: Any, **options: Any) -> Chain:
    """The scheduler's chain; a scheduler or argument of `step` that has none is refused by the chain's own sentence."""
    try:
        return scheduler_chain(scheduler, **options)
    except ValueError as error:
        raise Refused(str(error)) from error


def require_shape(chain: Chain, output: Tensor, sample: Tensor) -> None:
    """Refuse what is no output for the chain: the channels of the latents, and as many again for a learned variance."""
    twice = 1 if chain.low_variance is None else 2
    if output.shape != (len(sample), twice * sample.shape[1], *sample.shape[2:]):
        raise Refused(
            f"the scheduler is given an output of shape {tuple(output.shape)} for latents of {tuple(sample.shape)}, "
            "so it does something else than the chain contains (a learned variance?); use a scheduler with fixed "
            "variance"
        )


class _InOrder:
    """Calls the user's callback once for each step, in order, when all images have committed it."""

    def __init__(self, session: Session) -> None:
        self.session, self.next = session, 0
        self.waiting: dict[int, Tensor] = {}
        self.committed: Tensor | None = None

    def __call__(self, commit: Commit) -> None:
        session = self.session
        if session.callback is None:
            return
        if self.committed is None:
            self.committed = torch.zeros(session.images, dtype=torch.int64)
        for r, image in enumerate(commit.sample.tolist()):
            first, count = int(commit.step[r]), int(commit.committed[r])
            for j in range(count):
                shape = (session.images, *commit.states.shape[2:])
                states = self.waiting.setdefault(first + j, commit.states.new_empty(shape))
                states[image] = commit.states[r, j]
            self.committed[image] = first + count
        if session.tensors is not None:
            self.report()

    def report(self) -> None:
        """Call back for all steps that every image has committed."""
        session = self.session
        while (
            self.committed is not None
            and self.next < session.turns_expected
            and int(self.committed.min()) > self.next
        ):
            self.next += 1
            self._report(self.next - 1, self.waiting.pop(self.next - 1))

    def _report(self, step: int, latents: Tensor) -> None:
        session, pipe = self.session, self.session.pipe
        assert session.callback is not None
        if session.known is not None:
            raise Refused(
                "callback_on_step_end would be handed latents whose known region is not yet overwritten: leave it "
                f"out, or {REMEDY}"
            )
        session._require_unchanged()
        tensors = {**(session.tensors or {}), "latents": latents.clone()}
        given = {name: tensors[name] for name in session.wanted}
        kept, before = _copied(given), dict(vars(pipe))
        session.calling_back = True
        with self._index_after(step):
            answer = session.callback(pipe, step, session.timesteps[step], dict(given)) or {}
        session.calling_back = False
        for name in {**given, **answer}:  # what was not handed out may come back, and the loop would take it
            value = given.get(name)
            if name not in given or not (
                _same(answer.get(name, value), kept[name]) and _same(value, kept[name])
            ):
                raise Refused(
                    f"callback_on_step_end ({_name(session.callback)}) changed the {name} after step {step}, which an "
                    f"accelerated pipeline has already stepped beyond: leave the callback out, or {REMEDY}"
                )
        module = session.unchanged.change()
        if module is not None:
            raise Refused(
                f"callback_on_step_end ({_name(session.callback)}) changes the pipeline: {module} at step {step}, "
                f"which an accelerated pipeline has already stepped beyond; leave the callback out, or {REMEDY}"
            )
        after = vars(pipe)
        other = [k for k in {*before, *after} if not _same(before.get(k), after.get(k))]
        if other:
            raise Refused(
                f"callback_on_step_end ({_name(session.callback)}) changed pipe.{other[0]}, while an accelerated "
                f"pipeline has already stepped beyond step {step}; {REMEDY}"
            )

    @contextmanager
    def _index_after(self, step: int) -> Iterator[None]:
        """The scheduler's index is that of the untouched loop inside; ours stays at the first step."""
        own, index = vars(self.session.scheduler), self.session.start + step + 1
        before = own.get("_step_index")
        if before is None:
            yield
            return
        own["_step_index"] = index
        try:
            yield
        finally:
            if own.get("_step_index") == index:  # else the callback changed it, and is refused
                own["_step_index"] = before


# ------------------------------------------------------------------ helpers


def heavy_tailed(shape: tuple[int, ...], seed: int) -> Tensor:
    """Numbers of many sizes, 0.03 to 30: no clamp and no blend leaves them all alone."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator) * 10 ** (3 * torch.rand(shape, generator=generator) - 1.5)


def close(one: Tensor, two: Tensor) -> bool:
    """Equal but for rounding."""
    if one.shape != two.shape:
        return False
    if torch.equal(one, two):
        return True
    tolerance = 1e-4 if two.dtype in (torch.float32, torch.float64) else 3e-2
    return bool((one - two).abs().max() <= tolerance * two.abs().max())


def _name(callback: Any) -> str:
    return getattr(callback, "__name__", type(callback).__name__)


def _told_apart(seeds: Tensor) -> Tensor:
    """These seeds; where one came before, another that is made of it."""
    known = seeds.tolist()
    before = [known[:i].count(seed) for i, seed in enumerate(known)]
    return torch.tensor(
        [int(streams.seeds_of(seed, 1, n)) if n else seed for seed, n in zip(known, before, strict=True)]
    )


def _twins(values: Tensor) -> bool:
    """Whether the second half of the rows is the first once more."""
    half = len(values) // 2
    return len(values) == 2 * half and torch.equal(values[:half], values[half:])


def _plain(value: Any) -> Any:
    return value.as_subclass(Tensor) if isinstance(value, Tensor) else value


def _scalar(value: Any) -> Tensor:
    return torch.as_tensor(value).as_subclass(Tensor).detach().cpu().double().flatten()[:1]


def mapped(change: Callable[[Any], Any], tree: Any) -> Any:
    """The same containers of changed things."""
    if isinstance(tree, dict):
        return {k: mapped(change, v) for k, v in tree.items()}
    if type(tree) in (list, tuple):
        return type(tree)(mapped(change, v) for v in tree)
    return change(tree)


def _leaves(tree: Any) -> list[Any]:
    found: list[Any] = []
    mapped(found.append, tree)
    return found


def _copied(tree: Any) -> Any:
    """Tensors as they are now."""
    return mapped(lambda v: _plain(v).clone() if isinstance(v, Tensor) else v, tree)


def _same(one: Any, two: Any) -> bool:
    """Whether two arguments are the same object, or equal and plain."""
    if one is two:
        return True
    if type(one) is not type(two):
        return False
    if isinstance(one, Tensor):
        return one.shape == two.shape and torch.equal(_plain(one), _plain(two))
    if isinstance(one, dict):
        return one.keys() == two.keys() and all(_same(v, two[k]) for k, v in one.items())
    if isinstance(one, (list, tuple)):
        return len(one) == len(two) and all(_same(a, b) for a, b in zip(one, two, strict=True))
    return isinstance(one, (int, float, str, bool, torch.dtype, torch.device)) and one == two


def _offset(row: Tensor, copies: int, images: int) -> Tensor:
    """Rows of a batch of `copies` × images, for `copies` × these rows."""
    number = torch.arange(copies, device=row.device).repeat_interleave(len(row))
    return row.repeat(copies) + images * number


def _select(value: Any, row: Tensor, batch: int) -> Any:
    """The rows of a tensor with a batch dimension; anything else as it is."""
    fits = isinstance(value, Tensor) and value.ndim > 0 and len(value) == batch
    return value[row] if fits else value


def _beside(states: Tensor, dim: int, size: int) -> Tensor:
    return states.narrow(dim, size, states.shape[dim] - size)


def _routes(pipe: Any) -> dict[str, Route]:
    """Wan 2.2: from high noise to low, `transformer` serves down to a boundary, then `transformer_2`."""
    ratio = pipe.config.get("boundary_ratio") if hasattr(pipe, "config") else None
    if ratio is None or any(getattr(pipe, name, None) is None for name in ("transformer", "transformer_2")):
        return {}
    return {"transformer": Route("transformer_2", ratio * pipe.scheduler.config.num_train_timesteps)}


def _ways_to_tell(value: Tensor, timestep: Tensor, dtype: torch.dtype) -> list[Callable[[Tensor], Tensor]]:
    """The functions of the timestep that pipelines tell their networks, in the dtype received."""
    kind = value.dtype
    ways: list[Callable[[Tensor], Tensor]] = [lambda t: t.to(kind)]
    for half in dict.fromkeys((kind, dtype, torch.float32)):
        if half.is_floating_point:
            ways.append(lambda t, half=half: (t.to(half) / 1000).to(kind))  # type: ignore[misc]
            ways.append(lambda t, half=half: (1 - t.to(half) / 1000).to(kind))  # type: ignore[misc]
            ways.append(lambda t, half=half: ((1000 - t.to(half)) / 1000).to(kind))  # type: ignore[misc]
    if kind.is_floating_point and float(timestep):
        ratio = float(value.flatten()[0]) / float(timestep)
        ways.append(lambda t: (t * ratio).to(kind))
    return ways


def _unreachable(x: Tensor, time: Tensor, row: Tensor) -> Tensor:
    raise AssertionError("the pipeline evaluates the network, not the target")
