"""The free look refuses a target whose answers depend on more than the state; a sound one pays a few small calls."""

from __future__ import annotations

import math
from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from threading import Thread
from time import perf_counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import foresample as fs
from foresample.chains import Chain
from foresample.core.look import EVERY, Difference, FreeLook, dependence
from foresample.core.noise import START, normal, seeds_of
from foresample.core.round import Packed, Padded
from foresample.engine.tuning import Trial
from foresample.targets import ChainTarget, from_scheduler
from tests.support.small_chains import CHAINS, flow

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
    """Adds a little of the states of earlier calls: of all calls, or only of the last."""

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

LABELS = torch.arange(1000) % 2
BY_PLACE: dict[str, tuple[Network, str]] = {
    "the first row's time": (lambda x, step, row: x * (1 + 0.1 * step[0]), "mixes rows"),
    "labels by place": (
        lambda x, step, row: 0.5 * x + LABELS[: len(x), None],
        "depends on a row's place in its call",
    ),
    "halves": (
        lambda x, step, row: torch.cat([0.2 * x[: len(x) // 2], 0.8 * x[len(x) // 2 :]]),
        "depends on a row's place in its call",
    ),
}

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
def test_a_network_without_a_distribution_is_refused_by_every_way_to_sample(name: str, draw: str) -> None:
    make, said = WRONG[name]
    if (name, draw) == ("batch normalisation", "one sample"):
        said = "Expected more than 1 value per channel when training"  # torch itself, of a call on one state
    else:
        said = f"the target {said}: .* std; "
    with pytest.raises(ValueError, match=said):
        DRAWS[draw](of_vectors(make()))


@pytest.mark.parametrize("count", [1, 2, 8, 64])
@pytest.mark.parametrize("name", BY_PLACE)
def test_a_network_that_goes_by_the_place_in_its_call_is_refused(name: str, count: int) -> None:
    network, said = BY_PLACE[name]
    with pytest.raises(ValueError, match=f"the target {said}: "):
        fs.sample(walk(network), count, window=4)
    (found, *_) = fs.check(walk(network), window=4, samples=20).findings
    assert not found.passed
    assert found.detail.startswith(f"the target {said}: ")
    by_row = walk(lambda x, step, row: 0.5 * x * (1 + 0.1 * step[:, None]) + LABELS[row][:, None])
    assert fs.sample(by_row, count, window=4).report.evidence.largest_change < 1e-12


def test_an_engine_that_samples_sequentially_looks_in_every_way_to_draw() -> None:
    trial = Trial(2, 3, 1.0, 1.0, 10.0, 0.5)
    nothing_gains = fs.Tuning(STEPS, 5, 1.0, [trial], None, None)
    for draw in (fs.sample, lambda *args, **how: list(fs.stream(*args, **how))):
        with pytest.raises(ValueError, match="the target draws random numbers"):
            draw(of_vectors(perceptron(nn.Dropout(0.2))), 5, window=nothing_gains)
    report = fs.sample(of_vectors(perceptron()), 5, window=nothing_gains).report
    assert report.evidence.asked_again >= report.look_calls >= 1


@wrong
def test_a_refused_target_is_refused_again_and_can_be_forced(name: str) -> None:
    made = fs.Engine(of_vectors(WRONG[name][0]()), window=3, slots=2)
    for _ in range(2):
        with pytest.raises(ValueError, match="with look=False it is sampled nevertheless, inexactly"):
            made.sample([1, 2])
    run = fs.sample(of_vectors(WRONG[name][0]()), 2, window=3, look=False)
    assert run.report.look_calls == 0


def test_each_run_reports_its_own_looks() -> None:
    made, began = fs.Engine(flow(), window=3, slots=2), perf_counter()
    first, second = (made.sample([1, 2]).report for _ in range(2))
    assert first.look_calls > second.look_calls >= 0
    assert first.evidence.asked_again > second.evidence.asked_again
    assert first.evidence.largest_change < 1e-12
    assert 0 < first.seconds + second.seconds <= perf_counter() - began


def test_check_names_the_same_causes() -> None:
    for make, said in WRONG.values():
        found = fs.check(of_vectors(make()), window=3, samples=20)
        assert [finding.passed for finding in found.findings] == [False, True, False]
        assert found.findings[0].detail.startswith(f"the target {said}: ")


def test_a_network_in_eval_mode_passes() -> None:
    for module in (nn.BatchNorm1d(32), nn.Dropout(0.2)):
        run = fs.sample(of_vectors(perceptron(module).eval()), 5, window=3)
        assert run.report.evidence.asked_again >= run.report.look_calls >= 1


@pytest.mark.parametrize("shape", [(SIZE,), (1,)])
def test_clipping_does_not_hide_a_network_that_mixes_rows(shape: tuple[int, ...]) -> None:
    """A chain that clips returns ±1 at its noisy steps, whatever the network returns; then later calls are checked."""
    scheduler = pytest.importorskip("diffusers").DDPMScheduler(20, beta_schedule="squaredcos_cap_v2")
    scheduler.set_timesteps(20)
    for mixes in (0.0, 0.1):

        def network(x: Tensor, t: Tensor, row: Tensor, mixes: float = mixes) -> Tensor:
            return 0.5 * x + mixes * x.mean(0)

        target = from_scheduler(scheduler, network, shape)
        first = target.predict(torch.ones(3, *shape), torch.zeros(3).long(), torch.arange(3))
        assert (first.abs() == 1).all()
        for count in (1, 5):
            if mixes:
                with pytest.raises(ValueError, match="the target mixes rows"):
                    fs.sample(target, count, window=3)
            else:
                assert fs.sample(target, count, window=3).report.evidence.largest_change < 1e-6


# ------------------------------------------------------------------ what it costs


def test_a_report_says_when_nothing_was_checked() -> None:
    assert fs.sample(flow(), 2, window=4, look=False).report.evidence.trusted == ["look=False"]
    assert fs.sample(flow(), 2, window=4).report.evidence.trusted == []


@pytest.mark.slow
@pytest.mark.parametrize("layout", [Packed(), Padded()], ids=["packed", "padded"])
def test_a_report_covers_its_own_run_whatever_else_the_engine_draws(layout: Any) -> None:
    """A stream around it, one after it, and other threads."""
    made = fs.Engine(flow(), window=3, slots=2)
    made.speculation = replace(made.speculation, layout=layout)
    around = made.stream(range(9))
    next(around)
    report = made.sample(range(40)).report
    before = deepcopy(report.evidence)
    assert before.asked_again
    list(around)
    list(made.stream(range(90)))
    assert report.evidence == before

    made, reports = fs.Engine(Counting(flow()), window=3, slots=2), list[fs.Report]()
    threads = [Thread(target=lambda: reports.append(made.sample(range(60)).report)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    made_calls = len(made.target.calls)  # type: ignore[attr-defined]
    rounds = [round(r.rounds / (r.occupancy * r.slots)) for r in reports]
    assert made_calls == sum(rounds) + sum(r.look_calls for r in reports)
    assert all(0 <= 2 * r.look_calls - r.evidence.asked_again <= 1 for r in reports)


class Counting:
    """A target that keeps the states it was called with."""

    def __init__(self, target: fs.Target) -> None:
        self.shape, self.std, self.start, self.mean = target.shape, target.std, target.start, target.mean
        self.target, self.calls = target, list[tuple[int, list[int]]]()

    def predict(self, x: Tensor, step: Tensor, row: Tensor) -> Tensor:
        self.calls.append((len(x), row.tolist()))
        return self.target.predict(x, step, row)


LOOKED = (1, 4, 16, 64, 192, 320, 448)
"""Calls of an engine after which a small call follows."""


@pytest.mark.slow
@pytest.mark.parametrize("layout", [Packed(), Padded()], ids=["packed", "padded"])
@pytest.mark.parametrize(("count", "window"), [(1, 1), (1, 5), (3, 5), (9, 5), (90, 2)])
def test_looks_cost_calls_on_two_states_and_change_no_sample(layout: Any, count: int, window: int) -> None:
    engines = {}
    for looks in (True, False):
        target = Counting(flow())
        engines[looks] = fs.Engine(target, window=window, slots=min(count, 9), look=looks)
        engines[looks].speculation = replace(engines[looks].speculation, layout=layout)
    runs = {looks: engine.sample(seeds_of(3, count)) for looks, engine in engines.items()}
    calls, bare = (engines[looks].target.calls for looks in (True, False))  # type: ignore[attr-defined]
    expected, small = [], [n for n in LOOKED if n <= len(bare)]
    for made, call in enumerate(bare, 1):
        expected += [call, None] if made in LOOKED else [call]
    asked = [call for call, due in zip(calls, expected, strict=True) if due is None]
    assert [call for call, due in zip(calls, expected, strict=True) if due is not None] == bare
    assert all(
        states == 2 and set(rows) <= set(range(count)) for states, rows in asked
    )  # no row the user lacks
    for name in ("samples", "calls", "evaluations"):
        assert torch.equal(getattr(runs[True], name), getattr(runs[False], name))
    assert (runs[True].report.look_calls, runs[False].report.look_calls) == (len(small), 0)
    assert runs[True].report.evidence.asked_again == 2 * len(small) - 1
    assert runs[False].report.evidence.asked_again == 0
    assert "calls that check the target" in str(runs[True].report)
    assert "calls that check the target" not in str(runs[False].report)
    again = engines[True].sample(seeds_of(3, count))
    assert again.report.look_calls == len([n for n in LOOKED if len(bare) < n <= 2 * len(bare)])
    assert torch.equal(again.samples, runs[True].samples)


@pytest.mark.parametrize("chain", CHAINS)
def test_every_chain_passes(chain: str) -> None:
    assert fs.sample(CHAINS[chain](), 6, window=4).report.evidence.largest_change < 1e-6


def test_looks_are_rare_in_the_long_run() -> None:
    look, target = FreeLook(), flow()
    x, zero = target.start(torch.randn(1, 2, dtype=torch.float64), torch.zeros(1).long()), torch.zeros(1).long()
    for _ in range(1000):
        look.predict(target, x.clone(), zero, zero)
    assert look.calls == 4 + (1000 - 64) // EVERY


@pytest.mark.slow
@pytest.mark.parametrize("layout", [Packed(), Padded()], ids=["packed", "padded"])
def test_tuning_looks_with_one_window_and_not_while_its_clock_runs(
    monkeypatch: pytest.MonkeyPatch, layout: Any
) -> None:
    honest, pair, asked, during = fs.Engine.sample, FreeLook._pair, list[int](), list[int]()

    def counted(self: FreeLook, *given: Any) -> Tensor:
        asked.append(id(self._memory))
        return pair(self, *given)

    def drawn(self: fs.Engine, *given: Any, **rows: Any) -> fs.Run:
        self.speculation, before = replace(self.speculation, layout=layout), len(asked)
        run = honest(self, *given, **rows)
        during.append(len(asked) - before)
        return run

    monkeypatch.setattr(FreeLook, "_pair", counted)
    monkeypatch.setattr(fs.Engine, "sample", drawn)
    fs.tune(flow(), windows=[2, 3], samples=40)
    assert during[0] >= 1
    assert not any(during[1:])
    asked.clear()
    fs.sample(flow(), 2, window="auto")  # the run itself looks, too, unless the sequential sampler was faster
    assert 1 <= len(set(asked)) <= 2


# ------------------------------------------------------------------ whom it must not blame


def test_rounding_that_depends_on_the_size_of_a_call_is_checked_and_accepted() -> None:
    net = perceptron()

    def rounded(x: Tensor, step: Tensor, row: Tensor) -> Tensor:
        return net(x) * (1 + 1e-3 * len(x))

    report = fs.sample(walk(rounded), 9, window=3).report
    assert 1e-3 < report.evidence.largest_change < 0.1
    assert report.look_calls > 2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_half_precision_network_is_not_refused(dtype: torch.dtype) -> None:
    net = nn.Sequential(nn.Linear(SIZE, 256), nn.SiLU(), nn.Linear(256, SIZE)).to(dtype)
    target = walk(lambda x, step, row: net(x.to(dtype)).float())
    for count in (1, 4, 50):
        assert fs.sample(target, count, window=3).report.evidence.largest_change < 0.1


def test_a_broken_first_prediction_is_a_fault_and_not_refused_by_the_look() -> None:
    target = walk(lambda x, step, row: torch.where((row == 0).unsqueeze(1), math.nan, 0.5 * x))
    with pytest.raises(FloatingPointError, match="NaN or infinity at step 0 of sample 0"):
        fs.sample(target, 5, window=3)


def test_a_network_that_writes_into_its_states_is_not_refused() -> None:
    run = fs.sample(walk(lambda x, step, row: x.mul_(0.5).clone()), 5, window=3)
    assert run.report.evidence.largest_change == 0


@pytest.mark.parametrize("what", ["step", "row"])
def test_a_network_that_writes_into_steps_or_rows_is_refused(what: str) -> None:
    def writes(x: Tensor, step: Tensor, row: Tensor) -> Tensor:
        {"step": step, "row": row}[what].add_(1)
        return 0.5 * x

    target = walk(writes)
    for draw in (lambda: fs.sample(target, 5, window=3), lambda: fs.check(target, window=3, samples=20)):
        with pytest.raises(ValueError, match=f"writes into {what}, which the sampler goes on using"):
            draw()


def test_a_prior_is_fitted_on_samples_and_not_on_a_look() -> None:
    """The pilots' first states are those of their seeds; a look would replace them."""
    target, pilots = flow(), 8
    key = seeds_of(2**61, pilots)
    zero = torch.zeros_like(key)
    starts = target.start(
        normal(key, target.shape, target.std.dtype, stream=START, step=zero, draw=zero), torch.arange(len(key))
    )
    torch.testing.assert_close(fs.fit_prior(target, window=4, pilots=pilots).states[0, 0], starts.mean(0))


# ------------------------------------------------------------------ what it says


def test_the_size_of_the_effect_is_given_in_std() -> None:
    told = str(Difference("mixes", 0.1, 3, 2.0))
    assert "a prediction changes by 1.0e-01 of its size, the mean of step 3 by 2 std; let the network" in told
    assert "std" not in str(Difference("random", 0.1, 3, None))
    assert "the target's mean mixes rows: evaluated with other batch-mates, it changes" in str(
        Difference("mixes", 0.1, 3, None, "mean")
    )
    assert "the target's start draws random numbers: evaluated twice at one state, a first state" in str(
        Difference("random", 0.1, 0, None, "start")
    )


def refusal(target: fs.Target, x: Tensor, step: int = 0) -> str:
    """The error of the first look at a target that evaluates states x; "" if there is none."""
    zero = torch.zeros(len(x), dtype=torch.int64)
    with pytest.raises(ValueError, match="the target mixes rows") as refused:
        FreeLook().predict(target, x, zero + step, zero)
    return str(refused.value)


def test_the_reported_effect_has_its_true_size() -> None:
    """The network adds the batch mean: half of the other row, another first state of the same sample."""
    base = walk(lambda x, step, row: x + x.mean(0))
    mates = iter([0.0, 1.0, 0.0])

    class Starts(ChainTarget):
        def start(self, noise: Tensor, row: Tensor) -> Tensor:
            return torch.full_like(noise, next(mates))

    target = Starts(**vars(base))
    x = torch.ones(1, SIZE)
    said = refusal(target, x)  # 1.5 with a mate of 0, then 2 with a mate of 1
    assert "a prediction changes by 3.3e-01 of its size" in said
    moved = float(target.chain.prediction_weight[0] * 0.5 * SIZE**0.5 / target.std[0])
    assert f"the mean of step 0 by {moved:.2g} std" in said


def test_the_effect_is_that_of_the_first_step_with_noise() -> None:
    base = walk(lambda x, step, row: x + x.mean(0))
    std = base.std.clone()
    std[:2] = 0
    x = torch.randn(4, SIZE)
    assert "the mean of step 2 by " in refusal(replace(base, chain=replace(base.chain, std=std)), x)
    quiet = replace(base, chain=replace(base.chain, std=torch.zeros_like(std)))
    assert "of its size; let the network" in refusal(quiet, x)


def test_two_predictions_are_compared_with_the_rest_of_the_batch_exchanged() -> None:
    answers = iter([torch.ones(3), 2 * torch.ones(3), torch.ones(3), torch.ones(3)])
    found, difference = dependence(lambda kind: next(answers), lambda one, two: (5, 0.25))
    assert found == 1
    assert difference == Difference("mixes", 1.0, 5, 0.25)


# ------------------------------------------------------------------ states that the chain visits


def far_nan() -> ChainTarget:
    """A network that is finite wherever the chain goes, and NaN beyond about 30 (1 + sigma)."""

    def network(x: Tensor, sigma: Tensor, row: Tensor) -> Tensor:
        return 0.3 * torch.tanh(x) + 0 * torch.exp((x / (1 + sigma.view(-1, 1))) ** 2 / 10)

    return fs.targets.from_chain(
        network, fs.chains.euler_ancestral_chain([*torch.logspace(2, -2, 13), 0.0]), (3,)
    )


@pytest.mark.parametrize("count", [1, 4, 100])
def test_a_network_that_is_nan_only_where_no_chain_goes_is_not_refused(count: int) -> None:
    looked, bare = (fs.sample(far_nan(), count, window=6, look=look) for look in (True, False))
    assert torch.equal(looked.samples, bare.samples)
    assert looked.report.evidence.asked_again
    result = fs.check(far_nan(), window=6, samples=300)
    assert result.passed, str(result)


@pytest.mark.parametrize("chain", [*CHAINS, "far nan"])
@pytest.mark.parametrize("count", [1, 3])
def test_looks_use_only_states_of_the_run_and_first_states(chain: str, count: int) -> None:
    """Every state of a small call was in a call before, or is a first state at step 0."""
    base = far_nan() if chain == "far nan" else CHAINS[chain]()
    known = set[tuple[int, bytes]]()

    class Watched(ChainTarget):
        def start(self, noise: Tensor, row: Tensor) -> Tensor:
            x = super().start(noise, row)
            known.update((0, one.numpy().tobytes()) for one in x)
            return x

        def predict(self, x: Tensor, step: Tensor, row: Tensor, extra: Tensor | None = None) -> Tensor:
            states = {(k, one.numpy().tobytes()) for k, one in zip(step.tolist(), x, strict=True)}
            small.append(states <= known)
            known.update(states)
            return super().predict(x, step, row, extra)

    small: list[bool] = []
    run = fs.sample(Watched(**vars(base)), count, window=4)
    assert sum(small) >= 1 + run.report.look_calls > 1  # the first call is on first states, too


# ------------------------------------------------------------------ asked again later


class Changes:
    """A network that changes at a call of its own: a counter, a cache that starts to skip, other weights."""

    def __init__(self, at: int, by: float = 0.01) -> None:
        self.net, self.calls, self.at, self.by = perceptron(), 0, at, by

    def __call__(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.net(x) * (1 + self.by * (self.calls > self.at))


@pytest.mark.parametrize("at", [3, 5, 20, 200])
def test_a_network_that_changes_during_a_run_is_refused(at: int) -> None:
    with pytest.raises(
        ValueError, match="the target changed between two calls: evaluated again later, a prediction"
    ):
        fs.sample(of_vectors(Changes(at)), 400, window=3, slots=1)
    assert fs.sample(of_vectors(Changes(at)), 4, window=3, slots=1, look=False).report.evidence.asked_again == 0


def test_a_cache_that_replaces_every_other_call_is_refused() -> None:
    """Like the caches of diffusers: the first calls are computed, later ones return parts of earlier outputs."""
    net, calls, last = perceptron(), [0], [torch.zeros(SIZE)]

    def cached(x: Tensor, step: Tensor, row: Tensor) -> Tensor:
        calls[0] += 1
        if calls[0] > 3 and calls[0] % 2:
            return 0.9 * net(x) + 0.1 * last[0]
        answer = net(x)
        last[0] = answer.mean(0)
        return answer

    with pytest.raises(ValueError, match=r"the target (changed|keeps state)"):
        fs.sample(walk(cached), 1, window=3)


def dropping() -> nn.Module:
    return perceptron(nn.Dropout(0.2)).eval()


CHANGED: dict[str, tuple[Callable[[nn.Module], Any], str]] = {
    "train": (lambda net: net.train(), "draws random numbers"),
    "weights": (lambda net: next(net.parameters()).data.mul_(1.01), "changed between two calls"),
    "a hook": (
        lambda net: net.register_forward_hook(lambda _m, _x, out: 1.01 * out),
        "changed between two calls",
    ),
}


@pytest.mark.parametrize("layout", [Packed(), Padded()], ids=["packed", "padded"])
@pytest.mark.parametrize("name", CHANGED)
def test_a_network_changed_between_runs_of_an_engine_is_refused(name: str, layout: Any) -> None:
    change, said = CHANGED[name]
    net = dropping()
    made = fs.Engine(of_vectors(net), window=3, slots=1)
    made.speculation = replace(made.speculation, layout=layout)
    made.sample([0])
    change(net)
    with pytest.raises(ValueError, match=f"the target {said}"):
        list(map(made.sample, [[seed] for seed in range(1, 9)]))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["train", "a counting processor"])
def test_a_unet_of_diffusers_changed_after_the_first_picture_is_refused(name: str) -> None:
    diffusers = pytest.importorskip("diffusers")
    torch.manual_seed(0)
    unet = diffusers.UNet2DModel(
        sample_size=8,
        block_out_channels=(8, 8),
        norm_num_groups=4,
        attention_head_dim=4,
        dropout=0.1,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
    ).eval()
    scheduler = diffusers.DDPMScheduler(20)
    scheduler.set_timesteps(20)
    made = fs.Engine(
        from_scheduler(scheduler, lambda x, t, row: unet(x, t).sample, (3, 8, 8)), window=4, slots=1
    )
    first = made.sample([0]).report
    assert first.evidence.asked_again
    assert first.evidence.largest_change < 1e-4

    class CountingProcessor:
        def __init__(self) -> None:
            self.own, self.calls = diffusers.models.attention_processor.AttnProcessor2_0(), 0

        def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
            self.calls += 1
            return self.own(*args, **kwargs) * (1 + 0.1 * (self.calls > 5))

    if name == "train":
        unet.train()
    else:
        for module in unet.modules():
            if isinstance(module, diffusers.models.attention_processor.Attention):
                module.set_processor(CountingProcessor())
    with pytest.raises(ValueError, match=r"the target (draws random numbers|changed between two calls)"):
        list(map(made.sample, [[seed] for seed in range(1, 6)]))


def test_new_conditions_do_not_count_as_a_change_of_the_network() -> None:
    net, condition = dropping(), torch.zeros(SIZE)
    made = fs.Engine(walk(lambda x, step, row: net(x) + condition), window=3, slots=1)

    def draw(seed: int) -> fs.Run:
        condition.fill_(float(seed))
        return made.sample([seed])

    for seed in range(6):
        made.forget()
        draw(seed)
    with pytest.raises(ValueError, match="make a new engine after you change them"):
        list(map(draw, range(40)))


@torch.no_grad()
def test_captured_runs_are_checked_before_they_start() -> None:
    """CUDA graphs do not pass through `predict`; a run that replays them begins with a look back, rarely."""
    net = dropping()
    target, look = of_vectors(net), FreeLook()
    x, zero = torch.randn(1, SIZE), torch.zeros(1).long()
    look.predict(target, x, zero, zero)
    asked = []
    for _ in range(2, 65):
        before = look.calls
        look.look_back(target)
        asked.append(look.calls - before)
    assert [run for run, calls in enumerate(asked, 2) if calls] == [2, 4, 8, 16, 32, 48, 64]
    CHANGED["weights"][0](net)
    with pytest.raises(ValueError, match="the target changed between two calls"):
        list(map(look.look_back, [target] * 16))
    look.forget()
    look.look_back(target)


@pytest.mark.parametrize("warm", [False, True])
def test_looks_change_no_bit_of_any_sample(warm: bool) -> None:
    net = perceptron().eval()
    target = of_vectors(net)
    drafter = fs.Replay(prior=fs.fit_prior(target, window=5, pilots=8)) if warm else None
    runs = [fs.sample(target, 20, window=5, slots=3, drafter=drafter, look=look) for look in (True, False)]
    assert torch.equal(runs[0].samples, runs[1].samples)
    assert runs[0].report.look_calls >= 3
