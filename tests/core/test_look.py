"""The free look: a target without a law is refused at its first call, and one with a law pays one small call."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from time import perf_counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import foresample as fs
from foresample.core.look import STATES, Difference, compare, look
from foresample.core.noise import START, normal, seeds_of
from foresample.core.round import Packed, Padded
from foresample.targets import Chain, ChainTarget, from_scheduler
from tests.small_chains import CHAINS, flow

Network = Callable[[Tensor, Tensor, Tensor], Tensor]
STEPS, SIZE = 12, 6


def walk(network: Network, dtype: torch.dtype = torch.float32) -> ChainTarget:
    """A chain around a network of vectors."""
    one = torch.ones(STEPS, dtype=dtype)
    return ChainTarget(Chain(0.3 * one, one, 0.1 * one), torch.Size([SIZE]), network)


class Attention(nn.Module):
    """Attention that takes the batch for the sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(SIZE, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x, x, x)[0]


def perceptron(*between: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(SIZE, 32), *between, nn.SiLU(), nn.Linear(32, SIZE))


class Remembers:
    """Adds a little of what it was asked before: ever, or in the last call alone."""

    def __init__(self, ever: bool = True) -> None:
        self.net, self.last, self.ever = perceptron(), torch.zeros(SIZE), ever

    def __call__(self, x: Tensor) -> Tensor:
        answer = self.net(x) + 0.1 * self.last
        self.last = x[-1].clone() + self.ever * self.last.roll(1)
        return answer


WRONG: dict[str, tuple[Callable[[], Any], str]] = {
    "batch normalisation": (lambda: perceptron(nn.BatchNorm1d(32)), "mixes rows"),
    "attention": (Attention, "mixes rows"),
    "dropout": (lambda: perceptron(nn.Dropout(0.2)), "draws random numbers"),
    "state": (Remembers, "keeps state between calls"),
    "state of one call": (lambda: Remembers(ever=False), "keeps state between calls"),
}
wrong = pytest.mark.parametrize("name", WRONG)

DRAWS: dict[str, Callable[[fs.Target], object]] = {
    "sample": lambda target: fs.sample(target, 5, window=3),
    "one sample": lambda target: fs.sample(target, 1, window=3),
    "auto": lambda target: fs.sample(target, 2, window="auto"),
    "stream": lambda target: list(fs.stream(target, 5, window=3, slots=2)),
    "tune": lambda target: fs.tune(target, slots=2, windows=[3]),
    "engine": lambda target: fs.Engine(target, window=3, slots=2).sample([1, 2, 3]),
}


def of_vectors(net: Any) -> ChainTarget:
    return walk(lambda x, step, row: net(x))


@wrong
@pytest.mark.parametrize("draw", DRAWS)
def test_a_network_without_a_law_is_refused_by_everything_that_draws(name: str, draw: str) -> None:
    make, said = WRONG[name]
    if (name, draw) == ("batch normalisation", "one sample"):
        said = "Expected more than 1 value per channel when training"  # torch itself, of a call on one state
    else:
        said = f"the target {said}: .* std .*; "
    with pytest.raises(ValueError, match=said):
        DRAWS[draw](of_vectors(make()))


@wrong
def test_a_refused_target_is_refused_again_and_can_be_forced(name: str) -> None:
    made = fs.Engine(of_vectors(WRONG[name][0]()), window=3, slots=2)
    for _ in range(2):
        with pytest.raises(ValueError, match="look=False samples it all the same, inexactly"):
            made.sample([1, 2])
    run = fs.sample(of_vectors(WRONG[name][0]()), 2, window=3, look=False)
    assert run.report.look_calls == 0


def test_an_engine_looks_once_and_each_run_reports_its_own() -> None:
    made, began = fs.Engine(flow(), window=3, slots=2), perf_counter()
    first, second = (made.sample([1, 2]).report for _ in range(2))
    assert first.look_calls >= 1
    assert second.look_calls == 0
    assert 0 < first.seconds + second.seconds <= perf_counter() - began


def test_check_tells_the_same_causes_apart() -> None:
    for make, said in WRONG.values():
        found = fs.check(of_vectors(make()), window=3, samples=20)
        assert [finding.passed for finding in found.findings] == [False, True, False]
        assert found.findings[0].detail.startswith(f"the target {said}: ")


def test_a_whole_network_in_eval_mode_passes() -> None:
    for module in (nn.BatchNorm1d(32), nn.Dropout(0.2)):
        run = fs.sample(of_vectors(perceptron(module).eval()), 5, window=3)
        assert run.report.look_calls == 1


@pytest.mark.parametrize("shape", [(SIZE,), (1,)])
def test_what_is_clipped_hides_nothing(shape: tuple[int, ...]) -> None:
    """A chain that clips answers ±1 at its noisy steps, whatever the network says; the look is made halfway then."""
    scheduler = pytest.importorskip("diffusers").DDPMScheduler(20, beta_schedule="squaredcos_cap_v2")
    scheduler.set_timesteps(20)
    for mixes, calls in ((0.0, 2), (0.1, None)):

        def network(x: Tensor, t: Tensor, row: Tensor, mixes: float = mixes) -> Tensor:
            return 0.5 * x + mixes * x.mean(0)

        target = from_scheduler(scheduler, network, shape)
        first = target.predict(torch.ones(3, *shape), torch.zeros(3).long(), torch.arange(3))
        assert (first.abs() == 1).all()
        if calls is None:
            with pytest.raises(ValueError, match="the target mixes rows"):
                fs.sample(target, 5, window=3)
        else:
            assert fs.sample(target, 5, window=3).report.look_calls == calls


# ------------------------------------------------------------------ what it costs


class Counting:
    """A target that keeps what it was asked."""

    def __init__(self, target: fs.Target) -> None:
        self.shape, self.std, self.start, self.mean = target.shape, target.std, target.start, target.mean
        self.target, self.calls = target, list[tuple[int, list[int]]]()

    def predict(self, x: Tensor, step: Tensor, row: Tensor) -> Tensor:
        self.calls.append((len(x), row.tolist()))
        return self.target.predict(x, step, row)


@pytest.mark.parametrize("layout", [Packed(), Padded()], ids=["packed", "padded"])
@pytest.mark.parametrize(("count", "window"), [(1, 1), (1, 5), (3, 5), (9, 5)])
def test_it_costs_one_call_on_at_most_four_states_once_an_engine(layout: Any, count: int, window: int) -> None:
    engines = {}
    for looks in (True, False):
        target = Counting(flow())
        engines[looks] = fs.Engine(target, window=window, slots=count, look=looks)
        engines[looks].how = replace(engines[looks].how, layout=layout)
    runs = {looks: engine.sample(seeds_of(3, count)) for looks, engine in engines.items()}
    calls, bare = (engines[looks].target.calls for looks in (True, False))  # type: ignore[attr-defined]
    assert calls[:1] + calls[2:] == bare
    states, rows = calls[1]
    assert states == min(STATES, count * (window + 1)) <= 4
    assert set(rows) <= set(range(count))  # no row the user has not
    for name in ("samples", "calls", "evaluations"):
        assert torch.equal(getattr(runs[True], name), getattr(runs[False], name))
    assert (runs[True].report.look_calls, runs[False].report.look_calls) == (1, 0)
    assert "calls to look at it" in str(runs[True].report)
    assert "calls to look at it" not in str(runs[False].report)
    again = engines[True].sample(seeds_of(3, count))
    assert again.report.look_calls == 0
    assert torch.equal(again.samples, runs[True].samples)


@pytest.mark.parametrize("chain", CHAINS)
def test_every_chain_passes_with_one_call(chain: str) -> None:
    assert fs.sample(CHAINS[chain](), 6, window=4).report.look_calls == 1


def test_tuning_looks_once(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = []

    def counted(*asked: Any, **states: Any) -> int:
        looks.append(look(*asked, **states))
        return looks[-1]

    monkeypatch.setattr("foresample.core.look.look", counted)
    fs.tune(flow(), windows=[2, 3])
    assert looks == [1]
    fs.sample(flow(), 2, window="auto")
    assert looks == [1, 1]


# ------------------------------------------------------------------ whom it must not blame


def test_rounding_that_depends_on_the_size_of_a_call_is_asked_about_and_forgiven() -> None:
    net = perceptron()

    def rounded(x: Tensor, step: Tensor, row: Tensor) -> Tensor:
        return net(x) * (1 + 1e-3 * len(x))

    assert fs.sample(walk(rounded), 9, window=3).report.look_calls == 2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_half_precision_network_is_not_blamed(dtype: torch.dtype) -> None:
    net = nn.Sequential(nn.Linear(SIZE, 256), nn.SiLU(), nn.Linear(256, SIZE)).to(dtype)
    target = walk(lambda x, step, row: net(x.to(dtype)).float())
    for count in (1, 4, 50):
        assert 1 <= fs.sample(target, count, window=3).report.look_calls <= 2


def test_a_broken_first_prediction_is_a_fault_and_no_matter_of_the_look() -> None:
    target = walk(lambda x, step, row: torch.where((row == 0).unsqueeze(1), math.nan, 0.5 * x))
    with pytest.raises(FloatingPointError, match="NaN or infinity at step 0 of sample 0"):
        fs.sample(target, 5, window=3)


def test_a_network_that_writes_into_its_states_is_not_blamed() -> None:
    run = fs.sample(walk(lambda x, step, row: x.mul_(0.5).clone()), 5, window=3)
    assert run.report.look_calls == 1


@pytest.mark.parametrize("what", ["step", "row"])
def test_a_network_that_writes_into_steps_or_rows_is_refused(what: str) -> None:
    def writes(x: Tensor, step: Tensor, row: Tensor) -> Tensor:
        {"step": step, "row": row}[what].add_(1)
        return 0.5 * x

    target = walk(writes)
    for draw in (lambda: fs.sample(target, 5, window=3), lambda: fs.check(target, window=3, samples=20)):
        with pytest.raises(ValueError, match=f"writes into {what}, which the sampler goes on using"):
            draw()


def test_a_prior_is_fitted_on_what_was_sampled_and_not_on_a_look() -> None:
    """Its pilots' first states are those of their seeds; a look would have put others in their place."""
    target, pilots = flow(), 8
    key = seeds_of(2**61, pilots)
    zero = torch.zeros_like(key)
    starts = target.start(
        normal(key, target.shape, target.std.dtype, stream=START, step=zero, draw=zero), torch.arange(len(key))
    )
    torch.testing.assert_close(fs.fit_prior(target, window=4, pilots=pilots).states[0, 0], starts.mean(0))


# ------------------------------------------------------------------ what it says


def test_the_size_of_the_effect_is_told_in_std_and_in_words() -> None:
    told = [str(Difference("mixes", 0.1, 3, shift)) for shift in (2.0, 0.5, 0.01, 1e-5)]
    assert (
        "a prediction changes by 1.0e-01 of its size, the mean of step 3 by 2 std (more than the step"
        in told[0]
    )
    assert "a good part" in told[1]
    assert "a small part" in told[2]
    assert "next to nothing" in told[3]
    assert "std" not in str(Difference("random", 0.1, 3, None))


def test_the_effect_is_told_as_large_as_it_is() -> None:
    """Mates are 3x + 1 and −2x + 1, and the network adds what it is given on average."""
    target = walk(lambda x, step, row: x + x.mean(0))
    x, zero = torch.randn(4, SIZE), torch.zeros(4, dtype=torch.int64)
    moved = (3 + 2) * x[1:].sum(0) / 4
    there = x[0] + (x[0] + (3 * x[1:] + 1).sum(0)) / 4
    found, difference = compare(target, x, zero, zero)
    assert difference is not None
    assert found == difference.change == pytest.approx(float(moved.norm() / there.norm()), rel=1e-4)
    mean_moved = target.chain.prediction_weight[0] * moved
    assert difference.shift == pytest.approx(float(mean_moved.norm() / target.std[0]), rel=1e-4)


def test_the_effect_is_that_of_the_first_step_with_noise() -> None:
    base = walk(lambda x, step, row: x + x.mean(0))
    std = base.std.clone()
    std[:2] = 0
    target = replace(base, chain=replace(base.chain, std=std))
    x, zero = torch.randn(4, SIZE), torch.zeros(4, dtype=torch.int64)
    with pytest.raises(ValueError, match="the mean of step 2 by "):
        look(target, x, zero, zero, target.predict(x, zero, zero)[0])
    quiet = replace(base, chain=replace(base.chain, std=torch.zeros_like(std)))
    with pytest.raises(ValueError, match=r"of its size; put"):
        look(quiet, x, zero, zero, quiet.predict(x, zero, zero)[0])
