"""The findings of a check, and their verdict."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

LEVEL = 1e-3


@dataclass(frozen=True)
class Finding:
    """The answer to one question."""

    question: str
    passed: bool
    detail: str
    tests: int | None = None
    """Number of distribution tests run."""
    smallest_p: float | None = None
    note: bool = False
    """True for a remark that has no bearing on exactness."""
    smallest_shift: float | None = None
    """Shift of a transition's mean, in std of its noise, that these tests reveal 95 times in 100; None for none."""


@dataclass(frozen=True)
class Check:
    """The findings of `foresample.check`."""

    findings: list[Finding]
    level: float

    @property
    def passed(self) -> bool:
        return all(finding.passed for finding in self.findings)

    def to_json(self) -> str:
        return json.dumps({"passed": self.passed, **asdict(self)}, indent=2)

    def __str__(self) -> str:
        return "\n".join(
            f"{'note' if f.note else 'ok  ' if f.passed else 'FAIL'}  {f.question}: {f.detail}"
            for f in self.findings
        )


def require_level(level: float, name: str = "level") -> None:
    """Refuse a false-alarm level outside (0, 1): everything would pass, or nothing."""
    if not 0 < level < 1:
        raise ValueError(f"{name} must be a probability between 0 and 1, not {level}")
