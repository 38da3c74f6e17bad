"""The fused round against the plain one, on a GPU."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

import foresample as fs
from benchmarks.soak import wavy
from foresample.backends.rounds import Round
from foresample.checks.distribution import Recorder, law_tests
from foresample.core import noise as streams
from foresample.core.round import Layout, Packed, Padded, Speculation, begin, last_draftable
from foresample.engine import slots as engine_slots
from foresample.engine.slots import FixedSlots
from foresample.faults import NO_FAULT
from foresample.targets import ChainTarget
from tests.backends.fused import (
    assert_agree_along,
    assert_noise_is_the_same_stream,
    assert_pictures_are_turned,
    assert_scalars_agree,
    assert_sequential_is_its_formula,
    small,
    warm,
    wide,
)
from tests.support.small_chains import CHAINS, mixture

pytestmark = pytest.mark.gpu
GPU = torch.device("cuda")


def named(chain: str) -> ChainTarget:
    if "wide" in chain:
        return wide(GPU, getattr(torch, chain.split()[-1]), size=100 if "less" in chain else 700)
    return small(chain, GPU)


@pytest.mark.parametrize("layout", [Padded(), Packed()], ids=["padded", "packed"])
@pytest.mark.parametrize("block", [None, 1, 4])
@pytest.mark.parametrize("chain", [*CHAINS, "strays", "wide float32", "wide float64"])
def test_rounds_agree_along_whole_chains(chain: str, block: int | None, layout: Layout) -> None:
    target = named(chain)
    window, count = (10, 2_000) if chain == "strays" else (7, 40)
    assert_agree_along(target, fs.Replay(), window, streams.seeds_of(1, count), block, layout)


@pytest.mark.parametrize("chain", ["flow", "multistep", "wells", "wide float32", "less wide float32"])
@pytest.mark.parametrize("kind", ["table", "slopes", "jacobian", "diagonal"])
def test_rounds_agree_with_a_prior(chain: str, kind: str) -> None:
    target = named(chain)
    if target.shape.numel() > 128 and kind == "jacobian":
        pytest.skip("the plain round serves those")
    assert_agree_along(target, warm(target, kind), 7, streams.seeds_of(1, 40), None, Padded())


@pytest.mark.parametrize("chain", ["flow", "interrupted", "multistep", "wide float32"])
def test_narrow_rounds_agree(chain: str) -> None:
    """No wider than the longest draft a row can make."""
    target = named(chain)
    assert_agree_along(target, fs.Replay(), 9, streams.seeds_of(1, 30), None, None)


def test_lanes_come_to_one_decision() -> None:
    """In this sample's fifth round, lanes that ended Newton's iteration by themselves left it at different turns: the
    fused round wrote a fault, and then read out of bounds."""
    target = wavy("cuda", torch.float32)
    drafter = fs.Replay(prior=fs.fit_prior(target, window=8, pilots=200))
    seeds = streams.seeds_of(11, 150_000)[30_838:30_839]
    run = fs.Engine(target, window=11, slots=1, drafter=drafter).sample(seeds)
    assert run.samples.isfinite().all()
    assert_agree_along(target, drafter, 11, seeds, None, Padded())


def test_scalars_agree_over_the_whole_range() -> None:
    assert_scalars_agree(GPU, 1 << 16, 128)


def test_noise_is_the_same_stream() -> None:
    assert_noise_is_the_same_stream(GPU, 50)


def test_pictures_are_turned() -> None:
    assert_pictures_are_turned(GPU)


@pytest.mark.parametrize("shape", [(3, 16, 16), (3, 64, 64)], ids=["by the kernel", "by products"])
def test_pictures_by_their_frequencies(shape: tuple[int, ...]) -> None:
    """Captured or not, and whoever is beside it: the same sample; its Jacobian serves in the fused round."""
    flat = wide(GPU, torch.float32, size=math.prod(shape))

    def network(x: Tensor, step: Tensor, row: Tensor) -> Tensor:
        return flat.network(x.flatten(1), step, row).view_as(x)

    target = fs.targets.in_frequencies(replace(flat, shape=torch.Size(shape), network=network))
    drafter = fs.Replay(prior=fs.fit_prior(target, window=6, pilots=8))
    runs = [
        fs.sample(target, 9, window=6, drafter=drafter, slots=slots, graph=graph)
        for slots, graph in ((9, False), (9, True), (2, True))
    ]
    for run in runs[1:]:
        torch.testing.assert_close(run.samples, runs[0].samples, rtol=1e-4, atol=1e-4)
        assert torch.equal(run.calls, runs[0].calls)


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
@pytest.mark.parametrize("drafter", [None, fs.Frozen("nearest")], ids=["fused", "plain"])
def test_nothing_in_a_round_waits_for_the_device(drafter: fs.Drafter | None) -> None:
    """Ten rounds are queued with synchronisation forbidden; the free look, which waits at a few calls, is off."""
    target = wide(GPU, torch.float32)
    work = fs.Engine(target, window=6, slots=5, drafter=drafter, look=False)
    with work._lease(5) as slots:
        assert isinstance(slots, FixedSlots)
        slots.admit(torch.arange(5), streams.seeds_of(0, 5))
        slots._round(6)
        torch.cuda.set_sync_debug_mode("error")
        try:
            for _ in range(10):
                slots._round(6)
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("drafter", [None, fs.Frozen("parent")], ids=["fused", "plain"])
def test_graphs_slots_and_order_change_nothing(drafter: fs.Drafter | None) -> None:
    target = wide(GPU, torch.float64)
    reference = fs.sample(target, 37, window=6, drafter=drafter)
    for slots, graph in ((37, True), (5, True), (8, False), (1, True)):
        run = fs.sample(target, 37, window=6, drafter=drafter, slots=slots, graph=graph)
        if drafter is None:
            assert torch.equal(run.samples, reference.samples)
        else:  # PyTorch's own sums take another order in another shape
            torch.testing.assert_close(run.samples, reference.samples, rtol=1e-9, atol=1e-9)
        assert torch.equal(run.calls, reference.calls)
        assert run.report.accepted_lengths == reference.report.accepted_lengths
    if drafter is None:
        streamed = {s.index: s for s in fs.stream(target, 37, window=6, slots=4, graph=True)}
        assert torch.equal(torch.stack([streamed[i].x for i in range(37)]), reference.samples)


def test_an_engine_serves_again() -> None:
    """Also after a run that was left before its end."""
    target, seeds = wide(GPU, torch.float64), streams.seeds_of(5, 9)
    work = fs.Engine(target, window=6, slots=4, graph=True)
    first = work.sample(seeds)
    next(iter(work.draw(streams.seeds_of(6, 9))))
    again = work.sample(seeds)
    assert torch.equal(first.samples, again.samples)
    assert first.report.rounds == again.report.rounds


def test_a_prepared_engine_draws_the_same_samples_and_captures_no_more() -> None:
    target, seeds = wide(GPU, torch.float64), streams.seeds_of(5, 9)
    work = fs.Engine(target, window=6, slots=4, graph=True)
    work.prepare()
    run = work.sample(seeds)
    assert torch.equal(run.samples, fs.sample(target, seeds=seeds, window=6).samples)
    (slots,) = work._idle
    assert isinstance(slots, FixedSlots)
    assert slots.graphs is not None
    assert all(slots.graphs[drafts] is not None for drafts in (None, *slots.widths))
    assert slots.preparation_seconds == 0


@pytest.mark.parametrize("graph", [False, True])
def test_the_sequential_sampler_takes_the_same_path(graph: bool) -> None:
    assert_sequential_is_its_formula(wide(GPU, torch.float64), graph=graph)


@pytest.mark.parametrize("where", ["network", "state"])
@pytest.mark.parametrize("graph", [False, True])
def test_nan_is_named(where: str, graph: bool) -> None:
    base = wide(GPU, torch.float32)

    def network(x: Tensor, step: Tensor, row: Tensor) -> Tensor:
        bad = ((step == 11) & (row == 2)).unsqueeze(1)
        if where == "state":
            x.masked_fill_(bad, math.nan)  # an input written to must do no harm
        return torch.where(bad, math.nan, base.network(torch.nan_to_num(x), step, row))

    target = replace(base, network=network)
    runs: tuple[Callable[[], fs.Run], ...] = (
        lambda: fs.sample(target, 4, window=6, graph=graph),
        lambda: fs.sequential(target, 4, graph=graph),
    )
    for run in runs:
        with pytest.raises(FloatingPointError, match="NaN or infinity at step 11 of sample 2"):
            run()


def test_the_fused_round_has_the_law_of_the_chain(monkeypatch: pytest.MonkeyPatch) -> None:
    """100 000 samples through the kernels; verification against another chain must be caught."""
    there = fs.GaussianMixture(*(value.to(GPU) for value in vars(mixture()).values()))
    network = there.flow(16, 1.0).network  # not on the CPU: the test makes thousands of calls
    target = replace(small("flow", GPU), network=network)
    steps, samples = list(range(1, 16, 3)), 100_000

    def smallest() -> float:
        ours, theirs = Recorder(steps, target, samples), Recorder(steps, target, samples)
        seeds = streams.seeds_of(21, 2 * samples)
        fs.sample(target, seeds=seeds[:samples], window=6, observe=ours.from_sample(0))
        fs.sequential(target, seeds=seeds[samples:], observe=theirs.from_sample(0))
        p_values = [p for _, p in law_tests(target, ours, theirs, 21)]
        return min(p_values) * len(p_values)

    assert smallest() > 1e-4
    honest = engine_slots.round_for

    def lax(target: ChainTarget, speculation: Speculation) -> Round:
        chain = replace(target.chain, prediction_weight=0.8 * target.chain.prediction_weight)
        wrong, (propose, settle) = replace(target, chain=chain), honest(target, speculation)
        return Round(lambda _, *more: propose(wrong, *more), lambda _, *more: settle(wrong, *more))

    monkeypatch.setattr(engine_slots, "round_for", lax)
    assert smallest() < 1e-4


def test_faults_start_at_none() -> None:
    target = wide(GPU, torch.float32)
    speculation = Speculation(fs.Replay(), 3, None, True, last_draftable(target.std), Padded())
    rows = begin(target, speculation, streams.seeds_of(0, 2).to(GPU))
    assert (rows.fault == NO_FAULT).all()
