"""`fs.check`: is speculative sampling of this target, with this drafter, exact?"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from foresample.checks.adaptedness import drafter_is_adapted
from foresample.checks.distribution import Recorder, same_law, steps_to_test
from foresample.checks.findings import LEVEL, Check, Finding, require_level
from foresample.checks.network import network_is_doubtful, variance_is_above_its_base
from foresample.checks.rows import rows_are_independent
from foresample.contracts import Drafter, Target, at_least_one, drafter_for, require_target, resolve_window
from foresample.core.baseline import sequential
from foresample.core.noise import seeds_of
from foresample.drafters import Replay
from foresample.engine.sampling import sample


def check(
    target: Target,
    *,
    window: int,
    drafter: Drafter | None = None,
    block: int | None = None,
    recycle: bool = True,
    samples: int = 2000,
    batch: int = 500,
    rows: int | None = None,
    seed: int = 0,
    level: float = LEVEL,
    progress: Callable[[int], None] | None = None,
) -> Check:
    """Test a target and a drafter; see the module for what is tested.

    Args:
        target: the chain.
        window: as for `sample`.
        drafter: as for `sample`.
        block: as for `sample`.
        recycle: as for `sample`.
        samples: speculative samples, and as many sequential ones.
        batch: how many of them are drawn at a time, at most.
        rows: how many the target has, if it looks something up by `row` (labels, prompts): rows 0 … rows − 1 are used,
            and no others; as many as are drawn at a time by default.
        seed: fixes everything; two checks with one seed agree.
        level: probability with which a correct sampler fails the law tests.
        progress: called with the number of transitions committed since the last call.
    """
    require_target(target)
    require_level(level)
    drafter = drafter_for(Replay() if drafter is None else drafter, target)
    window = resolve_window(window, len(target.std))
    batch = min(at_least_one("batch", batch), at_least_one("samples", samples))
    rows = batch if rows is None else at_least_one("rows", rows)
    batch = min(batch, rows)
    with _naming_rows(rows):
        findings = [
            rows_are_independent(target, seed, rows=rows),
            drafter_is_adapted(drafter, target, window, seed, rows),
        ]
        if not findings[0].passed:
            skipped = Finding("distribution", False, "not tested: such a target has no transition distribution")
            return Check([*findings, skipped], level)

        seeds = seeds_of(seed, 2 * samples)
        steps = steps_to_test(target)
        recorders = [Recorder(steps, target, samples, seeds=part) for part in seeds.split(samples)]
        for first in range(0, samples, batch):
            last = min(first + batch, samples)
            watch = [recorder.from_sample(first, progress) for recorder in recorders]
            sample(
                target,
                seeds=seeds[first:last],
                window=window,
                drafter=drafter,
                block=block,
                recycle=recycle,
                look=False,  # that was the first question
                observe=watch[0],
            )
            plain = sequential(target, seeds=seeds[samples + first : samples + last], observe=watch[1])
        findings += same_law(target, recorders[0], recorders[1], seed, level)
        findings += network_is_doubtful(target, plain.samples)
        if getattr(getattr(target, "chain", None), "low_variance", None) is not None:
            findings.append(variance_is_above_its_base(target, recorders[0]))
    return Check(findings, level)


@contextmanager
def _naming_rows(rows: int) -> Iterator[None]:
    """Say what to do about a target that has fewer rows than are used."""
    try:
        yield
    except IndexError as error:
        raise ValueError(
            f"the target cannot look up one of rows 0 … {rows - 1} ({error}): say how many it has, as rows=64 "
            "(foresample check: --slots 64)"
        ) from error
