"""Result files about time: one sample, many, rounds, the first sample, Markov chains; and the tests on a GPU."""

from __future__ import annotations

from dataclasses import field

from benchmarks.result_files import Record, Result
from benchmarks.timing import Ratio
from foresample.checks.samples import SamplesLaw
from foresample.engine.tuning import Tuning
from foresample.schema import AtLeastOne, Count, NotNegative, Positive, Some


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
