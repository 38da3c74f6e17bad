"""The fused round against the plain one, on a GPU. Run by hand: `pytest -m gpu`."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

import foresample as fs
from foresample.core import coupling, engine, speculate
from foresample.core import noise as streams
from foresample.selftest import Recorder, law_tests
from foresample.contracts import NO_FAULT
from foresample.core.report import Tally
from foresample.core.baseline import Sequential
from foresample.core.round import Rows, Settings, begin, last_draftable
from foresample.targets import ChainTarget
from tests.chains import CHAINS, strays

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
GPU = torch.device("cuda")


def on_gpu(target: ChainTarget) -> ChainTarget:
    """The same chain there; its network runs where it did."""

    def network(x: Tensor, step: Tensor, row: Tensor) -> Tensor:
        return target.network(x.cpu(), step.cpu(), row.cpu()).to(GPU)

    weights = (target.std, target.state_weight, target.prediction_weight)
    previous = None if target.previous_weight is None else target.previous_weight.to(GPU)
    return ChainTarget(
        target.shape, *(v.to(GPU) for v in weights), network, target.start_scale, previous_weight=previous
    )


def wide(dtype: torch.dtype, steps: int = 40, size: int = 700) -> ChainTarget:
    """A chain in many dimensions with a smooth, cheap network that can be captured."""
    generator = torch.Generator().manual_seed(0)
    direction = torch.randn(size, generator=generator, dtype=torch.float64).to(GPU, dtype)

    def network(x: Tensor, step: Tensor, row: Tensor) -> Tensor:
        return torch.tanh(x + direction * (1 + step / steps).unsqueeze(1).to(dtype)) + row.unsqueeze(1) % 3

    ones = torch.ones(steps, dtype=dtype, device=GPU)
    return ChainTarget(torch.Size([size]), 0.1 * ones, 0.95 * ones, 0.05 * ones, network)


def answered(rounds, target: ChainTarget) -> tuple[Rows, fs.Commit]:  # type: ignore[no-untyped-def]
    call = next(rounds)
    with pytest.raises(StopIteration) as end:
        rounds.send(target.predict(call.x, call.step, call.row))
    return end.value.value


def both_rounds(target: ChainTarget, rows: Rows, settings: Settings, tallies: list[Tally]):  # type: ignore[no-untyped-def]
    from foresample.kernels import round as fused

    copy = rows.map(lambda v: v.clone())
    plain = answered(speculate.one_round(target, rows, settings, tallies[0]), target)
    return plain, answered(fused.one_round(target, copy, settings, tallies[1]), target)


@pytest.mark.parametrize("padded", [True, False], ids=["padded", "packed"])
@pytest.mark.parametrize("block", [None, 1, 4])
@pytest.mark.parametrize("chain", [*CHAINS, "strays", "wide float32", "wide float64"])
def test_rounds_agree_along_whole_chains(chain: str, block: int | None, padded: bool) -> None:
    if chain.startswith("wide"):
        target = wide(getattr(torch, chain.split()[1]))
    else:
        target = on_gpu(strays() if chain == "strays" else CHAINS[chain]())
    steps, window, count = len(target.std), *((10, 2_000) if chain == "strays" else (7, 40))
    settings = Settings(fs.Replay(), window, block, True, last_draftable(target.std), padded)
    tallies = [Tally(window, steps, GPU) for _ in range(2)]
    rows = begin(target, fs.Replay(), window, streams.seeds_of(1, count).to(GPU))
    near = {"rtol": 2e-4, "atol": 2e-4} if target.std.dtype == torch.float32 else {"rtol": 1e-8, "atol": 1e-8}
    while (rows.step < steps).any():
        (plain, commit), (fused, fused_commit) = both_rounds(target, rows, settings, tallies)
        # A uniform may fall between two roundings of its bound; then the rows part, rightly.
        same = plain.step == fused.step
        assert same.double().mean() > 0.9
        for name in ("round", "evaluations", "fault"):
            assert torch.equal(getattr(plain, name), getattr(fused, name)), name
        alive = same & (plain.step < steps)
        torch.testing.assert_close(plain.x[same], fused.x[same], **near)
        torch.testing.assert_close(plain.previous[same], fused.previous[same], **near)
        ahead = plain.step.unsqueeze(1) + torch.arange(window + 1, device=GPU) < steps
        used = ahead & alive.unsqueeze(1)
        torch.testing.assert_close(plain.noise[used], fused.noise[used], **near)
        for name, value in plain.memory.items():
            torch.testing.assert_close(value[alive], fused.memory[name][alive], **near)
        width = commit.mismatch.shape[1]
        torch.testing.assert_close(commit.mismatch, fused_commit.mismatch[:, :width], **near)
        rows = plain
    torch.testing.assert_close(tallies[0].mismatch, tallies[1].mismatch, **near)
    assert tallies[0].drafted == tallies[1].drafted


def test_scalars_agree_over_the_whole_range() -> None:
    """δ from 1e-12 to 1e3, p from 1e-300 to 1, at random."""
    import triton
    import triton.language as tl

    from foresample.kernels import coupling as device

    @triton.jit
    def every(mismatch, log_p, s, level, nodes, weights, out, n, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
        i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        u, w = tl.load(nodes + tl.arange(0, 16)), tl.load(weights + tl.arange(0, 16))
        d, p = tl.load(mismatch + i), tl.load(log_p + i)
        tl.store(out + i, device.acceptance(d, p, u, w))
        tl.store(out + n + i, device.tilted_cdf(tl.load(s + i), d, p, u, w))
        tl.store(out + 2 * n + i, device.residual(tl.load(level + i), d, p, u, w))

    count, generator = 1 << 16, torch.Generator().manual_seed(2)
    unit = torch.rand(4, count, generator=generator, dtype=torch.float64)
    mismatch = 10 ** (unit[0] * 15 - 12)
    log_p = -(10 ** (unit[1] * 10 - 7.2)).clamp(max=690)
    threshold = coupling.threshold(mismatch, log_p)
    s = torch.minimum(torch.randn(count, generator=generator, dtype=torch.float64), threshold)
    level = unit[3].clamp(1e-12, 1 - 1e-12)
    wanted = [
        coupling.acceptance(mismatch, log_p),
        coupling.tilted_cdf(s, mismatch, log_p),
        coupling.residual(level, mismatch, log_p),
    ]
    out = torch.empty(3, count, dtype=torch.float64, device=GPU)
    values = [v.to(GPU) for v in (mismatch, log_p, s, level)]
    every[(count // 128,)](*values, *coupling.quadrature(GPU), out, count, BLOCK=128)
    matters = wanted[0] > 2.0**-53  # below it, no uniform can come to the residual
    for got, want in zip(out.cpu(), wanted, strict=True):
        finite = torch.isfinite(want) & matters
        torch.testing.assert_close(got[finite], want[finite], rtol=1e-9, atol=1e-13)


def test_noise_is_the_same_stream() -> None:
    seed, step = streams.seeds_of(3, 50), torch.arange(50) * 20
    draw = torch.arange(50) % 3
    for size in (1, 2, 7, 3072):
        shape = torch.Size([size])
        here = streams.normal(seed, shape, torch.float64, step=step, draw=draw)
        there = streams.normal(seed.to(GPU), shape, torch.float64, step=step.to(GPU), draw=draw.to(GPU))
        torch.testing.assert_close(there.cpu(), here, rtol=1e-13, atol=1e-13)


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
@pytest.mark.parametrize("drafter", [None, fs.Frozen("nearest")], ids=["fused", "plain"])
def test_nothing_in_a_round_waits_for_the_device(drafter: fs.Drafter | None) -> None:
    """Ten rounds are queued with synchronisation forbidden."""
    target = wide(torch.float32)
    work = fs.Engine(target, window=6, slots=5, drafter=drafter)
    slots = work._slots(5)
    slots.admit(torch.arange(5), streams.seeds_of(0, 5))
    slots._round()  # type: ignore[attr-defined]
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(10):
            slots._round()  # type: ignore[attr-defined]
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("drafter", [None, fs.Frozen("parent")], ids=["fused", "plain"])
def test_graphs_slots_and_order_change_nothing(drafter: fs.Drafter | None) -> None:
    target = wide(torch.float64)
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
    target = wide(torch.float64)
    work = fs.Engine(target, window=6, slots=4, graph=True)
    first, again = work.sample(streams.seeds_of(5, 9)), work.sample(streams.seeds_of(5, 9))
    assert torch.equal(first.samples, again.samples)
    assert first.report.rounds == again.report.rounds


@pytest.mark.parametrize("graph", [False, True])
def test_the_sequential_sampler_takes_the_same_path(graph: bool) -> None:
    target = wide(torch.float64)
    key = streams.seeds_of(4, 6).to(GPU)
    row = torch.arange(6, device=GPU)
    run = Sequential(target, 6, graph=graph).sample(key)
    x = streams.normal(key, target.shape, torch.float64, stream=streams.START, step=key * 0, draw=key * 0)
    for k in range(len(target.std)):
        step = torch.full_like(key, k)
        noise = streams.normal(key, target.shape, torch.float64, step=step, draw=key * 0)
        x = target.mean(x, target.predict(x, step, row), step) + target.std[k] * noise
    torch.testing.assert_close(run.samples, x, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("where", ["network", "state"])
@pytest.mark.parametrize("graph", [False, True])
def test_a_number_that_is_none_is_named(where: str, graph: bool) -> None:
    base = wide(torch.float32)

    def network(x: Tensor, step: Tensor, row: Tensor) -> Tensor:
        bad = ((step == 11) & (row == 2)).unsqueeze(1)
        if where == "state":
            x.masked_fill_(bad, math.nan)  # an input written to must do no harm
        return torch.where(bad, math.nan, base.network(torch.nan_to_num(x), step, row))

    target = ChainTarget(base.shape, base.std, base.state_weight, base.prediction_weight, network)
    for run in (
        lambda: fs.sample(target, 4, window=6, graph=graph),
        lambda: fs.sequential(target, 4, graph=graph),
    ):
        with pytest.raises(FloatingPointError, match="NaN or infinity at step 11 of sample 2"):
            run()


def test_the_fused_round_has_the_law_of_the_chain(monkeypatch: pytest.MonkeyPatch) -> None:
    """100 000 samples through the kernels; verification against another chain must be caught."""
    base = CHAINS["flow"]()
    target = on_gpu(base)
    steps, samples = list(range(1, 16, 3)), 100_000

    def smallest() -> float:
        ours, theirs = Recorder(steps, target, samples), Recorder(steps, target, samples)
        seeds = streams.seeds_of(21, 2 * samples)
        fs.sample(target, seeds=seeds[:samples], window=6, observe=ours.from_sample(0))
        fs.sequential(target, seeds=seeds[samples:], observe=theirs.from_sample(0))
        p_values = [p for _, p in law_tests(target, ours, theirs, 21)]
        return min(p_values) * len(p_values)

    assert smallest() > 1e-4
    honest = engine.round_for

    def lax(target: ChainTarget, settings: Settings) -> engine.Round:
        round_ = honest(target, settings)

        def one_round(target: ChainTarget, rows: Rows, settings: Settings, tally: Tally):  # type: ignore[no-untyped-def]
            wrong = ChainTarget(
                target.shape, target.std, target.state_weight, 0.8 * target.prediction_weight, target.network
            )
            return (yield from round_(wrong, rows, settings, tally))

        return one_round

    monkeypatch.setattr(engine, "round_for", lax)
    assert smallest() < 1e-4


def test_faults_start_at_none() -> None:
    target = wide(torch.float32)
    rows = begin(target, fs.Replay(), 3, streams.seeds_of(0, 2).to(GPU))
    assert (rows.fault == NO_FAULT).all()
