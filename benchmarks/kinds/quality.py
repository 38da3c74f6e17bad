"""Result files about pictures and their distribution: distances, labels, and quality against cost."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from benchmarks.names import wilson
from benchmarks.result_files import Record, Result
from benchmarks.timing import Ratio
from foresample.schema import AtLeastOne, Count, NotNegative, Positive, Some


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
