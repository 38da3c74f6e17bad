"""Result files about robot policies: plans in closed loop and on the clock, priors, tasks, deadlines."""

from __future__ import annotations

from dataclasses import field

from benchmarks.result_files import Record, Result
from benchmarks.timing import Ratio
from foresample.schema import AtLeastOne, Count, NotNegative, Positive, Some


class Mean(Record):
    """A mean with its standard error."""

    mean: float
    error: NotNegative


class PValues(Record):
    """p-values of two-sample tests against the sequential policy."""

    distance: float
    to_goal: float


class PlanClock(Record):
    """Milliseconds of a plan."""

    ms: Positive
    ms_90: NotNegative
    calls: Positive
    network_ms: NotNegative | None
    faster: Ratio | None = None
    """Speed-up over the sequential policy, in turns."""


class PolicyRow(Record):
    """One policy in closed loop; without a window, the sequential one."""

    window: int | None
    distance: Mean
    to_goal: Mean
    arrived: Mean
    p_values: PValues
    calls: Positive
    batch_1: PlanClock

    @property
    def label(self) -> str:
        return "sequential" if self.window is None else f"accelerated, window {self.window}"


class Policy(Result, kind="policy"):
    """The handwriting policy (`benchmarks.policies`)."""

    rows: Some[PolicyRow]
    network_call_ms: dict[str, Positive]
    """Milliseconds of a call, by its number of states."""
    calls_by_steps: dict[str, Positive]
    network_call_ratio: dict[str, Ratio] = field(default_factory=dict)
    """The time of a call of one state over that of a larger call, by its number of states."""


class PolicyWarmRow(Record):
    """Calls of a plan in closed loop, by what its first window and its slopes come from."""

    window: AtLeastOne
    warm: bool
    prior: bool
    calls: Positive
    error: NotNegative


class PolicyWarm(Result, kind="policy-warm"):
    """The handwriting policy started warm (`benchmarks.robots handwriting`)."""

    rows: Some[PolicyWarmRow]


class PenRow(Record):
    """One sampler's plans of the demo's handwriting policy."""

    sampler: str
    """sequential or accelerated."""
    ms: Positive
    """Median milliseconds of a plan."""
    network_ms: Positive
    """Median milliseconds of a plan inside the network."""
    calls: Positive
    """Mean network calls of a plan."""
    plan_ms: Some[Positive]
    """Milliseconds of each plan of the first drawing."""
    paths: list[list[list[float]]]
    """Points of each plan of the first drawing."""


class PenSettings(Record):
    """The shape that both pens drew, and how often they planned."""

    shape: str
    start: list[float]
    steps: AtLeastOne
    window: AtLeastOne
    plans: AtLeastOne
    threads: AtLeastOne


class Pens(Result, kind="pens"):
    """The two pens of the demo, planning in turns (`benchmarks.pens`)."""

    settings: PenSettings
    rows: Some[PenRow]
    ratio: Positive
    """Sequential over accelerated, medians of a plan."""
    ratio_interval: list[float]
    """Interval of the median ratio of two plans in turn, at 95 %."""
    compiled: Ratio
    """How much faster the sequential policy is with a compiled network."""
    ours_compiled: Ratio
    """The same of the accelerated policy."""


class Spread(Record):
    """The spread of many plans: robots wait for the slow ones."""

    mean: Positive
    median: Positive
    p99: Positive
    most: Positive


class RobotClockRow(Record):
    """Plans at batch 1, one way of drawing them."""

    method: str
    """sequential or accelerated."""
    run: str
    """eager, compiled, graph, or compiled + graph."""
    window: int | None
    warm: bool
    prior: bool
    plans: AtLeastOne
    ms: Spread
    calls: Spread
    round_ms: Positive | None = None
    """A full-width round, replayed."""
    network_ms: Positive | None = None
    """The network alone on as many states, replayed."""
    rounds_ms: Positive | None = None
    """All rounds of a plan, replayed; the rest of `ms` is spent between and outside of them."""
    auto: bool = False
    """True if the window was measured."""
    faster: Ratio | None = None
    """Speed-up over the fastest sequential plan, in turns."""
    chosen: bool = False
    """True if it was the fastest of its method on other episodes."""
    learned_from: Count = 0
    """Plans that the prior was learned from, on other episodes; 0 for a pooled prior, and without one."""


class RobotClockSettings(Record):
    """The policy and where it ran."""

    parameters: AtLeastOne
    device: str
    threads: AtLeastOne
    steps: AtLeastOne
    tf32: bool = False
    """True if TF32 and cuDNN's benchmarking were on, as LeRobot's scripts set them."""
    precision: str = "float32"
    """Of the network's weights, on both sides; all else is float32."""
    channels_last: bool = False
    """Layout of the network's convolutions, on both sides."""
    failed: list[str] = field(default_factory=list)
    """Sides that failed, and why."""


class RobotClock(Result, kind="robot-clock"):
    """LeRobot's diffusion policy on recorded observations (`benchmarks.robots clock`)."""

    settings: RobotClockSettings
    rows: Some[RobotClockRow]


class CallKernel(Record):
    """A kernel, or all of a kind, in one network call; on a CPU an operator."""

    name: str
    kind: str
    count: Positive
    ms: Positive


class CallProfileRow(Record):
    """One network call on several states."""

    states: AtLeastOne
    ms: Positive
    """Median of a call, without the profiler."""
    gflop: Positive
    """Operations of the matrix products and convolutions."""
    kinds: Some[CallKernel]
    longest: list[CallKernel]
    """The kernels with most of the time, by name."""

    @property
    def kernels(self) -> float:
        return sum(kind.count for kind in self.kinds)

    @property
    def busy(self) -> float:
        """Share of a call's time in which a kernel runs."""
        return sum(kind.ms for kind in self.kinds) / self.ms


class CallProfileSettings(Record):
    """The policy, its weights, and where it ran."""

    parameters: AtLeastOne
    weight_bytes: AtLeastOne
    read_ms: Positive
    """Time in which the device reads all weights once."""
    device: str
    threads: AtLeastOne
    precision: str
    run: str
    """eager, graph, or compiled + graph."""
    channels_last: bool = False
    tf32: bool = False


class RobotProfile(Result, kind="robot-profile"):
    """Where the time of one network call of LeRobot's policy goes (`benchmarks.robots profile`)."""

    settings: CallProfileSettings
    rows: Some[CallProfileRow]


class PlanTail(Spread):
    """The spread of the calls of plans."""

    error: NotNegative
    """Standard error of the mean."""
    p90: Positive


class LearnedPlansRow(Record):
    """Plans at batch 1, all drafted from the same kind of path."""

    window: AtLeastOne
    drafted_from: str
    """nothing, last plan, pooled or learned."""
    learned_from: Count
    """Plans that the prior was made from; 0 without a prior."""
    plans: AtLeastOne
    calls: PlanTail
    evaluations: Positive
    """States evaluated for a plan, on average."""
    processor_ms: Spread
    """Processor time of a plan, on one core."""
    calls_by_part: list[NotNegative]
    """Calls of a plan that began in each equal part of the chain, on average."""
    slow_plans: Count
    """Plans of at least as many calls as the 90th percentile, and more than the mean."""
    slow_calls_by_part: list[NotNegative]
    """The same for the slow plans."""


class LearnedPlansSettings(Record):
    """Steps of the chain, and the equal parts in which calls are counted."""

    steps: AtLeastOne
    parts: AtLeastOne


class LearnedPlans(Result, kind="policy-learned"):
    """Calls of plans by what their first window is drafted from (`benchmarks.learning`)."""

    settings: LearnedPlansSettings
    rows: Some[LearnedPlansRow]


class SuccessRow(Record):
    """One task, one way of planning."""

    task: str
    method: str
    episodes: AtLeastOne
    successes: Count
    low: NotNegative
    high: NotNegative
    """Wilson's interval."""
    plans: AtLeastOne
    calls: Positive
    """Calls of a plan, on average."""


class SuccessSettings(Record):
    """The settings of an episode."""

    longest: AtLeastOne
    """Steps of an episode, at most."""
    waits: dict[str, Count] = field(default_factory=dict)
    """Steps that the robot holds still before each plan, by method; none where physics waits for plans."""


class RobotSuccess(Result, kind="robot-success"):
    """Meta-World in closed loop (`benchmarks.robots success`)."""

    settings: SuccessSettings
    rows: Some[SuccessRow]
    plan_ms: dict[str, Positive] = field(default_factory=dict)
    """Milliseconds of a plan at batch 1, by method, in files from before `benchmarks.robots deadlines`."""

    @property
    def methods(self) -> list[str]:
        return list(dict.fromkeys(row.method for row in self.rows))


class DeadlineRow(Record):
    """Plans of one method at batch 1."""

    method: str
    plans: AtLeastOne
    ms: Spread
    late: Count
    """Plans that took longer than the deadline."""
    faster: Ratio | None = None
    """Speed-up over the first method, in turns."""


class DeadlineSettings(Record):
    """The policy, where it ran, and its deadline."""

    policy: str
    parameters: AtLeastOne
    device: str
    threads: AtLeastOne
    steps: AtLeastOne
    window: AtLeastOne
    deadline_ms: Positive
    """Time in which the robot executes the actions of a plan."""


class Deadlines(Result, kind="robot-deadlines"):
    """Plans that come too late, by method (`benchmarks.robots deadlines`)."""

    settings: DeadlineSettings
    rows: Some[DeadlineRow]
