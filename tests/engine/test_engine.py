"""The engine: slots, refilling, streaming, faults. Fixed slots run on the CPU here, uncaptured."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from threading import Barrier, Event, local
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import foresample as fs
from foresample.baseline import Sequential
from foresample.core.noise import seeds_of
from foresample.core.round import Packed, Padded
from foresample.engine import Engine
from foresample.engine.slots import Finished, FixedSlots, LooseSlots, Slots
from foresample.engine.tuning import Trial
from foresample.faults import NO_FAULT
from foresample.targets import ChainTarget
from tests.support.small_chains import CHAINS, flow


@pytest.fixture(autouse=True)
def _plain_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loose slots are held to fixed ones bit for bit, which take the plain round here."""
    monkeypatch.setenv("FORESAMPLE_PLAIN", "1")


class WatchedEngine(Engine):
    """Remembers the slots of each draw."""

    def __init__(self, target: fs.Target, **arguments: Any) -> None:
        super().__init__(target, **arguments)
        self.leased: list[Slots] = []

    @contextmanager
    def _lease(self, capacity: int) -> Iterator[Slots]:
        with super()._lease(capacity) as slots:
            self.leased.append(slots)
            yield slots


def engine(target: fs.Target, kind: str, **arguments: Any) -> WatchedEngine:
    """An engine with one of the two kinds of slots, on any device."""
    made = WatchedEngine(target, **arguments)
    made.speculation = replace(made.speculation, layout=Padded() if kind == "fixed" else Packed())
    return made


def under_way(made: WatchedEngine) -> LooseSlots | FixedSlots:
    slots = made.leased[-1]
    assert isinstance(slots, LooseSlots | FixedSlots)
    return slots


kinds = pytest.mark.parametrize("kind", ["loose", "fixed"])


@pytest.mark.slow
@kinds
@pytest.mark.parametrize("chain", CHAINS)
def test_results_do_not_depend_on_slots(chain: str, kind: str) -> None:
    target = CHAINS[chain]()
    reference = fs.sample(target, 11, window=5)
    for slots in (1, 4, 10, 11, 30):
        run = engine(target, kind, window=5, slots=slots).sample(seeds_of(0, 11))
        assert torch.equal(run.samples, reference.samples)
        assert torch.equal(run.calls, reference.calls)
        assert run.report.accepted_lengths == reference.report.accepted_lengths
        torch.testing.assert_close(run.report.mismatch, reference.report.mismatch, equal_nan=True)


@pytest.mark.slow
@given(
    count=st.integers(1, 12),
    slots=st.integers(1, 14),
    window=st.integers(1, 20),
    kind=st.sampled_from(["loose", "fixed"]),
)
@settings(max_examples=20, deadline=None)
def test_any_count_window_and_slots(count: int, slots: int, window: int, kind: str) -> None:
    run = engine(flow(), kind, window=window, slots=slots).sample(seeds_of(3, count))
    assert torch.equal(run.samples, fs.sample(flow(), count, window=window, seed=3).samples)
    assert 0 < run.report.occupancy <= 1


@kinds
def test_the_order_of_samples_changes_no_sample(kind: str) -> None:
    seeds = seeds_of(1, 9)
    there = engine(flow(), kind, window=4, slots=3).sample(seeds).samples
    back = engine(flow(), kind, window=4, slots=3).sample(seeds.flip(0)).samples
    assert torch.equal(there, back.flip(0))


@kinds
def test_a_stream_gives_every_sample_once_and_in_order(kind: str) -> None:
    target = flow()
    run = fs.sample(target, 20, window=6, seed=5)
    drawn = [
        i for done in engine(target, kind, window=6, slots=3).draw(seeds_of(5, 20)) for i in done.index.tolist()
    ]
    assert sorted(drawn) == list(range(20)) != drawn  # as they finish, the quick ones first
    streamed = list(engine(target, kind, window=6, slots=3).stream(seeds_of(5, 20)))
    assert [s.index for s in streamed] == list(range(20))
    for s in streamed:
        assert torch.equal(s.x, run.samples[s.index])
        assert s.calls == run.calls[s.index]
        assert s.seed == seeds_of(5, 20)[s.index]


@pytest.mark.slow
@kinds
@pytest.mark.parametrize(("window", "slots"), [(1, 5), (4, 3), (14, 8)])
def test_a_stream_in_order_costs_no_round_and_holds_few_samples(kind: str, window: int, slots: int) -> None:
    """Slots × (window + 1) at most, however slow the one that holds the others up."""
    base = flow()

    def stubborn(x: Tensor, step: Tensor, row: Tensor) -> Tensor:  # every seventh sample takes a call a step
        prediction = base.network(x, step, row)
        return torch.where((row % 7 == 0).unsqueeze(1), prediction + 1e9 * torch.sin(1e9 * x), prediction)

    target = replace(base, network=stubborn)
    made, done = engine(target, kind, window=window, slots=slots), 0
    honest = made.draw

    def counted(*given: Any, **options: Any) -> Iterator[Finished]:
        nonlocal done
        for finished in honest(*given, **options):
            done += len(finished.index)
            yield finished

    made.draw = counted  # type: ignore[method-assign]
    most = 0
    for taken, sample in enumerate(made.stream(seeds_of(2, 35))):
        assert sample.index == taken
        most = max(most, done - taken - 1)
    assert done == 35
    assert 0 < most <= slots * (window + 1)
    whole = engine(target, kind, window=window, slots=slots)
    list(whole.draw(seeds_of(2, 35)))
    assert under_way(made).rounds == under_way(whole).rounds


def test_a_stream_makes_its_seeds_when_it_needs_them(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []

    def counted(seed: int, count: int, first: int = 0) -> Tensor:
        made.append(count)
        return seeds_of(seed, count, first)

    monkeypatch.setattr("foresample.engine.engine.seeds_of", counted)
    stream = fs.stream(flow(), 30_000_000, window=6, slots=4, seed=5)
    samples = [next(stream) for _ in range(3)]
    assert sum(made) <= 1024
    assert [s.seed for s in samples] == seeds_of(5, 3).tolist()
    monkeypatch.setattr("foresample.engine.engine._PART", 7)
    parts = list(fs.stream(flow(), 20, window=6, slots=4, seed=5))
    assert [s.seed for s in parts] == seeds_of(5, 20).tolist()
    assert torch.equal(torch.stack([s.x for s in parts]), fs.sample(flow(), 20, window=6, seed=5).samples)


def test_a_stream_yields_before_the_run_is_over() -> None:
    calls = 0

    def network(x: Tensor, time: Tensor, row: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return base.network(x, time, row)

    base = flow()
    target = replace(base, network=network)
    stream = fs.stream(target, 50, window=6, slots=2)
    assert isinstance(stream, Iterator)
    assert calls == 0
    next(stream)
    first = calls
    assert len(list(stream)) == 49
    assert first < calls / 10


@kinds
def test_parts_are_fetched_when_a_slot_is_free_and_overlap(kind: str) -> None:
    target, seeds, asked = flow(), seeds_of(5, 40), 0

    def parts() -> Iterator[tuple[Tensor, Tensor]]:
        nonlocal asked
        for index in torch.arange(40).split(4):
            asked += 1
            yield index, seeds[index]
            yield index[:0], seeds[:0]

    made = engine(target, kind, window=6, slots=3)
    found = torch.full((40, 2), torch.nan, dtype=torch.float64)
    done = 0
    for finished in made.draw(parts()):
        found[finished.index] = finished.x
        done += len(finished.index)
        assert 4 * asked - 4 < done + 3  # no part before there is room
    assert torch.equal(found, fs.sample(target, 40, window=6, seed=5).samples)
    whole = engine(target, kind, window=6, slots=3)
    list(whole.draw(seeds))
    assert under_way(made).rounds == under_way(whole).rounds  # no slot waited for the next part


@pytest.mark.slow
@kinds
def test_slots_stay_full_while_samples_wait(kind: str) -> None:
    """Slots are idle only while the last samples finish."""
    run = engine(flow(), kind, window=6, slots=6).sample(seeds_of(0, 240))
    assert run.report.occupancy > 0.97
    together = engine(flow(), kind, window=6, slots=240).sample(seeds_of(0, 240))
    assert run.report.occupancy > 1.2 * together.report.occupancy


@pytest.mark.slow
@kinds
def test_nothing_under_way_grows_with_the_chain_or_the_samples(kind: str) -> None:
    sizes = set()
    for steps, count in ((20, 10), (200, 10), (20, 60)):
        target = fs.GaussianMixture.of_draft_trees(2).langevin(steps, 0.01)
        made = engine(target, kind, window=5, slots=4)
        most = 0
        for _ in made.draw(seeds_of(0, count)):
            rows = under_way(made).rows
            if rows is not None:
                most = max(
                    most,
                    sum(
                        v.numel()
                        for v in (*vars(rows).values(), *rows.memory.values())
                        if isinstance(v, Tensor)
                    ),
                )
        sizes.add(most)
    assert len(sizes) == 1


def broken(at_step: int, of_sample: int) -> ChainTarget:
    base = flow()
    assert base.chain.time is not None
    at_time = base.chain.time[at_step]

    def network(x: Tensor, time: Tensor, row: Tensor) -> Tensor:
        bad = ((time == at_time) & (row == of_sample)).unsqueeze(1)
        return torch.where(bad, torch.nan, base.network(x, time, row))

    return replace(base, network=network)


@kinds
def test_a_broken_sample_leaves_with_its_fault_and_the_others_go_on(kind: str) -> None:
    made = engine(broken(7, 3), kind, window=5, slots=2)
    parts = list(made.draw(seeds_of(0, 8)))
    index, fault = (torch.cat([getattr(p, n) for p in parts]) for n in ("index", "fault"))
    assert sorted(index.tolist()) == list(range(8))
    assert fault[index == 3].item() == 7
    assert (fault[index != 3] == NO_FAULT).all()
    good = fs.sample(flow(), 8, window=5).samples
    for part in parts:
        for i, x in zip(part.index.tolist(), part.x, strict=True):
            assert i == 3 or torch.equal(x, good[i])


@kinds
def test_a_broken_sample_is_named(kind: str) -> None:
    for draw in (
        lambda: engine(broken(7, 3), kind, window=5, slots=2).sample(seeds_of(0, 8)),
        lambda: list(engine(broken(7, 3), kind, window=5, slots=2).stream(seeds_of(0, 8))),
    ):
        with pytest.raises(FloatingPointError, match="NaN or infinity at step 7 of sample 3;"):
            draw()


@kinds
def test_any_rows_of_the_target_can_be_sampled(kind: str) -> None:
    """The target gets the row of a sample, for example to choose the class of an image."""
    base = flow()
    target = replace(base, network=lambda x, time, row: base.network(x, time, row) + row.unsqueeze(1))
    seeds, made = seeds_of(0, 5), engine(target, kind, window=5, slots=2)
    whole, part = made.sample(seeds), made.sample(seeds[3:], rows=torch.tensor([3, 4]))
    assert torch.equal(part.samples, whole.samples[3:])
    assert not torch.equal(made.sample(seeds[3:]).samples, part.samples)
    assert torch.equal(made.sample(seeds[3:], rows=[3, 4]).samples, part.samples)


@pytest.mark.parametrize("rows", [[0], torch.zeros(2, 1, dtype=torch.long), [0.0, 1.0], [0, -1], 3])
def test_rows_that_do_not_name_one_row_per_seed_are_refused(rows: Any) -> None:
    with pytest.raises(ValueError, match="a row number, 0 or more, for each of the 2 seeds"):
        engine(flow(), "loose", window=5, slots=2).sample(seeds_of(0, 2), rows=rows)


def test_a_count_in_place_of_seeds_is_refused() -> None:
    with pytest.raises(
        TypeError, match=r"seeds must be a list with one seed per sample, such as range\(4\), not 4"
    ):
        engine(flow(), "loose", window=5, slots=2).sample(4)  # type: ignore[arg-type]


@kinds
def test_an_engine_serves_again(kind: str) -> None:
    made = engine(flow(), kind, window=5, slots=3)
    first = made.sample(seeds_of(0, 10))
    made.sample(seeds_of(9, 2))
    again = made.sample(seeds_of(0, 10))
    assert torch.equal(first.samples, again.samples)
    assert first.report.rounds == again.report.rounds
    assert first.report.accepted_lengths == again.report.accepted_lengths


@kinds
def test_an_engine_can_be_reused_after_a_stream_was_left(kind: str) -> None:
    made = engine(flow(), kind, window=5, slots=6)
    stream = made.stream(seeds_of(4, 10))
    next(stream)
    assert len(under_way(made))
    assert torch.equal(made.sample(seeds_of(0, 5)).samples, fs.sample(flow(), 5, window=5).samples)


@kinds
@pytest.mark.parametrize("slots", [2, 6])
def test_observers_see_every_committed_state_once(kind: str, slots: int) -> None:
    seen = torch.full((6, 17, 2), torch.nan, dtype=torch.float64)
    kept: list[fs.Commit] = []
    run = engine(flow(), kind, window=6, slots=slots).sample(seeds_of(0, 6), kept.append)
    for commit in kept:  # kept until the end: what was handed out must not change
        assert (commit.committed > 0).all()
        for r, sample in enumerate(commit.sample.tolist()):
            for j in range(int(commit.committed[r])):
                step = int(commit.step[r]) + 1 + j
                assert seen[sample, step].isnan().all()
                seen[sample, step] = commit.states[r, j]
    assert seen[:, 1:].isfinite().all()
    assert torch.equal(seen[:, -1], run.samples)


def test_padded_rounds_evaluate_and_report_every_position() -> None:
    """A round may be narrower than the window: at a cold start, and at the end of the chain."""
    loose = engine(flow(), "loose", window=6, slots=4).sample(seeds_of(0, 4))
    evaluated = torch.zeros(4, dtype=torch.int64)

    def watch(commit: fs.Commit) -> None:
        evaluated[commit.sample] += commit.path.shape[1]

    fixed = engine(flow(), "fixed", window=6, slots=4).sample(seeds_of(0, 4), watch)
    assert torch.equal(fixed.evaluations, evaluated)
    assert (loose.evaluations < fixed.evaluations).all()
    assert (fixed.evaluations < 7 * fixed.calls).all()


def test_a_padded_round_is_the_narrowest_that_fits() -> None:
    target = flow()
    made, seen = engine(target, "fixed", window=6, slots=1), list[tuple[int, int]]()

    def watch(commit: fs.Commit) -> None:
        seen.append((int(commit.step), commit.path.shape[1] - 1))

    made.sample(seeds_of(0, 1), watch)
    slots = under_way(made)
    assert isinstance(slots, FixedSlots)
    for i, (step, drafts) in enumerate(seen):
        needed = min(6, len(target.std) - 1 - step) if i else 0  # nothing is known before the first call
        assert drafts == min(width for width in slots.widths if width >= needed)


@pytest.mark.parametrize("kind", ["loose", "fixed"])
def test_a_sample_alone_fills_its_slot(kind: str) -> None:
    assert engine(flow(), kind, window=3, slots=1).sample([5]).report.occupancy == 1


def test_the_host_reads_results_only_when_a_sample_can_be_finished() -> None:
    target = fs.GaussianMixture.of_draft_trees(2).langevin(200, 0.01)
    made = engine(target, "fixed", window=4, slots=1)
    looks = 0
    honest = FixedSlots._look

    def counted(self: FixedSlots, rounds: int) -> Finished | None:
        nonlocal looks
        looks += 1
        return honest(self, rounds)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FixedSlots, "_look", counted)
        run = made.sample(seeds_of(0, 1))
    assert int(run.calls) == under_way(made).rounds  # and not a round too many
    assert looks < int(run.calls) / 4


def test_sequential_samples_do_not_depend_on_slots() -> None:
    reference = fs.sequential(flow(), 7, seed=2)
    for slots in (1, 3, 7, 20):
        run = fs.sequential(flow(), 7, seed=2, slots=slots)
        assert torch.equal(run.samples, reference.samples)
        assert torch.equal(run.calls, reference.calls)
    assert torch.equal(Sequential(flow(), 4).sample(seeds_of(2, 7)).samples, reference.samples)


@pytest.mark.parametrize("wrong", [4, 5])
def test_the_sequential_sampler_stops_where_its_network_breaks(wrong: int) -> None:
    base, steps = flow(), list[int]()

    def network(x: Tensor, step: Tensor, row: Tensor) -> Tensor:
        steps.append(int(step[0]))
        return base.network(x, step, row) + (torch.nan if steps[-1] == wrong else 0.0)

    with pytest.raises(FloatingPointError, match=f"step {wrong} of sample 0"):
        fs.sequential(replace(base, chain=replace(base.chain, time=None), network=network), 3)
    assert steps == list(range(wrong + 1))


@pytest.mark.parametrize("slots", [0, -1, 2.5, True])
def test_slots_must_be_a_positive_whole_number(slots: Any) -> None:
    draws: tuple[Callable[..., Any], ...] = fs.sample, fs.stream
    for draw in draws:
        with pytest.raises(ValueError, match="slots must be a whole number of at least 1"):
            draw(flow(), 3, window=4, slots=slots)


@pytest.mark.parametrize("draw", [partial(fs.sample, window=3), fs.sequential], ids=["sample", "sequential"])
def test_graphs_need_a_gpu(draw: Callable[..., fs.Run]) -> None:
    with pytest.raises(ValueError, match="graph=True needs a target on a CUDA device"):
        draw(flow(), 2, graph=True)


def test_a_window_longer_than_the_chain_is_cut_and_changes_nothing() -> None:
    """Noise is held for the whole window: 10⁸ positions for 16 steps would take gigabytes."""
    far, near = (fs.sample(flow(), 5, window=window, seed=3) for window in (10**8, 15))
    assert torch.equal(far.samples, near.samples)
    assert torch.equal(far.calls, near.calls)
    assert far.report.window == 15


# ------------------------------------------------------------------ several draws of one engine


def taken_in_turn(streams: list[Iterator[fs.Sample]]) -> list[list[fs.Sample]]:
    """All samples of these streams, one of each at a time."""
    taken: list[list[fs.Sample]] = [[] for _ in streams]
    left = list(range(len(streams)))
    while left:
        for number in list(left):
            sample = next(streams[number], None)
            taken[number].append(sample) if sample is not None else left.remove(number)
    return taken


@kinds
def test_streams_of_one_engine_may_be_interleaved(kind: str) -> None:
    made = engine(flow(), kind, window=5, slots=3)
    lengths = {4: 9, 5: 2, 6: 7}
    found = taken_in_turn([made.stream(seeds_of(s, n)) for s, n in lengths.items()])
    for (seed, count), samples in zip(lengths.items(), found, strict=True):
        alone = list(engine(flow(), kind, window=5, slots=3).stream(seeds_of(seed, count)))
        assert [s.index for s in samples] == [s.index for s in alone]
        for one, two in zip(samples, alone, strict=True):
            assert torch.equal(one.x, two.x)
            assert (one.seed, one.calls, one.evaluations) == (two.seed, two.calls, two.evaluations)


@kinds
def test_a_run_during_a_stream_changes_neither(kind: str) -> None:
    """Samples and reports stay the same, in an observer of the run and between two samples of a stream."""
    alone = fs.sample(flow(), 8, window=5, slots=3)
    made = engine(flow(), kind, window=5, slots=3)
    lone = engine(flow(), kind, window=5, slots=3).sample(seeds_of(0, 8))
    other = made.draw(seeds_of(7, 9))
    drawn = 0

    def observe(commit: fs.Commit) -> None:
        nonlocal drawn
        drawn += next(other, None) is not None

    stream = made.stream(seeds_of(0, 8))
    first = next(stream)
    run = made.sample(seeds_of(0, 8), observe)
    rest = list(stream)
    assert drawn > 3
    assert torch.equal(run.samples, alone.samples)
    assert torch.equal(torch.stack([s.x for s in (first, *rest)]), alone.samples)
    for name in ("rounds", "evaluations", "drafted", "accepted_lengths", "occupancy", "slots", "count"):
        assert getattr(run.report, name) == getattr(lone.report, name)


def test_fixed_slots_are_reused_however_their_draw_ended() -> None:
    """Exhausted, closed, forgotten or broken; slots of a draw that was never begun are not made."""
    made = engine(flow(), "fixed", window=5, slots=3)
    plain = made.sample(seeds_of(0, 5)).samples

    def fails(commit: fs.Commit) -> None:
        raise RuntimeError("an observer broke")

    def closed() -> None:
        stream = made.stream(seeds_of(1, 9))
        next(stream)
        stream.close()  # type: ignore[attr-defined]

    def forgotten() -> None:
        for _ in made.stream(seeds_of(1, 9)):
            break

    def broke() -> None:
        with pytest.raises(RuntimeError, match="an observer broke"):
            made.sample(seeds_of(1, 9), fails)

    def never_begun() -> None:
        made.stream(seeds_of(1, 9))
        made.draw(seeds_of(1, 9))

    for end in (closed, forgotten, broke, never_begun):
        end()
        assert torch.equal(made.sample(seeds_of(0, 5)).samples, plain)
    assert len({id(slots) for slots in made.leased}) == 1
    held = made.stream(seeds_of(1, 9))
    next(held)
    assert torch.equal(made.sample(seeds_of(0, 5)).samples, plain)
    assert len({id(slots) for slots in made.leased}) == 2


@kinds
def test_threads_may_share_an_engine(kind: str) -> None:
    """Both are under way at once: each waits for the other in its first call."""
    base, both = flow(), Barrier(2, timeout=60)
    met = local()

    def network(x: Tensor, time: Tensor, row: Tensor) -> Tensor:
        if not getattr(met, "other", False):
            met.other = True
            both.wait()
        return base.network(x, time, row)

    made = engine(replace(base, network=network), kind, window=5, slots=3)
    with ThreadPoolExecutor(2) as threads:
        runs = list(threads.map(lambda seed: made.sample(seeds_of(seed, 9)), (3, 4)))
    for seed, run in zip((3, 4), runs, strict=True):
        alone = engine(base, kind, window=5, slots=3).sample(seeds_of(seed, 9))
        assert torch.equal(run.samples, alone.samples)
        assert run.report.accepted_lengths == alone.report.accepted_lengths
        assert run.report.occupancy == alone.report.occupancy


def sequential_engine(target: fs.Target, slots: int) -> Engine:
    """An engine whose tuning says that no window gains."""
    trial = Trial(2, 3, 1.0, 1.0, 10.0, 0.5)
    return Engine(target, window=fs.Tuning(len(target.std), slots, 1.0, [trial], None, None), slots=slots)


def test_threads_may_share_an_engine_that_samples_sequentially() -> None:
    """In its first call one thread waits for a call of the other, which must not come in between."""
    base, called = flow(), [Event(), Event()]

    def network(x: Tensor, time: Tensor, row: Tensor) -> Tensor:
        own, other = called if (row < 4).all() else called[::-1]
        if not own.is_set():
            own.set()
            other.wait(timeout=0.3)
        return base.network(x, time, row)

    made, alone = (sequential_engine(target, 4) for target in (replace(base, network=network), base))
    parts = [(seeds_of(seed, 4), torch.arange(4) + 4 * seed) for seed in (0, 1)]
    with ThreadPoolExecutor(2) as threads:
        runs = list(threads.map(lambda part: made.sample(part[0], rows=part[1]).samples, parts))
    for (seeds, rows), samples in zip(parts, runs, strict=True):
        assert torch.equal(samples, alone.sample(seeds, rows=rows).samples)


@pytest.mark.parametrize("slots", [1, 2, 3])
def test_samples_come_in_the_order_of_their_rows(slots: int) -> None:
    rows, seeds = [2, 0, 1], seeds_of(0, 3)
    for made in (Engine(flow(), window=5, slots=slots), sequential_engine(flow(), slots)):
        ordered = made.sample(seeds[[1, 2, 0]], rows=[0, 1, 2])
        assert torch.equal(made.sample(seeds, rows=rows).samples, ordered.samples)


def test_an_observer_that_writes_into_what_it_sees_changes_no_sample() -> None:
    def spoil(commit: fs.Commit) -> None:
        for value in vars(commit).values():
            value.zero_()

    for draw in (partial(fs.sample, window=5), fs.sequential):
        assert torch.equal(draw(flow(), 9, observe=spoil).samples, draw(flow(), 9).samples)


def test_an_engine_made_in_inference_mode_samples_outside_of_it() -> None:
    with torch.inference_mode():
        made = sequential_engine(flow(), 2)
    assert torch.equal(made.sample(seeds_of(0, 5)).samples, fs.sequential(flow(), 5).samples)


@pytest.mark.parametrize("draw", ["stream", "draw"])
def test_seeds_without_their_indices_are_refused(draw: str) -> None:
    with pytest.raises(TypeError, match=r"each part of the seeds is a pair of tensors, \(indices, seeds\)"):
        list(getattr(Engine(flow(), window=3), draw)(iter([1, 2])))
