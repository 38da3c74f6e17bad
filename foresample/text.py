"""Values made ready to write: text from elsewhere for a terminal, numbers for JSON, durations for people."""

from __future__ import annotations

import math
from typing import Any


def printable(text: object) -> str:
    """The text with every unprintable character escaped.

    These are control characters (a terminal executes them), line breaks, marks that change the reading direction, and
    surrogates of names that are not valid UTF-8 (printing them fails).
    """
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in str(text))


def without_nan(value: Any) -> Any:
    """The same value with None for NaN and infinity, which JSON does not have."""
    if isinstance(value, dict):
        return {k: without_nan(v) for k, v in value.items()}
    if isinstance(value, list):
        return [without_nan(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def duration(seconds: float) -> str:
    """A time with three digits, in the unit that suits it."""
    unit, size = ("s", 1.0) if seconds >= 0.9995 else ("ms", 1e-3) if seconds >= 0.9995e-3 else ("µs", 1e-6)
    value = seconds / size
    return f"{value:.0f} {unit}" if value >= 99.95 else f"{value:.3g} {unit}"
