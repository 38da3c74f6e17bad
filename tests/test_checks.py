"""`foresample.check` passes exact samplers and names the defects of others."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor

import foresample as fs
from foresample.chains import Chain
from foresample.checks.kolmogorov import KolmogorovSmirnov, ks_normal, ks_two_sample, smallest_shift
from foresample.checks.rows import rows_are_independent
from foresample.checks.samples import can_fail, fewest_sequential, samples_law
from foresample.engine.tuning import Trial, Tuning
from foresample.targets import ChainTarget
from tests.support.small_chains import CHAINS, LooksAhead, flow, mixture, single_precision


def with_network(target: ChainTarget, network: Callable[[Tensor, Tensor, Tensor], Tensor]) -> ChainTarget:
    """The same weights with a network whose output is the prediction itself, and which takes the step."""
    weights = target.chain
    return replace(
        target, chain=Chain(weights.std, weights.state_weight, weights.prediction_weight), network=network
    )


@pytest.mark.law
@pytest.mark.parametrize("chain", CHAINS)
def test_an_exact_sampler_passes(chain: str) -> None:
    result = fs.check(CHAINS[chain](), window=6, samples=1000)
    assert result.passed, str(result)
    assert json.loads(result.to_json())["passed"]


def test_a_target_that_mixes_rows_is_named_with_the_size_of_the_effect() -> None:
    base = flow()

    def centred(x: Tensor, step: Tensor, row: Tensor) -> Tensor:
        return base.predict(x, step, row) + 0.05 * x.mean(0)  # what a batch normalisation in train mode does

    result = fs.check(with_network(base, centred), window=6, samples=100)
    assert not result.passed
    assert "mixes rows" in str(result)
    assert "std" in result.findings[0].detail


def test_a_real_batch_normalisation_is_found_in_train_mode_only() -> None:
    torch.manual_seed(0)
    net = torch.nn.Sequential(
        torch.nn.Linear(2, 16), torch.nn.BatchNorm1d(16), torch.nn.SiLU(), torch.nn.Linear(16, 2)
    )
    target = with_network(flow(), lambda x, step, row: net.double()(x))
    assert not rows_are_independent(target).passed
    net.eval()
    assert rows_are_independent(target).passed


def test_rounding_that_changes_with_the_batch_is_not_mixing() -> None:
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(2, 512), torch.nn.SiLU(), torch.nn.Linear(512, 2))
    base = CHAINS["single precision"]()
    assert rows_are_independent(with_network(base, lambda x, step, row: net(x))).passed


@pytest.mark.law
def test_a_drafter_that_looks_ahead_fails() -> None:
    result = fs.check(flow("x0"), window=14, drafter=LooksAhead(), samples=3000, slots=3000)
    assert [f.passed for f in result.findings] == [True, False, False]
    assert "changes when only later steps change" in str(result)


def test_a_row_keeps_its_condition_in_every_batch() -> None:
    """Targets look up prompts by row; the innovations of the self-test must use the same ones."""
    base = flow()
    shift = torch.linspace(-1, 1, 400, dtype=torch.float64)

    def conditional(x: Tensor, step: Tensor, row: Tensor) -> Tensor:
        return base.predict(x, step, row) + shift[row].unsqueeze(1)

    result = fs.check(with_network(base, conditional), window=6, samples=400, slots=150)
    assert result.passed, str(result)


def labelled(labels: int) -> ChainTarget:
    """A target that looks up a value by row and has `labels` of them."""
    base, shift = flow(), torch.linspace(-1, 1, labels, dtype=torch.float64)
    return with_network(base, lambda x, step, row: base.predict(x, step, row) + shift[row].unsqueeze(1))


@pytest.mark.slow
def test_only_rows_that_the_target_has_are_used() -> None:
    target = labelled(64)
    fs.sample(target, 64, window=6)
    result = fs.check(target, window=6, samples=150, rows=64)
    assert result.passed, str(result)
    assert fs.check(target, window=6, samples=64).passed  # as many as are drawn at a time
    assert fs.check(labelled(1), window=6, samples=10, rows=1).passed
    with pytest.raises(ValueError, match=r"cannot look up one of rows 0 … 499 .*rows=64 .*--slots 64"):
        fs.check(target, window=6, samples=1000)
    with pytest.raises(ValueError, match="rows must be a whole number of at least 1, not 0"):
        fs.check(target, window=6, rows=0)


@pytest.mark.parametrize("make", [flow, CHAINS["multistep"]], ids=["one step", "multistep"])
def test_a_target_that_writes_into_its_states_raises_no_false_alarm(make: Callable[[], ChainTarget]) -> None:
    class Writes(ChainTarget):
        def predict(self, x: Tensor, step: Tensor, row: Tensor, extra: Tensor | None = None) -> Tensor:
            prediction = super().predict(x.clone(), step, row, extra)
            x.add_(5.0)
            return prediction

    target = Writes(**vars(make()))
    result = fs.check(target, window=6, samples=500)
    assert result.passed, str(result)
    assert "writes into its states, which is harmless" in result.findings[0].detail


@pytest.mark.parametrize("level", [-5, 0, 1, 1.5, float("nan")])
def test_a_level_outside_zero_to_one_is_refused(level: float) -> None:
    sentence = f"level must be a probability between 0 and 1, not {level}"
    for judge in (
        lambda: fs.check(flow(), window=6, samples=20, level=level),
        lambda: samples_law(torch.randn(5, 2), [], level),
    ):
        with pytest.raises(ValueError, match=sentence):
            judge()


@pytest.mark.parametrize(
    ("plain", "ours"), [(1, 10), (5, 10), (7, 10), (8, 10), (3, 3), (24, 5), (25, 5), (5, 1000)]
)
def test_a_comparison_of_so_few_samples_that_no_difference_fails_it_is_recognised(
    plain: int, ours: int
) -> None:
    near, far = torch.randn(plain, 2), 1e6 + torch.randn(ours, 2)
    assert samples_law(near, [far]).passed is not can_fail(plain, ours)


def test_the_fewest_sequential_samples_of_a_comparison_that_can_fail() -> None:
    assert [fewest_sequential(ours) for ours in (1, 4, 5, 10, 10**6)] == [None, None, 25, 8, 5]


def test_progress_counts_every_transition() -> None:
    seen: list[int] = []
    fs.check(flow(), window=6, samples=50, slots=20, progress=seen.append)
    assert sum(seen) == 2 * 50 * 16


def test_a_chain_without_noise_is_refused() -> None:
    base = flow()
    quiet = replace(base, chain=replace(base.chain, std=torch.zeros_like(base.std)))
    for window in (3, "auto"):
        with pytest.raises(ValueError, match="nothing to speculate on"):
            fs.check(quiet, window=window)


@pytest.mark.parametrize("shift", [0.0, 0.05, 0.2])
def test_kolmogorov_smirnov_agrees_with_scipy(shift: float) -> None:
    rng = np.random.default_rng(0)
    a, b = rng.standard_normal(1500), rng.standard_normal(2500) + shift
    assert ks_two_sample(a, b) == pytest.approx(stats.ks_2samp(a, b, method="asymp").pvalue, rel=0.1)
    assert ks_normal(b) == pytest.approx(stats.kstest(b, "norm").pvalue, rel=0.1)


@pytest.mark.parametrize("decimals", [1, 12], ids=["ties", "no ties"])
@pytest.mark.parametrize("sizes", [(1, 1), (3, 50), (200, 70), (500, 2000)])
def test_a_sample_that_comes_in_parts_is_tested_like_a_whole_one(sizes: tuple[int, int], decimals: int) -> None:
    rng = np.random.default_rng(0)
    held, other = (
        np.round(rng.normal(shift, 1, n), decimals) for n, shift in zip(sizes, (0, 0.2), strict=True)
    )
    test = KolmogorovSmirnov(held)
    for part in np.array_split(other, 3):
        test.add(part)
    assert test.count == len(other)
    assert test.p_value() == pytest.approx(ks_two_sample(held, other), abs=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("said", ["x0", "eps", "v", "score"])
@pytest.mark.parametrize("returned", ["x0", "score"])
def test_a_network_that_returns_another_quantity_is_noted(said: Any, returned: str) -> None:
    """The network is still sampled exactly, but its samples are worthless."""
    grid = torch.linspace(0.02, 0.98, 12, dtype=torch.float64)

    def network(x: Tensor, level: Tensor, row: Tensor) -> Tensor:
        alpha, sigma = level.sqrt(), (1 - level).sqrt()
        x0 = mixture().denoise(x, alpha, sigma)
        return x0 if returned == "x0" else -(x - alpha[:, None] * x0) / sigma[:, None] ** 2

    target = fs.targets.vp(network, grid, (2,), predicts=said, dtype=torch.float64)
    result = fs.check(target, window=5, samples=300)
    assert result.passed
    doubts = [finding.detail for finding in result.findings if finding.note]
    if returned == said:
        assert not doubts
    elif (returned, said) != ("x0", "v"):  # which are too much alike here
        assert f"returns {said}, as its chain declares" in doubts[0]
        assert "note  network: the network does not find the noise that is put into finished samples" in str(
            result
        )


# ------------------------------------------------------------------ what it can find


@pytest.mark.parametrize("samples", [1, 10])
def test_too_few_samples_to_find_anything_are_noted(samples: int) -> None:
    result = fs.check(flow(), window=6, samples=samples)
    law = result.findings[2]
    assert law.smallest_shift is None
    assert law.note
    assert f"with {samples} sample" in law.detail
    assert "no power" in law.detail
    assert "note  distribution" in str(result)
    assert "ok    distribution" not in str(result)


@pytest.mark.slow
def test_the_smallest_error_that_the_samples_reveal_is_reported() -> None:
    law = fs.check(flow(), window=6, samples=500).findings[2]
    assert law.tests is not None
    assert law.smallest_shift == smallest_shift(1e-3 / law.tests, 500)
    assert f"500 samples reveal, 95 times in 100, a mean that is off by {law.smallest_shift:.2g}" in law.detail
    shifts = [smallest_shift(1e-5, n) for n in (100, 1000, 10_000)]
    assert shifts == sorted(shifts, reverse=True)  # type: ignore[type-var]


@pytest.mark.parametrize("samples", [100, 2000])
def test_an_error_of_the_reported_size_is_found_about_as_often_as_reported(samples: int) -> None:
    rng, level = np.random.default_rng(0), 1e-5
    one, two = smallest_shift(level, samples), smallest_shift(level, samples / 2)
    assert one is not None
    assert two is not None
    alone = [ks_normal(rng.standard_normal(samples) + one) < level for _ in range(200)]
    pairs = [
        ks_two_sample(rng.standard_normal(samples), rng.standard_normal(samples) + two) < level
        for _ in range(200)
    ]
    for found in (alone, pairs):
        assert np.mean(found) >= 0.93
    half = [ks_normal(rng.standard_normal(samples) + one / 2) < level for _ in range(200)]
    assert np.mean(half) < 0.5


@pytest.mark.law
@pytest.mark.parametrize("std", [1e-8, 1e-7, 3e-7, 1e-6, 3e-6, 1e-4])
def test_noise_lost_in_rounding_is_not_a_wrong_distribution(std: float) -> None:
    """States near 1 in float32, whose neighbours are 1e-7 apart; one dimension, where rounding shows most."""
    one = torch.ones(12)
    network = lambda x, step, row: torch.zeros_like(x)  # noqa: E731
    start = torch.ones(2000, 1)
    target = fs.targets.from_chain(network, Chain(std * one, one, 0 * one), (1,), start=start)
    law = fs.check(target, window=4, samples=2000, slots=2000).findings[2]
    if std < 4e-7:
        assert law.detail.startswith("not tested: float32 cannot represent the noise of steps 1, 3, 6, 9, 11")
        assert "use a chain in float64" in law.detail
        assert law.smallest_p is None
    else:
        assert law.passed, law.detail
    wide = replace(target, chain=target.chain.to("cpu", torch.float64), start_states=start.double())
    result = fs.check(wide, window=4, samples=500)
    assert result.passed, str(result)


@pytest.mark.law
def test_steps_within_precision_are_still_tested() -> None:
    one = torch.ones(12)
    std = torch.where(torch.arange(12) < 6, 0.1, 1e-8)
    network = lambda x, step, row: torch.zeros_like(x)  # noqa: E731
    target = ChainTarget(Chain(std * one, one, 0 * one), torch.Size([1]), network)
    result = fs.check(target, window=4, samples=1000)
    assert result.passed, str(result)
    assert "note  precision: float32 cannot represent the noise of steps 6, 9, 11" in str(result)
    assert result.findings[2].tests == 2 * 18


def test_the_number_of_tests_of_a_step_is_known() -> None:
    assert fs.check(flow(), window=6, samples=50).findings[2].tests == 18 * 5


def test_check_and_sample_refuse_a_prior_of_another_chain_alike() -> None:
    prior = fs.fit_prior(fs.GaussianMixture.of_draft_trees(3).flow(16, 0.1), window=4, pilots=8)
    sentences = []
    drafter = fs.Replay(prior=prior)
    for use in (fs.check, partial(fs.sample, count=2)):
        with pytest.raises(ValueError, match="prior") as refused:
            use(flow(), window=4, drafter=drafter)
        sentences.append(str(refused.value))
    assert sentences[0] == sentences[1]
    with pytest.raises(TypeError, match="is not a drafter"):
        fs.check(flow(), window=4, drafter=fs.Replay)  # type: ignore[arg-type]


class Held:
    """A custom drafter that holds another and fits it to the target, as the contract demands."""

    def __init__(self, replay: fs.Replay) -> None:
        self.replay = replay

    def __getattr__(self, name: str) -> Any:
        return getattr(self.replay, name)

    def for_target(self, target: fs.Target) -> Held:
        return Held(self.replay.for_target(target))


def test_every_drafter_is_fitted_to_the_target_before_it_is_tested() -> None:
    prior = fs.fit_prior(flow("x0"), window=4, pilots=8)
    assert fs.check(single_precision(), window=4, samples=20, drafter=Held(fs.Replay(prior=prior))).passed


@pytest.mark.parametrize("window", [0, -1, 2.5, "wide"])
def test_a_window_that_is_not_a_positive_whole_number_is_refused(window: Any) -> None:
    with pytest.raises(ValueError, match="window must be a whole number of at least 1"):
        fs.check(flow(), window=window, samples=10)


@pytest.mark.slow
def test_the_window_of_a_tuning_and_a_measured_window_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    tuned = Tuning(16, 10, 1e-3, [Trial(6, 70, 1e-3, 1e-3, 5.0, 2.0)], 6, 1.9)
    given = fs.check(flow(), window=6, samples=20, slots=10)
    assert fs.check(flow(), window=tuned, samples=20, slots=10) == given
    monkeypatch.setattr("foresample.engine.tuning.measure", lambda target, settings: tuned)
    assert fs.check(flow(), window="auto", samples=20, slots=10) == given
    with pytest.raises(ValueError, match="this tuning is of 16 steps with 10 samples at a time"):
        fs.check(flow(), window=tuned, samples=20)


def test_a_tuning_without_a_gain_leaves_nothing_to_check() -> None:
    sequential = Tuning(16, 20, 1e-3, [Trial(6, 140, 1e-3, 1e-3, 5.0, 0.5)], None, None)
    with pytest.raises(
        ValueError, match="with 20 samples at a time no window gains and sampling is sequential"
    ):
        fs.check(flow(), window=sequential, samples=20)


@pytest.mark.slow
def test_the_default_window_is_the_same_as_for_sampling() -> None:
    assert fs.check(flow(), samples=20) == fs.check(flow(), window=16, samples=20)


@pytest.mark.parametrize("name", ["graph", "look", "windows"])
def test_settings_that_check_does_not_take_are_refused_by_name(name: str) -> None:
    with pytest.raises(TypeError, match=f"{name} is not a setting here"):
        fs.check(flow(), samples=20, **{name: 1})  # type: ignore[arg-type]


@pytest.mark.slow
def test_a_window_longer_than_the_chain_is_cut() -> None:
    one, two = (fs.check(flow(), window=window, samples=10) for window in (15, 10**8))
    assert one == two


def test_a_learned_variance_is_tested_behind_a_wrapper_too() -> None:
    network = lambda x, time, row: torch.cat([0.3 * x, 0.5 * torch.tanh(x)], 1)  # noqa: E731
    target = fs.targets.vp(network, torch.linspace(0.05, 0.95, 6), (2, 2, 2), learned_base=0.5)
    plain, wrapped = (
        fs.check(t, window=3, samples=20) for t in (target, fs.targets.replicated([target, target]))
    )
    assert plain.findings[-1] == wrapped.findings[-1]
    assert plain.findings[-1].question == "variance is above its base"
    own = SimpleNamespace(
        **{n: getattr(target, n) for n in ("shape", "std", "start", "predict", "mean", "chain", "extra")}
    )
    last = fs.check(own, window=3, samples=20).findings[-1]
    assert last.note
    assert "not tested: SimpleNamespace has no method `output`, as ChainTarget has" in last.detail


# ------------------------------------------------------------------ rows


def test_a_mean_that_mixes_a_little_of_a_small_noise_is_found() -> None:
    """Half of a step's noise, of 1e-5, at states of size 1: a change of 5e-6 of its size."""
    one = torch.ones(12, dtype=torch.float64)
    network = lambda x, step, row: torch.zeros_like(x)  # noqa: E731
    base = ChainTarget(Chain(1e-5 * one, one, 0 * one), torch.Size([2]), network)

    class Mixes(ChainTarget):
        def mean(self, x: Tensor, prediction: Tensor, step: Tensor, *_: Any, **__: Any) -> Tensor:
            return x + 5e-6 * torch.tanh(x.mean(0))

    found = rows_are_independent(Mixes(**vars(base)))
    assert not found.passed
    assert "the target's mean mixes rows" in found.detail
    assert rows_are_independent(base).passed


def test_a_network_with_coarse_rounding_is_checked_and_accepted() -> None:
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(2, 256), torch.nn.SiLU(), torch.nn.Linear(256, 2)).bfloat16()
    base = CHAINS["single precision"]()

    def rounded(x: Tensor, step: Tensor, row: Tensor) -> Tensor:
        return net(x.bfloat16()).float() * (1 + 1e-3 * len(x))

    found = rows_are_independent(with_network(base, rounded))
    assert found.passed, found.detail


def test_a_long_chain_of_large_states_is_walked_without_holding_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("foresample.checks.rows._HELD", 1000)
    base = mixture().langevin(200, 0.01)
    assert rows_are_independent(base).passed

    def mixes(x: Tensor, step: Tensor, row: Tensor) -> Tensor:
        return base.network(x, step, row) + (step == 199).unsqueeze(1) * x.mean(0)

    assert not rows_are_independent(replace(base, network=mixes)).passed


def test_a_check_works_in_any_default_dtype_and_with_any_whole_seed() -> None:
    before, seed = torch.get_default_dtype(), cast(Any, np.int32(3))
    torch.set_default_dtype(torch.float64)
    try:
        assert fs.check(flow(), window=3, samples=50, seed=seed).findings[0].passed
    finally:
        torch.set_default_dtype(before)


def test_a_chain_too_short_to_test_is_refused_with_the_reason() -> None:
    chain = fs.chains.dpmpp_3m_sde_chain(fs.chains.karras_sigmas(4, 0.05, 10.0))
    target = fs.targets.from_chain(lambda x, sigma, row: x / (1 + sigma.view(-1, 1) ** 2), chain, (2,))
    with pytest.raises(ValueError, match=r"no step from 3 on adds noise.*with more steps"):
        fs.check(target, window=3, samples=50)
