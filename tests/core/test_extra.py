"""Extra noise: the same ξ for a sample and a step everywhere, and refusals where it is not supported."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import foresample as fs
from foresample.contracts import affine_chain, predict, transition_mean
from foresample.core.noise import EXTRA, START, STEP, extra_noise, normal, seeds_of
from foresample.engine.tuning import call_seconds
from tests.support.small_chains import NOISIER, ddpm, third_order, turned, two_noises


def test_extra_noise_is_a_function_of_seed_and_step_in_any_shape() -> None:
    target, seed = turned(), seeds_of(0, 3)
    step = torch.tensor([[0, 1], [5, 6], [5, 2]])
    both = extra_noise(target, seed, step)
    assert both is not None
    assert both.shape == (3, 2, 1)
    for j in range(2):
        one = extra_noise(target, seed, step[:, j])
        assert one is not None
        assert torch.equal(one, both[:, j])
        at, shape = step[:, j], torch.Size([1])
        assert torch.equal(one, normal(seed, shape, torch.float64, stream=EXTRA, step=at, draw=0 * at))


def test_extra_noise_has_its_own_stream() -> None:
    target, seed = two_noises(), seeds_of(0, 2000)
    step = torch.full_like(seed, 3)
    ours = extra_noise(target, seed, step)
    assert ours is not None
    for stream in (START, STEP):
        at = torch.zeros_like(step) if stream == START else step
        other = normal(seed, target.shape, torch.float64, stream=stream, step=at, draw=torch.zeros_like(step))
        assert abs(float((ours * other).mean())) < 5 / 4000**0.5
    assert EXTRA not in (START, STEP)


def test_a_target_without_extra_noise_is_called_without_it() -> None:
    target = ddpm()
    assert extra_noise(target, seeds_of(0, 2), torch.zeros(2, dtype=torch.int64)) is None
    assert fs.sample(target, 2, window=3).samples.shape == (
        2,
        2,
    )  # predict(x, step, row), mean(x, prediction, step)


class Listening:
    """A target that remembers which ξ it was given at which step of which sample."""

    def __init__(self, of: Any) -> None:
        self.of, self.shape, self.std, self.extra = of, of.shape, of.std, of.extra
        self.start = of.start
        self.heard: dict[tuple[int, int], list[Tensor]] = {}

    def predict(self, x: Tensor, step: Tensor, row: Tensor, extra: Tensor) -> Tensor:
        for k, sample, xi in zip(step.tolist(), row.tolist(), extra, strict=True):
            self.heard.setdefault((sample, k), []).append(xi)
        return self.of.predict(x, step, row, extra=extra)

    def mean(self, x: Tensor, prediction: Tensor, step: Tensor, extra: Tensor) -> Tensor:
        return self.of.mean(x, prediction, step, extra=extra)


def test_every_round_and_the_sequential_sampler_get_the_same_extra_noise() -> None:
    target: Any = Listening(turned())
    run = fs.sample(target, 4, window=5, seed=3, look=False)  # a look has noise of its own
    fs.sequential(target, 4, seed=3)
    assert (run.calls < len(target.std)).all()
    assert len(target.heard) == 4 * len(target.std)
    assert all(len(heard) >= 2 for heard in target.heard.values())
    assert all(torch.equal(xi, heard[0]) for heard in target.heard.values() for xi in heard)


@pytest.mark.parametrize("chain", NOISIER)
def test_a_sample_does_not_depend_on_its_batch_mates(chain: str) -> None:
    target, seeds = NOISIER[chain](), seeds_of(7, 5)
    together = fs.sample(target, seeds=seeds, window=4, slots=2)
    alone = fs.sample(target, seeds=seeds[3:4], window=4)
    assert torch.equal(together.samples[3], alone.samples[0])


@pytest.mark.parametrize("chain", NOISIER)
def test_extra_noise_reaches_replicas_and_the_measurement_of_windows(chain: str) -> None:
    target = NOISIER[chain]()
    split = fs.targets.replicated([target, target])
    runs = [fs.sample(t, 3, window=4, seed=1) for t in (target, split)]
    assert torch.equal(runs[0].samples, runs[1].samples)
    assert call_seconds(target, 4, repeats=1) > 0


@pytest.mark.parametrize("make", [two_noises, third_order])
def test_kernels_do_not_draw_extra_noise(make: Any) -> None:
    assert affine_chain(make()) is None


def test_a_chain_with_two_networks_and_one_noise_is_still_affine() -> None:
    target = two_noises()
    chain = replace(target.chain, extra_weight=None, inner_extra=None)
    assert affine_chain(replace(target, chain=chain)) is chain


def test_such_a_target_cannot_be_evaluated_without_it() -> None:
    target, zero = turned(), torch.zeros(2, dtype=torch.int64)
    x = torch.zeros(2, 2, dtype=torch.float64)
    for ask in (
        lambda xi: predict(target, x, zero, zero, xi),
        lambda xi: transition_mean(target, x, x, zero, x, xi),
    ):
        with pytest.raises(
            TypeError, match=r"it cannot draft for another target; draft with foresample\.Replay"
        ):
            ask(None)
        with pytest.raises(ValueError, match=r"must have shape \(2, 1\) here, not \(2, 3\)"):
            ask(torch.zeros(2, 3, dtype=torch.float64))
    with pytest.raises(TypeError, match="cannot draft for another target"):
        fs.sample(target, 1, window=3, drafter=fs.DraftModel(target))


@pytest.mark.parametrize("extra", [(2,), 3, torch.Size([])])
def test_the_shape_of_extra_noise_must_be_a_torch_size(extra: Any) -> None:
    with pytest.raises(ValueError, match=r"target\.extra must be a torch\.Size"):
        fs.sample(replace(turned(), extra=extra), 1, window=3)


def test_more_than_two_earlier_predictions_are_refused() -> None:
    target: Any = Listening(turned())
    target.multistep = 3
    with pytest.raises(ValueError, match=r"target\.multistep must be 0, 1 or 2"):
        fs.sample(target, 1, window=3)
