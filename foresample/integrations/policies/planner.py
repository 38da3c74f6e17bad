"""A planner: draws plans of one shape again and again, and keeps everything between them that can be reused.

The chain, the engine and, on a GPU, its captured rounds are made once. Observations are copied into tensors that stay
at their place in memory, so a new observation needs no new capture.

**Starting warm.** The last plan's path through the chain, moved on by the actions executed since, is a draft of the
next plan's first window (docs/theory.md, "Starting warm"). Only its states and predictions are kept, never its noise:
the new observation depends on the last plan's noise, so drawing with that noise again would change the distribution of
the plan given the observation. Therefore every plan's seed is hashed with what its draft depends on.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, TypedDict

import torch
from torch import Tensor

from foresample.chains import Chain
from foresample.contracts import at_least_one
from foresample.core.report import Run
from foresample.drafters import LearnedPrior, Prior, Replay
from foresample.engine import Engine
from foresample.engine.priors import RecordingTarget
from foresample.integrations.policies.learning import condition_of, unused_seeds
from foresample.integrations.untouched import undisturbed_window
from foresample.settings import Settings
from foresample.targets import ChainTarget


@dataclass(frozen=True)
class Request:
    """One call of a policy's sampling method, whatever the family: R plans of one shape."""

    network: Callable[..., Tensor]
    """network(trajectory, timesteps, **conditions)."""
    conditions: dict[str, Tensor | None]
    """Conditions of the network by name, each [R, …] or None."""
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
        return ~self.mask.any(0)


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
    """Actions of a plan that are executed before the next plan; None (unknown) does not move the last plan."""
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
        """Steps of the original loop that were watched for this planner and are in no report yet."""
        self.data, self.start = data.clone(), None
        self.conditions = {name: v if v is None else v.clone() for name, v in request.conditions.items()}
        self.index = None if bool(free.all()) else free.flatten().nonzero().squeeze(1)
        dtype = torch.promote_types(data.dtype, torch.float32)
        chain = chain.to(data.device, dtype)
        if request.noise is not None:
            self.start = self._free(request.noise).to(data.device, dtype).clone()
        self.target = ChainTarget(chain, torch.Size([int(free.sum())]), self._call, self.start)
        self.condition = condition_of(request) if options.learn or isinstance(prior, LearnedPrior) else None
        misfit = _misfit(prior, self.target, self.condition)
        if misfit is not None:
            if prior is options.prior:
                raise ValueError(misfit)
            prior = None  # it was fitted or learned here, from plans of another size
        self.learned: LearnedPrior | None = None
        self.table: Prior | None = None
        if isinstance(prior, LearnedPrior):
            self.learned = copy.deepcopy(prior).to(data.device, dtype)
            self.table = Prior(*self._expected(), jacobian=self.learned.jacobian)
        elif prior is not None:
            self.table = prior.to(data.device, dtype)
        self.past = self._of_prior = "" if prior is None else repr(prior)
        """Text that names everything the next plan's draft depends on; its seeds are hashed with it."""
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
        """Plans [R, *shape] of the policy's distribution, and what they cost."""
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
        """Draft the next plans with this prior instead of the earlier one."""
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
        """Release the engine and the memory of its captured rounds at once, not when garbage is collected."""
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
        engine = Engine(self.recorded or target, settings)
        engine.prepare()  # a capture in a later plan would make that plan late
        return engine

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
    """A planner's target that also records the network's whole outputs."""

    def __init__(self, planner: Planner, steps: int) -> None:
        super().__init__(planner.target, len(planner.data), steps)
        data = planner.data
        self.planner, self.outputs = planner, data.new_zeros((len(data), steps + 1, *data.shape[1:]))

    def predict(self, x: Tensor, step: Tensor, row: Tensor, **extra: Tensor) -> Tensor:
        prediction = super().predict(x, step, row, **extra)
        self.outputs[row, step.clamp(max=self.steps)] = self.planner.output.to(self.outputs)
        return prediction


def _shift(free: Tensor, executed: int) -> Tensor:
    """For each free coordinate, [F], the one `executed` actions later; beyond the plan's end, that of its last action.

    If that coordinate is conditioned, and so not part of a path, the coordinate itself is used.
    """
    number = torch.where(free, free.flatten().long().cumsum(0).view_as(free) - 1, -1)
    later = (torch.arange(len(free), device=free.device) + executed).clamp(max=len(free) - 1)
    return torch.where(number[later] >= 0, number[later], number)[free]


def _misfit(prior: Prior | LearnedPrior | None, target: ChainTarget, condition: Tensor | None) -> str | None:
    """Why a prior cannot draft plans of this size; None if it can."""
    steps, size = len(target.std), target.shape.numel()
    if prior is None:
        return None
    if isinstance(prior, LearnedPrior):
        assert condition is not None
        known, observed = prior.sizes, condition.shape[1]
        if known == (observed, steps, size):
            return None
        return (
            f"this prior was learned from plans of {known[2]} numbers in {known[1]} steps with {known[0]} numbers "
            f"observed; here plans have {size} in {steps} with {observed} observed: learn one for this policy"
        )
    fitted = steps if prior.jacobian is None else len(prior.jacobian)
    if prior.states.shape[2:] == target.shape and fitted == steps:
        return None
    return (
        f"the prior was fitted on plans of {prior.states.shape[2:].numel()} numbers in {fitted} steps, this "
        f"policy's have {size} in {steps}: fit one for it"
    )


def _padded(values: Tensor, states: int, window: int) -> Tensor:
    """The values with the last row repeated, up to `states` rows."""
    if len(values) > states:
        raise ValueError(
            f"batch_pad={states} is less than the {len(values)} states of a call; use batch_pad=True, or at "
            f"least {window + 1} for each plan of a batch"
        )
    return torch.cat([values, values[-1:].expand(states - len(values), *values.shape[1:])])
