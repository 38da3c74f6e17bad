"""The fused round against the plain one, on a GPU."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import foresample as fs
from foresample.core import coupling
from foresample.core import noise as streams
from foresample.core.baseline import Sequential
from foresample.core.report import Tally
from foresample.core.round import Layout, Packed, Padded, Speculation, begin, last_draftable
from foresample.engine import slots as engine_slots
from foresample.engine.slots import FixedSlots, Round
from foresample.faults import NO_FAULT
from foresample.selftest import Recorder, law_tests
from foresample.targets import Chain, ChainTarget
from tests.agreement import assert_rounds_agree, fused_round, plain_round
from tests.small_chains import CHAINS, strays

pytestmark = pytest.mark.gpu
GPU = torch.device("cuda")


def on_gpu(target: ChainTarget) -> ChainTarget:
    """The same chain there; its network runs where it did."""

    def network(x: Tensor, time: Tensor, row: Tensor) -> Tensor:
        return target.network(x.cpu(), time.cpu(), row.cpu()).to(GPU)

    return replace(target, chain=target.chain.to(GPU, target.std.dtype), network=network)


def wide(dtype: torch.dtype, steps: int = 40, size: int = 700) -> ChainTarget:
    """A chain in many dimensions with a smooth, cheap network that can be captured."""
    generator = torch.Generator().manual_seed(0)
    direction = torch.randn(size, generator=generator, dtype=torch.float64).to(GPU, dtype)

    def network(x: Tensor, step: Tensor, row: Tensor) -> Tensor:
        return torch.tanh(x + direction * (1 + step / steps).unsqueeze(1).to(dtype)) + row.unsqueeze(1) % 3

    ones = torch.ones(steps, dtype=dtype, device=GPU)
    return ChainTarget(Chain(0.1 * ones, 0.95 * ones, 0.05 * ones), torch.Size([size]), network)


def on_cpu(commit: fs.Commit) -> fs.Commit:
    return fs.Commit(**{name: value.cpu() for name, value in vars(commit).items()})


@pytest.mark.parametrize("layout", [Padded(), Packed()], ids=["padded", "packed"])
@pytest.mark.parametrize("block", [None, 1, 4])
@pytest.mark.parametrize("chain", [*CHAINS, "strays", "wide float32", "wide float64"])
def test_rounds_agree_along_whole_chains(chain: str, block: int | None, layout: Layout) -> None:
    """Row by row from the same rows: the same decision, and then the same numbers up to rounding.

    Rows may only part where a uniform lies between two roundings of its bar (`tests.agreement`), so few do.
    """
    if chain.startswith("wide"):
        target = wide(getattr(torch, chain.split()[1]))
    else:
        target = on_gpu(strays() if chain == "strays" else CHAINS[chain]())
    window, count = (10, 2_000) if chain == "strays" else (7, 40)
    assert_agree_along(target, fs.Replay(), window, count, block, layout)


@pytest.mark.parametrize("chain", ["flow", "multistep", "wells", "wide float32", "small float32"])
@pytest.mark.parametrize("kind", ["table", "slopes", "jacobian"])
def test_rounds_agree_with_a_prior(chain: str, kind: str) -> None:
    if chain.startswith(("wide", "small")):
        target = wide(torch.float32, size=700 if chain.startswith("wide") else 100)
    else:
        target = on_gpu(CHAINS[chain]())
    size, steps, generator = target.shape.numel(), len(target.std), torch.Generator().manual_seed(4)

    def random(*shape: int) -> Tensor:
        return 0.3 * torch.randn(*shape, generator=generator, dtype=target.std.dtype).to(target.std)

    path = random(3, 6, *target.shape), random(3, 6, *target.shape)
    extra = {
        "table": {},
        "slopes": {"gain": random(6)},
        "jacobian": {"response": random(steps, size, size) / size},
    }
    if size > 128 and kind == "jacobian":
        pytest.skip("the plain round serves those")
    prior = fs.Prior(*path, **extra[kind])
    assert_agree_along(target, fs.Replay(prior=prior), 7, 40, None, Padded())


@pytest.mark.parametrize("chain", ["flow", "interrupted", "multistep", "wide float32"])
def test_narrow_rounds_agree(chain: str) -> None:
    """No wider than the longest draft a row can make."""
    target = wide(torch.float32) if chain.startswith("wide") else on_gpu(CHAINS[chain]())
    assert_agree_along(target, fs.Replay(), 9, 30, None, None)


def assert_agree_along(
    target: ChainTarget, drafter: fs.Replay, window: int, count: int, block: int | None, layout: Layout | None
) -> None:
    """Plain and fused rounds along whole chains; without a layout, padded to what is needed."""
    steps = len(target.std)
    last = last_draftable(target.std)
    how = Speculation(drafter, window, block, True, last, layout or Padded())
    tallies = Tally(window, steps, torch.device("cpu")), Tally(window, steps, GPU)
    rows = begin(target, how.drafter, window, streams.seeds_of(1, count).to(GPU))
    single = target.std.dtype == torch.float32
    near: dict[str, Any] = {"rtol": 2e-4, "atol": 2e-4} if single else {"rtol": 1e-8, "atol": 1e-8}
    settled = undecided = 0
    while (rows.step < steps).any():
        if layout is None:
            first = rows.step.clamp(max=steps - 1)
            length = torch.minimum(how.drafter.reach(rows.memory, window), last[first] - first)
            how = replace(how, layout=Padded(max(1, int(length.max()))))
        one, other = plain_round(target, rows, how), fused_round(target, rows, how)
        may_part = assert_rounds_agree(one, other, block)
        under_way = rows.step < steps
        settled, undecided = settled + int(under_way.sum()), undecided + int(may_part.sum())
        plain, fused = one.after, other.after
        same = under_way & (plain.step == fused.step)
        assert torch.equal(same | may_part, under_way)
        alive = same & (plain.step < steps)
        torch.testing.assert_close(plain.x[same], fused.x[same], **near)
        torch.testing.assert_close(plain.previous[same], fused.previous[same], **near)
        ahead = plain.step.unsqueeze(1) + torch.arange(window + 1, device=GPU) < steps
        used = ahead & alive.unsqueeze(1)
        torch.testing.assert_close(plain.noise[used], fused.noise[used], **near)
        for name, value in plain.memory.items():
            torch.testing.assert_close(value[alive], fused.memory[name][alive], **near)
        width = one.commit.mismatch.shape[1]
        torch.testing.assert_close(one.commit.mismatch, other.commit.mismatch[:, :width], **near)
        tallies[0].count(on_cpu(one.commit))
        tallies[1].count(other.commit)
        rows = plain
    assert undecided <= (1e-2 if single else 1e-3) * settled
    torch.testing.assert_close(tallies[0].mismatch, tallies[1].mismatch.cpu(), **near)
    assert tallies[0].drafted == tallies[1].drafted
    assert (tallies[0].lengths - tallies[1].lengths.cpu()).abs().sum() <= 2 * undecided


def test_scalars_agree_over_the_whole_range() -> None:
    """δ from 1e-12 to 1e3, p from 1e-300 to 1, at random."""
    import triton
    import triton.language as tl

    from foresample.kernels import coupling as device

    @triton.jit
    def every(mismatch, log_p, s, level, nodes, weights, out, n, BLOCK: tl.constexpr):
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
def test_nan_is_named(where: str, graph: bool) -> None:
    base = wide(torch.float32)

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
    honest = engine_slots.round_for

    def lax(target: ChainTarget, how: Speculation) -> Round:
        chain = replace(target.chain, prediction_weight=0.8 * target.chain.prediction_weight)
        wrong, (propose, settle) = replace(target, chain=chain), honest(target, how)
        return Round(lambda _, *more: propose(wrong, *more), lambda _, *more: settle(wrong, *more))

    monkeypatch.setattr(engine_slots, "round_for", lax)
    assert smallest() < 1e-4


def test_faults_start_at_none() -> None:
    target = wide(torch.float32)
    rows = begin(target, fs.Replay(), 3, streams.seeds_of(0, 2).to(GPU))
    assert (rows.fault == NO_FAULT).all()
