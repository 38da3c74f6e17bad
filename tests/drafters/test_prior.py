"""Priors: fewer calls from the first window on, and refusals (tests/law tests the distribution)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

import foresample as fs
from foresample.chains import Chain
from foresample.contracts import Wrapper, no_history, remember, transition_mean
from foresample.core.noise import extra_noise, seeds_of
from foresample.core.round import Padded
from foresample.engine.priors import prior_of_paths
from foresample.targets import ChainTarget
from tests.backends.fused import CPU, wide
from tests.support.small_chains import CHAINS, NOISIER, ddpm, flow, mixture


def long_chain() -> fs.Target:
    return mixture().vp(torch.linspace(0.002, 0.995, 60, dtype=torch.float64))


def test_a_prior_saves_calls() -> None:
    target = long_chain()
    prior = fs.fit_prior(target, window=20, pilots=64)
    cold, warm = (
        fs.sample(target, 200, window=20, seed=2, drafter=fs.Replay(prior=p)).report for p in (None, prior)
    )
    assert warm.calls_mean < 0.9 * cold.calls_mean


def test_pilots_are_never_among_the_samples() -> None:
    """A prior fitted on the sample itself would break its distribution (tests/law/test_warm_starts.py)."""
    base, starts = mixture().flow(4, 0.1), []

    def network(x: Tensor, time: Tensor, row: Tensor) -> Tensor:
        starts.extend(x[time == time_of_start].tolist())
        return base.network(x, time, row)

    assert base.chain.time is not None
    time_of_start = base.chain.time[0]
    target = replace(base, network=network)
    fs.fit_prior(target, window=2, pilots=8)
    pilots = {tuple(x) for x in starts}
    starts.clear()
    fs.sample(target, 8, window=2, look=False)
    assert len(pilots) >= 8
    assert not pilots & {tuple(x) for x in starts}


def test_the_first_round_drafts_from_the_prior_and_a_cold_one_has_nothing() -> None:
    target, drafted = long_chain(), []
    for prior in (None, fs.fit_prior(target, window=8, pilots=8)):
        seen: list[int] = []

        def observe(commit: fs.Commit, seen: list[int] = seen) -> None:
            seen.append(int(commit.drafted.max()))

        fs.sample(target, 3, window=8, drafter=fs.Replay(prior=prior), observe=observe)
        drafted.append(seen[0])
    assert drafted == [0, 8]


def test_slopes_are_not_measured_against_the_prior() -> None:
    """After one round no state has been visited twice, so slopes are those of the prior, or 0 without a Jacobian."""
    target = ddpm()
    drafter = fs.Replay(prior=fs.Prior(torch.randn(1, 7, 2).double(), torch.randn(1, 7, 2).double()))
    row = torch.arange(4)
    memory = drafter.prime(drafter.begin(4, 6, torch.zeros(2).double()), row)
    assert memory["visited"].tolist() == [0] * 4
    assert memory["horizon"].tolist() == [7] * 4
    path = fs.drafters.DraftPath(
        torch.randn(4, 7, 2).double(),
        torch.randn(4, 7, 2).double(),
        torch.randn(4, 6, 2).double(),
        torch.full((4,), 6),
        torch.zeros(4, dtype=torch.int64),
    )
    assert drafter.learn(memory, path, torch.ones(4, dtype=torch.int64))["slope"].abs().max() == 0
    assert len(target.std) > 6


@pytest.mark.parametrize("matrix", [True, False])
def test_the_slopes_of_a_linear_network_are_found(matrix: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """One matrix a step for states of few elements, else one number; zero before the first noise."""
    monkeypatch.setattr("foresample.engine.priors.MATRIX_ELEMENTS", 2 if matrix else 1)
    one = torch.ones(6, dtype=torch.float64)
    true = (
        torch.tensor([[2.0, 1.0], [0.0, 1.0]], dtype=torch.float64) if matrix else 1.5 * torch.eye(2).double()
    )
    # The state's weights change, so that a step's noise is found by its own alone.
    weights = torch.tensor([1.0, 0.5, 1.5, 0.5, 1.5, 1.0]).double()
    walk = ChainTarget(Chain(one, weights, 0 * one), torch.Size([2]), lambda x, step, row: x @ true.T + 9)
    prior = fs.fit_prior(walk, window=3, pilots=60_000, paths=2)
    assert prior.states.shape == (2, 4, 2)
    torch.testing.assert_close(prior.predictions, prior.states @ true.T + 9)
    if matrix:
        assert prior.slope is None
        assert prior.jacobian is not None
        slope = 1.5 * torch.eye(2).double()
        shrunk = slope + (true - slope) / 1.1
        torch.testing.assert_close(prior.jacobian[1:], shrunk.expand(5, 2, 2), rtol=0, atol=0.02)
        assert not prior.jacobian[0].any()
    else:
        assert prior.jacobian is None
        torch.testing.assert_close(prior.slope, 1.5 * one[:4])


@pytest.mark.parametrize("std", [0.0, 1e-30])
def test_a_step_without_noise_or_with_noise_lost_in_rounding_has_no_slope(std: float) -> None:
    noise, one = torch.tensor([1.0, std, 1.0, 1.0]), torch.ones(4)
    walk = ChainTarget(Chain(noise, one, 0 * one), torch.Size([2]), lambda x, step, row: 2 * x)
    jacobian = fs.fit_prior(walk, window=2, pilots=50).jacobian
    assert jacobian is not None
    assert jacobian.isfinite().all()
    assert [bool(matrix.any()) for matrix in jacobian] == [False, True, False, True]


def answering(target: fs.Target, answer: Tensor, noise: Tensor, seeds: Tensor) -> fs.Prior:
    """The prior of paths along which predictions change by answer · noise and nothing else, [pilots, N−1, *shape]."""
    x = prediction = torch.ones_like(noise[:, 0])
    previous, states, predictions = no_history(target, x), [x], [prediction]
    for k in range(noise.shape[1]):
        step = torch.full((len(noise),), k)
        mean = transition_mean(target, x, prediction, step, previous, extra_noise(target, seeds, step))
        previous, x = remember(target, prediction, previous), mean + noise[:, k]
        prediction = prediction + answer * (x - mean)
        states.append(x)
        predictions.append(prediction)
    paths = torch.stack(states, 1), torch.stack(predictions, 1)
    return prior_of_paths(target, *paths, window=3, seeds=seeds)


@pytest.mark.parametrize("chain", ["ddpm", "multistep", "third order", "two noises", "turned"])
def test_the_noise_of_a_step_is_separated_from_the_rest_of_it(chain: str) -> None:
    """Earlier predictions and extra noise are not part of the slope."""
    target = (CHAINS | NOISIER)[chain]()
    generator = torch.Generator().manual_seed(6)
    shape = 1, len(target.std) - 1, *target.shape
    noise = torch.randn(shape, generator=generator, dtype=target.std.dtype)
    jacobian = answering(target, torch.tensor(-0.7).double(), noise, seeds_of(2, 1)).jacobian
    assert jacobian is not None
    noisy = torch.cat([torch.zeros(1), (target.std[:-1] > 0).double()]).view(-1, 1, 1)
    torch.testing.assert_close(jacobian, -0.7 * noisy * torch.eye(2).double(), rtol=0, atol=1e-6)


def test_a_band_without_noise_has_no_slope() -> None:
    pictures = wide(CPU, torch.float64, 4, 16)
    target = fs.targets.in_frequencies(replace(pictures, shape=torch.Size([1, 4, 4])))
    bands = torch.as_tensor(target.bands).view(1, 4, 4)
    quiet = bands == 2
    noise = torch.randn(5, 3, 1, 4, 4, generator=torch.Generator().manual_seed(1)).double() * ~quiet
    answer = (1.0 + bands).double()
    jacobian = answering(target, answer, noise, seeds_of(2, 5)).jacobian
    assert jacobian is not None
    expected = (answer * ~quiet).flatten().expand(3, 1, 16)
    torch.testing.assert_close(jacobian[1:], expected, rtol=1e-9, atol=1e-9)


def test_small_states_have_slopes_as_large_ones_have(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("foresample.engine.priors.MATRIX_ELEMENTS", 1)
    target, generator = ddpm(), torch.Generator().manual_seed(6)
    states = 1e-3 * torch.randn(9, 4, 2, generator=generator, dtype=torch.float64)
    states[:, 2] = 1
    slope = prior_of_paths(target, states, 3 * states, window=3).slope
    assert slope is not None
    torch.testing.assert_close(slope, torch.tensor([3.0, 3.0, 0.0, 3.0]).double())


def test_a_prior_needs_two_pilots_a_path() -> None:
    assert len(fs.fit_prior(ddpm(), window=3, pilots=6, paths=3).states) == 3
    with pytest.raises(ValueError, match="5 pilots are too few for 3 paths: draw at least two for each"):
        fs.fit_prior(ddpm(), window=3, pilots=5, paths=3)


def test_samples_take_their_paths_in_turn() -> None:
    states = torch.arange(3.0).view(3, 1, 1).expand(3, 2, 1)
    prior = fs.Prior(states, 10 * states, slope=torch.tensor([1.0, 2.0]))
    got, predicted, slope = prior.paths(torch.tensor([0, 4, 2]), 4)
    assert got[:, :, 0].tolist() == [[0.0] * 4, [1.0] * 4, [2.0] * 4]
    assert torch.equal(predicted, 10 * got)
    assert slope.tolist() == [1.0, 2.0, 2.0, 2.0]


@pytest.mark.slow
@pytest.mark.parametrize("chain", ["flow", "multistep", "interrupted", "single precision"])
def test_widths_do_not_change_samples(chain: str) -> None:
    """Padded rounds are as narrow as the rows allow; samples and calls are those of packed ones."""
    target = CHAINS[chain]()
    drafter = fs.Replay(prior=fs.fit_prior(target, window=9, pilots=16))
    seeds = torch.arange(12)
    packed = fs.Engine(target, window=9, slots=3, drafter=drafter)
    for slots in (1, 3, 12):
        padded = fs.Engine(target, window=9, slots=slots, drafter=drafter)
        padded.speculation = replace(padded.speculation, layout=Padded())
        one, two = packed.sample(seeds), padded.sample(seeds)
        torch.testing.assert_close(one.samples, two.samples, rtol=1e-5, atol=1e-5)
        assert torch.equal(one.calls, two.calls)
        assert (two.evaluations >= one.evaluations).all()
        if slots == 1:  # no other row keeps the last rounds wide
            assert two.evaluations.sum() < 10 * two.calls.sum()


def test_a_prior_is_saved_and_read(tmp_path: Path) -> None:
    prior = fs.fit_prior(ddpm(), window=5, pilots=8)
    prior.save(tmp_path / "prior.safetensors")
    again = fs.Prior.load(tmp_path / "prior.safetensors")
    assert str(again) == str(prior)
    (tmp_path / "prior.safetensors").write_bytes(b"nothing")
    with pytest.raises(ValueError, match=r"is no safetensors file \(.*\): give the file that Prior.save wrote"):
        fs.Prior.load(tmp_path / "prior.safetensors")


def test_a_file_without_a_prior_is_refused_in_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(OSError, match=r"cannot be read \(it is not a plain file\): give the file"):
        fs.Prior.load(tmp_path)
    with pytest.raises(FileNotFoundError, match=r"nowhere cannot be read \(No such file.*\): give the file"):
        fs.Prior.load(tmp_path / "nowhere")
    for tensors, sentence in (
        ({"weight": torch.zeros(3)}, "holds no prior, but weight: give the file"),
        ({"states": torch.zeros(1, 2, 3)}, "holds no prior, but states: give the file"),
        ({"states": torch.zeros(3), "predictions": torch.zeros(3)}, r"holds no prior \(.*\): give the file"),
    ):
        save_file(tensors, tmp_path / "other.safetensors")
        with pytest.raises(ValueError, match=sentence) as raised:
            fs.Prior.load(tmp_path / "other.safetensors")
        assert len(str(raised.value).splitlines()) == 1


def test_a_drafter_s_text_shows_the_settings_that_affect_samples() -> None:
    prior = fs.fit_prior(ddpm(), window=5, pilots=8)
    other = replace(prior, predictions=prior.predictions + 1)
    assert str(fs.Replay()) == "Replay(secant=True)"
    assert str(fs.Replay(prior=prior)) != str(fs.Replay(prior=other))
    assert fs.Replay(prior=prior) == fs.Replay(prior=prior) != fs.Replay(prior=other)


def test_refusals() -> None:
    target, table = ddpm(), torch.zeros(1, 4, 2).double()
    with pytest.raises(ValueError, match=r"paths, steps, \*shape"):
        fs.Prior(table, table[:, :3])
    with pytest.raises(ValueError, match="needs the secant"):
        fs.Replay(secant=False, prior=fs.Prior(table, table))
    with pytest.raises(ValueError, match="fit one for this target"):
        fs.sample(
            target, 2, window=3, drafter=fs.Replay(prior=fs.Prior(torch.zeros(1, 4, 3), torch.zeros(1, 4, 3)))
        )
    short = fs.Prior(table, table, jacobian=torch.zeros(4, 2, 2))
    with pytest.raises(ValueError, match="fit one for this number of steps"):
        fs.sample(target, 2, window=3, drafter=fs.Replay(prior=short))
    with pytest.raises(ValueError, match="at least two for each"):
        fs.fit_prior(target, window=3, pilots=3, paths=2)


TABLE = torch.zeros(2, 4, 3)
"""Two paths of four steps, of states with three elements."""
UNFIT: dict[str, tuple[dict[str, Any], str]] = {
    "a short slope": (
        {"slope": torch.zeros(3)},
        r"slope is one number for each step of its paths, \[4\], not \[3\]",
    ),
    "a long slope": ({"slope": torch.zeros(5)}, r"slope is one number .* \[4\], not \[5\]"),
    "a slope a path": ({"slope": torch.zeros(2, 4)}, r"slope is one number .* \[4\], not \[2, 4\]"),
    "one slope": ({"slope": torch.tensor(1.0)}, r"slope is one number .* \[4\], not \[\]"),
    "no path": (
        {"states": TABLE[:0], "predictions": TABLE[:0]},
        r"at least one path and one step, .*\(0, 4, 3\)",
    ),
    "no step": ({"states": TABLE[:, :0], "predictions": TABLE[:, :0]}, "at least one path and one step"),
    "no element": ({"states": TABLE[..., :0], "predictions": TABLE[..., :0]}, "at least one path and one step"),
    "other predictions": ({"predictions": TABLE[:, :3]}, r"\[paths, steps, \*shape\] both"),
    "scalar states": (
        {"states": TABLE[..., 0], "predictions": TABLE[..., 0]},
        r"\[paths, steps, \*shape\] both",
    ),
    "a short jacobian": ({"jacobian": torch.zeros(3, 3, 3)}, r"with N of at least 4, .*not \[3, 3, 3\]"),
    "a jacobian of others": (
        {"jacobian": torch.zeros(9, 2, 2)},
        r"\[N, 3, 3\] or \[N, 1, 3\] .*not \[9, 2, 2\]",
    ),
    "a jacobian a step": ({"jacobian": torch.zeros(9)}, r"matrix or its diagonal .*not \[9\]"),
    "a jacobian without rows": ({"jacobian": torch.zeros(9, 3)}, r"matrix or its diagonal .*not \[9, 3\]"),
    "integers": ({"states": TABLE.long()}, "a prior's states must be a tensor of floating-point numbers"),
}


@pytest.mark.parametrize("name", UNFIT)
def test_an_invalid_prior_is_refused_when_made_and_when_read(name: str, tmp_path: Path) -> None:
    """The prior is constructed, or read from a damaged file."""
    fields, sentence = UNFIT[name]
    tensors: dict[str, Tensor] = {"states": TABLE, "predictions": TABLE, **fields}
    with pytest.raises((ValueError, TypeError), match=sentence):
        fs.Prior(**tensors)
    save_file({n: value.clone().contiguous() for n, value in tensors.items()}, tmp_path / "damaged.safetensors")
    with pytest.raises(
        ValueError, match=rf"damaged.safetensors holds no prior \(.*{sentence}.*\): give the file"
    ):
        fs.Prior.load(tmp_path / "damaged.safetensors")


def test_a_prior_of_lists_is_refused() -> None:
    with pytest.raises(TypeError, match="a prior's states must be a tensor of floating-point numbers"):
        fs.Prior([[[0.0]]], TABLE)  # type: ignore[arg-type]


@pytest.mark.parametrize("draw", ["sample", "stream", "tune", "engine"])
def test_a_prior_of_another_chain_is_refused_before_any_call(draw: str) -> None:
    target, calls = ddpm(), 0

    def network(x: Tensor, time: Tensor, row: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return target.network(x, time, row)

    counted = replace(target, network=network)
    table = torch.zeros(1, 4, 2)
    draws: dict[str, Callable[[fs.Drafter], object]] = {
        "sample": lambda drafter: fs.sample(counted, 2, window=3, drafter=drafter),
        "stream": lambda drafter: next(fs.stream(counted, 2, window=3, slots=2, drafter=drafter)),
        "tune": lambda drafter: fs.tune(counted, drafter=drafter),
        "engine": lambda drafter: fs.Engine(counted, window=3, slots=2, drafter=drafter),
    }
    for jacobian, states, sentence in (
        (torch.zeros(13, 2, 2), table, "fit one for this number of steps"),
        (None, torch.zeros(1, 4, 3), "fit one for this target"),
    ):
        drafter = fs.Replay(prior=fs.Prior(states, states, jacobian=jacobian))
        with pytest.raises(ValueError, match=sentence):
            draws[draw](drafter)
        assert calls == 0


class Halves(Wrapper):
    """Predicts half of each state, which it writes over the state itself if asked."""

    in_place = False

    def predict(self, x: Tensor, step: Tensor, row: Tensor, **extra: Tensor) -> Tensor:
        return x.mul_(0.5) if self.in_place else 0.5 * x


def test_a_target_that_writes_into_its_states_gets_the_same_prior() -> None:
    plain, writes = Halves(flow()), Halves(flow())
    writes.in_place = True
    one, two = (fs.fit_prior(target, window=4, pilots=8) for target in (plain, writes))
    assert torch.equal(one.states, two.states)
    assert repr(one) == repr(two)


def test_a_seed_of_any_whole_type_fits_a_prior_and_others_are_refused() -> None:
    seeds: list[Any] = [3, np.int32(3)]
    one, two = (fs.fit_prior(flow(), window=4, pilots=8, seed=seed) for seed in seeds)
    assert repr(one) == repr(two)
    with pytest.raises(ValueError, match="a seed must be a whole number"):
        fs.fit_prior(flow(), window=4, pilots=8, seed=1.5)  # type: ignore[arg-type]
