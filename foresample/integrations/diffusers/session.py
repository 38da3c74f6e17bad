"""The speculative sampler in a pipeline's denoising loop: each turn of the loop is one call.

The loop takes all its N turns, with its own counter and timesteps. The images are usually finished after a few of
them; no network runs in the remaining turns. So everything that the loop does at any step can be checked:

    turn 0      the pipeline's own states: its calls and their arguments are recorded
    turn 1 …    drafted states, of many steps at once, and `witnesses`, rows that are never evaluated
    the last    the finished images are handed out

The distribution is the sequential pipeline's if what the loop does to a row depends on that row and its image, but not
on the turn. That is checked in every turn, and nothing is taken on trust:

    latents        come back bit by bit as they were handed out, except coordinates that are overwritten with
                   values of the image and the state's own step (a known region)
    the networks   are called in the same order, with the states and the `arguments` of turn 0
    guidance       gives the same results for the witnesses in all turns
    modules        and the scheduler are changed by nothing but the networks' own calls (`unchanged`)
    outputs        are the same when a state of the turn before is evaluated again (`again`)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from time import perf_counter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from foresample.chains import Chain, scheduler_chain
from foresample.core import noise as streams
from foresample.core.report import Report
from foresample.integrations.diffusers.again import Answered, Reevaluation
from foresample.integrations.diffusers.arguments import Recorded
from foresample.integrations.diffusers.callbacks import InOrder
from foresample.integrations.diffusers.clock import Clock
from foresample.integrations.diffusers.networks import Networks, transposed
from foresample.integrations.diffusers.rounds import Rounds, Unevaluated
from foresample.integrations.diffusers.trees import copied, leaves, plain, same, select, tensors, twins
from foresample.integrations.diffusers.witnesses import Batch, Witnesses
from foresample.integrations.refusal import REMEDY, Changed, Refused, require
from foresample.settings import Settings

TIMES = ("timestep", "timesteps", "t")
"""Names that networks give to their time argument."""
FOLLOWING = ("prev_timestep", "timestep_back", "old_pred_original_sample")
OWN = ("model_output", "timestep", "sample", *FOLLOWING, "return_dict")
"""Arguments of `step` that follow the loop; the others must stay the same."""


class Step(NamedTuple):
    """The result of `scheduler.step`; pipelines take the first by name or by position."""

    prev_sample: Tensor
    pred_original_sample: Tensor


class Session:
    """One call of an accelerated pipeline: drives its loop."""

    def __init__(
        self,
        pipe: Any,
        settings: Settings,
        seeds: Callable[[int], Tensor],
        callback: tuple[Callable[..., Any] | None, list[str]],
        wrap: type[Tensor],
        callers: dict[str, Callable[[dict[str, Any]], Any]],
        rounding: dict[str, float],
        new: bool,
        watched: dict[str, Answered],
        rehearsed: bool = False,
    ) -> None:
        """`callback`: the user's, and the tensors it wants. `rounding`, `new`, `watched`: see `Reevaluation`.
        `rehearsed`: nothing is drawn, and the loop gets made-up states after its first turn (`parts`)."""
        self.rehearsed = rehearsed
        self.scheduler, self.settings, self.seeds, self.wrap = pipe.scheduler, settings, seeds, wrap
        self.clock = Clock()
        self.networks = Networks(pipe, callers, self.clock, counters=not settings.look)
        self.again = Reevaluation(self.networks, rounding, new, watched) if settings.look else None
        self.in_order = InOrder(pipe, *callback, self.networks, wrap)
        self.explain: Callable[[Chain, Tensor, dict[str, Any]], None] | None = None
        self.over = self.answered = False
        self.copies = 1
        """Rows of the latents for an image: 2 if the pipeline keeps each twice."""
        self.step_arguments: dict[str, Any] = {}
        self.step_names: set[str] = set()
        self.batch: Batch | None = None
        """The rows given to the loop, from turn 1 on."""
        self.chain: Chain
        self.witnesses: Witnesses
        self.rounds: Rounds | Unevaluated
        self.own_seconds = 0.0
        self._recorded: list[Recorded] = []
        self._called = 0  # networks called in this turn

    # ------------------------------------------------------------ where the loop is

    @property
    def turn(self) -> int:
        return self.clock.turn

    @property
    def loop_turn(self) -> int:
        return self.clock.loop_turn

    @property
    def calling_back(self) -> bool:
        return self.in_order.calling

    @property
    def inside(self) -> bool:
        """Whether the loop is under way, outside of networks and callbacks."""
        return self.turn >= 0 and not self.over and not self.networks.evaluating and not self.calling_back

    @property
    def done(self) -> bool:
        return "rounds" in vars(self) and self.rounds.done

    @property
    def finished(self) -> bool:
        """Whether the images themselves were handed out."""
        return self.done and self.turn >= self.clock.steps - 1

    @property
    def report(self) -> Report:
        return self.rounds.report

    def turns(self, timesteps: Tensor, first: int = 0, end: int | None = None) -> Iterator[Tensor]:
        """The timesteps that the pipeline's loop iterates over: its own, those from `first` to `end`."""
        clock, turn = self.clock, 0
        clock.begin(timesteps, self.scheduler.timesteps.as_subclass(Tensor), first, end)
        if first and "_step_index" in vars(self.scheduler):
            self.scheduler._step_index = clock.start
        while turn < clock.steps or not self.done:
            clock.turn, self._called, self.answered = turn, 0, False
            yield clock.timestep()
            if not self.answered and turn == 0 and not self._recorded:
                clock.turn = -1  # not the loop: `denoising_end` counts timesteps
                yield from timesteps[1:].unbind()
                return
            require(
                self.answered,
                f"the pipeline skipped step {self.loop_turn} of its loop (pipe.interrupt was set?), while other "
                "states are of that step",
            )
            turn += 1
        if self.again is not None:
            self.again.at_the_end(callback=self.in_order.callback is not None)
        self.over = True

    def close(self) -> None:
        """Refuse a pipeline that returned before its loop was whole."""
        require(self.turn >= 0 and self.done, "the pipeline did not go through its scheduler's timesteps")
        whole = self.turn >= self.clock.steps - 1
        require(whole, f"the pipeline left its loop at step {self.loop_turn}, before its end")
        self.in_order.require_all()
        if self.again is not None:
            self.report.evidence, self.report.look_calls = self.again.evidence, self.again.calls

    # ------------------------------------------------------------ the scheduler's step

    def step(self, original: Callable[..., Any], bound: dict[str, Any]) -> Step:
        """Instead of `scheduler.step`: take the guided network output, hand out the next states to evaluate."""
        started = perf_counter()
        once = not self.answered and not self.over
        require(once, f"the pipeline stepped its scheduler twice at step {self.loop_turn}")
        self.answered = True
        self.clock.require_now(bound["timestep"])
        output, sample = plain(bound["model_output"]), plain(bound["sample"])
        with torch.no_grad():
            if self.turn == 0:
                self.networks.unchanged.watch("scheduler")
                self._first(output, sample, bound)
            else:
                self.networks.unchanged.require(self.loop_turn, "scheduler")
                self._require_same_step(bound)
                self._next(output, sample)
            states = self._hand_out()
        self.own_seconds += perf_counter() - started
        return states

    def _first(self, output: Tensor, sample: Tensor, bound: dict[str, Any]) -> None:
        require(bool(self._recorded), "the pipeline stepped its scheduler without calling a network of its own")
        answers = [plain(v) for recorded in self._recorded for v in tensors(recorded.output).values()]
        self.copies = copies_of_each(answers, output, sample)
        images = len(sample) // self.copies
        self.step_arguments, self.step_names = {k: v for k, v in bound.items() if k not in OWN}, set(bound)
        first, first_output = sample[:images], output[:images]
        chain = self._read_chain(bound)
        # A loop may end early; and what was made of the patched timesteps must not go out to users as such.
        values = {k: plain(v)[: self.clock.steps] for k, v in vars(chain).items() if isinstance(v, Tensor)}
        self.chain = replace(chain, **values).to(first.device, torch.float32)
        require_shape(self.chain, output, sample)
        if self.explain is not None:
            self.explain(self.chain, first[:1].float(), self.step_arguments)
        scale = 1.0 if self.chain.scale is None else float(self.chain.scale[0])
        for recorded in self._recorded:
            recorded.locate(first, scale)
        seeds = self.seeds(images)
        if bound.get("generator") is None:  # the loop's own noise is torch's, however alike the generators are
            seeds = _distinct(seeds)
        self.in_order.begin(images, first.dtype)
        self.witnesses = Witnesses(first, first_output, self.chain, self.clock)
        if self.rehearsed:
            self.rounds = Unevaluated(first)
        else:
            seeds = seeds.to(first.device)
            self.rounds = Rounds(self.chain, first, self.settings, seeds, self.in_order.observe)
        if self.again is not None:
            for recorded in self._recorded:
                self.again.keep_first(recorded, self.rounds.shift)
        call = self.rounds.call
        if call is not None:
            self._settle(call.x, first_output)

    def _read_chain(self, bound: dict[str, Any]) -> Chain:
        """The chain of this part of the loop."""
        first = self.clock.first
        chain = read_chain(self.scheduler, bound, self.clock.start - first)
        if first and (chain.previous_weight is not None or chain.older_weight is not None):
            raise Refused(
                f"the pipeline's loop changes at step {first}, and its {type(self.scheduler).__name__} uses earlier "
                f"predictions, which a loop drawn in parts does not keep; use solver_order=1, or {REMEDY}"
            )
        return chain.since(first) if first else chain

    def record(self) -> tuple[Any, ...]:
        """The loop's calls and arguments, as far as they do not depend on the states: the same in all runs."""
        calls = [
            (
                recorded.name,
                recorded.copies,
                {p: v for p, v in leaves(recorded.arguments).items() if p not in recorded.side},
            )
            for recorded in self._recorded
        ]
        arguments = {k: v for k, v in self.step_arguments.items() if k != "generator"}
        return calls, self.copies, arguments, self.witnesses.results()

    def _next(self, output: Tensor, sample: Tensor) -> None:
        batch = self.batch
        assert batch is not None
        missing, rows = self._recorded[self._called :], self.copies * len(batch)
        if missing:
            raise Changed(
                f"the pipeline does not call its {missing[0].name} at step {self.loop_turn} as at step "
                f"{self.clock.first}",
                self.loop_turn,
            )
        whole = len(output) == rows == len(sample)
        require(whole, "the pipeline changes the number of rows inside of its loop")
        if self.copies == 2:
            require(twins(output) and twins(sample), "the pipeline keeps each image twice, but not alike")
            output, sample = output[: len(batch)], sample[: len(batch)]
        self.witnesses.require_same_latents(batch, sample)
        scaled = batch.scaled(self.chain, sample)
        for recorded in self._recorded:
            recorded.require_latents(scaled)
        self.witnesses.require_same_guidance(batch, output)
        known = self.witnesses.known
        self.in_order.overwritten = known is not None
        call = self.rounds.call
        if call is not None:
            x = call.x
            if known is not None:
                x = torch.where(known[call.row], sample[: batch.drafted].to(x.dtype), x)
            self._settle(x, output[: batch.drafted])

    def _settle(self, x: Tensor, output: Tensor) -> None:
        """Settle the round under way, given the guided output at x: the states as the loop had them."""
        self.rounds.settle(x, output, self.witnesses.known)
        if self.rounds.done:
            self.rounds.finish(self.own_seconds, len(self.networks.straddled))

    def _hand_out(self) -> Step:
        """The next states and the witnesses; in the last turn the images."""
        if self.finished:
            images = self.rounds.images(self.witnesses.known).to(self.witnesses.first.dtype)
            images = torch.cat([images] * self.copies)
            return Step(images, images)
        self.batch = self.witnesses.beside(self.rounds.call)
        states = torch.cat([self.batch.states] * self.copies)
        # Drafted states have no denoised estimates yet; NaN shows in whatever uses them.
        estimates = states.new_tensor(torch.nan).expand_as(states)
        return Step(states.as_subclass(self.wrap), estimates.as_subclass(self.wrap))

    def _require_same_step(self, bound: dict[str, Any]) -> None:
        for name, value in bound.items():
            require(
                name in OWN or same(value, self.step_arguments.get(name)),
                f"the pipeline gives its scheduler another {name} at step {self.loop_turn} than at step "
                f"{self.clock.first}",
            )

    # ------------------------------------------------------------ other calls of the loop

    def scale(self, sample: Tensor) -> Tensor:
        """`scale_model_input`, for states at different steps."""
        assert self.batch is not None
        if self.chain.scale is None:
            return sample
        return self.batch.scaled(self.chain, plain(sample)).as_subclass(self.wrap)

    def aligned(self, tree: Any) -> Any:
        """The arguments of an operation on drafted states, with a row for each state."""
        return tree if self.batch is None else self.batch.aligned(tree, self.wrap)

    def shape_for_images(self, states: Tensor) -> torch.Size:
        """The shape that these rows would have with one state for each image, for loops that count their rows."""
        shape, batch = plain(states).shape, self.batch
        if batch is None or not shape or shape[0] % len(batch):
            return shape
        return torch.Size((shape[0] // len(batch) * batch.images, *shape[1:]))

    def add_noise(self, original: Callable[..., Tensor], bound: dict[str, Any]) -> Tensor:
        """`add_noise` and `scale_noise` after a step, as inpainting does: to the level of each state's own step."""
        batch = self.batch
        assert batch is not None
        name = next(k for k in ("timesteps", "timestep") if k in bound)
        level = bound[name]
        require(
            bool((plain(level).cpu() == self.clock.timestep(1).cpu()).all()),
            "the pipeline adds noise of another level than its next step's inside of its loop",
        )
        others = {k: plain(v) for k, v in bound.items() if k != name}
        order, noised = [], []
        # Step by step, because a scheduler with an index takes one level for all rows.
        for step in batch.step.unique().tolist():
            index = (batch.step == step).nonzero().flatten()
            given = {k: select(v, batch.row[index], batch.images) for k, v in others.items()}
            times = self.clock.at(batch.step[index], level.device)
            with self.in_order.index_after(self.clock.first + step - 1):
                noised.append(original(**given, **{name: times}))
            order.append(index)
        return torch.cat(noised)[torch.cat(order).argsort()].as_subclass(self.wrap)

    def evaluate(self, called: str, bound: dict[str, Any], parameters: list[str]) -> Any:
        """Stand in for a network that the loop calls."""
        bound = transposed(bound)
        first, time = parameters[0], next((n for n in TIMES if n in parameters), None)
        states = bound.get(first)
        if time is None or time not in bound or not isinstance(states, Tensor):
            raise Refused(
                f"the pipeline calls its {called} inside of its loop, which foresample does not follow; {REMEDY}"
            )
        require(
            not self.answered,
            f"the pipeline calls its {called} after the scheduler's step {self.loop_turn}, before the next",
        )
        self.clock.require_known_time(called, bound[time], len(states), states.dtype)
        name = self.networks.first_of_route(called)
        self.networks.watch(name)
        rest = {k: v for k, v in bound.items() if k not in (first, time)}
        number = self._called
        self._called += 1
        if self.turn == 0:
            # Copied before the call: some networks empty the lists they are given.
            rest, given = copied(rest), states.clone()
            output = self.networks.call(called, bound)
            self._recorded.append(Recorded(name, (first, time), given, rest, output, self.clock, self.wrap))
            return output
        expected = [recorded.name for recorded in self._recorded[number : number + 1]]
        if expected != [name]:
            raise Changed(
                f"at step {self.loop_turn} the pipeline calls its {name} where at step {self.clock.first} it called "
                f"{f'its {expected[0]}' if expected else 'the scheduler'}",
                self.loop_turn,
            )
        return self._answered(self._recorded[number], plain(states), rest)

    def _answered(self, recorded: Recorded, states: Tensor, rest: dict[str, Any]) -> Any:
        """The output for drafted states and witnesses; the network is called with the drafted states only."""
        batch, copies, output = self.batch, recorded.copies, None
        assert batch is not None
        recorded.require_states(batch, states)
        arguments = recorded.for_drafted(batch, rest)
        if batch.drafted:
            real = states[batch.is_drafted(copies, states.device)].unflatten(0, (copies, batch.drafted))
            if self.again is not None:
                output = self.again.evaluate(recorded, batch, real, arguments)
            else:
                output = self.networks.evaluate(recorded, real, arguments, batch.step[: batch.drafted])
        return recorded.with_witnesses(output, batch.drafted)


def read_chain(scheduler: Any, arguments: dict[str, Any], start: int) -> Chain:
    """The chain of a scheduler and of the arguments of its `step`; a scheduler without a chain is refused."""
    eta, clipped = arguments.get("eta") or 0.0, bool(arguments.get("use_clipped_model_output"))
    try:
        return scheduler_chain(scheduler, eta=eta, use_clipped=clipped, start=start)
    except ValueError as error:
        raise Refused(str(error)) from error


def copies_of_each(answers: list[Tensor], output: Tensor, sample: Tensor) -> int:
    """2 if the pipeline keeps each image twice, for guidance: two outputs, and one guided output of both. Otherwise 1.

    Images that are alike (generators of one seed, the same `latents`) have the same outputs instead.
    """
    apart = any(v.ndim and len(v) == len(sample) and not twins(v) for v in answers)
    return 2 if apart and twins(sample) and twins(output) else 1


def require_shape(chain: Chain, output: Tensor, sample: Tensor) -> None:
    """Require the channels of the latents, and as many again for a learned variance."""
    twice = 1 if chain.low_variance is None else 2
    if output.shape != (len(sample), twice * sample.shape[1], *sample.shape[2:]):
        raise Refused(
            f"the scheduler is given an output of shape {tuple(output.shape)} for latents of {tuple(sample.shape)}, "
            "so it does something else than the chain contains (a learned variance?); use a scheduler with fixed "
            "variance"
        )


def _distinct(seeds: Tensor) -> Tensor:
    """The seeds, with each repeated one replaced by another that is derived from it."""
    known = seeds.tolist()
    before = [known[:i].count(seed) for i, seed in enumerate(known)]
    return torch.tensor(
        [int(streams.seeds_of(seed, 1, n)) if n else seed for seed, n in zip(known, before, strict=True)]
    )
