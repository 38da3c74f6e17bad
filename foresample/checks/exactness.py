"""`fs.check`: tests that speculative sampling of a target with a drafter is exact."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Unpack

from foresample.baseline import sequential
from foresample.checks.adaptedness import drafter_is_adapted
from foresample.checks.distribution import Recorder, same_law, steps_to_test
from foresample.checks.findings import LEVEL, Check, Finding, require_level
from foresample.checks.network import network_is_doubtful, variance_is_above_its_base
from foresample.checks.rows import rows_are_independent
from foresample.checks.steps import step_is_its_own
from foresample.contracts import Target, at_least_one, require_target, seed_number
from foresample.core.noise import seeds_of
from foresample.engine.engine import Engine, chosen_window
from foresample.engine.priors import naming_rows
from foresample.settings import Settings, SpeculationKeywords


def check(
    target: Target,
    *,
    samples: int = 2000,
    slots: int = 500,
    rows: int | None = None,
    seed: int = 0,
    level: float = LEVEL,
    progress: Callable[[int], None] | None = None,
    **settings: Unpack[SpeculationKeywords],
) -> Check:
    """Test a target and a drafter; see `foresample.checks` for what is tested.

    Args:
        target: the chain.
        samples: speculative samples, and as many sequential ones.
        slots: samples under way at a time, at most.
        rows: number of rows that the target has, if it looks something up by `row` (labels, prompts): only rows
            0 … rows − 1 are used. The slots by default.
        seed: seed of all random numbers; two checks with the same seed agree.
        level: false-alarm probability: a correct sampler fails the distribution tests at most that often.
        progress: called with the number of transitions committed since the last call.
        **settings: window, drafter, block and recycle; see `foresample.settings`.
    """
    require_target(target)
    require_level(level)
    seed = seed_number(seed)
    given = Settings.of(settings, without=("slots", "graph", "look")).for_target(target)
    slots = min(at_least_one("slots", slots), at_least_one("samples", samples))
    rows = slots if rows is None else at_least_one("rows", rows)
    slots = min(slots, rows)
    given = replace(given, slots=slots, look=False)  # the test of rows covers more than a look would
    with naming_rows(rows, "rows=64 (foresample check: --slots 64)"):
        window = _window_to_check(target, given)
        given = replace(given, window=window)
        findings = [
            rows_are_independent(target, seed, rows=rows),
            drafter_is_adapted(given.drafter, target, window, seed, rows),
        ]
        if not findings[0].passed:
            skipped = Finding("distribution", False, "not tested: such a target has no transition distribution")
            return Check([*findings, skipped], level)

        seeds = seeds_of(seed, 2 * samples)
        steps = steps_to_test(target)
        recorders = [Recorder(steps, target, samples, seeds=part) for part in seeds.split(samples)]
        for first in range(0, samples, slots):
            ours, theirs = (part[first : first + slots] for part in seeds.split(samples))
            watch = [recorder.from_sample(first, progress) for recorder in recorders]
            Engine(target, given.for_count(len(ours))).sample(ours, watch[0])
            plain = sequential(target, seeds=theirs, observe=watch[1])
        findings += same_law(target, recorders[0], recorders[1], seed, level)
        findings += network_is_doubtful(target, plain.samples)
        findings += step_is_its_own(target, seed)
        findings += variance_is_above_its_base(target, recorders[0])
    return Check(findings, level)


def _window_to_check(target: Target, settings: Settings) -> int:
    """The window as a number; "auto" is measured with the slots of the check."""
    if settings.window == "auto":
        steps_to_test(target)  # raises for a chain that adds no noise
    window = chosen_window(target, settings)
    if window is None:
        raise ValueError(
            f"with {settings.slots} samples at a time no window gains and sampling is sequential, so there is no "
            "speculation to check: give window as a number to check that window"
        )
    return window
