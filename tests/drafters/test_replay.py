"""Replay: what it learns, what it forgets, and what it must not use."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import Tensor

import foresample as fs
from foresample.core.noise import seeds_of
from foresample.core.round import Layout, Packed, Padded, Speculation, last_draftable
from foresample.drafters.replay import is_replay
from tests.support.small_chains import flow, mixture, strays


class Plain:
    """Replay written a second time, for one row, with lists."""

    def __init__(self, prior: fs.Prior | None, row: int) -> None:
        self.jacobian = None if prior is None else prior.jacobian
        self.states: list[Tensor] = []
        self.predictions: list[Tensor] = []
        self.slopes: list[Tensor] = []
        self.visited, self.response = 0, torch.tensor(0.0)
        self.last = (torch.zeros(2, dtype=torch.float64),) * 2
        if prior is not None:
            which = row % len(prior.states)
            self.states, self.predictions = [*prior.states[which]], [*prior.predictions[which]]
            assert prior.slope is not None
            self.slopes = [*prior.slope, *prior.slope[-1:].expand(9)]  # the last one goes on

    def guess(self, x: Tensor, position: int, step: int, before: tuple[Tensor, Tensor] | None) -> Tensor:
        if position < len(self.states):
            apart = x - self.states[position]
            known = self.predictions[position] + self.slopes[position] * apart
            return known if self.jacobian is None else known + self.jacobian[step] @ apart
        if before is None:  # all was committed: from where the path ended
            x_last, prediction = self.last
            return prediction if self.jacobian is None else prediction + self.jacobian[step] @ (x - x_last)
        guess, innovation = before
        if self.jacobian is not None:
            return guess + self.jacobian[step] @ innovation
        return guess + self.response * innovation

    def learn(
        self, states: Tensor, predictions: Tensor, innovations: Tensor, step: int, committed: int
    ) -> None:
        length = len(states) - 1
        for j in range(committed + 1, min(self.visited, length + 1)):
            swept = (predictions[j] - self.predictions[j]).norm()
            if swept > 6 * (predictions[j] - predictions[0]).norm():
                length = j - 1
                break
        slopes: list[Tensor] = []
        slope = None
        for j in range(length + 1):
            if j < self.visited:
                dx, dp = states[j] - self.states[j], predictions[j] - self.predictions[j]
                if self.jacobian is not None:
                    dp = dp - self.jacobian[step + j] @ dx
                if dx @ dx > torch.finfo(torch.float64).eps * (states[j] @ states[j]):
                    slope = (dx @ dp) / (dx @ dx)
            earlier = self.slopes[j] if j < len(self.slopes) else torch.tensor(0.0)
            slopes.append(earlier if slope is None else slope)
        self.response = torch.tensor(0.0)
        if length:
            z = innovations[:length]
            self.response = (predictions[: length + 1].diff(dim=0) * z).sum() / (z * z).sum()
        self.states, self.predictions = (
            [*states[committed : length + 1]],
            [*predictions[committed : length + 1]],
        )
        self.slopes, self.visited = slopes[committed:], length + 1 - committed
        self.last = states[length], predictions[length]


OTHERS = torch.randn(2, 3, 4, 2, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
PRIOR = fs.Prior(OTHERS[0], OTHERS[1], slope=torch.linspace(0.5, 1, 4, dtype=torch.float64))
JACOBIAN = torch.randn(40, 2, 2, generator=torch.Generator().manual_seed(2), dtype=torch.float64)


@pytest.mark.parametrize(
    "prior", [None, PRIOR, replace(PRIOR, jacobian=JACOBIAN)], ids=["cold", "warm", "with a Jacobian"]
)
def test_guesses_follow_the_formulas(prior: fs.Prior | None) -> None:
    """Any paths, of any lengths, with states seen twice to rounding, in windows of any width."""
    rows, window, generator = 60, 5, torch.Generator().manual_seed(0)
    drafter = fs.Replay(prior=prior)
    row, plain = torch.arange(rows), [Plain(prior, r) for r in range(rows)]
    memory = drafter.prime(drafter.begin(rows, window, torch.zeros(2, dtype=torch.float64)), row)
    step = torch.zeros(rows, dtype=torch.int64)
    reach = [0 if prior is None else window] * rows
    for _ in range(6):
        assert drafter.reach(memory, window).tolist() == reach
        length = torch.minimum(torch.randint(0, window + 1, (rows,), generator=generator), torch.tensor(reach))
        width = max(1, int(length.max()))
        states, predictions, innovations = torch.randn(
            3, rows, width + 1, 2, generator=generator, dtype=torch.float64
        )
        states *= 10
        again = torch.rand(rows, width + 1, generator=generator) < 0.3
        nudge = 1e-8 * torch.randn(rows, width + 1, 1, generator=generator, dtype=torch.float64)
        states = torch.where(again.unsqueeze(2), memory["states"][:, : width + 1] * (1 + nudge), states)
        before: fs.drafters.PreviousDraft | None = None
        for j in range(width + 1):
            guess = drafter.guess(memory, states[:, j], j, step + j, row, before)
            for r in range(rows):
                row_before = None if before is None else (before.guess[r], before.innovation[r])
                told = plain[r].guess(states[r, j], j, int(step[r]) + j, row_before)
                torch.testing.assert_close(guess[r], told, rtol=1e-9, atol=1e-9)
            before = fs.drafters.PreviousDraft(guess, innovations[:, j])
        committed = torch.minimum(torch.randint(1, window + 2, (rows,), generator=generator), length + 1)
        path = fs.drafters.DraftPath(states, predictions, innovations[:, :width], length, step)
        memory = drafter.learn(memory, path, committed)
        for r in range(rows):
            n = int(length[r]) + 1
            plain[r].learn(states[r, :n], predictions[r, :n], innovations[r], int(step[r]), int(committed[r]))
        step, reach = step + committed, [window] * rows
        assert memory["visited"].tolist() == [p.visited for p in plain]


def test_secant_slopes_ignore_paths_that_agree_to_rounding() -> None:
    """Else g is rounding over rounding, and a draft can run away."""
    drafter, generator = fs.Replay(), torch.Generator().manual_seed(0)
    states = torch.randn(1, 5, 2, generator=generator, dtype=torch.float64)
    predictions = torch.randn(1, 5, 2, generator=generator, dtype=torch.float64)
    memory = drafter.begin(1, 4, states[0, 0])
    length, one = torch.tensor([4]), torch.tensor([1])
    memory = drafter.learn(
        memory, fs.drafters.DraftPath(states, predictions, states[:, 1:], length, 0 * length), one
    )
    nudged = memory["states"] * (1 + 1e-15)
    memory = drafter.learn(
        memory,
        fs.drafters.DraftPath(nudged, memory["predictions"] + 1e-3, states[:, 1:], length, 0 * length),
        one,
    )
    assert memory["slope"].abs().max() == 0


def test_replay_forgets_where_sweeps_diverge() -> None:
    """The rows diverge nowhere; at position 4; and at the committed position and the next, which stay."""
    drafter, ones = fs.Replay(), torch.ones(3, dtype=torch.int64)
    line = torch.arange(6.0, dtype=torch.float64).expand(3, 6).unsqueeze(2)
    memory = drafter.begin(3, 5, line[0, 0])
    memory = drafter.learn(
        memory, fs.drafters.DraftPath(line, line + 100, line[:, 1:], 5 * ones, 0 * ones), ones
    )
    assert memory["visited"].tolist() == [5, 5, 5]  # seen once only

    again = line + 101  # at the same steps, the same predictions
    memory["predictions"][1, 4] += 6.1 * 4  # the sweep moves it so far, and it is 4 away from the first
    memory["predictions"][1, 3] += 5.9 * 3
    memory["predictions"][2, :3] += 1000
    memory = drafter.learn(memory, fs.drafters.DraftPath(line, again, line[:, 1:], 5 * ones, ones), 2 * ones)
    assert memory["visited"].tolist() == [4, 2, 4]
    assert memory["predictions"][1].flatten().tolist() == [103, 104, 104, 104, 104, 104]


def test_a_wider_window_does_not_mislead_replay() -> None:
    """Where the force is steep, far drafts diverge; their predictions must not be used in the next window."""
    from benchmarks.curves import wells

    target = wells(100, "cpu", half=False).targets["force"]
    narrow, wide = (fs.sample(target, 24, window=window, seed=0).speedup for window in (15, 63))
    assert wide > narrow > 6


@pytest.mark.parametrize("churn", [1e-4, 1e-6])
def test_replay_drafts_on_where_there_is_little_noise(churn: float) -> None:
    """Means may be thousands of std apart in the first rounds, and replay still converges."""
    run = fs.sample(mixture().flow(60, churn, reuse="x0"), 8, window=40, seed=0)
    assert max(m for m in run.report.mismatch if m == m) > 1e2
    assert run.speedup > 5


@dataclass(frozen=True)
class Careful(fs.Replay):
    """Checks what it is given to learn from, and counts the rejected drafts that it is not given."""

    spared: list[int] = field(default_factory=list)

    def learn(
        self, memory: fs.drafters.DrafterMemory, path: fs.drafters.DraftPath, committed: Tensor
    ) -> fs.drafters.DrafterMemory:
        inside = torch.arange(path.states.shape[1]) <= path.length.unsqueeze(1)
        broken = ~(path.predictions.isfinite() & path.states.isfinite()).flatten(2).all(2)
        assert not (broken & inside).any()
        self.spared.append(int(broken.sum()))
        return super().learn(memory, path, committed)


def test_replay_learns_nothing_from_a_draft_that_broke_the_network(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORESAMPLE_PLAIN", "1")  # the twin, a subclass, is not compiled
    drafter = Careful()
    run = fs.sample(strays(), 500, window=10, drafter=drafter)
    assert sum(drafter.spared) > 50  # else there was nothing to be careful of
    assert torch.equal(run.samples, fs.sample(strays(), 500, window=10).samples)


# ------------------------------------------------------------------ who drafts as Replay does


class Named(fs.Replay):
    """Another name, and nothing else."""

    def __str__(self) -> str:
        return "named"


@dataclass(frozen=True)
class Scaled(fs.Replay):
    """A field and a guess of its own."""

    by: float = 0.5

    def guess(self, *given: Any) -> Tensor:
        return self.by * super().guess(*given)


def subclass_with(method: str) -> type[fs.Replay]:
    """A subclass with its own method that happens to do the same as Replay's."""

    def same(self: fs.Replay, *given: Any) -> Any:
        return getattr(fs.Replay, method)(self, *given)

    return type("Own", (fs.Replay,), {method: same})


def instance_with(method: str, **fields: Any) -> fs.Replay:
    drafter = fs.Replay(**fields)
    object.__setattr__(drafter, method, getattr(fs.Replay(**fields), method))
    return drafter


METHODS = ("begin", "prime", "reach", "guess", "learn", "_slope")
OWN: dict[str, Callable[[], fs.Drafter]] = {
    **{f"subclass with {name}": partial(lambda name: subclass_with(name)(), name) for name in METHODS},
    **{f"instance with {name}": partial(instance_with, name) for name in METHODS},
    "subclass of such a subclass": lambda: type("Deeper", (Scaled,), {})(),
    "another drafter": lambda: fs.Frozen("nearest"),
    "a class": lambda: fs.Replay,  # type: ignore[return-value, dict-item]
}


def takes_its_place(drafter: Any) -> dict[str, bool]:
    """The kernels, each with True if it would replace this drafter."""
    target = flow()
    speculation = Speculation(drafter, 4, None, True, last_draftable(target.std), Packed())
    found = {"rule": is_replay(drafter)}
    if find_spec("numba"):
        from foresample.backends.numba import round as compiled

        found["numba"] = compiled.serves(target, speculation)
    if find_spec("triton"):
        from foresample.backends.triton import round as fused

        found["triton"] = fused.serves(target, speculation)
    return found


@pytest.mark.parametrize("name", OWN)
def test_no_kernel_replaces_a_drafter_with_its_own_method(name: str) -> None:
    """All kernels must agree, or a subclass would be used on one device and replaced on another."""
    assert set(takes_its_place(OWN[name]()).values()) == {False}


@pytest.mark.parametrize("drafter", [fs.Replay(), Named(), fs.Replay(prior=None)], ids=str)
def test_kernels_replace_replay_and_subclasses_that_only_rename_it(drafter: fs.Replay) -> None:
    assert set(takes_its_place(drafter).values()) == {True}


def test_no_kernel_replaces_a_drafter_whose_class_was_patched(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(fs.Replay, "guess", Scaled.guess)
    assert set(takes_its_place(fs.Replay()).values()) == {False}


@pytest.mark.parametrize("layout", [Packed(), Padded()], ids=["packed", "padded"])
def test_an_engine_calls_a_custom_drafter_also_with_a_prior(layout: Layout) -> None:
    """A prior is moved to the target's device in a copy: what a subclass or an instance has of its own stays."""
    target, asked = flow(), list[str]()
    prior = fs.fit_prior(target, window=4, pilots=8)

    class Noting(fs.Replay):
        def __init__(self, note: str) -> None:  # arguments of its own
            super().__init__(prior=prior)
            object.__setattr__(self, "note", note)

        def guess(self, *given: Any) -> Tensor:
            asked.append(vars(self)["note"])
            return super().guess(*given)

    patched = fs.Replay(prior=prior)

    def guess(*given: Any) -> Tensor:
        asked.append("patched")
        return fs.Replay.guess(patched, *given)

    object.__setattr__(patched, "guess", guess)
    plain = fs.sample(target, 3, window=4, drafter=fs.Replay(prior=prior)).samples
    for drafter, note in ((Noting("mine"), "mine"), (patched, "patched")):
        asked.clear()
        made = fs.Engine(target, window=4, slots=3, drafter=drafter)
        made.speculation = replace(made.speculation, layout=layout)
        torch.testing.assert_close(made.sample(seeds_of(0, 3)).samples, plain)
        assert set(asked) == {note}


def test_replay_refuses_a_prior_of_another_type() -> None:
    with pytest.raises(TypeError, match=r"prior must be a foresample.Prior, not str: .*Prior.load"):
        fs.Replay(prior="prior.safetensors")  # type: ignore[arg-type]
