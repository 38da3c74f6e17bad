"""Replay: what it learns, what it forgets, and what it must not look at."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

import foresample as fs
from tests.small_chains import mixture, strays


def test_secant_gains_ignore_paths_that_agree_to_rounding() -> None:
    """Else g is rounding over rounding, and a draft can run away."""
    drafter, generator = fs.Replay(), torch.Generator().manual_seed(0)
    states = torch.randn(1, 5, 2, generator=generator, dtype=torch.float64)
    predictions = torch.randn(1, 5, 2, generator=generator, dtype=torch.float64)
    memory = drafter.begin(1, 4, states[0, 0])
    length, one = torch.tensor([4]), torch.tensor([1])
    memory = drafter.learn(memory, fs.DraftPath(states, predictions, states[:, 1:], length, 0 * length), one)
    nudged = memory["states"] * (1 + 1e-15)
    memory = drafter.learn(
        memory, fs.DraftPath(nudged, memory["predictions"] + 1e-3, states[:, 1:], length, 0 * length), one
    )
    assert memory["gain"].abs().max() == 0


def test_replay_forgets_where_sweeps_diverge() -> None:
    """Rows: none diverges; one does at position 4; one at what is committed and what comes next, which stay."""
    drafter, ones = fs.Replay(), torch.ones(3, dtype=torch.int64)
    line = torch.arange(6.0, dtype=torch.float64).expand(3, 6).unsqueeze(2)
    memory = drafter.begin(3, 5, line[0, 0])
    memory = drafter.learn(memory, fs.DraftPath(line, line + 100, line[:, 1:], 5 * ones, 0 * ones), ones)
    assert memory["visited"].tolist() == [5, 5, 5]  # seen once only

    again = line + 101  # at the same steps, the same predictions
    memory["predictions"][1, 4] += 6.1 * 4  # the sweep moves it so far, and it is 4 away from the first
    memory["predictions"][1, 3] += 5.9 * 3
    memory["predictions"][2, :3] += 1000
    memory = drafter.learn(memory, fs.DraftPath(line, again, line[:, 1:], 5 * ones, ones), 2 * ones)
    assert memory["visited"].tolist() == [4, 2, 4]
    assert memory["predictions"][1].flatten().tolist() == [103, 104, 104, 104, 104, 104]


def test_a_wider_window_does_not_mislead_replay() -> None:
    """Where the force is steep, far drafts run away; what they met must not come back in the next window."""
    from benchmarks.curves import wells

    target = wells(100, "cpu", half=False).targets["force"]
    narrow, wide = (fs.sample(target, 24, window=window, seed=0).speedup for window in (15, 63))
    assert wide > narrow > 6


@pytest.mark.parametrize("churn", [1e-4, 1e-6])
def test_little_noise_is_no_reason_to_give_up(churn: float) -> None:
    """Means may be thousands of std apart in the first rounds, and replay still converges."""
    run = fs.sample(mixture().flow(60, churn, reuse="x0"), 8, window=40, seed=0)
    assert max(m for m in run.report.mismatch if m == m) > 1e2
    assert run.speedup > 5


@dataclass(frozen=True)
class Careful(fs.Replay):
    """Looks at what it is given to learn from, and counts the drafts it is spared."""

    spared: list[int] = field(default_factory=list)

    def learn(self, memory: fs.DrafterMemory, path: fs.DraftPath, committed: Tensor) -> fs.DrafterMemory:
        inside = torch.arange(path.states.shape[1]) <= path.length.unsqueeze(1)
        broken = ~(path.predictions.isfinite() & path.states.isfinite()).flatten(2).all(2)
        assert not (broken & inside).any()
        self.spared.append(int(broken.sum()))
        return super().learn(memory, path, committed)


def test_nothing_is_learned_from_a_draft_that_broke_the_network(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORESAMPLE_PLAIN", "1")  # the twin, a subclass, is not compiled
    drafter = Careful()
    run = fs.sample(strays(), 500, window=10, drafter=drafter)
    assert sum(drafter.spared) > 50  # else there was nothing to be careful of
    assert torch.equal(run.samples, fs.sample(strays(), 500, window=10).samples)
