"""The peers: their formulas, their laws, what they cost, and broken ones that must be caught.

The exact peers pass the same law tests as our sampler. A correct peer fails anywhere in this file with
probability at most SUITE_LEVEL: each of the SHARES statistical cases may use an equal part of it (and seeds are
fixed, so a green suite stays green).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from typing import Any

import mpmath
import numpy as np
import pytest
import torch
from scipy import integrate, stats
from torch import Tensor

import foresample as fs
from benchmarks.kinds.rivals import Claim, Setting
from benchmarks.peers import (
    Committed,
    PeerRun,
    Schedule,
    anderson,
    asd,
    blocks,
    chains,
    ddim,
    ddpm,
    dgrs,
    dpmpp_2m,
    nodes,
    paradigms,
    parasolver,
    parataa,
    ranks,
    rass,
    reflection,
    trailing,
    trees,
)
from benchmarks.published import gain, measure
from benchmarks.ranked import by_rank
from foresample.checks.distribution import Recorder, law_tests
from tests.support.small_chains import CHAINS, flow, mixture

SUITE_LEVEL = 1e-3
SHARES = 60
SAMPLES = 5_000

EXACT: dict[str, Callable[..., PeerRun]] = {
    "reflection, head": partial(reflection, window=5, draft="head"),
    "reflection, parent": partial(reflection, window=5, draft="parent"),
    "reflection, nearest": partial(reflection, window=5, draft="nearest"),
    "blocks, parent": partial(blocks, window=8, draft="parent"),
    "blocks, nearest": partial(blocks, window=8, draft="nearest"),
    "asd, 4 ahead": partial(asd, lookahead=4),
    "asd, to the end": partial(asd, lookahead=None),
    "dgrs, 3-2-1": partial(dgrs, children=(3, 2, 1)),
    "dgrs, 4-2": partial(dgrs, children=(4, 2)),
    "rass, 3-2-1": partial(rass, children=(3, 2, 1)),
    "rass, 4-2": partial(rass, children=(4, 2)),
}
LOSSY: dict[str, Callable[..., PeerRun]] = {
    "paradigms": partial(paradigms, window=6, tolerance=0.1),
    "parasolver": partial(parasolver, window=6, tolerance=0.1, warm=3),
    "parataa": partial(parataa, window=6, tolerance=0.1),
    "parataa, order 4": partial(parataa, window=6, tolerance=0.1, order=4, history=3),
}

mp = mpmath.MPContext()
mp.dps = 40


# ------------------------------------------------------------------ the law


def watching(recorder: Recorder) -> Callable[[Committed], None]:
    """The four attributes that a recorder's observer reads."""
    return recorder.from_sample(0)  # type: ignore[return-value]


@cache
def sequential_states(chain: str, samples: int) -> Recorder:
    target = CHAINS[chain]()
    recorder = Recorder(steps_of(target), target, samples)
    fs.sequential(target, samples, seed=1_000_003, observe=recorder.from_sample(0))
    return recorder


def steps_of(target: fs.Target) -> list[int]:
    return [k for k in range(1, len(target.std)) if target.std[k] > 0][::3]


def smallest_p_value(chain: str, peer: Callable[..., PeerRun], samples: int = SAMPLES, seed: int = 21) -> float:
    """The smallest p-value of all tests along the chain, corrected for their number."""
    target = CHAINS[chain]()
    recorder = Recorder(steps_of(target), target, samples)
    run = peer(target, samples, seed=seed, observe=watching(recorder))
    assert run.samples.shape == (samples, *target.shape)
    p_values = [p for _, p in law_tests(target, recorder, sequential_states(chain, samples), seed)]
    return min(p_values) * len(p_values)


@pytest.mark.law
@pytest.mark.parametrize("chain", ["flow", "langevin", "interrupted"])
@pytest.mark.parametrize("name", EXACT)
def test_exact_peers_have_the_law_of_the_chain(name: str, chain: str) -> None:
    assert smallest_p_value(chain, EXACT[name]) > SUITE_LEVEL / SHARES


def kept_as_it_is(s: Tensor, delta: Tensor, length: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    """No reflection: the rejected draft is used as the corrected state."""
    kept, mirrored = chains.reflect(s, delta, length, uniforms)
    return kept, chains.at(delta, kept) - mirrored


def first_failure(s: Tensor, delta: Tensor, length: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    """A block's test that stops at the first i that fails, instead of keeping the largest that passes."""
    log_p, h = chains.block_levels(s, delta, length)
    inside = torch.arange(s.shape[1]) < length.unsqueeze(1)
    kept = ((uniforms[:, :-1] < h) & inside).cumprod(1).sum(1)
    level, d, p = uniforms[:, -1], chains.at(delta, kept), chains.at(log_p, kept)
    return kept, chains.coupling.residual(level, d, p)


def lambda_stays(s: Tensor, delta: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    """Every child is tried against the whole target."""
    passed = uniforms[:, : s.shape[1]] < trees.ratio(delta.unsqueeze(1), s)
    _, coordinate = trees.try_in_turn(s, delta, uniforms)
    return torch.where(passed.any(1), passed.long().argmax(1), -1), coordinate


def first_residual(s: Tensor, delta: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    """Children in turn, but the residual of one child."""
    kept, _ = trees.try_in_turn(s, delta, uniforms)
    return kept, trees.try_in_turn(s[:, :1], delta, uniforms)[1]


def wrong_selected_density(s: Tensor, delta: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    """The pick is tested as if it were a plain draft."""
    lean = ranks.leans(delta, s.shape[1])
    rank = (uniforms[:, :1] >= (lean + 1 / s.shape[1]).cumsum(1)).sum(1, keepdim=True)
    child = s.argsort(1).gather(1, rank.clamp(max=s.shape[1] - 1)).squeeze(1)
    picked = s.gather(1, child.unsqueeze(1)).squeeze(1)
    passed = uniforms[:, 1] < trees.ratio(delta, picked)
    return torch.where(passed, child, -1), residual_where(~passed, uniforms, delta, torch.zeros_like(lean))


def plain_residual(s: Tensor, delta: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    """The pick is tested rightly, but replaced by the residual of a plain draft."""
    kept, _ = trees.try_by_rank(s, delta, uniforms)
    return kept, residual_where(kept < 0, uniforms, delta, torch.zeros_like(s))


def residual_where(rejected: Tensor, uniforms: Tensor, delta: Tensor, lean: Tensor) -> Tensor:
    coordinate = torch.zeros_like(delta)
    coordinate[rejected] = ranks.residual(uniforms[rejected, -1], delta[rejected], lean[rejected])
    return coordinate


def chain_of(test: chains.Test, draft: chains.Draft, **options: bool) -> Callable[..., PeerRun]:
    return lambda target, count, seed, observe: chains.chain(
        target, count, seed, 6, draft, test, observe=observe, **options
    )


def tree_of(test: trees.Test, *children: int) -> Callable[..., PeerRun]:
    return lambda target, count, seed, observe: trees.tree(target, count, seed, children, test, observe)


BROKEN = {
    "reflection without the reflection": chain_of(kept_as_it_is, "nearest"),
    "blocks that stop at the first failure": chain_of(first_failure, "parent", fresh_residual=True),
    "asd without the reflection": chain_of(kept_as_it_is, "head", upfront=True),
    "dgrs with λ not updated": tree_of(lambda_stays, 3, 2),
    "rass with a wrong g": tree_of(wrong_selected_density, 3, 2),
}


@pytest.mark.law
@pytest.mark.parametrize("name", BROKEN)
def test_broken_peers_are_caught(name: str) -> None:
    assert smallest_p_value("flow", BROKEN[name], 20_000) < SUITE_LEVEL / SHARES


@pytest.mark.parametrize("name", LOSSY)
@pytest.mark.parametrize("chain", ["flow", "interrupted"])
def test_without_tolerance_it_is_the_sequential_sampler_and_with_a_large_one_it_is_not(
    name: str, chain: str
) -> None:
    target, peer = CHAINS[chain](), LOSSY[name]
    exact = peer(target, 100, seed=3, tolerance=0.0)
    sequential = fs.sequential(target, 100, seed=3)
    torch.testing.assert_close(exact.samples, sequential.samples, rtol=0, atol=1e-9)
    rough = peer(target, 100, seed=3, tolerance=3.0)
    assert (rough.samples - sequential.samples).abs().max() > 0.1
    assert rough.calls.double().mean() < 0.8 * exact.calls.double().mean()


def test_anderson_finds_the_root_of_a_linear_equation_and_looks_at_no_later_state() -> None:
    """One past iterate is enough for the one unknown; the ridge leaves a ten-thousandth."""
    generator = torch.Generator().manual_seed(0)
    then, now = torch.randn(2, 1, 4, 1, generator=generator, dtype=torch.float64)
    residual = lambda x: 3.0 - 0.4 * x  # noqa: E731
    then, now = (torch.stack([x, residual(x)], 1) for x in (then, now))
    open_ = torch.tensor([[False, True, True, True]])
    moved = now[:, 0] + anderson._step(now, then.unsqueeze(1), open_)
    torch.testing.assert_close(moved[0, 1], torch.tensor([7.5], dtype=torch.float64), rtol=1e-3, atol=0)
    now[:, :, 3] += 1.0
    again = now[:, 0] + anderson._step(now, then.unsqueeze(1), open_)
    assert torch.equal(again[:, :3], moved[:, :3])


def test_a_warm_start_saves_sweeps() -> None:
    """Behind its warm steps ParaSolver needs fewer calls than ParaDiGMS from the same place, with a window as wide."""
    target = mixture().vp(torch.linspace(0.001, 0.99, 60, dtype=torch.float64))
    cold = paradigms(target, 100, seed=1, window=20, tolerance=0.1)
    warm = parasolver(target, 100, seed=1, window=20, tolerance=0.1, warm=1)
    assert warm.calls.double().mean() < cold.calls.double().mean()


@pytest.mark.law
@pytest.mark.parametrize("name", ["paradigms", "parasolver", "parataa"])
def test_a_large_tolerance_is_caught(name: str) -> None:
    loose = partial(LOSSY[name], tolerance=20.0)
    assert smallest_p_value("flow", loose, 20_000) < SUITE_LEVEL / SHARES


# ------------------------------------------------------------------ formulas


def mass_left(delta: float, lam: float) -> float:
    """∫ (φ(s − δ) − λ φ(s))₊ ds."""
    start = math.log(lam) / delta + delta / 2 if lam > 0 else -mp.inf
    return float(
        mp.quad(lambda s: mp.npdf(s - delta) - lam * mp.npdf(s), [start, max(start, delta) + 1, mp.inf])
    )


@pytest.mark.slow
@pytest.mark.parametrize("delta", [1e-3, 0.1, 0.7, 2.0, 5.0])
def test_the_leftover_of_the_target_after_rejected_children(delta: float) -> None:
    """λ_k and G_{k+1} against integration, and the recursion's own closed form."""
    lam, mass = 0.0, 1.0
    for k, (found, left) in enumerate(trees.leftover(torch.tensor([delta], dtype=torch.float64), 6)):
        assert float(found) == pytest.approx(lam, rel=1e-9)
        assert float(left) == pytest.approx(mass, rel=1e-8)
        lam, mass = lam + mass, mass_left(delta, lam + mass)
        t = math.log(lam) / delta
        closed = mp.ncdf(-(t - mp.mpf(delta) / 2)) - lam * mp.ncdf(-(t + mp.mpf(delta) / 2))
        assert mass == pytest.approx(float(closed), rel=1e-6), k


@pytest.mark.parametrize("count", [1, 2, 3, 7])
def test_densities_of_ranks(count: int) -> None:
    u = torch.linspace(0, 1, 101, dtype=torch.float64)
    density, cdf = ranks.rank_densities(u, count), ranks.rank_cdfs(u, count)
    for r in range(1, count + 1):
        law = stats.beta(r, count - r + 1)
        np.testing.assert_allclose(density[:, r - 1], law.pdf(u), atol=1e-12)
        np.testing.assert_allclose(cdf[:, r - 1], law.cdf(u), atol=1e-12)
    np.testing.assert_allclose(density.sum(1), count, rtol=1e-12)


@pytest.mark.parametrize("count", [2, 5])
@pytest.mark.parametrize("delta", [0.02, 0.13, 0.5, 1.0, 2.2, 4.0])
def test_ranks_overlap_more_than_any_single_draft_and_than_children_in_turn(count: int, delta: float) -> None:
    lean = ranks.leans(torch.tensor([delta], dtype=torch.float64), count)[0]
    assert float(lean.sum()) == pytest.approx(0, abs=1e-9)
    assert (lean + 1 / count > -1e-12).all()
    weights = lean + 1 / count

    s = np.linspace(-9, 9 + delta, 200_001)
    density = ranks.rank_densities(torch.from_numpy(stats.norm.cdf(s)), count) @ weights
    common = np.minimum(stats.norm.pdf(s - delta), stats.norm.pdf(s) * density.numpy())
    integrated = integrate.trapezoid(common, s)
    found = ranks.overlap(delta, lean)
    assert found == pytest.approx(integrated, abs=2e-4)
    plain = 2 * stats.norm.cdf(-delta / 2)
    levels = trees.leftover(torch.tensor([delta], dtype=torch.float64), count)
    in_turn = 1 - float(levels[-1][1])
    assert ranks.overlap(delta, torch.zeros(count, dtype=torch.float64)) == pytest.approx(plain, abs=2e-4)
    assert plain < in_turn < found
    # No other weights do better: the best is a maximum.
    generator = np.random.default_rng(0)
    for _ in range(20):
        other = torch.from_numpy(0.9 * weights.numpy() + 0.1 * generator.dirichlet(np.ones(count))) - 1 / count
        assert ranks.overlap(delta, other) < found + 1e-3 * delta


def one_node(test: trees.Test, delta: float, count: int = 4, rows: int = 40_000) -> tuple[float, float]:
    """The rate at which a child is kept, and the p-value of a node's output being N(δ, 1)."""
    generator = torch.Generator().manual_seed(4)
    s = torch.randn(rows, count, generator=generator, dtype=torch.float64)
    uniforms = torch.rand(rows, count + 2, generator=generator, dtype=torch.float64)
    kept, coordinate = test(s, torch.full((rows,), delta, dtype=torch.float64), uniforms)
    out = torch.where(kept >= 0, s.gather(1, kept.clamp(min=0).unsqueeze(1)).squeeze(1), coordinate)
    return float((kept >= 0).double().mean()), stats.kstest(out.numpy() - delta, "norm").pvalue


@pytest.mark.law
@pytest.mark.parametrize("delta", [0.3, 1.3])
def test_a_node_passes_on_the_target_and_keeps_children_as_often_as_the_formulas_say(delta: float) -> None:
    d = torch.tensor([delta], dtype=torch.float64)
    expected = {
        trees.try_in_turn: 1 - float(trees.leftover(d, 4)[-1][1]),
        trees.try_by_rank: ranks.overlap(delta, ranks.leans(d, 4)[0]),
    }
    for test, probability in expected.items():
        share, p_value = one_node(test, delta)
        assert abs(share - probability) < 5 * math.sqrt(probability * (1 - probability) / 40_000) + 2e-4
        assert p_value > SUITE_LEVEL / SHARES


@pytest.mark.law
@pytest.mark.parametrize("test", [lambda_stays, first_residual, wrong_selected_density, plain_residual])
def test_a_broken_node_is_caught(test: trees.Test) -> None:
    assert one_node(test, 1.3)[1] < SUITE_LEVEL / SHARES


@pytest.mark.parametrize("count", [1, 2, 5])
@pytest.mark.parametrize("delta", [1e-6, 0.01, 0.4, 1.5, 4.0, 12.0, 60.0])
def test_residual_of_ranks(count: int, delta: float) -> None:
    """The residual's distribution function, integrated numerically, has the requested value."""
    level = torch.tensor([1e-6, 0.03, 0.4, 0.9, 1 - 1e-6], dtype=torch.float64)
    d = torch.full_like(level, delta)
    lean = ranks.leans(d, count)
    found = ranks.residual(level, d, lean)
    if count == 1:
        expected = trees.coupling.residual(1 - level, d, torch.zeros_like(d))
        tolerance = 1e-9 / min(delta, 1) + 1e-9
        torch.testing.assert_close(found, expected, rtol=0, atol=max(tolerance, 1e-8))
    s = np.linspace(delta - 9, delta + 9, 400_001)
    grid = torch.from_numpy(s)
    tilt = ranks.tilt(grid, lean[:1].expand(len(s), -1)).numpy()
    if delta < 1:
        density = stats.norm.pdf(s) * (np.expm1(delta * s - delta**2 / 2) - tilt)
    else:
        density = stats.norm.pdf(s - delta) - stats.norm.pdf(s) * (1 + tilt)
    density = np.clip(density, 0, None)
    cdf = integrate.cumulative_trapezoid(density, s, initial=0)
    np.testing.assert_allclose(np.interp(found, s, cdf / cdf[-1]), level, atol=2e-6)


def test_nodes_of_a_tree() -> None:
    assert nodes((5, 5, 5)) == 155
    assert nodes((7,) * 6) == 137_256
    assert nodes((4, 1, 1)) == 12


# ------------------------------------------------------------------ costs, seeds, agreement with ours


@pytest.mark.parametrize("name", [*EXACT, *LOSSY])
def test_a_seed_fixes_a_run(name: str) -> None:
    peer, target = (EXACT | LOSSY)[name], flow()
    one, two, other = (peer(target, 8, seed=seed) for seed in (5, 5, 6))
    assert torch.equal(one.samples, two.samples)
    assert torch.equal(one.calls, two.calls)
    assert not torch.equal(one.samples, other.samples)


class Watched:
    """A target that notes the rows of every call."""

    def __init__(self, target: fs.Target) -> None:
        self.shape, self.std, self.start, self.mean = target.shape, target.std, target.start, target.mean
        self.of, self.rows = target, list[Tensor]()

    def predict(self, x: Tensor, step: Tensor, row: Tensor) -> Tensor:
        self.rows.append(row)
        return self.of.predict(x, step, row)


@pytest.mark.parametrize("name", [*EXACT, *LOSSY])
@pytest.mark.parametrize("chain", ["flow", "interrupted"])
def test_costs_are_those_of_the_calls_made(name: str, chain: str) -> None:
    target, count = Watched(CHAINS[chain]()), 20
    run = (EXACT | LOSSY)[name](target, count, seed=7)
    for i in range(count):
        here = [int((row == i).sum()) for row in target.rows]
        assert int(run.calls[i]) == sum(n > 0 for n in here)
        assert int(run.evaluations[i]) == sum(here)
    most = {"reflection": 6, "blocks": 9, "asd": len(target.std), "dgrs": 16, "rass": 16}
    most |= dict.fromkeys(("paradigms", "parasolver", "parataa"), 6)
    assert (run.evaluations <= most[name.split(",")[0]] * run.calls).all()
    assert (run.calls <= (2 if "head" in name or "asd" in name else 1) * len(target.std)).all()
    assert run.calls.double().mean() < len(target.std)


def test_committed_states_are_the_whole_chain_once() -> None:
    for name, peer in (EXACT | LOSSY).items():
        target, seen = CHAINS["interrupted"](), torch.zeros(10, 15, dtype=torch.int64)
        last = torch.zeros(10, 2, dtype=torch.float64)

        def observe(c: Committed, seen: Tensor = seen, last: Tensor = last) -> None:
            for r, i in enumerate(c.sample.tolist()):
                begin, many = int(c.step[r]), int(c.committed[r])
                seen[i, begin : begin + many] += 1
                last[i] = c.states[r, many - 1]

        run = peer(target, 10, seed=8, observe=observe)
        assert (seen == 1).all(), name
        assert torch.equal(last, run.samples), name


def mean_agrees(one: Tensor, two: Tensor) -> bool:
    """Equal means at SUITE_LEVEL/SHARES, by a normal test."""
    one, two = one.double(), two.double()
    error = math.sqrt(float(one.var() / len(one) + two.var() / len(two)))
    bound = stats.norm.isf(SUITE_LEVEL / SHARES / 2)
    return abs(float(one.mean() - two.mean())) < bound * error


@pytest.mark.law
@pytest.mark.parametrize("chain", ["flow", "langevin"])
def test_reflection_and_blocks_cost_as_much_as_our_samplers(chain: str) -> None:
    target, count = CHAINS[chain](), 4_000
    pairs: list[tuple[Callable[..., PeerRun], dict[str, Any]]] = [
        (EXACT["reflection, nearest"], {"window": 5, "drafter": fs.Frozen("nearest"), "block": 1}),
        (EXACT["blocks, parent"], {"window": 8, "drafter": fs.Frozen("parent"), "recycle": False}),
    ]
    for peer, ours in pairs:
        theirs, run = peer(target, count, seed=9), fs.sample(target, count, seed=10, **ours)
        assert mean_agrees(theirs.calls, run.calls)
        assert mean_agrees(theirs.evaluations, run.evaluations)


@pytest.mark.law
def test_peers_that_coincide_cost_the_same() -> None:
    """ASD costs what reflection with a head draft does; trees of single chains what the nearest draft does."""
    target, count = flow(), 4_000
    head = reflection(target, count, seed=11, window=4, draft="head")
    assert mean_agrees(asd(target, count, seed=12, lookahead=4).calls, head.calls)
    nearest = reflection(target, count, seed=13, window=4, draft="nearest")
    for peer in (dgrs, rass):
        assert mean_agrees(peer(target, count, seed=14, children=(1,) * 4).calls, nearest.calls)


@pytest.mark.law
def test_more_children_cost_fewer_calls_and_ranks_fewer_still() -> None:
    target, count = flow(), 4_000
    plain, turn, rank = (
        peer(target, count, seed=15, children=children).calls.double().mean()
        for peer, children in ((dgrs, (1, 1, 1)), (dgrs, (4, 4, 4)), (rass, (4, 4, 4)))
    )
    assert rank < 0.99 * turn < 0.95 * plain


def test_refusals() -> None:
    target = flow()
    with pytest.raises(ValueError, match="draft is one of"):
        reflection(target, 2, seed=0, window=4, draft="tail")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="one-step"):
        asd(CHAINS["multistep"](), 2, seed=0, lookahead=2)
    with pytest.raises(ValueError, match="depth"):
        dgrs(target, 2, seed=0, children=())
    with pytest.raises(ValueError, match="tolerance"):
        paradigms(target, 2, seed=0, window=2, tolerance=-1.0)


def test_a_single_precision_chain_stays_in_single_precision() -> None:
    target = CHAINS["single precision"]()
    for peer in (EXACT | LOSSY).values():
        assert peer(target, 4, seed=16).samples.dtype == torch.float32


# ------------------------------------------------------------------ fewer steps


def diffusers_walk(
    scheduler: object, x0: Callable[[Tensor, int], Tensor], x: Tensor, **options: bool
) -> Tensor:
    """A scheduler's own loop, fed with denoised estimates."""
    for k, t in enumerate(scheduler.timesteps):  # type: ignore[attr-defined]
        x = scheduler.step(x0(x, k), t, x, **options).prev_sample  # type: ignore[attr-defined]
    return x


def few_step_scheduler(solver: Callable[..., PeerRun], **config: object) -> object:
    import diffusers

    if solver is ddim:
        return diffusers.DDIMScheduler(**config)
    return diffusers.DPMSolverMultistepScheduler(**config, algorithm_type="dpmsolver++", solver_order=2)


@pytest.mark.parametrize("solver", [ddim, dpmpp_2m])
@pytest.mark.parametrize("steps", [10, 20, 50])
def test_few_steps_on_the_mixture_are_those_of_diffusers(solver: Callable[..., PeerRun], steps: int) -> None:
    more = {"clip_sample": False} if solver is ddim else {}
    scheduler = few_step_scheduler(solver, prediction_type="sample", timestep_spacing="trailing", **more)
    scheduler.set_timesteps(steps)  # type: ignore[attr-defined]
    grid = scheduler.alphas_cumprod[scheduler.timesteps].double()  # type: ignore[attr-defined]
    schedule = Schedule.of_mixture(mixture(), grid)
    row = torch.arange(50)
    x = start_of(schedule, 50)
    theirs = diffusers_walk(scheduler, lambda x, k: schedule.target.predict(x, torch.full_like(row, k), row), x)
    ours = solver(schedule, 50, seed=17)
    torch.testing.assert_close(ours.samples, theirs, rtol=0, atol=2e-4)
    assert (ours.calls == steps).all()
    assert (ours.evaluations == steps).all()


@pytest.mark.parametrize("solver", [ddim, dpmpp_2m])
def test_few_steps_of_the_embedded_model_are_those_of_diffusers(solver: Callable[..., PeerRun]) -> None:
    from foresample import pretrained

    model = pretrained.load()
    schedule = Schedule.of_pretrained(model, 4, labels=[1, 8])
    config = {k: v for k, v in model.scheduler.config.items() if k.startswith(("beta", "num_train"))}
    more = {"clip_sample": True} if solver is ddim else {}
    scheduler = few_step_scheduler(
        solver, **config, **more, prediction_type="sample", timestep_spacing="trailing"
    )
    scheduler.set_timesteps(4)  # type: ignore[attr-defined]
    labels = torch.tensor([1, 8])

    def x0(x: Tensor, k: int) -> Tensor:
        t = scheduler.timesteps[k]  # type: ignore[attr-defined]
        v = model.unet(x, t.expand(2), class_labels=labels).sample
        level = scheduler.alphas_cumprod[t]  # type: ignore[attr-defined]
        return (level.sqrt() * x - (1 - level).sqrt() * v).clamp(-1, 1)

    options = {"use_clipped_model_output": True} if solver is ddim else {}
    with torch.no_grad():
        theirs = diffusers_walk(scheduler, x0, start_of(schedule, 2), **options)
    torch.testing.assert_close(solver(schedule, 2, seed=17).samples, theirs, rtol=0, atol=2e-3)


def start_of(schedule: Schedule, count: int) -> Tensor:
    """The noise a run with seed 17 starts from: the first state before any step."""
    states: list[Tensor] = []

    def look(x: Tensor, step: Tensor, row: Tensor) -> Tensor:
        states.append(x)
        return torch.zeros_like(x)

    assert isinstance(schedule.target, fs.targets.ChainTarget)
    watched = replace(schedule.target, network=look)
    ddim(replace(schedule, target=watched), count, seed=17)
    return states[0]


def test_few_steps_come_closer_to_the_data_with_more_of_them() -> None:
    """Lossy, but convergent: against draws of the mixture itself."""
    law = mixture()
    generator = torch.Generator().manual_seed(18)
    which = torch.randint(4, (20_000,), generator=generator)
    noise = torch.randn(20_000, 2, generator=generator, dtype=torch.float64)
    data = law.means[which] + law.stds[which].unsqueeze(1) * noise
    for solver in (ddim, dpmpp_2m):
        distance = []
        for steps in (3, 60):
            grid = torch.sigmoid(torch.linspace(-9, 9, steps, dtype=torch.float64))
            samples = solver(Schedule.of_mixture(law, grid), 20_000, seed=19).samples
            distance.append(stats.ks_2samp(samples[:, 0].numpy(), data[:, 0].numpy()).statistic)
        assert distance[1] < 0.02 < distance[0]


def test_few_ancestral_steps_are_the_sequential_sampler_of_the_shorter_chain() -> None:
    schedule = Schedule.of_mixture(mixture(), [0.1, 0.5, 0.9])
    found = ddpm(schedule, 5, seed=3)
    assert torch.equal(found.samples, fs.sequential(schedule.target, 5, seed=3).samples)
    assert (found.calls.tolist(), found.evaluations.tolist()) == ([3] * 5, [3] * 5)


def test_a_trailing_schedule_begins_at_the_noisiest_step() -> None:
    import diffusers

    made = trailing(diffusers.DDPMScheduler(num_train_timesteps=1000), 4)
    assert made.timesteps.tolist() == [999, 749, 499, 249]


# ------------------------------------------------------------------ published figures


@pytest.mark.slow
def test_ranks_reject_less_than_turns_at_the_same_mismatches() -> None:
    row = by_rank("wells", 10, 20)
    assert 0 < row.rejected_by_rank < row.rejected_in_turn < 1
    assert row.mismatch > 0


def test_a_figure_and_a_gain() -> None:
    rows = [
        measure(
            name, Setting(dim=2, churn=1.0, steps=16, window=8), flow(), 200, peer, window=8, draft="parent"
        )
        for name, peer in (("reflection-parent", reflection), ("blocks-parent", blocks))
    ]
    found = gain(rows[1], rows[0], Claim(low=None, high=6.3))
    assert [row.samples for row in rows] == [200, 200]
    assert found.faster > 0
    assert found.faster == pytest.approx(100 * (rows[1].speedup / rows[0].speedup - 1))
    assert found.fewer_calls == pytest.approx(100 * (1 - rows[1].calls / rows[0].calls))
