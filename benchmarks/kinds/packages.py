"""Result files about the samplers of other packages."""

from __future__ import annotations

from benchmarks.result_files import Record, Result
from benchmarks.timing import Ratio
from foresample.checks.samples import SamplesLaw
from foresample.schema import AtLeastOne, NotNegative, Positive, Some


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
