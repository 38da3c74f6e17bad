"""Plans of one shape, drawn again and again: an engine kept between them, and what one plan leaves to the next.

A robot plans, executes a part and plans again. What does not change between plans is made once: the chain, the engine
and, on a GPU, its captured rounds. What does change, observations, is copied into tensors that stay where they are, so
that a new observation needs no new capture.

**Starting warm.** The last plan's path through the chain, moved on by the actions executed since, is a draft of the
next plan's first window (theory, section 7). Only its states and predictions are kept, never its noise: noise is fresh
for every plan. The new observation depends on the last plan's noise, so drawing with that noise again would change the
distribution of the plan given the observation. So every plan's seed is hashed with what its draft depends on.
"""

from __future__ import annotations

import copy
import hashlib
import threading
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, TypedDict

import torch
from torch import Tensor, nn

from foresample.chains import Chain, scheduler_chain
from foresample.contracts import at_least_one
from foresample.core.report import Run
from foresample.drafters import LearnedPrior, Prior, Replay
from foresample.engine import Engine
from foresample.engine.priors import RecordingTarget, prior_of_paths
from foresample.integrations.networks import require_fixed
from foresample.integrations.policies.learning import MOST, condition_of, learn_prior, unused_seeds
from foresample.integrations.trusted import foreign_part, held
from foresample.integrations.untouched import NothingGains, undisturbed_window
from foresample.settings import Settings
from foresample.targets import ChainTarget

KEPT = 4
"""Kinds of requests whose planners are kept: each holds memory, on a GPU that of its captured rounds."""


@dataclass(frozen=True)
class Request:
    """One call of a policy's sampling method, whatever the family: R plans of one shape."""

    network: Callable[..., Tensor]
    """network(trajectory, timesteps, **conditions)."""
    conditions: dict[str, Tensor | None]
    """What the network is conditioned on, each [R, …] or None."""
    data: Tensor
    """[R, *shape]: values of the conditioned coordinates; its dtype and device are the network's."""
    mask: Tensor | None
    """[R, *shape]: which coordinates are conditioned; None where none can be."""
    noise: Tensor | None
    """[R, *shape]: where to start, instead of drawing it."""
    generator: torch.Generator | None
    step_options: dict[str, Any]
    """Keyword arguments the policy would pass to scheduler.step."""

    @cached_property
    def free(self) -> Tensor:
        """[*shape]: the coordinates that are drawn, one set for all plans of a call."""
        if self.mask is None:
            return torch.ones(self.data.shape[1:], dtype=torch.bool, device=self.data.device)
        if not (self.mask == self.mask[:1]).all():
            raise ValueError(
                "condition_mask differs between the samples of a batch; call conditional_sample once for each mask"
            )
        return ~self.mask[0]


class PlanKeywords(TypedDict, total=False):
    """The options that only policies have; see `PlanSettings`."""

    batch_pad: bool | int
    prior: Prior | LearnedPrior | str | Path | None
    warm: bool
    executed: int | None
    pilots: int | None
    learn: bool


@dataclass(frozen=True)
class PlanSettings:
    """Checked options that only policies have, and `trace`; see `foresample.accelerate`."""

    batch_pad: bool | int = False
    prior: Prior | LearnedPrior | str | Path | None = None
    warm: bool = False
    executed: int | None = None
    """Actions executed of a plan before the next is drawn; None, not known, leaves the last plan where it was."""
    pilots: int | None = None
    learn: bool = False
    trace: bool = True

    def __post_init__(self) -> None:
        if self.prior is not None and self.pilots is not None:
            raise ValueError(
                "a prior is given and another to be fitted on the first plans: leave prior or pilots out"
            )
        if self.learn and self.pilots is not None:
            raise ValueError(
                "learn=True and pilots both make a prior from the policy's plans: leave one of them out"
            )
        if self.batch_pad is not True and self.batch_pad is not False:
            at_least_one("batch_pad", self.batch_pad)
        if self.executed is not None:
            object.__setattr__(self, "executed", at_least_one("executed", self.executed))
        if self.pilots is not None:
            object.__setattr__(self, "pilots", max(2, at_least_one("pilots", self.pilots)))


class Planner:
    """Draws plans on the free coordinates of one shape, [F], float32 around a half-precision network.

    With `follow` it keeps all states of the last plans and the network's answers to them, for a loop to walk along.
    """

    def __init__(
        self,
        request: Request,
        chain: Chain,
        settings: Settings,
        options: PlanSettings,
        prior: Prior | LearnedPrior | None,
        *,
        follow: bool = False,
    ) -> None:
        data, free = request.data, request.free
        self.network, self.settings, self.options, self.follow = request.network, settings, options, follow
        self.unreported = len(chain.std) if options.trace else 0
        """Steps of the original loop that were watched for this planner, until a report says so."""
        self.data, self.start = data.clone(), None
        self.conditions = {name: v if v is None else v.clone() for name, v in request.conditions.items()}
        self.index = None if bool(free.all()) else free.flatten().nonzero().squeeze(1)
        dtype = torch.promote_types(data.dtype, torch.float32)
        chain = chain.to(data.device, dtype)
        if request.noise is not None:
            self.start = self._free(request.noise).to(data.device, dtype).clone()
        self.target = ChainTarget(chain, torch.Size([int(free.sum())]), self._call, self.start)
        self.condition = condition_of(request) if options.learn or isinstance(prior, LearnedPrior) else None
        self.learned: LearnedPrior | None = None
        self.table: Prior | None = None
        if isinstance(prior, LearnedPrior):
            self.learned = copy.deepcopy(_learned_for(prior, self.target, self.condition)).to(
                data.device, dtype
            )
            self.table = Prior(*self._expected(), jacobian=self.learned.jacobian)
        elif prior is not None:
            self.table = _fitting(prior, self.target).to(data.device, dtype)
        self.past = self._of_prior = "" if prior is None else repr(prior)
        """What the next plan's draft depends on, as text; its seeds are hashed with it."""
        self.window = self._window()
        self.padded = (
            len(data) * ((self.window or 0) + 1) if options.batch_pad is True else int(options.batch_pad)
        )
        self.recorded: RecordingTarget | None = None
        self.output = data
        """The network's answer to its last call."""
        self.last: Prior | None = None
        if self.window is not None:
            self._shift = _shift(free, options.executed or 0)
            self.engine = self._engine(self.window)

    def plan(self, request: Request, seeds: Tensor) -> tuple[Tensor, Run]:
        """Plans [R, *shape] of the policy's law, and what they cost."""
        if request.mask is not None:
            self.data.copy_(request.data)
        for name, value in request.conditions.items():
            if value is not None:
                kept = self.conditions[name]
                assert kept is not None
                kept.copy_(value)
        if self.start is not None and request.noise is not None:
            self.start.copy_(self._free(request.noise))
        if self.learned is not None:
            self.condition = condition_of(request)
            self._draft_from(*self._expected())
        self.engine.forget()  # its answers were for other observations
        seeds = unused_seeds(seeds, self.past)
        run = self.engine.sample(seeds)
        if self.options.warm:
            self.past = hashlib.blake2b(f"{self.past} {seeds.tolist()}".encode(), digest_size=16).hexdigest()
        if self.last is not None and self.learned is None and self.recorded is not None:
            steps = self.last.steps
            for kept, new in (
                (self.last.states, self.recorded.states),
                (self.last.predictions, self.recorded.predictions),
            ):
                kept.copy_(new[:, :steps].index_select(2, self._shift))
        return self._whole(self.data, run.samples), run

    def forget(self) -> None:
        """Start the next plan from the prior's table, or from plans of zeros."""
        self.past = self._of_prior
        if self.last is None:
            return
        if self.table is None:
            self.last.states.zero_()
            self.last.predictions.zero_()
        else:
            row = torch.arange(len(self.data), device=self.data.device)
            self._draft_from(*self.table.paths(row, self.last.steps)[:2])

    def take(self, prior: LearnedPrior) -> None:
        """Draft the next plans with this prior, in the place of the one before it."""
        assert self.learned is not None
        self.learned.load_state_dict(prior.state_dict())
        self.past = self._of_prior = repr(prior)

    def _expected(self) -> tuple[Tensor, Tensor]:
        """The paths expected of plans under the condition at hand, [R, N, F] both."""
        assert self.learned is not None
        assert self.condition is not None
        with torch.no_grad():
            return self.learned(self.condition.to(self.learned.mean))

    def _draft_from(self, states: Tensor, predictions: Tensor) -> None:
        """Draft the next plans' first window from these paths, [R, …, F] both."""
        assert self.last is not None
        self.last.states.copy_(states[:, : self.last.steps])
        self.last.predictions.copy_(predictions[:, : self.last.steps])

    def close(self) -> None:
        """Let the engine go, and with it the memory of its captured rounds: at once, not when garbage is collected."""
        vars(self).pop("engine", None)

    def paths(self) -> tuple[Tensor, Tensor]:
        """States and predictions of the last plans at every step, [R, N, F] both."""
        assert self.recorded is not None
        steps = self.recorded.steps
        return self.recorded.states[:, :steps].clone(), self.recorded.predictions[:, :steps].clone()

    def path(self) -> tuple[list[Tensor], list[Tensor]]:
        """The states x_0 … x_{N−1} of the last plans and the network's answers to them, [R, *shape] each."""
        assert isinstance(self.recorded, _FollowedTarget)
        steps = self.recorded.steps
        states = [self._whole(self.data, self.recorded.states[:, k]).clone() for k in range(steps)]
        return states, [self.recorded.outputs[:, k].clone() for k in range(steps)]

    def _window(self) -> int | None:
        settings = replace(self.settings, slots=len(self.data))
        self.padded = 0
        if self.table is not None:
            settings = replace(settings, drafter=Replay(prior=self.table))
        return undisturbed_window(replace(self.target, start_states=None), settings)

    def _engine(self, window: int) -> Engine:
        target, options = self.target, self.options
        steps = min(window + 1, len(target.std))
        if self.follow:
            self.recorded = _FollowedTarget(self, len(target.std))
        elif options.warm or options.pilots or options.learn:
            whole = options.pilots or options.learn
            self.recorded = RecordingTarget(target, len(self.data), len(target.std) if whole else steps)
        if options.warm or self.learned is not None:
            empty = target.std.new_zeros((len(self.data), steps, *target.shape))
            table, slope = self.table, None
            if table is not None and table.slope is not None:
                slope = table.paths(torch.zeros(1, dtype=torch.int64), steps)[2]
            self.last = Prior(empty, empty.clone(), slope, None if table is None else table.jacobian)
            self.forget()
        settings = replace(self.settings, window=window, slots=len(self.data))
        prior = self.last or self.table
        if prior is not None:
            settings = replace(settings, drafter=Replay(prior=prior))
        return Engine(self.recorded or target, settings)

    def _call(self, x: Tensor, time: Tensor, row: Tensor) -> Tensor:
        count = len(x)
        if self.padded:
            x, time, row = (_padded(v, self.padded, self.window or 0) for v in (x, time, row))
        data = self.data[row] if self.index is not None else self.data[:1].expand(len(x), *self.data.shape[1:])
        conditions = {name: v if v is None else v[row] for name, v in self.conditions.items()}
        self.output = self.network(self._whole(data, x), time, **conditions)[:count]
        return self._free(self.output)

    def _free(self, whole: Tensor) -> Tensor:
        """The free coordinates, [B, F], of whole plans, [B, *shape]."""
        flat = whole.flatten(1)
        return flat if self.index is None else flat.index_select(1, self.index)

    def _whole(self, data: Tensor, x: Tensor) -> Tensor:
        """Whole plans: conditioned coordinates from `data`, free ones from the states x, [B, F]."""
        x = x.to(data.dtype)
        if self.index is None:
            return x.view_as(data)
        return data.flatten(1).index_copy(1, self.index, x).view_as(data)


class _FollowedTarget(RecordingTarget):
    """A planner's target that also remembers the network's whole answers."""

    def __init__(self, planner: Planner, steps: int) -> None:
        super().__init__(planner.target, len(planner.data), steps)
        data = planner.data
        self.planner, self.outputs = planner, data.new_zeros((len(data), steps + 1, *data.shape[1:]))

    def predict(self, x: Tensor, step: Tensor, row: Tensor, **extra: Tensor) -> Tensor:
        prediction = super().predict(x, step, row, **extra)
        self.outputs[row, step.clamp(max=self.steps)] = self.planner.output.to(self.outputs)
        return prediction


def kind_of(request: Request, network: Any, scheduler: Any, graph: bool, *more: Any) -> tuple:
    """Everything a planner is made for: another network, scheduler, shape or place in memory needs another planner.

    It is made anew for each plan, from what the policy holds then, so that nothing a planner has read goes stale.
    """
    tensors = {"data": request.data, "noise": request.noise, **request.conditions}
    return (
        weakref.ref(network),  # equal for one living network only
        _captured(network) if graph else None,
        type(scheduler),
        repr(sorted(scheduler.config.items())),
        held(scheduler),
        repr(sorted(request.step_options.items())),
        None if request.mask is None else tuple(request.free.flatten().tolist()),
        *((n, None if v is None else (v.shape, v.dtype, v.device)) for n, v in tensors.items()),
        *more,
    )


def _captured(network: Any) -> tuple:
    """What a captured graph has in it of a network: where its tensors lie, and the values its modules hold."""
    if not isinstance(network, nn.Module):
        return ()
    tensors = (*network.parameters(), *network.buffers())
    values = (v for m in network.modules() for v in vars(m).values() if isinstance(v, (bool, int, float, str)))
    return (*(tensor.data_ptr() for tensor in tensors), *values)


@dataclass(eq=False)
class Plans:
    """What is kept between the plans of one policy."""

    settings: Settings
    options: PlanSettings
    prior: Prior | LearnedPrior | None
    """Given, fitted on the first plans, or learned from the latest."""
    planners: dict[tuple, Planner] = field(default_factory=dict)
    """One for each kind of request, the last used last: engines, captured rounds, the last plans."""
    pilots: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    """Paths of the first plans, until there are enough to fit a prior."""
    seen: deque[tuple[Tensor, Tensor, Tensor]] = field(default_factory=deque)
    """Conditions and paths of the latest plans, to learn from."""
    known: set[tuple] = field(default_factory=set)
    """Kinds of requests that were planned before, and traced."""
    turn: threading.RLock = field(default_factory=threading.RLock, repr=False)
    """Held while a plan is drawn, since planners keep its conditions: plans of several threads wait for one another."""

    def draw(
        self,
        kind: tuple,
        request: Request,
        scheduler: Any,
        watch: Callable[[Chain], Any],
        *,
        follow: bool = False,
    ) -> tuple[Planner, Tensor, Run]:
        """Plans, what drew them and what they cost; once there are pilots enough, later plans have a prior.

        A planner is made when the first request of its kind comes, after `watch` has compared the policy's method with
        the chain; the one not used for longest makes room.
        """
        planner = self.planners.pop(kind, None)
        if planner is None:
            options = self.options if self.prior is None else replace(self.options, prior=None, pilots=None)
            options = replace(options, trace=options.trace and kind not in self.known)
            chain = policy_chain(scheduler, request.step_options)
            if options.trace:
                watch(chain)
            planner = Planner(request, chain, self.settings, options, self.prior, follow=follow)
            if len(self.planners) >= KEPT:
                self.planners.pop(next(iter(self.planners))).close()
        self.planners[kind] = planner
        if planner.window is None:
            raise NothingGains(len(planner.target.std), len(request.data))
        plans, run = planner.plan(request, seeds_from(request.generator, len(request.data)))
        run.report.evidence.steps_replayed, planner.unreported = planner.unreported, 0
        self.known.add(kind)
        if planner.options.learn:
            self._remember(planner, request)
        if planner.options.pilots:
            self.pilots.append(planner.paths())
            if sum(len(states) for states, _ in self.pilots) >= planner.options.pilots:
                states, predictions = (torch.cat(parts) for parts in zip(*self.pilots, strict=True))
                assert planner.window is not None
                self.prior = prior_of_paths(planner.target, states, predictions, window=planner.window)
                self.pilots.clear()
                self.clear()
        return planner, plans, run

    def learn(self, network: Any) -> LearnedPrior:
        """Learn a prior from the latest plans of this network and draft the next ones with it; takes seconds."""
        with self.turn:
            if not self.seen:
                raise ValueError(
                    "there is no plan to learn from: give learn=True to accelerate, and plan first"
                )
            planner = next(reversed(self.planners.values()))
            sizes = [value.shape[1:] for value in self.seen[-1]]
            alike = [plan for plan in self.seen if [value.shape[1:] for value in plan] == sizes]
            condition, states, predictions = (torch.cat(parts) for parts in zip(*alike, strict=True))
            self.prior = learn_prior(planner.target, network, condition, states, predictions)
            if planner.learned is not None and planner.learned.sizes == self.prior.sizes:
                planner.take(self.prior)
            else:
                self.clear()
            return self.prior

    def _remember(self, planner: Planner, request: Request) -> None:
        self.seen.append((condition_of(request), *planner.paths()))
        while sum(len(condition) for condition, _, _ in self.seen) > MOST:
            self.seen.popleft()

    def forget(self) -> None:
        with self.turn:
            for planner in self.planners.values():
                planner.forget()

    def clear(self) -> None:
        with self.turn:
            for planner in self.planners.values():
                planner.close()
            self.planners.clear()


def _shift(free: Tensor, executed: int) -> Tensor:
    """[F]: for each free coordinate the one `executed` actions later; behind the plan's end its last action's.

    Where that one is conditioned, and so in no path, the coordinate itself.
    """
    number = torch.where(free, free.flatten().long().cumsum(0).view_as(free) - 1, -1)
    later = (torch.arange(len(free), device=free.device) + executed).clamp(max=len(free) - 1)
    return torch.where(number[later] >= 0, number[later], number)[free]


def _fitting(prior: Prior, target: ChainTarget) -> Prior:
    """The prior, if it is one of such plans."""
    steps = len(target.std) if prior.jacobian is None else len(prior.jacobian)
    if prior.states.shape[2:] != target.shape or steps != len(target.std):
        raise ValueError(
            f"the prior was fitted on plans of {prior.states.shape[2:].numel()} numbers in {steps} steps, this "
            f"policy's have {target.shape.numel()} in {len(target.std)}: fit one for it"
        )
    return prior


def _learned_for(prior: LearnedPrior, target: ChainTarget, condition: Tensor | None) -> LearnedPrior:
    """The prior, if it was learned from such plans and such observations."""
    assert condition is not None
    wanted = condition.shape[1], len(target.std), target.shape.numel()
    if prior.sizes != wanted:
        seen, steps, size = prior.sizes
        raise ValueError(
            f"this prior was learned from plans of {size} numbers in {steps} steps with {seen} numbers observed; here "
            f"plans have {wanted[2]} in {wanted[1]} with {wanted[0]} observed: learn one for this policy"
        )
    return prior


def _padded(values: Tensor, states: int, window: int) -> Tensor:
    """The same with the last row repeated, up to `states` rows."""
    if len(values) > states:
        raise ValueError(
            f"batch_pad={states} is less than the {len(values)} states of a call; use batch_pad=True, or at "
            f"least {window + 1} for each plan of a batch"
        )
    return torch.cat([values, values[-1:].expand(states - len(values), *values.shape[1:])])


def seeds_from(generator: torch.Generator | None, count: int) -> Tensor:
    """One seed a plan, from the generator that would have drawn its noise."""
    device = "cpu" if generator is None else generator.device
    return torch.randint(2**63 - 1, (count,), generator=generator, device=device)


def require_own_scheduler(scheduler: Any) -> None:
    """Refuse a scheduler with code of someone else: its chain is read off its tables, and its `step` is not run."""
    foreign = foreign_part(scheduler, "diffusers")
    if foreign is not None:
        raise ValueError(
            f"the policy's scheduler is not as diffusers made it ({foreign}), so its steps may be others than the ones "
            "foresample reads off its tables: use diffusers' scheduler, make a target with foresample.targets, or give "
            "trace=False if you know that the steps are the same"
        )


def policy_chain(scheduler: Any, options: dict[str, Any]) -> Chain:
    """The chain of a policy's scheduler, whose `step` is given these options; its noise has a fixed variance.

    Policies' loops scale no states, and start from unit noise: a scheduler that needs either scaled is refused.
    """
    clipped = options.get("use_clipped_model_output", False)
    chain = scheduler_chain(scheduler, eta=options.get("eta", 0.0), use_clipped=clipped)
    if chain.low_variance is not None:  # whose extra noise is no part of what policies are drawn with
        raise ValueError(
            "a learned variance (variance_type='learned_range') is not served in a policy; use "
            "variance_type='fixed_small', or foresample.targets.from_scheduler with the network"
        )
    if chain.scale is not None or chain.start_scale != 1.0:
        raise ValueError(
            f"a policy's loop starts from unit noise and shows its states as they are, and {type(scheduler).__name__} "
            "needs both scaled: use DDPMScheduler"
        )
    return chain


def require_eval(model: Any, network: Any = None) -> None:
    """Refuse a policy in training mode, and a network that draws or mixes rows."""
    if getattr(model, "training", False):
        raise ValueError("the policy is in training mode; call policy.eval() before planning")
    require_fixed(network, "the policy's network", "; call policy.eval()")
