"""Do two rounds of the same rows agree? Yes, up to uniforms that fall between two roundings of their bar.

A draft is kept by comparing uniforms u with bars h, which are made of the gaps between target and draft means. Two
rounds that round differently see slightly different gaps, so their bars differ a little, and a row may decide
differently where its u lies between. Nowhere else: the bars of each round are computed here from the gaps that
round itself saw, widened by what rounding can do to them, and its decision must lie between those of its lowest and
of its highest bars. Decisions are monotone in the bars, so where these two agree the row has no choice, and where
they agree for both rounds, both must have decided alike.

The noise that a round recycles is moved along the gap it saw. Where a draft is nearly right the gap is small and its
direction mostly rounding, so the two rounds need not move the noise alike. But their gaps must agree, and each
must have moved its noise as its own gap demands.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import foresample as fs
from foresample.contracts import affine_chain, expand
from foresample.core import coupling
from foresample.core import noise as streams
from foresample.core import round as plain
from foresample.core.round import Rows, Speculation
from foresample.core.verify import _levels, verify
from foresample.drafters.replay import ReplayMemory

SLOPES = "slope"
"""The memory's field of learned slopes, which agree less closely than the others (`_near_slopes`)."""
assert SLOPES in ReplayMemory._fields


@dataclass(frozen=True)
class Settled:
    """A finished round and its inputs."""

    rows: Rows
    """The rows before the round."""
    after: Rows
    commit: fs.Commit
    gap: Tensor
    """[R, W, *shape]: target mean − draft mean."""
    noise: Tensor
    """[R, W, *shape]"""
    std: Tensor
    """[R, W]"""

    def cpu(self) -> Settled:
        """The same, where it is judged faster."""
        commit = fs.Commit(**{name: value.cpu() for name, value in vars(self.commit).items()})
        rows, after = (rows.map(lambda value: value.cpu()) for rows in (self.rows, self.after))
        return Settled(rows, after, commit, self.gap.cpu(), self.noise.cpu(), self.std.cpu())

    @property
    def accepted(self) -> Tensor:
        """[R]: drafts kept by rows under way."""
        return (self.commit.committed - 1).clamp(min=0)


def plain_round(target: fs.Target, rows: Rows, speculation: Speculation) -> Settled:
    draft = plain.propose(target, rows, speculation)
    call = draft.call
    predictions = target.predict(call.x, call.step, call.row)
    after, commit = plain.settle(target, rows, draft, predictions, speculation)
    spread = call.spread(predictions, draft.states)
    means = plain._target_means(target, draft, spread, plain._history(target, rows, spread))
    width = draft.mean.shape[1]
    return Settled(
        rows, after, commit, means[:, :-1] - draft.mean, rows.noise[:, :width], target.std[draft.step[:, :-1]]
    )


def fused_round(target: fs.Target, rows: Rows, speculation: Speculation) -> Settled:
    """Run the round on a GPU, on a copy of the rows."""
    from foresample.backends.triton import round as fused

    mine = rows.map(lambda value: value.clone())
    draft = fused.propose(target, mine, speculation)
    call = draft.call
    predictions = target.predict(call.x, call.step, call.row)
    after, commit = fused.settle(target, mine, draft, predictions, speculation)
    difference = call.spread(predictions, draft.states)[:, :-1] - draft.guesses
    step = draft.step[:, :-1]
    gap = _gap(target, difference, step)
    return Settled(rows, after, commit, gap, draft.spent[:, : draft.guesses.shape[1]], target.std[step])


def compiled_round(target: fs.Target, rows: Rows, speculation: Speculation) -> Settled:
    """Run the round on a CPU, on a copy of the rows."""
    from foresample.backends.numba import round as compiled

    mine = rows.map(lambda value: value.clone())
    draft = compiled.propose(target, mine, speculation)
    call = draft.call
    predictions = target.predict(call.x, call.step, call.row)
    after, commit = compiled.settle(target, mine, draft, predictions, speculation)
    difference = call.spread(predictions, draft.states)[:, :-1] - draft.guesses
    width, steps = difference.shape[1], len(target.std)
    step = (rows.step.unsqueeze(1) + torch.arange(width)).clamp(max=steps - 1)
    gap = _gap(target, difference, step)
    return Settled(rows, after, commit, gap, rows.noise[:, :width], target.std[step])


def _gap(target: fs.Target, difference: Tensor, step: Tensor) -> Tensor:
    """Target mean − draft mean, [R, W, *shape], of the difference between prediction and guess."""
    chain = affine_chain(target)
    assert chain is not None
    gap = expand(chain.prediction_weight[step], difference) * difference
    if chain.previous_weight is not None:  # the prediction before the window is no guess
        gap[:, 1:] += expand(chain.previous_weight[step], difference)[:, 1:] * difference[:, :-1]
    return gap


def decisions(round_: Settled, block: int | None) -> tuple[Tensor, Tensor]:
    """[R] each: the fewest and the most drafts a round that saw this may keep."""
    low, high = (_bars(round_, block, sign) for sign in (-1, 1))
    return _accepted(round_, block, low), _accepted(round_, block, high)


def assert_rounds_agree(one: Settled, other: Settled, block: int | None) -> Tensor:
    """Every decision is one that the round's own bars allow. Returns which rows may have parted, [R].

    Counters, faults and the number of examined positions agree whatever was decided.
    """
    for name in ("round", "evaluations", "fault"):
        assert torch.equal(getattr(one.after, name), getattr(other.after, name)), name
    assert torch.equal(one.commit.drafted, other.commit.drafted)
    under_way = one.commit.committed > 0
    ends = []
    for round_ in (one, other):
        fewest, most = decisions(round_, block)
        wrong = under_way & ((round_.accepted < fewest) | (round_.accepted > most))
        assert not wrong.any(), (
            f"row {wrong.nonzero()[0].item()} kept {round_.accepted[wrong][0].item()} drafts; its uniforms allow "
            f"{fewest[wrong][0].item()} to {most[wrong][0].item()}"
        )
        ends += [fewest, most]
    return under_way & (torch.stack(ends).amin(0) < torch.stack(ends).amax(0))


def near(dtype: torch.dtype) -> dict[str, Any]:
    """The rounding errors that rounds may have in this precision, for `torch.testing.assert_close`."""
    return dict.fromkeys(("rtol", "atol"), 2e-4 if dtype == torch.float32 else 1e-8)


def _near_slopes(dtype: torch.dtype) -> dict[str, Any]:
    """The same for slopes: quotients of differences, which count from √ε of the state on."""
    return dict.fromkeys(("rtol", "atol"), 10 * torch.finfo(dtype).eps ** 0.5)


def assert_rows_agree(
    plain: Settled, other: Settled, block: int | None, steps: int, *, equal_nan: bool = False
) -> tuple[Tensor, Tensor]:
    """`assert_rounds_agree`, and rows that decided alike are alike: states, predictions, gaps, the noise and the memory
    that later rounds look at (whose memory may hold NaN, with `equal_nan`). Returns which rows did, and which may
    have parted, [R] both.
    """
    may_part = assert_rounds_agree(plain, other, block)
    ours, theirs, under_way = other.after, plain.after, plain.rows.step < steps
    rounding = near(theirs.x.dtype)
    same = under_way & (ours.step == theirs.step)
    assert torch.equal(same | may_part, under_way)
    torch.testing.assert_close(ours.x[same], theirs.x[same], **rounding)
    torch.testing.assert_close(ours.previous[same], theirs.previous[same], **rounding)
    alive = same & (theirs.step < steps)
    position = torch.arange(theirs.noise.shape[1], device=alive.device)
    used = (theirs.step.unsqueeze(1) + position < steps) & alive.unsqueeze(1)
    _, drafted = _inside(plain)
    torch.testing.assert_close(other.gap[:, : drafted.shape[1]][drafted], plain.gap[drafted], **rounding)
    for round_ in (plain, other):
        _assert_noise_is_recycled(round_, used & ~may_part.unsqueeze(1), block)
    moved = position + plain.commit.committed.unsqueeze(1) < plain.commit.drafted.unsqueeze(1)
    torch.testing.assert_close(ours.noise[used & ~moved], theirs.noise[used & ~moved], **rounding)
    for name, value in theirs.memory.items():
        at = used if name in ("states", "predictions") else alive  # what lies behind the chain is of no use
        allowed = _near_slopes(theirs.x.dtype) if name == SLOPES else rounding
        torch.testing.assert_close(ours.memory[name][at], value[at], equal_nan=equal_nan, **allowed)
    return same, may_part


def _assert_noise_is_recycled(round_: Settled, used: Tensor, block: int | None) -> None:
    """The rest of the window's noise, where `used`, [R, W], is what `verify` leaves for the gaps that the round saw.

    In double precision, and with the noise's coordinate along the gap a little lower and a little higher, for
    what its rounding can do.
    """
    low, right, high = (_recycled(round_, block, sign) for sign in (-1, 0, 1))
    position = torch.arange(used.shape[1], device=used.device)
    source = (position + round_.commit.committed.unsqueeze(1)).expand_as(used)
    row, at = (used & (source < right.shape[1])).nonzero(as_tuple=True)
    place = source[row, at]
    wanted, got = right[row, place], round_.after.noise[row, at].double()
    tolerance = near(round_.gap.dtype)["atol"] * (1 + wanted.abs()) + (high - low)[row, place].abs()
    wrong = (got - wanted).abs() > tolerance
    assert not wrong.any(), f"noise is off by up to {(got - wanted)[wrong].abs().max():.2e}"


def _recycled(round_: Settled, block: int | None, sign: int) -> Tensor:
    """[R, W, *shape], float64: the noise after the decision."""
    direction, _, _, error = _seen(round_)
    gap, noise = round_.gap.flatten(2).double(), round_.noise.flatten(2).double()
    verdict = verify(
        noise + sign * error.unsqueeze(2) * direction,
        torch.zeros_like(gap),
        gap,
        round_.std.double(),
        round_.commit.drafted,
        streams.uniform(round_.rows.seed, gap.shape[1], round=round_.rows.round),
        block=block,
    )
    return verdict.noise.view_as(round_.noise)


def _inside(round_: Settled) -> tuple[Tensor, Tensor]:
    """[W]: positions, and [R, W]: which were examined."""
    position = torch.arange(round_.gap.shape[1], device=round_.gap.device)
    return position, position < round_.commit.drafted.unsqueeze(1)


def _seen(round_: Settled) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """In float64, 0 where nothing was examined: the gap's direction, [R, W, d]; the mismatch δ, the noise's coordinate
    s along the gap, and how far rounding may have moved that, [R, W].

    Rounding of the gap and of its product with the noise moves s by no more than a few ε·|z|, and a relative error ε
    of δ acts like moving s by ε·(|s| + δ).
    """
    _, inside = _inside(round_)
    gap = torch.where(expand(inside, round_.gap), round_.gap, 0.0).flatten(2).double()
    noise = round_.noise.flatten(2).double()
    size = gap.norm(dim=2)
    direction = gap / torch.where(size > 0, size, 1.0).unsqueeze(2)
    mismatch = torch.where(inside, size / round_.std.double(), 0.0)
    error = 4 * torch.finfo(round_.gap.dtype).eps * (noise.norm(dim=2) + mismatch)
    return direction, mismatch, (direction * noise).sum(2), error


def _bars(round_: Settled, block: int | None, sign: int) -> Tensor:
    """h at every position, [R, W], at the lower (−1) or upper (+1) end of what rounding leaves open.

    h rises with s. The kernels' special functions agree with the plain ones to 1e-9.
    """
    eps = torch.finfo(round_.gap.dtype).eps
    _, mismatch, s, error = _seen(round_)
    block = s.shape[1] if block is None else block
    _, after = _levels(coupling.log_ratio(mismatch, s + sign * error), block)
    inner = coupling.acceptance(mismatch.roll(-1, dims=1), after)
    h = torch.where(_ends(round_, block), after.exp(), inner)
    return h * (1 + sign * (4 * eps + 1e-9))


def _ends(round_: Settled, block: int) -> Tensor:
    position = torch.arange(round_.gap.shape[1], device=round_.gap.device)
    return (position % block == block - 1) | (position == round_.commit.drafted.unsqueeze(1) - 1)


def _accepted(round_: Settled, block: int | None, bars: Tensor) -> Tensor:
    """[R]: the largest position that passes in the first block whose last does not, and all before that block."""
    position, inside = _inside(round_)
    width = len(position)
    block = width if block is None else block
    passed = inside & (streams.uniform(round_.rows.seed, width, round=round_.rows.round) < bars)
    index = (position // block).expand_as(inside)
    failing = torch.where(inside & _ends(round_, block) & ~passed, index, width).amin(1, keepdim=True)
    kept = inside & ((index < failing) | (index == failing) & passed)
    return torch.where(kept, position + 1, 0).amax(1)
