"""One round in its two halves: what is carried from one to the next, and what the two layouts share."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch

import foresample as fs
from foresample.chains import Chain
from foresample.contracts import predict
from foresample.core import round as rounds
from foresample.core.noise import seeds_of
from foresample.core.round import (
    Layout,
    Packed,
    Padded,
    Rows,
    Speculation,
    begin,
    last_draftable,
    propose,
    settle,
)
from foresample.core.verify import Verdict, verify
from foresample.targets import ChainTarget
from tests.support.small_chains import CHAINS, NOISIER, Zero, flow, interrupted


def settings_of(target: fs.Target, window: int, layout: Layout | None = None) -> Speculation:
    return Speculation(fs.Replay(), window, None, True, last_draftable(target.std), layout or Packed())


def test_memory_is_bounded_by_the_window() -> None:
    """Nothing carried from round to round has a dimension that grows with the chain."""
    target = fs.GaussianMixture.of_draft_trees(2).langevin(300, 0.01)
    speculation = settings_of(target, 4)
    rows = begin(target, speculation, seeds_of(0, 3))
    for _ in range(3):
        draft = propose(target, rows, speculation)
        call = draft.call
        assert len(call.x) <= 3 * 5
        rows, _ = settle(target, rows, draft, target.predict(call.x, call.step, call.row), speculation)
    for value in (rows.noise, rows.previous, *rows.memory.values()):
        assert value.shape[0] == 3
        assert value.numel() <= 3 * 5 * 2


def test_the_first_call_drafts_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The call evaluates each row's own state, and the round is a step of the sequential sampler."""
    monkeypatch.setenv("FORESAMPLE_PLAIN", "1")
    target, seeds = flow(), seeds_of(2, 4)
    speculation = settings_of(target, 5)
    rows = begin(target, speculation, seeds)
    draft = propose(target, rows, speculation)
    assert torch.equal(draft.call.x, rows.x)
    assert draft.length.tolist() == [0, 0, 0, 0]
    after, commit = settle(target, rows, draft, target.predict(rows.x, rows.step, rows.sample), speculation)
    assert commit.committed.tolist() == [1, 1, 1, 1]
    seen: list[torch.Tensor] = []
    fs.sequential(target, seeds=seeds, observe=lambda c: seen.append(c.x))
    assert torch.equal(after.x, seen[0])


def tensors(rows: Rows) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []

    def kept(value: torch.Tensor) -> torch.Tensor:
        found.append(value)
        return value

    rows.map(kept)
    return found


def test_settling_leaves_rows_and_draft_as_they_were() -> None:
    """The plain round returns new tensors, so that a caller who kept the old ones can settle again."""
    target = flow()
    speculation = settings_of(target, 5)
    rows = begin(target, speculation, seeds_of(2, 4))
    for _ in range(3):
        before = [value.clone() for value in tensors(rows)]
        draft = propose(target, rows, speculation)
        predictions = target.predict(draft.call.x, draft.call.step, draft.call.row)
        after, _ = settle(target, rows, draft, predictions, speculation)
        again, _ = settle(target, rows, draft, predictions, speculation)
        assert all(torch.equal(a, b) for a, b in zip(tensors(rows), before, strict=True))
        assert all(torch.equal(a, b) for a, b in zip(tensors(after), tensors(again), strict=True))
        rows = after


@pytest.mark.parametrize("chain", [*CHAINS, *NOISIER])
def test_padded_rounds_commit_what_packed_ones_do(chain: str) -> None:
    """The layouts differ in what they evaluate and count, and in nothing that is committed."""
    target, window = {**CHAINS, **NOISIER}[chain](), 6
    kinds = [settings_of(target, window, layout) for layout in (Packed(), Padded())]
    both = [begin(target, speculation, seeds_of(4, 9)) for speculation in kinds]
    steps = len(target.std)
    while (both[0].step < steps).any():
        commits = []
        for i, speculation in enumerate(kinds):
            draft = propose(target, both[i], speculation)
            call = draft.call
            evaluated = 9 * (window + 1) if i else int((draft.length + 1).sum())
            assert len(call.x) == evaluated
            before = both[i]
            said = predict(target, call.x, call.step, call.row, call.extra)
            both[i], commit = settle(target, before, draft, said, speculation)
            commits.append(commit)
            if (before.step < steps).all():
                assert int((both[i].evaluations - before.evaluations).sum()) == evaluated
        assert torch.equal(commits[0].committed, commits[1].committed)
        moved = commits[0].committed > 0  # a row at its end keeps its slot, and its state means nothing
        assert torch.equal(both[0].x[moved], both[1].x[moved])
        assert torch.equal(both[0].fault[moved], both[1].fault[moved])


def test_padded_rounds_draft_no_more_than_their_layout_allows() -> None:
    target = flow()
    for most, drafts in ((2, 2), (4, 4), (9, 4), (None, 4)):
        speculation = settings_of(target, 4, Padded(most))
        draft = propose(target, begin(target, speculation, seeds_of(4, 9)), speculation)
        assert len(draft.call.x) == 9 * (drafts + 1)


@pytest.mark.parametrize("drafter", [Zero(), fs.Frozen("parent")], ids=str)
def test_fresh_noise_was_used_by_no_earlier_round(drafter: fs.Drafter, monkeypatch: pytest.MonkeyPatch) -> None:
    """Exactness needs noise that no round has used, and few samples would show a mistake."""
    seen: set[float] = set()

    def watched(noise: torch.Tensor, *rest: Any, fresh: torch.Tensor, **speculation: Any) -> Verdict:
        seen.update(noise.flatten().tolist())
        assert not seen.intersection(fresh.flatten().tolist())
        seen.update(fresh.flatten().tolist())
        return verify(noise, *rest, fresh=fresh, **speculation)

    monkeypatch.setenv("FORESAMPLE_PLAIN", "1")
    monkeypatch.setattr(rounds, "verify", watched)
    run = fs.sample(flow(), 9, window=5, recycle=False, drafter=drafter)
    assert run.report.accepted < run.report.drafted
    assert len(seen) > 9 * 16 * 2


def test_no_window_reaches_across_a_deterministic_step() -> None:
    std = interrupted().std  # deterministic: 0, 5, 9, 10, 14 of 15
    assert last_draftable(std).tolist() == [0, 5, 5, 5, 5, 5, 9, 9, 9, 9, 10, 14, 14, 14, 14]
    assert last_draftable(torch.ones(4)).tolist() == [3, 3, 3, 3]


@dataclass(frozen=True)
class Astray(Zero):
    """Drafts far away, and remembers its rows and the paths it learned from."""

    value: float = 60.0
    primed: list[int] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)

    def prime(self, memory: fs.drafters.DrafterMemory, row: torch.Tensor) -> fs.drafters.DrafterMemory:
        self.primed.extend(row.tolist())
        return memory

    def learn(
        self, memory: fs.drafters.DrafterMemory, path: fs.drafters.DraftPath, committed: torch.Tensor
    ) -> fs.drafters.DrafterMemory:
        for row, length in enumerate(path.length.tolist()):
            assert path.predictions[row, : length + 1].isfinite().all()
            self.lengths.append(length)
        return memory


class Listening(fs.Replay):
    """Remembers the last path it learned from."""

    def learn(
        self, memory: fs.drafters.DrafterMemory, path: fs.drafters.DraftPath, committed: torch.Tensor
    ) -> fs.drafters.DrafterMemory:
        object.__setattr__(self, "path", path)
        return super().learn(memory, path, committed)


def test_a_drafter_learns_what_was_drafted_and_committed() -> None:
    target, drafter = flow(), Listening()
    speculation = replace(settings_of(target, 4), drafter=drafter)
    rows = begin(target, speculation, seeds_of(3, 7))
    for k in range(3):
        draft = propose(target, rows, speculation)
        width = draft.mean.shape[1]
        said = draft.call.spread(target.predict(draft.call.x, draft.call.step, draft.call.row), draft.states)
        after, _ = settle(target, rows, draft, said[draft.call.needed], speculation)
        path: fs.drafters.DraftPath = vars(drafter)["path"]
        assert path.length.tolist() == [0 if k == 0 else 4] * 7
        assert torch.equal(path.step, rows.step)
        assert torch.equal(path.states, draft.states)
        assert torch.equal(path.predictions, said)
        noise = target.std[draft.step[:, :-1]].unsqueeze(2) * rows.noise[:, :width]
        torch.testing.assert_close(path.innovations, noise)
        rows = after


def test_a_drafter_learns_of_all_committed_transitions_even_broken_ones() -> None:
    """The sample is given up; its drafter must not learn of fewer drafts than were kept."""
    one, drafter = torch.ones(5, dtype=torch.float64), Listening()
    target = ChainTarget(Chain(one, 0.5 * one, one), torch.Size([2]), lambda x, step, row: x * torch.nan)
    with pytest.raises(FloatingPointError):
        fs.sample(target, 3, window=3, drafter=drafter)
    assert vars(drafter)["path"].length.tolist() == [0, 0, 0]


@pytest.mark.parametrize("window", [1, 3])
def test_a_drafter_learns_nothing_where_a_draft_broke_the_network(window: int) -> None:
    """Drafts go 60 std off, which is not hopeless, and there the network breaks; the chain itself never does."""

    def network(x: torch.Tensor, step: torch.Tensor, row: torch.Tensor) -> torch.Tensor:
        return torch.where(x.abs().amax(1, keepdim=True) > 40, torch.nan, 0.1 * x)

    one, drafter = torch.ones(5, dtype=torch.float64), Astray()
    target = ChainTarget(Chain(one, 0.5 * one, one), torch.Size([2]), network)
    run = fs.sample(target, 6, window=window, drafter=drafter)
    assert run.samples.isfinite().all()
    assert run.report.accepted_mean == 0
    assert drafter.lengths
    assert set(drafter.lengths) == {0}


def test_a_row_begins_with_the_memory_of_its_own_sample() -> None:
    target, drafter = flow(), Astray()
    speculation = replace(settings_of(target, 3), drafter=drafter)
    begin(target, speculation, seeds_of(1, 3), sample=torch.tensor([7, 2, 9]))
    assert drafter.primed == [7, 2, 9]


@pytest.mark.parametrize("step", [0, 1, 7, 15])
def test_a_broken_output_is_named_by_the_step_that_used_it(step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error at the output names the network as the cause; one at the state that follows would name the chain."""
    monkeypatch.setenv("FORESAMPLE_PLAIN", "1")
    base = flow()
    assert base.chain.time is not None
    time = base.chain.time[step]

    def network(x: torch.Tensor, at: torch.Tensor, row: torch.Tensor) -> torch.Tensor:
        return torch.where(((at == time) & (row == 2)).unsqueeze(1), torch.nan, base.network(x, at, row))

    with pytest.raises(FloatingPointError, match=f"the network returned NaN .* at step {step} of sample 2;"):
        fs.sample(replace(base, network=network), 4, window=5)
