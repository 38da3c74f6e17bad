"""Result files about the number of calls: methods side by side, growth with the chain, and the order of finishing."""

from __future__ import annotations

from benchmarks.names import label
from benchmarks.result_files import BenchRow, Record, Result
from foresample.schema import AtLeastOne, NotNegative, Positive, Some


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
