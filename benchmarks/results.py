"""The committed result files: the kinds of this repository's evidence, read by `benchmarks.result_files`.

Every script here writes its file with `save`; tables, plots and the page read it with `load` or `read`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, field, is_dataclass, replace
from pathlib import Path
from typing import Annotated, Any, TypeVar

from benchmarks.result_files import BenchRow, Record, Result, ResultError, Results, read_result, read_results
from benchmarks.timing import Ratio
from foresample.checks.samples import SamplesLaw
from foresample.datasets.manifest import Costs
from foresample.datasets.shards import Failure
from foresample.engine.tuning import Tuning
from foresample.provenance import make_result, write_result
from foresample.schema import AtLeastOne, Count, NotNegative, Positive, Rule, Some

RESULTS = Path(__file__).parent / "results"

LABELS = {
    "reflection-head": "reflection, head",
    "reflection-nearest": "reflection, nearest",
    "per-step-parent-fresh": "per step, parent, fresh noise",
    "block-parent-fresh": "block, parent, fresh noise",
    "replay-per-step": "replay without secant, per step",
    "replay-block": "replay without secant",
    "default": "default",
    "sequential": "sequential",
    "reflection-parent": "reflection, parent",
    "blocks-parent": "blocks, parent",
    "blocks-nearest": "blocks, nearest",
    "asd": "ASD",
    "dgrs": "D-GRS",
    "rass": "RASS",
    "paradigms": "ParaDiGMS",
    "parasolver": "ParaSolver",
    "parataa": "ParaTAA",
    "ddpm": "few-step DDPM",
    "ddim": "DDIM",
    "dpmpp-2m": "DPM-Solver++ 2M",
}
"""Methods as people read them, those of the package and their peers."""
MODELS = {"cifar10": "CIFAR-10", "fashion_mnist": "Fashion-MNIST"}
"""Models by their folders."""


def wilson(successes: int, count: int) -> tuple[float, float]:
    """Wilson's interval of a share, at 95 %."""
    share, z2 = successes / count, 1.959963984540054**2 / count
    middle, wide = share + z2 / 2, math.sqrt(z2 * (share * (1 - share) + z2 / 4))
    return max(0.0, (middle - wide) / (1 + z2)), min(1.0, (middle + wide) / (1 + z2))


def label(method: str) -> str:
    """A method as people read it."""
    return LABELS.get(method, method)


Tree = Annotated[
    str, Rule("a tree such as 5-3-1", lambda text: bool(re.fullmatch(r"\d{1,9}(-\d{1,9})*", text)))
]
"""Children of a tree's nodes, level by level."""


# ------------------------------------------------------------------ calls


class CallsRow(BenchRow):
    """One method on a chain of `steps` steps."""

    steps: AtLeastOne
    reuse: str

    @property
    def label(self) -> str:
        return f"{label(self.method)}, {self.reuse} reused"


class CallsSettings(Record):
    """A trained model."""

    model: str
    window: AtLeastOne
    count: AtLeastOne
    seed: int
    half: bool


class Calls(Result, kind="calls"):
    """Speed-up in calls on a trained model (`benchmarks.models calls`)."""

    settings: CallsSettings
    rows: Some[CallsRow]


class CurveSettings(Record):
    """A chain, and how it was measured."""

    problem: str
    """Its key, in `benchmarks.curves.PROBLEMS`."""
    target: str
    """A label for people."""
    steps: AtLeastOne
    reuse: list[str]
    samples: AtLeastOne
    seed: int
    pilots: AtLeastOne
    part: AtLeastOne
    device: str
    half: bool


class CurvePoint(Record):
    """One method at one verification batch: means over samples and their standard errors."""

    method: str
    exact: bool
    states: AtLeastOne
    samples: AtLeastOne
    calls: Positive
    calls_error: NotNegative
    evaluations: Positive
    evaluations_error: NotNegative
    speedup: Positive
    speedup_error: NotNegative
    reuse: str
    shape: Tree | None = None


class Curves(Result, kind="curves"):
    """Every method at equal states a call (`benchmarks.curves`)."""

    settings: CurveSettings
    commands: list[str]
    rows: Some[CurvePoint]


class GrowthRow(Record):
    """A chain of `steps` steps."""

    steps: AtLeastOne
    calls: Positive
    calls_error: NotNegative


class GrowthSettings(Record):
    """A trained model."""

    model: str
    network: str
    window: AtLeastOne
    samples: AtLeastOne
    seed: int


class Growth(Result, kind="growth"):
    """Calls against chain length (`benchmarks.clock growth`)."""

    settings: GrowthSettings
    rows: Some[GrowthRow]
    exponent: float


# ------------------------------------------------------------------ the clock


class LatencyRow(Record):
    """One sample at a time; window 0 is the sequential sampler."""

    steps: AtLeastOne
    window: Count
    calls: Positive
    ms: Positive
    ms_error: NotNegative
    gain: Positive
    faster: Ratio | None = None
    """Speed-up over the sequential sampler, in turns."""
    chosen: bool = False
    """True if the window was the fastest on pilot samples."""
    way: str | None = None
    """How the network ran (`benchmarks.ways`), the fastest way of this side on pilot samples."""
    law: SamplesLaw | None = None
    """The timed samples against those of the sequential sampler, drawn from other seeds."""


class WayRow(Record):
    """A way to run the network (`benchmarks.ways`), tried on pilot samples; window 0 is the sequential sampler."""

    way: str
    steps: AtLeastOne
    window: Count
    ms: Positive
    """Median of a sample."""
    chosen: bool
    """True if this side was then timed in this way."""


class RoundShare(Record):
    """Microseconds of a round and of the network in it; window 0 is the sequential sampler."""

    window: Count
    round_us: Positive
    round_us_error: NotNegative
    network_us: Positive
    network_us_error: NotNegative
    share: float
    """Share of a round's time that is not the network's."""


class LatencySettings(Record):
    """A trained model, "graph" or "eager"."""

    model: str
    network: str
    mode: str
    samples: AtLeastOne
    seed: int
    pilots: Count = 0
    """Pilots of the prior that first windows were drafted from; 0 without a prior."""
    bands: bool = False
    """True if the prior had the network's average Jacobian, by bands of frequency."""
    benchmarked: bool = False
    """In files without `ways`: True if cuDNN chose its convolutions by trying them, for both samplers."""


class Latency(Result, kind="latency"):
    """Milliseconds a sample on a GPU (`benchmarks.clock latency`)."""

    settings: LatencySettings
    rows: Some[LatencyRow]
    rounds: list[RoundShare] = field(default_factory=list)
    tunings: list[Tuning] = field(default_factory=list)
    ways: list[WayRow] = field(default_factory=list)


class WarmRow(Record):
    """Calls of a sample started cold and started from a prior, from the same seeds."""

    model: str
    steps: AtLeastOne
    window: AtLeastOne
    bands: bool = False
    """True if the prior also had the network's average Jacobian, by bands of frequency."""
    pilots: AtLeastOne
    cold: Positive
    cold_error: NotNegative
    warm: Positive
    warm_error: NotNegative
    fewer: float
    """Share of the cold calls that is saved."""
    fewer_error: NotNegative


class WarmSettings(Record):
    """Trained models."""

    samples: AtLeastOne
    seed: int
    network: str


class Warm(Result, kind="warm"):
    """Calls saved by starting warm (`benchmarks.clock warm`)."""

    settings: WarmSettings
    rows: Some[WarmRow]


class CpuRoundRow(Record):
    """Milliseconds of one core a round: the network, and all else by the compiled round and by the plain one."""

    target: str
    dim: AtLeastOne
    steps: AtLeastOne
    window: AtLeastOne
    slots: AtLeastOne
    calls: Positive
    network_ms: Positive
    own_ms: NotNegative
    plain_own_ms: NotNegative
    sequential_ms: Positive
    """A sample, one by one as all samples here."""
    sample_ms: Positive

    @property
    def share(self) -> float:
        """All else over the network."""
        return self.own_ms / self.network_ms


class CpuRoundSettings(Record):
    """The quickest of `repeats` repeats counts."""

    repeats: AtLeastOne
    seed: int


class CpuRounds(Result, kind="cpu-rounds"):
    """The sampler's own arithmetic on a CPU (`benchmarks.clock cpu`)."""

    settings: CpuRoundSettings
    rows: Some[CpuRoundRow]


class CpuClockRow(Record):
    """One chain on one core, its samples drawn `together`."""

    target: str
    steps: AtLeastOne
    together: AtLeastOne
    window: AtLeastOne
    calls: Positive
    sequential_ms: Positive
    """Median milliseconds a sample."""
    ms: Positive
    ratio: Ratio


class CpuClockSettings(Record):
    """Time limit of a case, and the seed of the samples that were timed."""

    seconds: Positive
    seed: int


class CpuClock(Result, kind="cpu-clock"):
    """Both samplers on one core (`benchmarks.cpu`)."""

    settings: CpuClockSettings
    rows: Some[CpuClockRow]


class ThroughputRow(Record):
    """A GPU that is full."""

    steps: AtLeastOne
    calls: Positive
    occupancy: NotNegative
    fixed_occupancy: NotNegative
    samples_per_second: Positive
    fixed_samples_per_second: Positive
    sequential_samples_per_second: Positive
    gain_over_fixed: NotNegative
    faster: Ratio | None = None
    """Speed-up over the sequential sampler in fixed batches, in turns."""
    faster_than_fixed: Ratio | None = None


class ThroughputSettings(Record):
    """A trained model."""

    model: str
    network: str
    window: AtLeastOne
    slots: AtLeastOne
    samples: AtLeastOne


class Throughput(Result, kind="throughput"):
    """Many samples through few slots (`benchmarks.clock throughput`)."""

    settings: ThroughputSettings
    rows: Some[ThroughputRow]
    tunings: list[Tuning]


class MemoryRow(Record):
    """Peak memory of a stream."""

    steps: AtLeastOne
    samples: AtLeastOne
    peak_mib: NotNegative


class MemorySettings(Record):
    """A trained model."""

    model: str
    network: str
    slots: AtLeastOne
    window: AtLeastOne


class Memory(Result, kind="memory"):
    """Device memory over chain lengths and numbers of samples (`benchmarks.clock memory`)."""

    settings: MemorySettings
    rows: Some[MemoryRow]


class GpuTests(Result, kind="gpu-tests"):
    """Tests that need a GPU (`benchmarks.clock tests`)."""

    passed: list[str]
    failed: list[str]
    skipped: list[str] = field(default_factory=list)
    unfinished: list[str] = field(default_factory=list)
    """Begun or not: the run was stopped before."""


class SoakSettings(Record):
    """Samples of all variants together, and how they were drawn."""

    samples: AtLeastOne
    seed: int
    slots: AtLeastOne
    pilots: AtLeastOne
    device: str


class SoakRow(Record):
    """One variant of the fused rounds in one precision."""

    variant: str
    """Its key, in `benchmarks.soak.VARIANTS`."""
    dtype: str
    samples: AtLeastOne
    faults: Count
    calls: Positive
    """Mean network calls a sample."""
    compared: Count
    """Samples whose every round was compared with the plain one."""
    difference: str | None = None
    """The first disagreement."""


class Soak(Result, kind="gpu-soak"):
    """Millions of samples through the fused rounds (`benchmarks.soak draw`)."""

    settings: SoakSettings
    rows: Some[SoakRow]


class SanitizerSettings(Record):
    """Tools of compute-sanitizer, and the rounds they watched."""

    tools: list[str]
    variants: list[str]
    dtypes: list[str]
    device: str


class SanitizerRow(Record):
    """The verdict of one tool."""

    tool: str
    status: int
    """The program's exit status."""
    findings: Count | None
    """Errors or hazards that the tool counted; None if it ended without a summary."""
    summary: str | None
    output: str
    """Its own lines, the first 400."""

    @property
    def clean(self) -> bool:
        return self.status == 0 and self.findings == 0


class Sanitized(Result, kind="gpu-sanitizer"):
    """The kernels under compute-sanitizer (`benchmarks.soak sanitize`)."""

    settings: SanitizerSettings
    rows: Some[SanitizerRow]


# ------------------------------------------------------------------ quality


class Distance(Record):
    """Fréchet distance of two sets of pictures: keys of `Quality.runs`, or "real"."""

    a: str
    b: str
    distance: float


class PictureRun(Record):
    """One set of pictures."""

    sampler: str
    """Sequential or speculative."""
    calls: Positive
    agreement: NotNegative
    """Share of pictures in which the classifier sees the requested label."""


class QualitySettings(Record):
    """A trained model."""

    steps: AtLeastOne
    window: AtLeastOne
    count: AtLeastOne
    half: bool


class Quality(Result, kind="quality"):
    """Are the pictures as good? (`benchmarks.models quality`)"""

    settings: QualitySettings
    runs: dict[str, PictureRun]
    distances: Some[Distance]

    @property
    def pairs(self) -> dict[tuple[str, str], list[float]]:
        """Distances by the samplers of the two sets, real pictures among them."""
        groups: dict[tuple[str, str], list[float]] = {}
        for row in self.distances:
            one, two = sorted(self.runs[key].sampler if key in self.runs else key for key in (row.a, row.b))
            groups.setdefault((one, two), []).append(row.distance)
        return groups


class QualityCostPoint(Record):
    """The cost of a method's samples, and their distance to the sequential sampler's."""

    method: str
    window: int | None = None
    """Window of an exact method. The other methods trade quality for calls by one of the next two:"""
    tolerance: float | None = None
    steps: int | None = None
    exact: bool
    calls: Positive
    evaluations: Positive
    distance: float
    """Distance to the sequential sampler: a mean over sets of samples, where there are several."""
    distance_error: NotNegative | None = None
    """Standard error over the sets, as below; one set has none."""
    to_data: float | None = None
    """Distance to real data, measured alike."""
    to_data_error: NotNegative | None = None
    seconds: NotNegative
    """A sample, many at a time."""
    alone_ms: float | None = None
    """A sample drawn alone."""
    faster: Ratio | None = None
    """Speed-up over the sequential sampler, samples drawn alone and in turns."""

    @property
    def detail(self) -> str:
        parts = {"window {}": self.window, "tolerance {:g}": self.tolerance, "{} steps": self.steps}
        return ", ".join(text.format(value) for text, value in parts.items() if value is not None)


class QualityCostSettings(Record):
    """A trained model; `features` names the features in which distances are measured."""

    target: str
    steps: AtLeastOne
    count: AtLeastOne
    window: AtLeastOne
    seed: int
    half: bool
    device: str
    features: str = "the shipped classifier's"
    sets: AtLeastOne = 1
    """Sets of `count` samples of each method, each of seeds of its own."""
    data: str | None = None
    """The real data that distances are also taken to."""


class QualityCost(Result, kind="quality-cost"):
    """Distance to the sequential distribution against calls (`benchmarks.quality_cost`)."""

    settings: QualityCostSettings
    commands: list[str]
    rows: Some[QualityCostPoint]

    @property
    def floor(self) -> QualityCostPoint:
        """Sequential samples of other seeds."""
        return next(row for row in self.rows if row.method == "sequential")

    @staticmethod
    def joined(results: Sequence[QualityCost]) -> list[QualityCost]:
        """Results of the same settings as one, under the first name; methods together, loose tolerances last."""
        groups: dict[str, list[QualityCost]] = {}
        for result in results:
            groups.setdefault(repr(result.settings), []).append(result)
        whole = []
        for same in groups.values():
            rows = [row for result in same for row in result.rows]
            order = list(dict.fromkeys(row.method for row in rows))
            rows.sort(key=lambda row: (order.index(row.method), row.tolerance or 0, row.steps or 0))
            whole.append(replace(same[0], rows=rows))
        return whole


# ------------------------------------------------------------------ published figures


class Setting(Record):
    """A chain of the mixture of the draft-tree papers, and a window or a tree on it."""

    dim: AtLeastOne
    churn: float
    steps: AtLeastOne
    window: int | None = None
    tree: Tree | None = None

    @property
    def chain(self) -> str:
        return f"d = {self.dim}, ε = {self.churn:g}, T = {self.steps}"


class Claim(Record):
    """A published figure: one number, a range, or "up to" where there is no `low`."""

    low: float | None
    high: float

    def __str__(self) -> str:
        if self.low is None:
            return f"up to {self.high:g}"
        return f"{self.high:g}" if self.low == self.high else f"{self.low:g}–{self.high:g}"


class PublishedRow(Record):
    """One method on one chain."""

    method: str
    setting: Setting
    published: Claim | None
    """Its speed-up."""
    speedup: Positive
    error: NotNegative
    calls: Positive
    calls_error: NotNegative
    evaluations_a_call: NotNegative
    samples: AtLeastOne


class Gain(Record):
    """One method against another, in per cent."""

    method: str
    against: str
    setting: Setting
    published: Claim
    """The published gain: of trees in fewer calls, of blocks in speed."""
    fewer_calls: float
    faster: float
    error: NotNegative
    """Standard error of `faster`; that of `fewer_calls` is smaller."""


class PublishedSettings(Record):
    """The samples, and the prediction that is reused."""

    samples: AtLeastOne
    reuse: str
    target: str


class Published(Result, kind="published"):
    """Papers' figures, measured again (`benchmarks.published`)."""

    settings: PublishedSettings
    rows: Some[PublishedRow]
    gains: Some[Gain]
    growth: str
    """A sentence on what the gain of blocks depends on."""


class RankSettings(Record):
    """Samples of each method and chain, and the tree of all."""

    samples: AtLeastOne
    tree: Tree


class RankGain(Record):
    """RASS against D-GRS on one chain."""

    chain: str
    mismatch: NotNegative
    """Median at the nodes with several children, in standard deviations of the transition."""
    rejected_in_turn: NotNegative
    """Share of such nodes whose children D-GRS rejects, computed at the mismatches it met."""
    rejected_by_rank: NotNegative
    """The same of RASS, at the same mismatches."""
    fewer_calls: float
    """The difference in per cent."""
    error: NotNegative


class Ranked(Result, kind="ranked"):
    """The saving of ranks in draft trees (`benchmarks.ranked`)."""

    settings: RankSettings
    rows: Some[RankGain]


# ------------------------------------------------------------------ the policy


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


# ------------------------------------------------------------------ packages


class PackageCountRow(Record):
    """A package's own loop and the accelerated one, timed in turns for a number of samples at a time."""

    count: AtLeastOne
    window: AtLeastOne
    """Chosen on a pilot."""
    calls: Positive
    """Per sample, mean of the turns; the own loop makes one a step."""
    calls_error: NotNegative
    evaluations: Positive
    """States evaluated per sample."""
    seconds: Positive
    """Median of the turns, for all samples of one."""
    own_seconds: Positive
    """The same of the package's own loop."""
    faster: Ratio
    """The own loop's time over the accelerated one's."""


class PackageRow(PackageCountRow):
    """The same of one package on a GPU, eager or captured."""

    name: str
    steps: AtLeastOne
    captured: bool
    """True for the sequential sampler against ours, both as CUDA graphs; False for the package's own loop against the
    accelerated one, both eager. The own loop's seconds are then ten times those of a loop with a tenth of the steps."""
    law: SamplesLaw
    """The timed samples against all of the package's captured sequential sampler."""


class Packages(Result, kind="packages"):
    """`benchmarks.packages` on a GPU."""

    rows: Some[PackageRow]


class PackageCounts(Result, kind="package-counts"):
    """`benchmarks.packages` for 1 to 1000 samples at a time."""

    package: str
    steps: AtLeastOne
    rows: Some[PackageCountRow]
    law: SamplesLaw
    """All samples of the last row's turns against those of the package's own loop."""


class CopyRow(Record):
    """A repository's copy of OpenAI's diffusion class, and how many tests it passed."""

    repository: str
    commit: str
    passed: AtLeastOne
    skipped: int
    """Tests of what this copy does not have."""
    failed: int


class Copies(Result, kind="openai"):
    """`python -m tests.openai`."""

    rows: Some[CopyRow]


# ------------------------------------------------------------------ who finishes first


class OrderRow(Record):
    """A rule by which samples are chosen from a run."""

    rule: str
    rounds: AtLeastOne | None
    """Rounds after which the run was stopped; None if it was not."""
    kept: Positive
    """Samples a run, on average."""
    right: NotNegative
    """P(x > 0) among them."""
    error: NotNegative


class OrderSettings(Record):
    """The chain and the runs."""

    steps: AtLeastOne
    window: AtLeastOne
    slots: AtLeastOne
    runs: AtLeastOne
    seed: int
    sequential: AtLeastOne


class Order(Result, kind="order"):
    """Samples chosen by when they were done (`benchmarks.order`)."""

    settings: OrderSettings
    right: NotNegative
    """P(x > 0) of the sequential sampler."""
    error: NotNegative
    rows: Some[OrderRow]


class McmcChain(Record):
    """A Langevin chain, and the effective samples of one path behind its burn-in, for both samplers."""

    name: str
    effective: Positive
    """Effective samples of sequential paths, from which rates are computed."""
    effective_error: NotNegative
    speculative: Positive
    speculative_error: NotNegative


class McmcRow(Record):
    """One chain, or several at a time; window 0 is the sequential sampler."""

    chain: str
    chains: AtLeastOne
    window: Count
    calls: Positive
    """Mean calls of a chain."""
    ms: Positive
    """A run of all of them."""
    ms_error: NotNegative
    effective_a_second: Positive
    gain: Ratio | None
    """Ratio to the sequential sampler; None for that sampler itself."""


class McmcSettings(Record):
    """Chains of `steps` transitions, the first `burn` of which are not counted."""

    steps: AtLeastOne
    burn: Count
    seed: int


class Mcmc(Result, kind="mcmc"):
    """Effective samples a second of Langevin chains (`benchmarks.mcmc`)."""

    settings: McmcSettings
    chains: Some[McmcChain]
    rows: Some[McmcRow]


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


# ------------------------------------------------------------------ the first sample


class StartRow(Record):
    """A new process, from its start to its first sample."""

    way: str
    """eager, compiled, captured, or compiled and captured."""
    cached: bool
    """True if an earlier process has left compiled code in the caches of Numba and torch."""
    seconds: Positive
    processor_seconds: Positive
    """Processor seconds of the whole process, which draws a second sample."""
    import_seconds: Positive
    preparation_seconds: NotNegative
    next_seconds: Positive
    """The second sample."""
    compilations: Count
    """Graphs that torch.compile compiled."""


class StartCommand(Record):
    """A command that prints help or a usage error."""

    arguments: list[str]
    status: Count
    processor_seconds: Positive
    """Median of several runs."""


class StartSettings(Record):
    """The model, the chain and the machine."""

    model: str
    steps: AtLeastOne
    window: AtLeastOne
    device: str
    repeats: AtLeastOne


class Start(Result, kind="start"):
    """Seconds to the first sample, and processor seconds of help and errors (`benchmarks.clock start`)."""

    settings: StartSettings
    rows: Some[StartRow]
    commands: Some[StartCommand]


# ------------------------------------------------------------------ one figure, settled


class AgreementSettings(Record):
    """Settings of every set of pictures."""

    steps: AtLeastOne
    window: AtLeastOne
    slots: AtLeastOne
    count: AtLeastOne


class AgreementRow(Record):
    """One set of pictures."""

    network: str
    """float32 or bfloat16."""
    sampler: str
    """sequential or speculative."""
    seed: int
    pictures: AtLeastOne
    agree: Count
    """Pictures in which the classifier sees the requested label."""
    calls: Positive
    seconds: Positive

    @property
    def share(self) -> float:
        return self.agree / self.pictures

    @property
    def interval(self) -> tuple[float, float]:
        return wilson(self.agree, self.pictures)


class CallSizeRow(Record):
    """Differences between the network's answers and its answers in calls of one state."""

    network: str
    states: AtLeastOne
    """States in a call."""
    most: NotNegative
    rms: NotNegative
    mean: float
    mean_error: NotNegative
    answer: NotNegative
    """Root mean square of the answers themselves."""


class Agreement(Result, kind="agreement"):
    """Labels that the classifier sees in sequential and in speculative pictures (`benchmarks.agreement`)."""

    settings: AgreementSettings
    rows: Some[AgreementRow]
    calls: list[CallSizeRow]

    def differences(self) -> dict[str, tuple[float, float]]:
        """Speculative minus sequential share and its standard error, for every network that has both sets."""
        found = {}
        for network in dict.fromkeys(row.network for row in self.rows):
            sets = {row.sampler: row for row in self.rows if row.network == network}
            if {"sequential", "speculative"} <= sets.keys():
                one, two = sets["sequential"], sets["speculative"]
                both = (one.agree + two.agree) / (one.pictures + two.pictures)
                error = math.sqrt(max(both * (1 - both), 1e-9) * (1 / one.pictures + 1 / two.pictures))
                found[network] = two.share - one.share, error
        return found

    @property
    def p_value(self) -> float:
        """One test that samplers agree: Σ (difference / error)² over the networks, χ² of as many degrees of freedom."""
        squares = [(d / error) ** 2 for d, error in self.differences().values()]
        if len(squares) == 1:
            return math.erfc(math.sqrt(squares[0] / 2))
        if len(squares) == 2:
            return math.exp(-sum(squares) / 2)
        raise ValueError("the test is of one network or two, and there are both sets of none")


# ------------------------------------------------------------------ datasets and training


class OverheadRow(Record):
    """The cost of a dataset beyond the engine's own work."""

    target: str
    count: AtLeastOne
    window: AtLeastOne
    slots: AtLeastOne
    shard: AtLeastOne
    engine_seconds: Positive
    dataset_seconds: Positive
    beside: float
    beside_error: NotNegative | None = None
    turns: AtLeastOne | None = None
    inside: float
    inside_cpu: float


class GenerateOverhead(Result, kind="generate-overhead"):
    """`benchmarks.generate overhead`."""

    rows: Some[OverheadRow]


class GenerateMemoryRow(Record):
    """Peak resident memory of a dataset."""

    dim: AtLeastOne
    count: AtLeastOne
    samples_mib: Positive
    peak_mib: Positive
    seconds: Positive


class GenerateMemory(Result, kind="generate-memory"):
    """`benchmarks.generate memory`."""

    rows: Some[GenerateMemoryRow]


class GenerateLawSettings(Record):
    """The mixture."""

    dim: AtLeastOne
    steps: AtLeastOne
    window: AtLeastOne
    slots: AtLeastOne
    count: AtLeastOne


class GenerateLaw(Result, kind="generate-law"):
    """A large dataset (`benchmarks.generate law`)."""

    settings: GenerateLawSettings
    law: SamplesLaw
    costs: Costs
    failures: list[Failure]
    shards: Count
    seconds: Positive
    peak_mib: Positive


class Training(Result, kind="training"):
    """A model (`recipes.train`)."""

    model: str
    parameters: AtLeastOne
    bytes: AtLeastOne
    steps: AtLeastOne
    batch: AtLeastOne
    seconds: Positive
    loss: float
    test_loss: float


class ClassifierTraining(Result, kind="training-classifier"):
    """The judge (`recipes.classifier`)."""

    parameters: AtLeastOne
    bytes: AtLeastOne
    epochs: AtLeastOne
    train_accuracy: NotNegative
    test_accuracy: NotNegative
    seconds: Positive


# ------------------------------------------------------------------ reading and writing

R = TypeVar("R", bound=Result)


def read(folder: Path = RESULTS) -> Results:
    """All results of the folder and those below it."""
    return read_results(folder)


def load(kind: type[R], name: str, folder: Path = RESULTS) -> R:
    """One of them, which must be of this kind."""
    path = folder / f"{name}.json"
    result = read_result(path, name)
    if not isinstance(result, kind):
        raise ResultError(f"{path} is no result of the kind {kind.__name__}")
    return result


def save(path: Path, kind: str, settings: Any, **content: Any) -> None:
    """Write a result; dataclasses as objects."""
    write_result(path, make_result(kind, _plain(settings), **_plain(content)))


def _plain(value: Any) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        return asdict(value)
    if isinstance(value, Mapping):
        return {key: _plain(part) for key, part in value.items()}
    return [_plain(part) for part in value] if isinstance(value, list) else value
