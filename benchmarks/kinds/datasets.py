"""Result files about `foresample generate`, and the training of the shipped models."""

from __future__ import annotations

from benchmarks.result_files import Record, Result
from foresample.checks.samples import SamplesLaw
from foresample.datasets.manifest import Costs
from foresample.datasets.shards import Failure
from foresample.schema import AtLeastOne, Count, NotNegative, Positive, Some


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
