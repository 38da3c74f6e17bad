"""Result files about other exact methods: curves on equal terms, their published figures, and ranked trees."""

from __future__ import annotations

import re
from typing import Annotated

from benchmarks.result_files import Record, Result
from foresample.schema import AtLeastOne, NotNegative, Positive, Rule, Some

Tree = Annotated[
    str, Rule("a tree such as 5-3-1", lambda text: bool(re.fullmatch(r"\d{1,9}(-\d{1,9})*", text)))
]
"""Children of a tree's nodes, level by level."""


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
