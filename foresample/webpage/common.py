"""What several sections share: names of methods and models, series by method."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from foresample.webpage.markup import Point, Role, Series, number
from foresample.webpage.results import Result, is_number

Row = dict[str, Any]

SPEEDUP = "transitions per network call"
EARLIER = ("reflection, nearest, x0 reused", "block, parent, fresh noise, x0 reused")
DEFAULT = "default, x0 reused"
OURS = (DEFAULT, "default", "foresample", "ours", "replay, block, secant")
"""How the names of our own method begin; of several the first in this order is drawn strongest."""
MODELS = {"cifar10": "CIFAR-10", "fashion_mnist": "Fashion-MNIST"}


def bench_rows(result: Result, x: str) -> list[Row]:
    """Rows of a benchmark: method, x, and speed-up with its error."""
    return result.rows(text=("method",), numbers=("speedup_error",), positive=(x, "speedup"))


def model_title(result: Result) -> str:
    """The model as people call it."""
    name = str(result.settings.get("model", result.name))
    return MODELS.get(name, name)


def by_method(
    rows: Sequence[Row], x: str, y: str, error: str | None, note: Callable[[Row], str]
) -> list[Series]:
    """One series for each method, our own drawn strongest."""
    methods: dict[str, list[Row]] = {}
    for row in rows:
        methods.setdefault(row["method"], []).append(row)
    ours = next((name for start in OURS for name in methods if name.lower().startswith(start)), None)
    series = []
    for name, own in methods.items():
        exact = all(row.get("exact", True) for row in own)
        role: Role = "inexact" if not exact else "ours" if name == ours else "exact"
        own = sorted(own, key=lambda row: row[x])
        errors = [row.get(error) if error and is_number(row.get(error)) else None for row in own]
        points = [Point(row[x], row[y], e, note(row)) for row, e in zip(own, errors, strict=True)]
        series.append(Series(name, points, role))
    return series


def counts(row: Row) -> str:
    """What a row cost."""
    told = [(row.get("calls"), "calls"), (row.get("evaluations"), "evaluations a sample")]
    return ", ".join(f"{number(value)} {what}" for value, what in told if is_number(value))


def machine_of(result: Result) -> str:
    """Where it ran, to stand behind a sentence."""
    machine = result.data.get("machine")
    gpu = machine.get("gpu") if isinstance(machine, dict) else None
    return f" on one {gpu}" if gpu else " on a CPU"
