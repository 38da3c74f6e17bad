"""An exactness self-test that users run on their own target and drafter.

Three questions, each answered with numbers:

    rows       Do `start`, `predict` and `mean` treat rows independently, and answer the same when asked the same?
               What they answered along a few paths, at every step, is asked for again with other batch-mates
               (`core.look`). A target that mixes rows, draws random numbers or keeps state has no transition
               distribution at all.
    adapted    Does a guess at a step, or how far a window reaches, change when states and predictions of later
               steps do?
    distribution
               Do speculative and sequential samples have the same distribution? Kolmogorov–Smirnov tests along the
               chain: random projections and norms of states, of increments (the joint distribution of consecutive
               states), and innovations (x_{k+1} − mean_k(x_k))/std_k, which must be N(0, I) and independent of x_k.

The first two compare numbers, and their power does not depend on how many samples are drawn. The distribution tests
share one false-alarm level: a correct sampler fails them with at most that probability. They also say which error so
many samples would have shown.

A network that does not return what was promised (a score for x0, say) is sampled exactly all the same, and its samples
are worth nothing: where noise put into them is not found again, a note says so.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from statistics import NormalDist
from typing import Any

import numpy as np
import torch
from torch import Tensor

from foresample.contracts import (
    Drafter,
    DraftPath,
    PreviousDraft,
    Target,
    Wrapper,
    at_least_one,
    begin_memory,
    drafter_for,
    earlier_predictions,
    expand,
    no_history,
    predict,
    remember,
    require_target,
    resolve_window,
    start_states,
    transition_mean,
)
from foresample.core.baseline import sequential
from foresample.core.look import (
    DIFFERS,
    STATES,
    Difference,
    Part,
    Shift,
    State,
    dependence,
    require_unedited,
    shift_at,
)
from foresample.core.noise import START, extra_noise, normal, seeds_of
from foresample.core.report import Commit
from foresample.drafters import Replay
from foresample.engine.sampling import sample

LEVEL = 1e-3
_NEAR = 1.05  # of its base: a learned variance that low came near it
_FOUND = 0.5  # of the noise put into samples: a network that finds less of it is doubted


@dataclass(frozen=True)
class Finding:
    """One answer."""

    question: str
    passed: bool
    detail: str
    tests: int | None = None
    """Number of distribution tests run."""
    smallest_p: float | None = None
    note: bool = False
    """Whether it is a remark beside the question of exactness."""
    smallest_shift: float | None = None
    """Shift of a transition's mean, in std of its noise, that these tests find 95 times in 100; None if none."""


@dataclass(frozen=True)
class Check:
    """All answers."""

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
        steps = _steps_to_test(target)
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


def require_level(level: float) -> None:
    """Refuse what is no probability of a false alarm: with it everything would pass, or nothing."""
    if not 0 < level < 1:
        raise ValueError(f"level is a probability between 0 and 1, not {level}")


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


# ---------------------------------------------------------------- rows

_AT_ONCE = 64  # states of many steps in one call
_DOUBTED = 64  # answers that are asked for twice more, at most
_STARTS = 4 * STATES  # first states that are compared
_HELD = 2**24  # elements of the states that are kept of a walk


@dataclass(frozen=True)
class Asked:
    """A method of a target, with arguments for many rows and the answers that they got."""

    part: Part
    answer: Callable[[Tensor], Tensor]
    """Answers to the arguments of these indices, in one call."""
    before: Tensor
    """[M, *shape]: answers as they were first given, NaN where there is none."""
    allowed: Tensor
    """[M]: relative changes that are rounding."""
    shift: Callable[[int], Shift]


def rows_are_independent(target: Target, seed: int = 0, rows: int | None = None) -> Finding:
    """Ask for first states, predictions and means a second time, in other company, at every step of the chain.

    A few samples are walked through the chain. Then what the target answered along their paths is asked for again, in
    calls on states of many steps. An answer that differs may be rounding, so it is asked for twice more, in calls of
    one size with different batch-mates. All states are on the samples' own paths.
    """
    with torch.no_grad():
        start, (prediction, mean), edited = _walked(target, seed, rows or STATES)
        worst = []
        for asked in (start, prediction, mean):
            change, wrong = _depends(asked)
            if wrong is not None:
                return Finding("rows are independent", False, str(replace(wrong, part=asked.part)))
            worst.append(change)
    detail = (
        f"with other batch-mates a prediction changes by {worst[1]:.1e} of its size, a mean by {worst[2]:.1e}, a first "
        f"state by {worst[0]:.1e} ({len(target.std)} steps)"
    )
    if edited:
        detail += "; predict writes into its states, which does no harm here: they are copies"
    return Finding("rows are independent", True, detail)


def _depends(asked: Asked) -> tuple[float, Difference | None]:
    """The largest change of an answer, and what else than its own row it depends on."""
    count, device = len(asked.before), asked.before.device
    changes = torch.zeros(count)
    order = torch.randperm(count, generator=torch.Generator().manual_seed(0))
    half = order % STATES < STATES // 2  # of the samples, so that a call's average over rows is another one
    at_once = max(STATES, min(_AT_ONCE, _ELEMENTS // asked.before[0].numel()))
    for part in (*order[half].split(at_once), *order[~half].split(at_once)):
        at = part.to(device)
        one, two = asked.before[at].flatten(1), asked.answer(at).flatten(1)
        apart = (one - two).norm(dim=1) / (one.norm(dim=1) + 1e-30)
        changes[part] = torch.where(apart.isfinite(), apart, 0.0).float().cpu()
    doubted = (changes > asked.allowed).nonzero().flatten()
    for i in doubted[torch.linspace(0, len(doubted) - 1, min(_DOUBTED, len(doubted))).long()].tolist():
        found = dependence(partial(_in_company, asked, i), asked.shift(i), float(asked.allowed[i]))[1]
        if found is not None:
            return float(changes.max()), found
    return float(changes.max()), None


def _in_company(asked: Asked, i: int, kind: int) -> Tensor:
    """Answer i, second in a call with the other samples' or with far ones of a single other sample: an `Ask`."""
    count = len(asked.before)
    away = [1, 2, 3] if kind == 0 else [count // 2 // STATES * STATES + STATES * n + 2 for n in range(3)]
    mates = [(i + n) % count for n in away]
    at = torch.tensor([mates[0], i, *mates[1:]], device=asked.before.device)
    return asked.answer(at)[1].clone()


def _walked(target: Target, seed: int, rows: int) -> tuple[Asked, tuple[Asked, Asked], bool]:
    """First states; predictions and means along the paths of a few samples; whether predict writes into its states."""
    key = seeds_of(seed, _STARTS).to(target.std.device)
    row = torch.arange(_STARTS, device=key.device) % rows
    start = _started(target, key, row)
    columns, edited = _walk(target, start.before[:STATES], key[:STATES], row[:STATES])
    return start, _along(target, columns), edited


def _started(target: Target, key: Tensor, row: Tensor) -> Asked:
    """First states, made in calls of four rows."""
    zero = torch.zeros_like(key)
    unit = normal(key, target.shape, target.std.dtype, stream=START, step=zero, draw=zero)

    def started(i: Tensor) -> Tensor:
        return start_states(target, unit[i], row[i])

    x = torch.cat([started(i) for i in torch.arange(len(key), device=key.device).split(STATES)])
    return Asked("start", started, x, torch.full((len(key),), DIFFERS), lambda i: lambda one, two: (0, None))


def _walk(target: Target, x: Tensor, key: Tensor, row: Tensor) -> tuple[list[Any], bool]:
    """States, steps, rows, predictions, earlier ones, means and extra noise of samples, at all steps or at many."""
    std, steps = target.std, len(target.std)
    kept = set(range(steps))
    if steps * x.numel() > _HELD:
        kept = set(torch.linspace(0, steps - 1, min(_AT_ONCE, steps)).long().tolist())
    walked, edited = [], False
    previous, zero = no_history(target, x), torch.zeros_like(key)
    for k in range(steps):
        step = torch.full_like(key, k)
        given = x.clone(), step.clone(), row.clone()
        extra = extra_noise(target, key, step)
        prediction = predict(target, *given, extra).clone()
        edited |= not torch.equal(given[0], x)
        require_unedited((step, row), given[1:])
        mean = transition_mean(target, x, prediction, step, previous, extra)
        if k in kept:
            walked.append((x, step, row, prediction, previous, mean, extra))
        previous = remember(target, prediction, previous)
        x = mean + std[k] * normal(key, target.shape, std.dtype, step=step, draw=zero)
    return [None if v[0] is None else torch.cat(v) for v in zip(*walked, strict=True)], edited


def _along(target: Target, columns: list[Any]) -> tuple[Asked, Asked]:
    """Predictions and means of a walk: its states, steps, rows, predictions, earlier ones, means and extra noise."""
    x, step, row, prediction, previous, mean, extra = columns
    some = (lambda i: None) if extra is None else (lambda i: extra[i])

    def predicted(i: Tensor) -> Tensor:
        return predict(target, x[i], step[i], row[i], some(i))

    def meant(i: Tensor) -> Tensor:
        return transition_mean(target, x[i], prediction[i], step[i], previous[i], some(i))

    def at(i: int) -> Shift:
        one = slice(i, i + 1)
        return shift_at(target, State(x[one], step[one], row[one], some(one)))

    def of_mean(i: int) -> Shift:
        return partial(_shift_of_mean, int(step[i]), float(target.std[step[i]]))

    # A mean's change matters relative to the step's noise, as far as its digits go.
    std = target.std[step] * math.sqrt(target.shape.numel())
    noise = 1e-2 * std / (mean.flatten(1).norm(dim=1) + 1e-30)
    allowed = torch.where(std > 0, noise.clamp(64 * torch.finfo(std.dtype).eps, DIFFERS), DIFFERS).float().cpu()
    return (
        Asked("prediction", predicted, prediction, torch.full_like(allowed, DIFFERS), at),
        Asked("mean", meant, mean, allowed, of_mean),
    )


def _shift_of_mean(step: int, std: float, one: Tensor, two: Tensor) -> tuple[int, float | None]:
    return step, float((one - two).norm()) / std if std > 0 else None


# ---------------------------------------------------------------- adaptedness

_ROWS = 64  # whose guesses are compared: the first, and as many spread over all
_MANY = 160  # rows of the largest batch, at least
_ELEMENTS = 2**20  # of a path held at a time
_STARTS_AT = 8, 16  # windows begin at so many places along the chain, at least and at most


def drafter_is_adapted(
    drafter: Drafter, target: Target, window: int, seed: int = 0, rows: int = _ROWS
) -> Finding:
    """Change what happened at later steps than some step: nothing that is decided before that step may move.

    Some rounds are learned, with drafts rejected. Then every guess of the next window, and how far it reaches, is
    compared with that of a memory whose rounds differ only in noise of that step and later, and in what came of it.
    Sizes vary over decades from position to position, for rules that look at them. Rows are many, the first of
    0 … rows − 1 and others spread over them, for rules that look at their numbers. Windows begin along the whole chain,
    after none to eight rounds that committed one transition or many, in batches of 1, 2 and many rows.
    """
    few = torch.arange(min(rows, _ROWS // 2))
    spread = torch.cat([few, torch.linspace(0, rows - 1, _ROWS - len(few)).long()]).unique()
    at_a_time = max(1, _ELEMENTS // (target.shape.numel() * (window + 1)))
    many = torch.arange(min(max(rows, _MANY), 512, at_a_time)) % rows
    generator = torch.Generator().manual_seed(seed)
    histories = _histories(len(target.std), window)
    cases = [(part, histories[0], 16) for part in spread.split(at_a_time)]
    cases += [(batch, history, 5) for history in histories[1:] for batch in (many, many[:1], many[:2])]
    with torch.no_grad():
        for row, history, steps in cases:
            row = row.to(target.std.device)
            detail = _looks_ahead(drafter, target, window, row, history, steps, generator)
            if detail is not None:
                return Finding("drafter is adapted", False, detail)
    longest = max(len(history.committed) for history in histories)
    detail = (
        f"no guess of a window of {window} looks ahead, nor how far it reaches ({len(spread)} rows, after up to "
        f"{longest} rounds, along the whole chain, in batches of 1, 2 and {len(many)})"
    )
    return Finding("drafter is adapted", True, detail)


@dataclass(frozen=True)
class History:
    """Rounds before a window."""

    committed: tuple[int, ...]
    """Transitions that each of them committed."""
    start: int
    """The window's first step."""

    @property
    def first(self) -> list[int]:
        """The first step of each round."""
        return [self.start - sum(self.committed[i:]) for i in range(len(self.committed))]


def _histories(steps: int, window: int) -> list[History]:
    """Two rounds from the first step on, and then windows along the chain after rounds of several kinds."""
    kinds = [(2, 1, min(3, window + 1), 1, 1, 1), (window + 1, 1, 1, window, 1), (1,), (1,) * 5]
    found = [History((1, 1), 2)] if steps > 3 else []
    places = min(_STARTS_AT[1], max(_STARTS_AT[0], -(-steps // window)))
    for i, start in enumerate(torch.linspace(0, max(0, steps - 2), places).long().unique().tolist()):
        for kind in ((1,) * 8, kinds[i % len(kinds)]):
            committed = list(kind)
            while sum(committed) > start:  # a chain has no rounds before its first step
                committed[committed.index(max(committed))] -= 1
                committed = [c for c in committed if c]
            found.append(History(tuple(committed), start))
    return list(dict.fromkeys(found))


def _looks_ahead(
    drafter: Drafter,
    target: Target,
    window: int,
    row: Tensor,
    history: History,
    steps: int,
    generator: torch.Generator,
) -> str | None:
    """What of these rows' next window moves with steps later than some, at most `steps` of them, and the remedy."""
    rows, device, dtype = len(row), target.std.device, target.std.dtype
    start, last_step = history.start, len(target.std) - 1
    positions = min(window, max(1, last_step - start))

    def states(*lead: int) -> Tensor:
        return torch.randn(*lead, *target.shape, generator=generator, dtype=dtype).to(device)

    def path() -> tuple[Tensor, Tensor, Tensor]:
        size = 10 ** torch.randn(rows, window + 1, generator=generator, dtype=dtype).to(device)
        x, prediction, innovation = states(rows, window + 1), states(rows, window + 1), states(rows, window)
        return x, expand(size, prediction) * prediction, innovation

    paths, other = ([path() for _ in history.committed] for _ in range(2))
    current, noise = states(positions, rows), states(positions, rows)
    full = torch.full((rows,), window, device=device)

    def next_window(changed_from: int, positions: int) -> tuple[Tensor, list[Tensor]]:
        """Reach and first guesses of the window; the noise of its rounds is changed from that step on."""
        memory = begin_memory(drafter, window, row, current[0, 0])
        for first, committed, old, new in zip(history.first, history.committed, paths, other, strict=True):
            # A state at a step is made by the noise of the step before; an innovation is that noise.
            x, prediction, innovation = (
                _where_later(first + offset, changed_from, b, a)
                for a, b, offset in zip(old, new, (0, 0, 1), strict=True)
            )
            length = full.clamp(max=max(1, last_step - first))
            learned = DraftPath(x, prediction, innovation, length, torch.full_like(full, first))
            memory = drafter.learn(memory, learned, torch.full_like(full, committed))
        found: list[Tensor] = []
        for j in range(positions):
            before = PreviousDraft(found[-1], noise[j]) if found else None
            step = torch.full_like(row, min(start + j, last_step))
            found.append(drafter.guess(memory, current[j], j, step, row, before))
        return drafter.reach(memory, window), found

    reach, guesses = next_window(len(target.std) + window, positions)
    changes = torch.linspace(1, positions, min(positions, steps)).long().tolist()
    for known in changes:  # positions of the window decided before the noise of step start + known − 1
        other_reach, other_guesses = next_window(start + known - 1, known)
        if not torch.equal(other_reach.clamp(max=known), reach.clamp(max=known)):
            return (
                "how far a window reaches moves when only later steps change; whether a transition is drafted may "
                "depend on noise of the steps before it only"
            )
        for j, (one, two) in enumerate(zip(other_guesses, guesses, strict=False)):
            if not torch.equal(one, two):
                return (
                    f"the guess at position {j} of a window moves when only later steps change (step {start + j}, "
                    f"after {len(paths)} rounds, {rows} rows at once); use states and predictions of that step and "
                    "before only"
                )
    return None


def _where_later(first: int, step: int, new: Tensor, old: Tensor) -> Tensor:
    """`new` at the positions of a path from `first` on that lie behind `step`, else `old`."""
    later = first + torch.arange(old.shape[1], device=old.device) > step
    return torch.where(later.view(-1, *(1,) * (old.ndim - 2)), new, old)


# ---------------------------------------------------------------- law


class Recorder:
    """Keeps the states around chosen steps, in float64: x_k and x_{k+1} for each k, and before them as many as its
    mean needs predictions of."""

    def __init__(
        self, steps: Sequence[int], target: Target, samples: int, *, seeds: Tensor | None = None
    ) -> None:
        self.steps = list(steps)
        shape = (len(self.steps), 2 + earlier_predictions(target), samples, *target.shape)
        self.states = torch.full(shape, torch.nan, dtype=torch.float64)
        self.row = torch.zeros(samples, dtype=torch.int64)  # of each sample in its own run
        # Of the samples; only the extra noise of a target that has some is asked for with them.
        self.seeds = torch.zeros_like(self.row) if seeds is None else seeds

    def from_sample(
        self, first: int, progress: Callable[[int], None] | None = None
    ) -> Callable[[Commit], None]:
        """An observer for a run whose samples are first, first + 1, …"""

        def observe(commit: Commit) -> None:
            for i, k in enumerate(self.steps):
                sides = self.states.shape[1]
                for side in range(sides):  # x_k is committed by transition k − 1, at position k − 1 − step
                    position = k + side - (sides - 1) - commit.step
                    hit = (position >= 0) & (position < commit.committed)
                    row = commit.sample[hit].cpu()
                    self.states[i, side, first + row] = commit.states[hit, position[hit]].double().cpu()
                    self.row[first + row] = row
            if progress is not None:
                progress(int(commit.committed.sum()))

        return observe


def same_law(target: Target, ours: Recorder, theirs: Recorder, seed: int, level: float) -> list[Finding]:
    """Compare two sets of recorded states by many Kolmogorov–Smirnov tests at one joint level."""
    require_level(level)
    coarse = _too_coarse(target, ours, level)
    results = law_tests(target, ours, theirs, seed, without=coarse)
    if not results:
        return [Finding("distribution", False, f"not tested: {_coarse(target, coarse)}")]
    smallest, worst = min((p_value, name) for name, p_value in results)
    tests, samples = len(results), len(ours.row)
    passed = smallest >= level / tests
    detail = f"{tests} tests at joint level {level:g}, smallest p-value {smallest:.1e} ({worst}); "
    shift = smallest_shift(level / tests, samples)
    if shift is None:
        detail += (
            f"with {samples} sample{'s' * (samples > 1)} these tests have no power, not even against the largest "
            "error: draw 1000 or more"
        )
    else:
        state = smallest_shift(level / tests, samples / 2)
        detail += (
            f"{samples} samples find, 95 times in 100, a mean that is off by {shift:.2g} of a step's noise along a "
            "tested direction" + (f", or by {state:.2g} of a state's std" if state is not None else "")
        )
    law = Finding(
        "distribution", passed, detail, tests, smallest, note=passed and shift is None, smallest_shift=shift
    )
    if not coarse:
        return [law]
    return [law, Finding("precision", True, f"{_coarse(target, coarse)}; not tested there", note=True)]


def smallest_shift(p_value: float, points: float) -> float | None:
    """The shift of N(0, 1) that a Kolmogorov–Smirnov test at that p-value finds 95 times in 100; None if no shift is.

    Shifted by s the distribution functions are 2Φ(s/2) − 1 apart at s/2, where their empirical difference has a
    standard error of at most 1/(2√points). A two-sample test of n and n values has n/2 points.
    """
    distance = _critical(p_value, points) + 1.645 / (2 * math.sqrt(points))
    return 2 * NormalDist().inv_cdf((1 + distance) / 2) if distance < 1 else None


def _critical(p_value: float, points: float) -> float:
    """The distance of distribution functions that has this p-value; 1 or more if none has."""
    low, high = 0.0, 2.0
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (low, middle) if _kolmogorov(middle, points) < p_value else (middle, high)
    return high


_TESTS = 18  # of each step


def _too_coarse(target: Target, recorder: Recorder, level: float) -> dict[int, float]:
    """Steps whose noise the chain's floating-point numbers cannot hold: std in spacings of the states there.

    With u = spacing/std the distribution function of an innovation has jumps of up to u/√(2π), and lies up to half of
    one from the normal one. Half of the distance that fails a test is too much: it would be taken for an error.
    """
    eps, distance = (
        torch.finfo(target.std.dtype).eps,
        _critical(level / (_TESTS * len(recorder.steps)), len(recorder.row)),
    )
    found = {}
    for k, states in zip(recorder.steps, recorder.states, strict=True):
        held = float(target.std[k]) / max(eps * float(states[-1].abs().mean()), 1e-300)
        if 1 / (held * math.sqrt(2 * math.pi)) > min(distance, 1.0):
            found[k] = held
    return found


def _coarse(target: Target, coarse: dict[int, float]) -> str:
    kind = str(target.std.dtype).removeprefix("torch.")
    steps = ", ".join(map(str, coarse))
    return (
        f"{kind} cannot hold the noise of step{'s' * (len(coarse) > 1)} {steps}: its std is {min(coarse.values()):.2g} "
        "times the distance of two neighbouring numbers of the states' size; use a chain in float64"
    )


def law_tests(
    target: Target, ours: Recorder, theirs: Recorder, seed: int = 0, *, without: Collection[int] = ()
) -> list[tuple[str, float]]:
    """(name, p-value) of every test; they are dependent, so use them with Bonferroni's bound."""
    generator = torch.Generator().manual_seed(seed)
    results = []
    for i, k in enumerate(ours.steps):
        if k in without:
            continue
        (*_, x, y), (*_, x_seq, y_seq) = ours.states[i].flatten(2), theirs.states[i].flatten(2)
        directions = torch.randn(x.shape[1], 3, generator=generator, dtype=torch.float64)
        directions /= directions.norm(dim=0)

        def compare(name: str, one: Tensor, two: Tensor, k: int = k) -> None:
            results.append((f"{name} at step {k}", ks_two_sample(one.numpy(), two.numpy())))

        for along in directions.T:
            one, two = [(a @ along, (b - a) @ along) for a, b in ((x, y), (x_seq, y_seq))]
            compare("state", one[0] + one[1], two[0] + two[1])
            compare("increment", one[1], two[1])
            # Centred alike on both sides: sharp laws would show a difference of the two sample means.
            centre = [torch.cat(pair).mean() for pair in zip(one, two, strict=True)]
            products = [(a - centre[0]) * (b - centre[1]) for a, b in (one, two)]
            compare("state × increment", *products)
        compare("norm of the state", y.norm(dim=1), y_seq.norm(dim=1))
        compare("norm of the increment", (y - x).norm(dim=1), (y_seq - x_seq).norm(dim=1))
        innovation = _innovations(target, ours, i)
        for along in directions.T:
            z = innovation @ along
            results.append((f"innovation at step {k}", ks_normal(z.numpy())))
            product = torch.sign(x @ along - (x @ along).median()) * z
            results.append((f"innovation given the state at step {k}", ks_normal(product.numpy())))
        compare("norm of the innovation", innovation.norm(dim=1), _innovations(target, theirs, i).norm(dim=1))
    return results


def _steps_to_test(target: Target, at_most: int = 5) -> list[int]:
    """Stochastic steps spread over the chain, from the first on whose states before it are committed ones."""
    std = target.std
    candidates = [k for k in range(1 + earlier_predictions(target), len(std)) if std[k] > 0]
    if not candidates:
        raise ValueError(
            "no transition of this chain but perhaps the first adds noise: nothing to speculate on"
        )
    return sorted({candidates[round(i)] for i in np.linspace(0, len(candidates) - 1, at_most)})


def _innovations(target: Target, recorder: Recorder, i: int, batch: int = 1024) -> Tensor:
    """(x_{k+1} − mean_k(x_k))/std_k, [samples, size]."""
    k, std = recorder.steps[i], target.std
    rows, scale = [], float(std[k])
    parts = (*recorder.states[i], recorder.row, recorder.seeds)
    for *states, y, row, seed in zip(*(part.split(batch) for part in parts), strict=True):
        row, seed = row.to(std.device), seed.to(std.device)
        with torch.no_grad():
            mean = _mean_along([x.to(std) for x in states], target, k, row, seed).double().cpu()
        rows.append(((y - mean) / scale).flatten(1))
    return torch.cat(rows)


def _mean_along(states: list[Tensor], target: Target, k: int, row: Tensor, seed: Tensor) -> Tensor:
    """The mean of transition k, given the states before it, the last being x_k: as many as it needs predictions of."""
    previous = no_history(target, states[-1])
    for x, at in zip(states, range(k - len(states) + 1, k + 1), strict=True):
        step = torch.full_like(row, at)
        extra = extra_noise(target, seed, step)
        prediction = predict(target, x.clone(), step, row, extra)  # a target may write into its states
        if at < k:
            previous = remember(target, prediction, previous)
    return transition_mean(target, states[-1], prediction, step, previous, extra)


# ---------------------------------------------------------------- what the network returns


def network_is_doubtful(target: Any, samples: Tensor, at_most: int = 256) -> list[Finding]:
    """A note if the network does not find the noise that is put into finished samples, rows 0, 1, … of the target.

    With ξ̂ = E[ξ | x] at x = α y + σ ξ one has E⟨ξ, ξ̂⟩ = E‖ξ̂‖², so the slope of ξ on ξ̂ is 1 at every level; with what
    networks and samples are like it is near 1, and with a score in the place of x0 near 0 at the lower levels.
    """
    chain, y = getattr(target, "chain", None), samples[:at_most]
    levels = getattr(chain, "levels", None)
    if chain is None or levels is None:
        return []
    generator = torch.Generator().manual_seed(0)
    row, found = torch.arange(len(y), device=y.device), []
    c, d = (v.to(y) for v in levels.kind(chain.reuse))
    alpha, sigma = levels.alpha.to(y), levels.sigma.to(y)
    for k in torch.linspace(0, 0.8 * (len(chain.std) - 1), 4).long().tolist():
        drawn = torch.randn(y.shape, generator=generator, dtype=torch.float64).to(y)
        x, step = alpha[k] * y + sigma[k] * drawn, torch.full_like(row, k)
        extra = extra_noise(target, row, step)
        with torch.no_grad():
            prediction = predict(target, x.clone(), step, row, None if extra is None else 0 * extra)
        noise = (x - alpha[k] * (prediction - c[k] * x) / d[k]) / sigma[k]
        found.append((float((drawn * noise).sum() / (noise * noise).sum()), k))
    worst, k = min(found)
    if not worst < _FOUND:
        return []
    detail = (
        f"noise put into finished samples is not what the network finds there (slope {worst:.2g} at step {k}, 1 for a "
        f"denoiser): is it trained, and does it return {chain.predicts}, as was said?"
    )
    return [Finding("network", True, detail, note=True)]


# ---------------------------------------------------------------- learned variances


def variance_is_above_its_base(target: Any, recorder: Recorder) -> Finding:
    """How near a learned variance comes to the part of it that the chain takes for certain."""
    question, chain, device, ratios = "variance is above its base", target.chain, target.std.device, []
    while isinstance(target, Wrapper):
        target = target.target
    if not hasattr(target, "output"):
        detail = (
            f"not tested: {type(target).__name__} does not hand out its network's output, as ChainTarget does"
        )
        return Finding(question, True, detail, note=True)
    for k, states in zip(recorder.steps, recorder.states, strict=True):
        x, row = states[-2].to(target.std), recorder.row.to(device)
        step = torch.full_like(row, k)
        with torch.no_grad():
            variance = chain.variance(target.output(x, step, row), step)
        ratios.append((variance / chain.std[k] ** 2).flatten().cpu())
    ratio = torch.cat(ratios)
    near = float((ratio < _NEAR).double().mean())
    detail = f"the learned variance is at least {float(ratio.min()):.3g} of it; {near:.2%} of values are below {_NEAR}"
    return Finding(question, bool((ratio >= 1).all()), detail)


# ---------------------------------------------------------------- the law of finished samples


@dataclass(frozen=True)
class SamplesLaw:
    """Finished samples against sequential ones."""

    passed: bool
    tests: int
    smallest_p: float
    worst: str
    """The test with the smallest p-value."""
    level: float
    """Probability with which samples of the right law fail."""
    samples: int
    sequential: int


def samples_law(
    target: Target, parts: Iterable[Tensor], seeds: Tensor, slots: int, level: float = LEVEL
) -> SamplesLaw:
    """Have samples, [n, *shape] in parts, the law of sequential ones drawn from `seeds` (not their own)?"""
    require_level(level)
    return same_samples_law(sequential(target, seeds=seeds, slots=slots).samples, parts, level)


def same_samples_law(plain: Tensor, parts: Iterable[Tensor], level: float = LEVEL) -> SamplesLaw:
    """Have samples, [n, *shape] in parts, the law of those in `plain`?

    Kolmogorov–Smirnov tests of random projections and of the norm. Parts are looked at once and one at a time:
    memory does not grow with their number.
    """
    generator = torch.Generator().manual_seed(0)
    directions = torch.randn(plain[0].numel(), 8, generator=generator, dtype=torch.float64)

    def features(x: Tensor) -> np.ndarray:
        flat = x.flatten(1).double().cpu()
        return torch.cat([flat @ directions, flat.norm(dim=1, keepdim=True)], 1).T.numpy()

    tests = [KolmogorovSmirnov(values) for values in features(plain)]
    for part in parts:
        for test, values in zip(tests, features(part), strict=True):
            test.add(values)
    names = [*(f"projection {i}" for i in range(directions.shape[1])), "norm"]
    smallest, worst = min((test.p_value(), name) for test, name in zip(tests, names, strict=True))
    passed = smallest >= level / len(tests)
    return SamplesLaw(passed, len(tests), smallest, worst, level, tests[0].count, len(plain))


class KolmogorovSmirnov:
    """The two-sample test of a sample that is held against one that comes in parts.

    Between two held values the empirical law of the held sample is constant and that of the other rises, so
    their distance is largest at or just before a held value: to count there is enough.
    """

    def __init__(self, held: np.ndarray) -> None:
        self.held, self.count = np.sort(held), 0
        self.at, self.before = (np.zeros(len(held) + 1, dtype=np.int64) for _ in range(2))

    def add(self, values: np.ndarray) -> None:
        """A part of the other sample."""
        self.count += len(values)
        self.at += np.bincount(np.searchsorted(self.held, values, "left"), minlength=len(self.at))
        self.before += np.bincount(np.searchsorted(self.held, values, "right"), minlength=len(self.at))

    def p_value(self) -> float:
        held, n, m = self.held, len(self.held), max(1, self.count)
        at = np.cumsum(self.at)[:-1] / m - np.searchsorted(held, held, "right") / n
        before = np.cumsum(self.before)[:-1] / m - np.searchsorted(held, held, "left") / n
        return _kolmogorov(float(max(np.abs(at).max(), np.abs(before).max())), n * m / (n + m))


def ks_two_sample(a: np.ndarray, b: np.ndarray) -> float:
    """P-value of the two-sample Kolmogorov–Smirnov test (asymptotic, Stephens' correction)."""
    a, b = np.sort(a), np.sort(b)
    both = np.concatenate([a, b])
    distance = np.abs(np.searchsorted(a, both, "right") / len(a) - np.searchsorted(b, both, "right") / len(b))
    return _kolmogorov(float(distance.max()), len(a) * len(b) / (len(a) + len(b)))


def ks_normal(z: np.ndarray) -> float:
    """P-value of the Kolmogorov–Smirnov test against N(0, 1)."""
    z = np.sort(z)
    cdf = torch.special.ndtr(torch.from_numpy(z)).numpy()
    grid = np.arange(len(z) + 1) / len(z)
    return _kolmogorov(float(max((grid[1:] - cdf).max(), (cdf - grid[:-1]).max())), len(z))


def _kolmogorov(distance: float, n: float) -> float:
    """P(sup |empirical − true| ≥ distance) for n points."""
    if not np.isfinite(distance):
        return 0.0
    t = (np.sqrt(n) + 0.12 + 0.11 / np.sqrt(n)) * distance
    if t < 0.3:
        return 1.0
    j = np.arange(1, 101)
    return float(np.clip(2 * np.sum((-1.0) ** (j - 1) * np.exp(-2 * (j * t) ** 2)), 0.0, 1.0))
