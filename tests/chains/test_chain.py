"""The table of kinds: what a network predicts and what is reused change nothing but what is reused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast, get_args

import pytest
import torch
from torch import Tensor

import foresample as fs
from foresample.chains import Chain, Kind, flow_chain, scheduler_chain, vp_chain
from tests.chains.common import LINEAR, every_step, f64, states

KINDS = get_args(Kind)
GRIDS: dict[Callable[..., Chain], tuple[Tensor, dict[str, Any]]] = {
    vp_chain: (LINEAR[[900, 500, 100, 10]], {}),
    flow_chain: (torch.tensor([0.9, 0.5, 0.2, 0.01], dtype=f64), {"churn": 0.4}),
}
processes = pytest.mark.parametrize("process", list(GRIDS), ids=["vp", "flow"])


def denoised(x: Tensor) -> Tensor:
    """Some denoised estimate, beyond ±0.5 at times."""
    return torch.sin(3 * x) + 0.2 * x


def output_of(kind: str, process: Callable[..., Chain], x: Tensor, squash: float | None = None) -> Tensor:
    """The output of a network that returns `kind` at states x, one a step, by the definitions of eps and v."""
    level = GRIDS[process][0].view(-1, 1)
    alpha, sigma = (level.sqrt(), (1 - level).sqrt()) if process is vp_chain else (1 - level, level)
    x0 = denoised(x) if squash is None else denoised(x).clamp(-squash, squash)
    xi = (x - alpha * x0) / sigma
    v = alpha * xi - sigma * x0 if process is vp_chain else xi - x0
    return {"x0": x0, "eps": xi, "v": v, "score": -xi / sigma}[kind]


def transition(chain: Chain, x: Tensor, output: Tensor) -> Tensor:
    step = every_step(chain)
    return chain.mean(x, chain.predict(x, output, step), step)


@processes
@pytest.mark.parametrize("predicts", KINDS)
@pytest.mark.parametrize("reuse", KINDS)
def test_the_transition_does_not_depend_on_what_is_predicted_or_reused(
    process: Callable[..., Chain], predicts: str, reuse: str
) -> None:
    grid, options = GRIDS[process]
    chain = process(grid, predicts=predicts, reuse=reuse, **options)
    plain = process(grid, predicts="x0", reuse="x0", **options)
    x, step = states(len(grid)), every_step(chain)
    output = output_of(predicts, process, x)
    expected = transition(plain, x, output_of("x0", process, x))
    torch.testing.assert_close(transition(chain, x, output), expected, rtol=1e-9, atol=1e-11)
    assert torch.equal(chain.std, plain.std)
    # And the prediction is the quantity that was asked for.
    torch.testing.assert_close(chain.predict(x, output, step), output_of(reuse, process, x))


@pytest.mark.parametrize("predicts", KINDS)
@pytest.mark.parametrize("reuse", KINDS)
def test_clip_clamps_the_denoised_estimate(predicts: Kind, reuse: Kind) -> None:
    grid, _ = GRIDS[vp_chain]
    x = states(len(grid))
    assert (denoised(x).abs() > 0.5).any()
    clipped = vp_chain(grid, predicts=predicts, reuse=reuse, clip=0.5)
    expected = transition(vp_chain(grid, predicts="x0"), x, output_of("x0", vp_chain, x, squash=0.5))
    found = transition(clipped, x, output_of(predicts, vp_chain, x))
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-11)


@processes
@pytest.mark.parametrize("argument", ["predicts", "reuse"])
def test_an_unknown_kind_of_prediction_is_refused_with_the_known_ones(
    process: Callable[..., Chain], argument: str
) -> None:
    grid, options = GRIDS[process]
    with pytest.raises(ValueError, match="one of x0, eps, v, score, not 'epsilon'"):
        process(grid, **{argument: "epsilon"}, **options)


def test_an_eps_network_is_refused_at_pure_noise() -> None:
    with pytest.raises(ValueError, match="start the grid below it, or use v"):
        flow_chain(torch.tensor([1.0, 0.5]), churn=0.1, predicts="eps")


def test_a_chain_from_a_later_step_on_is_the_rest_of_it() -> None:
    chain = vp_chain(LINEAR[[900, 500, 100, 10]], predicts="v", clip=0.5)
    rest = chain.since(2)
    x, output = states(2), states(2, seed=1)
    assert torch.equal(transition(rest, x, output), chain.mean(
        x, chain.predict(x, output, torch.tensor([2, 3])), torch.tensor([2, 3])
    ))  # fmt: skip
    assert rest.time is not None
    assert chain.time is not None
    assert torch.equal(rest.time, chain.time[2:])


def test_a_chain_moves_whole_and_time_keeps_its_dtype() -> None:
    """Networks look up embeddings by whole timesteps."""
    diffusers = pytest.importorskip("diffusers")
    scheduler = diffusers.DDIMScheduler(clip_sample=True)
    scheduler.set_timesteps(5)
    chain = scheduler_chain(scheduler, eta=1.0).to("cpu", torch.float32)
    tensors = {name: value for name, value in vars(chain).items() if isinstance(value, Tensor)}
    times = tensors.pop("time")
    assert times.dtype == torch.int64
    assert {value.dtype for value in tensors.values()} == {torch.float32}
    assert "unlimited_weight" in tensors


@pytest.mark.parametrize("name", ["state_weight", "previous_weight", "time"])
@pytest.mark.parametrize("shape", [(1,), (4,), (6,), (), (5, 1)], ids=str)
def test_coefficients_must_be_one_number_for_each_step(name: str, shape: tuple[int, ...]) -> None:
    five, wrong = torch.ones(5), {name: cast(Any, torch.ones(shape))}
    fs.chains.Chain(five, five, five, start_scale=cast(Any, torch.tensor(2.0)))
    with pytest.raises(ValueError, match=r"a chain's time has .* type list"):
        fs.chains.Chain(five, five, five, time=cast(Any, [1.0] * 5))
    with pytest.raises(ValueError, match=rf"a chain's {name} has shape .* one number for each step"):
        replace(fs.chains.Chain(five, five, five), **wrong)
