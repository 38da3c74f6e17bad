"""The Triton kernels against plain PyTorch, wherever they run: on a GPU (tests/gpu) or interpreted (interpreted.py)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

import foresample as fs
from foresample.baseline import Sequential
from foresample.chains import Chain
from foresample.core import coupling
from foresample.core import noise as streams
from foresample.core.report import Tally
from foresample.core.round import Layout, Padded, Speculation, begin, last_draftable
from foresample.targets import ChainTarget
from tests.support.agreement import assert_rows_agree, fused_round, near, plain_round
from tests.support.small_chains import CHAINS, strays

CPU = torch.device("cpu")


def small(chain: str, device: torch.device) -> ChainTarget:
    """A small chain there; its network runs where it did."""
    target = strays() if chain == "strays" else CHAINS[chain]()

    def network(x: Tensor, time: Tensor, row: Tensor) -> Tensor:
        return target.network(x.cpu(), time.cpu(), row.cpu()).to(device)

    return replace(target, chain=target.chain.to(device, target.std.dtype), network=network)


def wide(device: torch.device, dtype: torch.dtype, steps: int = 40, size: int = 700) -> ChainTarget:
    """A chain in many dimensions with a smooth, cheap network that can be captured."""
    generator = torch.Generator().manual_seed(0)
    direction = torch.randn(size, generator=generator, dtype=torch.float64).to(device, dtype)

    def network(x: Tensor, step: Tensor, row: Tensor) -> Tensor:
        return torch.tanh(x + direction * (1 + step / steps).unsqueeze(1).to(dtype)) + row.unsqueeze(1) % 3

    ones = torch.ones(steps, dtype=dtype, device=device)
    return ChainTarget(Chain(0.1 * ones, 0.95 * ones, 0.05 * ones), torch.Size([size]), network)


def warm(target: ChainTarget, kind: str) -> fs.Replay:
    """The drafter with a prior at random: a table, that with slopes, or with a Jacobian or its diagonal."""
    size, steps, generator = target.shape.numel(), len(target.std), torch.Generator().manual_seed(4)

    def random(*shape: int) -> Tensor:
        return 0.3 * torch.randn(*shape, generator=generator, dtype=target.std.dtype).to(target.std)

    table = min(6, steps)
    path = random(3, table, *target.shape), random(3, table, *target.shape)
    extra: dict[str, Callable[[], dict[str, Tensor]]] = {
        "table": dict,
        "slopes": lambda: {"slope": random(table)},
        "jacobian": lambda: {"jacobian": random(steps, size, size) / size},
        "diagonal": lambda: {"jacobian": random(steps, 1, size)},
    }
    return fs.Replay(prior=fs.Prior(*path, **extra[kind]()))


def assert_pictures_are_turned(device: torch.device) -> None:
    """A matrix product of any supported size, with states whose memory is not in order."""
    from foresample.backends.triton import basis

    generator = torch.Generator().manual_seed(3)
    for count, rows, columns in ((3, 96, 32), (2, 5, 7), (1, 28, 28)):
        sizes = (rows, rows), (columns, rows, count), (columns, columns)
        left, x, right = (torch.randn(size, generator=generator).to(device) for size in sizes)
        x = x.permute(2, 1, 0)
        assert basis._serves(x)
        torch.testing.assert_close(basis.turn(left, x, right), left @ x @ right, rtol=1e-4, atol=1e-3)
    assert not basis._serves(x.double())
    assert not basis._serves(x.new_empty(1, 192, 64))


def assert_agree_along(
    target: fs.Target,
    drafter: fs.Replay,
    window: int,
    seeds: Tensor,
    block: int | None,
    layout: Layout | None,
) -> None:
    """Plain and fused rounds along whole chains; without a layout, padded to what is needed.

    Row by row from the same rows: the same decision, and then the same numbers up to rounding. Rows may only part
    where a uniform lies between two roundings of its bar (`tests.support.agreement`), so few do.
    """
    from foresample.backends.triton.tally import count as fused_count

    steps, device = len(target.std), target.std.device
    last = last_draftable(target.std)
    speculation = Speculation(drafter, window, block, True, last, layout or Padded())
    tallies = Tally(window, steps, CPU), Tally(window, steps, device)
    rows = begin(target, speculation, seeds.to(device))
    rounding = near(target.std.dtype)
    settled = undecided = 0
    while (rows.step < steps).any():
        if layout is None:
            first = rows.step.clamp(max=steps - 1)
            length = torch.minimum(speculation.drafter.reach(rows.memory, window), last[first] - first)
            speculation = replace(speculation, layout=Padded(max(1, int(length.max()))))
        one, other = plain_round(target, rows, speculation), fused_round(target, rows, speculation)
        fused_count(other.commit, tallies[1].lengths, tallies[1].drafted, tallies[1].mismatch)
        rows = one.after
        one, other = one.cpu(), other.cpu()
        _, may_part = assert_rows_agree(one, other, block, steps)
        settled, undecided = settled + int((one.rows.step < steps).sum()), undecided + int(may_part.sum())
        width = one.commit.mismatch.shape[1]
        torch.testing.assert_close(one.commit.mismatch, other.commit.mismatch[:, :width], **rounding)
        tallies[0].count(one.commit)
    assert undecided <= (1e-2 if target.std.dtype == torch.float32 else 1e-3) * settled
    torch.testing.assert_close(tallies[0].mismatch, tallies[1].mismatch.cpu(), **rounding)
    assert tallies[0].drafted == tallies[1].drafted
    assert (tallies[0].lengths - tallies[1].lengths.cpu()).abs().sum() <= 2 * undecided


def assert_scalars_agree(device: torch.device, count: int, at_once: int) -> None:
    """δ from 1e-12 to 1e3, p from 1e-300 to 1, at random; a program takes a block of them at once."""
    from tests.backends.scalars import every

    generator = torch.Generator().manual_seed(2)
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
    out = torch.empty(3, count, dtype=torch.float64, device=device)
    values = [v.to(device) for v in (mismatch, log_p, s, level)]
    every[(count // at_once,)](*values, *coupling.quadrature(device), out, count, BLOCK=at_once)
    matters = wanted[0] > 2.0**-53  # below it, no uniform can come to the residual
    for got, want in zip(out.cpu(), wanted, strict=True):
        finite = torch.isfinite(want) & matters
        torch.testing.assert_close(got[finite], want[finite], rtol=1e-9, atol=1e-13)


def assert_noise_is_the_same_stream(device: torch.device, count: int) -> None:
    from foresample.backends.triton.noise import normal

    seed, step = streams.seeds_of(3, count), torch.arange(count) * 20
    draw = torch.arange(count) % 3
    seed[0] = 2**63 - 1
    for size in (1, 2, 7, 700):
        for stream in (streams.START, streams.STEP):
            shape = torch.Size([size])
            here = streams.normal(seed, shape, torch.float64, stream=stream, step=step, draw=draw)
            there = normal(
                seed.to(device), shape, torch.float64, stream=stream, step=step.to(device), draw=draw.to(device)
            )
            torch.testing.assert_close(there.cpu(), here, rtol=1e-13, atol=1e-13)


def assert_sequential_is_its_formula(target: ChainTarget, *, graph: bool = False) -> None:
    """The sequential sampler, which takes the kernel where it serves, against the recurrence written out."""
    key = streams.seeds_of(4, 3).to(target.std.device)
    row = torch.arange(3, device=key.device)
    sampler = Sequential(target, 3, graph=graph)
    assert (sampler.backend.name, sampler.chain) == ("Triton", target.chain)
    x = streams.normal(key, target.shape, target.std.dtype, stream=streams.START, step=key * 0, draw=key * 0)
    x, previous = target.start(x, torch.arange(len(x), device=x.device)), torch.zeros_like(x)
    for k in range(len(target.std)):
        step = torch.full_like(key, k)
        noise = streams.normal(key, target.shape, x.dtype, step=step, draw=key * 0)
        prediction = target.predict(x, step, row)
        x = target.mean(x, prediction, step, previous) + target.std[k] * noise
        previous = prediction
    torch.testing.assert_close(sampler.sample(key).samples, x, rtol=1e-12, atol=1e-12)
