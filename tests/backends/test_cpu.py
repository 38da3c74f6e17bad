"""The compiled round against the plain one and against arbitrary precision, on a CPU."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("numba", reason="numba is not installed: pip install 'foresample[fast]'")

import foresample as fs
from foresample.backends import backend_of, normal
from foresample.backends.numba import compiling, coupling
from foresample.backends.numba import round as compiled
from foresample.backends.rounds import round_for
from foresample.chains import Chain
from foresample.contracts import affine_chain
from foresample.core import coupling as plain_coupling
from foresample.core import noise as streams
from foresample.core import round as plain
from foresample.core.report import Tally
from foresample.core.round import Packed, Padded, Speculation, begin, last_draftable
from foresample.drafters import Prior
from foresample.targets import ChainTarget
from tests.core.test_coupling import (
    COORDINATES,
    DELTAS,
    LEVELS,
    LOG_PS,
    TOLERANCE,
    UNREACHABLE,
    backward_error,
    error,
    mp,
    oracle,
    reachable,
)
from tests.core.test_coupling import tilted_cdf as exact_tilted_cdf
from tests.support.agreement import assert_rows_agree, compiled_round, near, plain_round
from tests.support.small_chains import CHAINS, HalfMean, strays


def wide(dtype: torch.dtype, steps: int = 40, shape: tuple[int, ...] = (2, 20)) -> ChainTarget:
    """A chain in many dimensions with a smooth network."""
    direction = torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(dtype)

    def network(x: Tensor, step: Tensor, row: Tensor) -> Tensor:
        step, row = (v.view(-1, *(1,) * len(shape)) for v in (step, row))
        return torch.tanh(x + direction * (1 + step / steps).to(dtype)) + row % 3

    ones = torch.ones(steps, dtype=dtype)
    return ChainTarget(Chain(0.1 * ones, 0.95 * ones, 0.05 * ones), torch.Size(shape), network)


def warm(target: ChainTarget, *, rows: int = 0) -> fs.Replay:
    """A drafter with a prior, and with a random Jacobian if it has rows (one row for a diagonal)."""
    prior = fs.fit_prior(target, window=6, pilots=40)
    if rows:
        size = target.shape.numel()
        generator = torch.Generator().manual_seed(1)
        jacobian = 0.2 * torch.randn(len(target.std), rows, size, generator=generator, dtype=torch.float64)
        prior = replace(prior, jacobian=jacobian.to(target.std))
    return fs.Replay(prior=prior)


DRAFTERS: dict[str, Callable[[ChainTarget], fs.Replay]] = {
    "secant": lambda target: fs.Replay(),
    "prior": warm,
    "Jacobian": lambda target: warm(target, rows=target.shape.numel()),
    "diagonal": lambda target: warm(target, rows=1),
}
TARGETS: dict[str, Callable[[], ChainTarget]] = {
    **CHAINS,
    "strays": strays,
    "wide float32": lambda: wide(torch.float32),
    "wide float64": lambda: wide(torch.float64),
}


@pytest.mark.slow
@pytest.mark.parametrize("block", [None, 1, 4])
@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("chain", TARGETS)
def test_rounds_agree_along_whole_chains(chain: str, drafter: str, block: int | None) -> None:
    """Row by row from the same rows: the same decision, and then the same numbers up to rounding.

    Rows may only part where a uniform lies between two roundings of its bar (`tests.support.agreement`), so few do.
    """
    target = TARGETS[chain]()
    steps, window, count = len(target.std), *((10, 500) if chain == "strays" else (7, 40))
    speculation = Speculation(
        DRAFTERS[drafter](target), window, block, True, last_draftable(target.std), Packed()
    )
    assert compiled.serves(target, speculation)
    rows = begin(target, speculation, streams.seeds_of(1, count))
    rounding = near(target.std.dtype)
    settled = undecided = 0
    while (rows.step < steps).any():
        one, other = plain_round(target, rows, speculation), compiled_round(target, rows, speculation)
        same, may_part = assert_rows_agree(one, other, block, steps, equal_nan=True)
        under_way = rows.step < steps
        settled, undecided = settled + int(under_way.sum()), undecided + int(may_part.sum())
        torch.testing.assert_close(other.commit.mismatch[under_way], one.commit.mismatch[under_way], **rounding)
        states = torch.arange(other.commit.path.shape[1]) < one.commit.committed.unsqueeze(1)
        states &= same.unsqueeze(1)
        torch.testing.assert_close(other.commit.states[states], one.commit.states[states], **rounding)
        rows = one.after
    assert undecided <= (1e-2 if target.std.dtype == torch.float32 else 1e-3) * settled


@pytest.mark.parametrize("chain", ["flow", "multistep", "interrupted", "wide float64"])
def test_samples_and_costs_are_those_of_the_plain_round(chain: str, monkeypatch: pytest.MonkeyPatch) -> None:
    target, runs = TARGETS[chain](), []
    for plainly in ("0", "1"):
        monkeypatch.setenv("FORESAMPLE_PLAIN", plainly)
        runs.append(fs.sample(target, 20, window=6, slots=7, seed=3))
        sequential = fs.sequential(target, 20, seed=3)
        runs.append(sequential)
    ours, our_sequential, theirs, their_sequential = runs
    torch.testing.assert_close(ours.samples, theirs.samples, rtol=1e-8, atol=1e-8)
    torch.testing.assert_close(our_sequential.samples, their_sequential.samples, rtol=1e-12, atol=1e-12)
    assert torch.equal(ours.calls, theirs.calls)
    assert torch.equal(ours.evaluations, theirs.evaluations)
    assert ours.report.accepted_lengths == theirs.report.accepted_lengths
    assert ours.report.drafted == theirs.report.drafted
    found = torch.tensor([ours.report.mismatch, theirs.report.mismatch], dtype=torch.float64)
    torch.testing.assert_close(found[0], found[1], rtol=1e-8, atol=1e-8, equal_nan=True)


@pytest.mark.parametrize("chain", ["wide float32", "multistep"])
def test_a_sample_is_the_same_bits_beside_any_others(chain: str) -> None:
    target = TARGETS[chain]()
    alone = fs.sample(target, 9, window=6, slots=1, drafter=DRAFTERS["prior"](target))
    for slots in (2, 9):
        beside = fs.sample(target, 9, window=6, slots=slots, drafter=DRAFTERS["prior"](target))
        assert torch.equal(alone.samples, beside.samples)
        assert torch.equal(alone.calls, beside.calls)


def test_states_that_an_observer_keeps_do_not_change() -> None:
    """Rows are changed in place; what a commit shows is not among them."""
    target, kept, copies = wide(torch.float32), [], []

    def observe(commit: fs.Commit) -> None:
        kept.append(commit)
        copies.append({name: value.clone() for name, value in vars(commit).items()})

    fs.sample(target, 5, window=6, slots=3, observe=observe)
    assert len(kept) > 1
    for commit, copy in zip(kept, copies, strict=True):
        for name, value in copy.items():
            assert torch.equal(getattr(commit, name), value), name


def test_a_network_that_writes_to_its_input_does_no_harm() -> None:
    base = wide(torch.float64)

    def network(x: Tensor, step: Tensor, row: Tensor) -> Tensor:
        answer = base.network(x, step, row)
        x.fill_(torch.nan)
        return answer

    run = fs.sample(replace(base, network=network), 5, window=6)
    assert torch.equal(run.samples, fs.sample(base, 5, window=6).samples)


class Bold(fs.Replay):
    """Guesses in its own way."""

    def guess(self, *given: Any) -> Tensor:
        return 2 * super().guess(*given)


def test_the_plain_round_is_used_where_the_compiled_one_would_differ() -> None:
    target = wide(torch.float64)
    last = last_draftable(target.std)
    speculation = Speculation(fs.Replay(), 6, None, True, last, Packed())
    assert round_for(target, speculation).propose is compiled.propose
    own_mean = HalfMean(target.chain, target.shape, target.network)
    assert affine_chain(own_mean) is None
    size = target.shape.numel()
    states = torch.zeros(1, 3, *target.shape, dtype=torch.float64)
    short = Prior(states, states, jacobian=torch.zeros(len(last) - 1, size, size, dtype=torch.float64))
    narrow = Prior(states, states, jacobian=torch.zeros(len(last), size, size))
    others = {
        "a mean of its own": (own_mean, speculation),
        "half precision": (wide(torch.bfloat16), speculation),
        "a drafter of its own": (target, replace(speculation, drafter=Bold())),
        "no secant": (target, replace(speculation, drafter=fs.Replay(secant=False))),
        "another drafter": (target, replace(speculation, drafter=fs.Frozen("nearest"))),
        "fresh noise": (target, replace(speculation, recycle=False)),
        "padded": (target, replace(speculation, layout=Padded())),
        "a Jacobian of another chain": (target, replace(speculation, drafter=fs.Replay(prior=short))),
        "a Jacobian of another dtype": (target, replace(speculation, drafter=fs.Replay(prior=narrow))),
    }
    for name, (other, settings) in others.items():
        assert round_for(other, settings).propose is plain.propose, name


def test_plain_rounds_can_be_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    target = wide(torch.float64)
    speculation = Speculation(fs.Replay(), 6, None, True, last_draftable(target.std), Packed())
    monkeypatch.setenv("FORESAMPLE_PLAIN", "1")
    assert round_for(target, speculation).propose is plain.propose


@pytest.mark.parametrize("where", ["network", "state"])
def test_nan_is_named(where: str) -> None:
    base = wide(torch.float32, shape=(30,))

    def network(x: Tensor, step: Tensor, row: Tensor) -> Tensor:
        bad = ((step == 11) & (row == 2)).unsqueeze(1)
        return torch.where(bad, torch.nan, base.network(x, step, row))

    if where == "network":
        target, said = replace(base, network=network), "network returned NaN or infinity at step 11 of sample 2"
    else:
        weight = base.chain.state_weight.clone()
        weight[10] = torch.inf
        target = replace(base, chain=replace(base.chain, state_weight=weight))
        said = "the state at step 11 of sample . is NaN or infinite"
    for run in (lambda: fs.sample(target, 4, window=6), lambda: fs.sequential(target, 4)):
        with pytest.raises(FloatingPointError, match=said):
            run()


def test_the_tally_is_the_plain_one(monkeypatch: pytest.MonkeyPatch) -> None:
    target, commits = CHAINS["interrupted"](), list[fs.Commit]()
    fs.sample(target, 30, window=6, slots=4, observe=commits.append)
    tallies = []
    for plainly in ("0", "1"):
        monkeypatch.setenv("FORESAMPLE_PLAIN", plainly)
        tally = Tally(6, len(target.std), torch.device("cpu"), backend_of(target).count)
        for commit in commits:
            tally.count(commit)
        tallies.append(tally)
    assert torch.equal(tallies[0].lengths, tallies[1].lengths)
    assert tallies[0].drafted == tallies[1].drafted
    torch.testing.assert_close(tallies[0].mismatch, tallies[1].mismatch)


@pytest.mark.parametrize("size", [1, 2, 7, 784])
def test_noise_is_the_same_stream(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    seed, step, draw = streams.seeds_of(3, 50), torch.arange(50) * 20, torch.arange(50) % 3
    seed[0] = 2**63 - 1
    drawn = []
    for plainly in ("0", "1"):
        monkeypatch.setenv("FORESAMPLE_PLAIN", plainly)
        drawn.append(normal(seed, torch.Size([size]), torch.float64, step=step, draw=draw))
    torch.testing.assert_close(drawn[0], drawn[1], rtol=1e-13, atol=1e-13)


# ------------------------------------------------------------------ the 1-D maths, against arbitrary precision


def test_the_special_functions_match_arbitrary_precision() -> None:
    for x in [*torch.linspace(-20, 60, 801, dtype=torch.float64).tolist(), 1e3, 1e8, 11.999999, 12.0]:
        exact = mp.exp(mp.mpf(x) ** 2) * mp.erfc(x) if x < 1e3 else 1 / (mp.mpf(x) * mp.sqrt(mp.pi))
        assert error(coupling.erfcx(x), exact) < (2e-15 if x < 1e3 else 1e-6), x
    for y in torch.linspace(-37.4, 8.2, 500, dtype=torch.float64).tolist():
        level = float(mp.erfc(-mp.mpf(y) / mp.sqrt(2)) / 2)
        found = mp.mpf(coupling.ndtri(level))
        # Its own rounding, and what that of the level is worth.
        density = mp.exp(-found * found / 2) / mp.sqrt(2 * mp.pi)
        slack = 1e-15 * (1 + abs(y)) + 2.0**-53 * level / float(density)
        assert abs(float(found) - y) < slack, y


@pytest.mark.parametrize("delta", DELTAS)
def test_surplus_acceptance_and_tilted_cdf_match_the_oracle(delta: float) -> None:
    for log_p in map(float, LOG_PS):
        _, t, surplus, deficit = oracle(delta, log_p)
        found = coupling.acceptance(float(delta), log_p)
        if reachable(delta, log_p):
            assert error(coupling.surplus(float(delta), log_p), surplus) < TOLERANCE, log_p
            assert error(found, surplus / deficit) < TOLERANCE, log_p
        elif log_p:
            assert found <= 2 * UNREACHABLE, log_p
        for s in (s for s in COORDINATES if s <= t):
            value = coupling.tilted_cdf(float(s), float(delta), log_p)
            assert error(value, exact_tilted_cdf(s, delta, log_p)) < TOLERANCE, (s, log_p)


@pytest.mark.parametrize("delta", DELTAS[1:])
def test_residual_is_at_its_survival_level(delta: float) -> None:
    for log_p in (float(v) for v in LOG_PS if reachable(delta, v)):
        for level in LEVELS:
            found = coupling.residual(level, float(delta), log_p)
            assert backward_error(found, level, delta, log_p) < TOLERANCE, (level, log_p)


def test_scalars_agree_over_the_whole_range() -> None:
    """δ from 1e-12 to 1e3, p from 1e-300 to 1, at random."""
    count, generator = 20_000, torch.Generator().manual_seed(2)
    unit = torch.rand(4, count, generator=generator, dtype=torch.float64)
    mismatch = 10 ** (unit[0] * 15 - 12)
    log_p = -(10 ** (unit[1] * 10 - 7.2)).clamp(max=690)
    threshold = plain_coupling.threshold(mismatch, log_p)
    s = torch.minimum(torch.randn(count, generator=generator, dtype=torch.float64), threshold)
    level = unit[3].clamp(1e-12, 1 - 1e-12)
    matters = plain_coupling.acceptance(mismatch, log_p) > UNREACHABLE
    for name, arguments in {
        "acceptance": (mismatch, log_p),
        "tilted_cdf": (s, mismatch, log_p),
        "residual": (level, mismatch, log_p),
    }.items():
        want = getattr(plain_coupling, name)(*arguments)
        one = getattr(coupling, name)
        values = [one(*v) for v in zip(*(a.tolist() for a in arguments), strict=True)]
        got = torch.tensor(values, dtype=torch.float64)
        finite = torch.isfinite(want) & matters
        torch.testing.assert_close(got[finite], want[finite], rtol=1e-9, atol=1e-13)


# ------------------------------------------------------------------ where what was compiled is kept


def test_the_name_of_the_cache_covers_all_compiled_sources() -> None:
    """Numba would not notice a change in another file than a function's own."""
    sources = {Path(__file__).parents[2] / "foresample" / name for name in compiling._CONSTANTS}
    assert all(path.is_file() for path in sources)
    imported = {module.__file__ for module in (plain_coupling, streams, compiled.verify)} | {
        sys.modules[name].__file__ for name in ("foresample.drafters.replay", "foresample.faults")
    }
    assert {str(path) for path in sources} == imported


@pytest.mark.slow
def test_everything_works_without_a_folder_for_the_cache(tmp_path: Path) -> None:
    """A file where the folder should be: every process compiles anew."""
    blocked = tmp_path / "file"
    blocked.write_text("")
    code = (
        "import torch; from foresample.backends.numba import compiling, noise; assert compiling.cache_folder() is None;"
        "from foresample.core.noise import normal; z = torch.zeros(1, dtype=torch.int64);"
        "print(normal(z, torch.Size([3]), torch.float64, step=z, draw=z).isfinite().all())"
    )
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(blocked / "folder"), "FORESAMPLE_PLAIN": "0"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert "True" in done.stdout, done.stderr
