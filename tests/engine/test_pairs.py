"""Every way to draw from an engine, with loose and with fixed slots: the samples are those of the plain call.

`tests/test_pairs.py` has the settings of all ways to draw. The settings here: the way an engine's samples are taken,
conditions and start states looked up by row, drafters with and without a prior, observers, windows given or measured.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

import foresample as fs
from foresample.core.noise import seeds_of
from foresample.core.round import Padded
from foresample.engine import Engine
from foresample.engine.slots import in_order
from foresample.targets import ChainTarget
from tests.support.small_chains import mixture

COUNT, SLOTS, WINDOW, STEPS = 5, 3, 3, 6
SEEDS = seeds_of(3, COUNT)


@dataclass(frozen=True)
class Case:
    """A target and the settings it is sampled with."""

    conditions: str
    start: str
    drafter: str

    def __str__(self) -> str:
        return f"{self.conditions}, {self.start}, {self.drafter}"


CASES = [
    Case(*one)
    for one in product(
        ("no conditions", "labels"), ("noise", "start states"), ("cold", "prior", "own guess", "draft model")
    )
]


PAIRS = [case for number, case in enumerate(CASES) if (number // 8 + number // 4 + number) % 2]
"""Half of the cases, in which every pair of settings occurs."""


class Halved(fs.Replay):
    """Guesses in its own way."""

    def guess(self, *given: Any) -> Tensor:
        return 0.5 * super().guess(*given)


@cache
def target_of(conditions: str, start: str) -> ChainTarget:
    """A condition for each sample, and no more."""
    base = mixture().flow(STEPS, 1.0)
    labels = torch.linspace(-0.5, 0.5, COUNT, dtype=torch.float64)
    starts = torch.randn(COUNT, 2, generator=torch.Generator().manual_seed(1), dtype=torch.float64)

    def network(x: Tensor, time: Tensor, row: Tensor) -> Tensor:
        shift = labels[row] if conditions == "labels" else torch.zeros(len(x), dtype=x.dtype)
        return base.network(x, time, row) + shift.unsqueeze(1)

    return replace(base, network=network, start_states=starts if start == "start states" else None)


@cache
def settings_of(case: Case) -> tuple[ChainTarget, fs.Drafter]:
    target = target_of(case.conditions, case.start)
    drafters: dict[str, Callable[[], fs.Drafter]] = {
        "cold": fs.Replay,
        "prior": lambda: fs.Replay(prior=fs.fit_prior(target, window=WINDOW, pilots=12, rows=COUNT)),
        "own guess": lambda: Halved(prior=fs.fit_prior(target, window=WINDOW, pilots=12, rows=COUNT)),
        "draft model": lambda: fs.DraftModel(target),
    }
    return target, drafters[case.drafter]()


@cache
def plain(case: Case, window: int | None = WINDOW) -> Tensor:
    """All samples at once, with that window; or sequential ones."""
    target, drafter = settings_of(case)
    if window is None:
        return fs.sequential(target, seeds=SEEDS).samples
    return fs.sample(target, seeds=SEEDS, window=window, drafter=drafter).samples


class Watch:
    """An observer that puts the samples together from what is committed, each step once."""

    def __init__(self) -> None:
        self.path = torch.full((COUNT, STEPS, 2), torch.nan, dtype=torch.float64)

    def __call__(self, commit: fs.Commit) -> None:
        for r, sample in enumerate(commit.sample.tolist()):
            for j in range(int(commit.committed[r])):
                place = self.path[sample, int(commit.step[r]) + j]
                assert place.isnan().all()
                place.copy_(commit.states[r, j])


@pytest.fixture(autouse=True)
def _plain_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loose slots are held to fixed ones bit for bit, which take the plain round here."""
    monkeypatch.setenv("FORESAMPLE_PLAIN", "1")


@pytest.fixture(params=["loose", "fixed"])
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The kind of slots that every engine has."""
    honest = Engine.__init__

    def made(self: Engine, *given: Any, **settings: Any) -> None:
        honest(self, *given, **settings)
        self.speculation = replace(self.speculation, layout=Padded())

    for case in CASES:  # references have loose slots, whatever window is measured
        for window in (None, *range(1, STEPS)) if case in PAIRS else (WINDOW,):
            plain(case, window)
    if request.param == "fixed":
        monkeypatch.setattr(Engine, "__init__", made)
    return str(request.param)


def together(samples: list[fs.Sample]) -> Tensor:
    """The samples in order, after a check that each came once and with its own seed."""
    found = {sample.index: sample for sample in samples}
    assert [found[i].seed for i in range(COUNT)] == SEEDS.tolist()
    assert len(samples) == COUNT
    return torch.stack([found[i].x for i in range(COUNT)])


def interleaved(engine: Engine) -> Tensor:
    """One sample of a stream, then one of another."""
    one, other = engine.stream(SEEDS), engine.stream(SEEDS.flip(0))
    taken = [sample for pair in zip(one, other, strict=True) for sample in pair]
    return together(taken[::2])


def inside(engine: Engine, watch: Watch | None) -> Tensor:
    """A run while a stream is open, another inside of its observer."""
    stream = engine.stream(SEEDS)
    first = next(stream)

    def observe(commit: fs.Commit) -> None:
        if commit.step[0] == 0:
            engine.sample(SEEDS[-1:])
        if watch is not None:
            watch(commit)

    samples = engine.sample(SEEDS, observe).samples
    assert torch.equal(together([first, *stream]), samples)
    return samples


def again(engine: Engine, watch: Watch | None) -> Tensor:
    """Samples of an engine after a run and after a stream that was left."""
    engine.sample(SEEDS.flip(0))
    next(engine.stream(SEEDS))
    return engine.sample(SEEDS, watch).samples


DRAWS: dict[str, Callable[[Engine, Watch | None], Tensor]] = {
    "sample": lambda engine, watch: engine.sample(SEEDS, watch).samples,
    "draw": lambda engine, watch: in_order(list(engine.draw(SEEDS, watch))).x,
    "parts": lambda engine, watch: (
        in_order(list(engine.draw(zip(torch.arange(COUNT).split(2), SEEDS.split(2), strict=True), watch))).x
    ),
    "again": again,
    "inside": inside,
}
STREAMS: dict[str, Callable[[Engine], Tensor]] = {
    "stream": lambda engine: together(list(engine.stream(SEEDS))),
    "interleaved": interleaved,
}


def all_cases() -> Iterator[tuple[Case, Engine]]:
    for case in CASES:
        target, drafter = settings_of(case)
        yield case, Engine(target, window=WINDOW, slots=SLOTS, drafter=drafter)


@pytest.mark.parametrize("draw", DRAWS)
def test_an_engine_draws_the_same_samples_in_every_way(draw: str, kind: str) -> None:
    """Every other case is observed, others for the next way to draw."""
    for number, (case, engine) in enumerate(all_cases(), list(DRAWS).index(draw)):
        watch = Watch() if number % 2 else None
        assert torch.equal(DRAWS[draw](engine, watch), plain(case)), str(case)
        assert watch is None or torch.equal(watch.path[:, -1], plain(case)), str(case)


@pytest.mark.slow
@pytest.mark.parametrize("draw", STREAMS)
def test_a_stream_gives_the_same_samples_in_every_way(draw: str, kind: str) -> None:
    for case, engine in all_cases():
        assert torch.equal(STREAMS[draw](engine), plain(case)), str(case)


@pytest.mark.slow
@pytest.mark.parametrize("window", ["auto", "tuning", "a tuning without a gain"])
def test_a_measured_window_gives_the_samples_of_that_window(
    window: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("foresample.engine.tuning.WINDOWS", (2, 4))
    for number, case in enumerate(PAIRS):
        target, drafter = settings_of(case)
        chosen: Any = window
        if window != "auto":
            chosen = fs.tune(target, slots=SLOTS, windows=[WINDOW], drafter=drafter)
            chosen = replace(chosen, window=WINDOW if window == "tuning" else None, achieved=1.5)
        watch = Watch() if number // 2 % 2 else None
        run = fs.sample(target, seeds=SEEDS, window=chosen, slots=SLOTS, drafter=drafter, observe=watch)
        found = None if run.report.method == "sequential" else run.report.window
        assert window == "auto" or found == chosen.window
        assert torch.equal(run.samples, plain(case, found)), str(case)
        assert watch is None or torch.equal(watch.path[:, -1], run.samples), str(case)


def test_compiled_rounds_draw_the_same_samples_up_to_rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    for case in CASES:
        plain(case)
    monkeypatch.delenv("FORESAMPLE_PLAIN")
    for case, engine in all_cases():
        for draw in (STREAMS["interleaved"], lambda engine: DRAWS["inside"](engine, Watch())):
            torch.testing.assert_close(draw(engine), plain(case), rtol=1e-9, atol=1e-9)
