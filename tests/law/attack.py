"""The law, attacked from outside: chains, a sampler and tests that share nothing with the package or its suite.

The chains are written in numpy and are nasty on purpose; the reference walks them by a loop of its own with numpy's
generator; the tests are scipy's and look at whole paths: every marginal, pairs of states, innovations against
N(0, I), alone, in pairs and in sums along the chain. All tests of all cases together alarm falsely with probability
at most LEVEL (Bonferroni, an equal share for each of CASES).

`test_attack.py` runs CASES at 2·10⁵ samples each; by hand, every chain with every way to draft, and as many samples
as one has patience for:

    python -m tests.law.attack --samples 2000000 --everything
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from itertools import pairwise
from unittest.mock import patch

import numpy as np
import torch
from scipy import stats
from torch import Tensor

import foresample as fs
from foresample.core.noise import seeds_of
from foresample.core.round import Padded
from foresample.engine import Engine

LEVEL = 1e-3
SAMPLES = 200_000

Force = Callable[[np.ndarray, np.ndarray], np.ndarray]
"""States [B, d] and steps [B] -> predictions [B, d]."""


# ------------------------------------------------------------------ chains


@dataclass(frozen=True)
class Walk:
    """x_{k+1} = state·x + prediction·p (+ previous·p of the step before) + std·z, with p = force(x, k).

    A target of the package, and all that the reference needs.
    """

    force: Force
    noise_scale: np.ndarray
    state: np.ndarray
    prediction: np.ndarray
    previous: np.ndarray | None = None
    dim: int = 1
    dtype: torch.dtype = torch.float64

    @property
    def shape(self) -> torch.Size:
        return torch.Size([self.dim])

    @property
    def std(self) -> Tensor:
        return torch.from_numpy(self.noise_scale).to(self.dtype)

    @property
    def multistep(self) -> bool:
        return self.previous is not None

    def start(self, noise: Tensor, row: Tensor) -> Tensor:
        return noise + 0.5 * noise.sin()

    def predict(self, x: Tensor, step: Tensor, row: Tensor) -> Tensor:
        return torch.from_numpy(self.force(x.double().numpy(), step.numpy())).to(x.dtype)

    def mean(self, x: Tensor, prediction: Tensor, step: Tensor, previous: Tensor | None = None) -> Tensor:
        weights = [torch.from_numpy(w).to(x.dtype)[step].unsqueeze(1) for w in (self.state, self.prediction)]
        mean = weights[0] * x + weights[1] * prediction
        if self.previous is None or previous is None:
            return mean
        return mean + torch.from_numpy(self.previous).to(x.dtype)[step].unsqueeze(1) * previous


def walk_mean(chain: Walk, k: int, x: np.ndarray, before: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
    """The mean of transition k at states x, and the prediction there; `before` is that of the step before."""
    p = chain.force(x, np.full(len(x), k))
    mean = chain.state[k] * x + chain.prediction[k] * p
    if chain.previous is not None and before is not None:
        mean = mean + chain.previous[k] * before
    return mean, p


def walk(chain: Walk, count: int, seed: int) -> np.ndarray:
    """The reference: whole paths x_1 … x_N, [count, N, d], one step after the other."""
    random = np.random.default_rng(seed)
    noise = random.standard_normal((count, chain.dim))
    x, before, path = noise + 0.5 * np.sin(noise), None, []
    for k, std in enumerate(chain.noise_scale):
        mean, before = walk_mean(chain, k, x, before)
        x = mean + std * random.standard_normal(x.shape)
        path.append(x)
    return np.stack(path, 1)


def nonlinear() -> Walk:
    """Means that fold the line over itself: slopes between −4 and 6."""
    one = np.ones(6)
    return Walk(lambda x, k: np.sin(5 * x) + np.cos(k)[:, None] * x, 0.6 * one, one, one)


def bimodal() -> Walk:
    """Four modes in the plane, the ways between them curved."""

    def force(x: np.ndarray, k: np.ndarray) -> np.ndarray:
        u, v = x.T
        far = 1 + 0.1 * (u * u + v * v) * (u * u + v * v)  # so that no draft can run away
        return np.stack([(3 - 2 * u * u) * u + v, (3 - 2 * v * v) * v - u * np.abs(v)], 1) / far[:, None]

    one = np.ones(6)
    return Walk(force, 0.45 * one, one, 0.3 * one, dim=2)


def six_decades() -> Walk:
    """Noise from 10³ to 10⁻³: each step forgets most of what the one before knew, and bends the rest."""
    std = np.logspace(3, -3, 7)
    before = np.concatenate([[1.0], std[:-1]])
    return Walk(lambda x, k: np.sin(3 * x / before[k][:, None]), std, 0.8 * std / before, 0.9 * std)


def interrupted() -> Walk:
    """Deterministic steps inside, two in a row, and at the end."""
    std = 0.5 * np.ones(7)
    std[[2, 3, 6]] = 0
    one = np.ones(7)
    return Walk(lambda x, k: np.tanh(2 * np.roll(x, 1, 1) - x), std, 0.9 * one, one, dim=2)


def multistep() -> Walk:
    """The mean also needs the prediction of the step before."""
    one = np.ones(6)
    previous = -0.7 * one
    previous[0] = 0
    return Walk(lambda x, k: np.cos(3 * x), 0.5 * one, one, 1.2 * one, previous)


def discontinuous() -> Walk:
    """A network that jumps: stairs and a cliff."""
    one = np.ones(6)
    return Walk(lambda x, k: np.floor(2 * x) % 3 - np.sign(x), 0.5 * one, 0.8 * one, one)


def pulled() -> Walk:
    """Tame, so that what is far is only the draft."""
    one = np.ones(5)
    return Walk(lambda x, k: -np.tanh(x), one, one, 0.5 * one, dim=2)


def pulled_in_single_precision() -> Walk:
    return replace(pulled(), dtype=torch.float32)


CHAINS: dict[str, Callable[[], Walk]] = {
    "nonlinear": nonlinear,
    "bimodal": bimodal,
    "six decades": six_decades,
    "interrupted": interrupted,
    "multistep": multistep,
    "discontinuous": discontinuous,
    "pulled": pulled,
    "pulled in float32": pulled_in_single_precision,
}


# ------------------------------------------------------------------ drafters


@dataclass(frozen=True)
class Off:
    """Guesses the target's prediction and adds `by` std: a constant mismatch."""

    target: Walk
    by: float

    def begin(self, rows: int, window: int, like: Tensor) -> fs.drafters.DrafterMemory:
        return {"ready": torch.ones(rows, dtype=torch.bool)}

    def reach(self, memory: fs.drafters.DrafterMemory, window: int) -> Tensor:
        return memory["ready"] * window

    def guess(
        self,
        memory: fs.drafters.DrafterMemory,
        x: Tensor,
        position: int,
        step: Tensor,
        row: Tensor,
        before: fs.drafters.PreviousDraft | None,
    ) -> Tensor:
        scale = torch.from_numpy(self.by * self.target.noise_scale / self.target.prediction).to(x.dtype)
        shift = torch.zeros_like(x)
        shift[:, -1] = scale[step]
        return self.target.predict(x, step, row) + shift

    def learn(
        self, memory: fs.drafters.DrafterMemory, path: fs.drafters.DraftPath, committed: Tensor
    ) -> fs.drafters.DrafterMemory:
        return memory


@dataclass(frozen=True)
class Nonsense(Off):
    """Guesses that have nothing to do with the target, as far as a whim of the sample's number lets it draft."""

    by: float = 1.0

    def begin(self, rows: int, window: int, like: Tensor) -> fs.drafters.DrafterMemory:
        return {"row": torch.zeros(rows, dtype=torch.int64)}

    def prime(self, memory: fs.drafters.DrafterMemory, row: Tensor) -> fs.drafters.DrafterMemory:
        return {"row": row.clone()}

    def reach(self, memory: fs.drafters.DrafterMemory, window: int) -> Tensor:
        return (memory["row"] % (window + 2)).clamp(max=window)

    def guess(
        self,
        memory: fs.drafters.DrafterMemory,
        x: Tensor,
        position: int,
        step: Tensor,
        row: Tensor,
        before: fs.drafters.PreviousDraft | None,
    ) -> Tensor:
        return self.by * torch.sin(11 * x + (row + 3 * step + position).unsqueeze(1).to(x.dtype))


def own_prior(chain: Walk, window: int) -> fs.Replay:
    return fs.Replay(prior=fs.fit_prior(chain, window=window, pilots=48, paths=3))


def wrong_prior(chain: Walk, window: int) -> fs.Replay:
    """A prior of another chain: as exact as any."""
    return fs.Replay(
        prior=fs.fit_prior(replace(chain, force=lambda x, k: 1 - 0.5 * x), window=window, pilots=8)
    )


DRAFTERS: dict[str, Callable[[Walk, int], fs.Drafter]] = {
    "replay": lambda chain, window: fs.Replay(),
    "replay without the secant": lambda chain, window: fs.Replay(secant=False),
    "head": lambda chain, window: fs.Frozen("head"),
    "nearest": lambda chain, window: fs.Frozen("nearest"),
    "prior": own_prior,
    "wrong prior": wrong_prior,
    "nonsense": lambda chain, window: Nonsense(chain),
    "1 std off": lambda chain, window: Off(chain, 1.0),
    "30 std off": lambda chain, window: Off(chain, 30.0),
    "3e5 std off": lambda chain, window: Off(chain, 3e5),
    "3e7 std off": lambda chain, window: Off(chain, 3e7),
}


# ------------------------------------------------------------------ cases


def record(path: Tensor) -> Callable[[fs.Commit], None]:
    """An observer that writes the states of samples into x_1 … x_N, [count, N, d]."""

    def observe(commit: fs.Commit) -> None:
        states = commit.states.to(path.dtype)
        for j in range(states.shape[1]):
            hit = j < commit.committed
            path[commit.sample[hit], commit.step[hit] + j] = states[hit, j]

    return observe


@dataclass(frozen=True)
class Case:
    """A target and the settings to draw it with."""

    chain: str
    drafter: str = "replay"
    window: int = 4
    block: int | None = None
    recycle: bool = True
    padded: bool = False
    """Fixed slots with rounds of several widths, as on a GPU."""
    cut_off: str | None = None
    """FAR or DIVERGED, made so small that it fires all the time."""

    def __str__(self) -> str:
        words = [self.chain, self.drafter, f"window {self.window}"]
        words += [f"block {self.block}"] * (self.block is not None) + ["fresh"] * (not self.recycle)
        return ", ".join(
            words + ["padded"] * self.padded + [f"{self.cut_off} forced"] * (self.cut_off is not None)
        )

    def engine(self, slots: int) -> Engine:
        chain = CHAINS[self.chain]()
        drafter = DRAFTERS[self.drafter](chain, self.window)
        made = Engine(
            chain, window=self.window, slots=slots, drafter=drafter, block=self.block, recycle=self.recycle
        )
        if self.padded:
            made.speculation = replace(made.speculation, layout=Padded())
        return made

    def draw(self, count: int, seed: int, slots: int = 4_000) -> np.ndarray:
        """Whole paths x_1 … x_N, [count, N, d], drawn by the package."""
        chain = CHAINS[self.chain]()
        path = torch.full((count, len(chain.noise_scale), chain.dim), torch.nan, dtype=torch.float64)
        with self.forced():
            run = self.engine(min(slots, count)).sample(seeds_of(seed, count), record(path))
        assert torch.equal(path[:, -1], run.samples.double())
        return path.numpy()

    def forced(self) -> AbstractContextManager[object]:
        return nullcontext() if self.cut_off is None else patch(*CUT_OFFS[self.cut_off])


CUT_OFFS = {
    "FAR": ("foresample.core.verify.FAR", 0.4),
    "DIVERGED": ("foresample.drafters.replay.DIVERGED", 0.05),
}

CASES = (
    Case("nonlinear", "replay", cut_off="FAR"),
    Case("bimodal", "prior", window=3, padded=True),
    Case("six decades", "replay", recycle=False),
    Case("interrupted", "wrong prior", window=2, padded=True, block=1),
    Case("multistep", "prior", window=5, cut_off="DIVERGED"),
    Case("discontinuous", "nonsense", block=3, recycle=False),
    Case("pulled", "30 std off", window=2),
    Case("pulled in float32", "3e5 std off", window=2, padded=True),
)


def everything() -> Iterator[Case]:
    """Every chain with every way to draft, in rotating settings, besides CASES."""
    yield from CASES
    for i, chain in enumerate(CHAINS):
        for j, drafter in enumerate(DRAFTERS):
            turn = i + j
            yield Case(
                chain,
                drafter,
                window=(4, 9, 2, 14)[turn % 4],
                block=(None, None, 1, 3)[turn // 2 % 4],
                recycle=turn % 3 != 0,
                padded=j % 2 == 0,
                cut_off=(None, None, "FAR", None, "DIVERGED")[turn % 5],
            )


# ------------------------------------------------------------------ tests


def p_values(chain: Walk, ours: np.ndarray, theirs: np.ndarray) -> Iterator[tuple[str, float]]:
    """(name, p-value) of every test of paths x_1 … x_N, [count, N, d], against the reference's and the chain."""
    steps, dim = ours.shape[1:]
    angle = np.array([np.cos(1.0), np.sin(1.0)])[:dim]
    for k in range(steps):
        for name, one, two in (
            ("first coordinate", ours[:, k, 0], theirs[:, k, 0]),
            ("projection", ours[:, k] @ angle, theirs[:, k] @ angle),
        )[:dim]:
            yield f"{name} of x_{k + 1}", stats.ks_2samp(one, two, method="asymp").pvalue
    pairs = [((k, 0), (k + 1, dim - 1)) for k in range(steps - 1)] + [((0, 0), (steps - 1, 0))]
    if dim == 2:
        pairs += [((k, 0), (k, 1)) for k in range(steps)]
    for (j, a), (k, b) in pairs:
        name = f"x_{j + 1}[{a}] with x_{k + 1}[{b}]"
        yield name, same_table(ours[:, j, a], ours[:, k, b], theirs[:, j, a], theirs[:, k, b])

    z = innovations(chain, ours)
    for k, values in z.items():
        for a in range(dim):
            yield f"innovation {k}[{a}]", stats.kstest(values[:, a], "norm", method="asymp").pvalue
        yield (
            f"length of innovation {k}",
            stats.kstest((values**2).sum(1), "chi2", (dim,), method="asymp").pvalue,
        )
        yield f"innovation {k} given its state", given(rank(ours[:, k - 1, -1]), values[:, 0])
    noisy = list(z)
    for j, k in pairwise(noisy):
        yield f"innovations {j} and {k}", given(stats.norm.cdf(z[j][:, -1]), z[k][:, 0])
        for power in ((1, 1), (2, 1), (1, 2)):
            yield (
                f"moments {power} of innovations {j}, {k}",
                _moment(z[j][:, 0] ** power[0] * z[k][:, 0] ** power[1], power),
            )
    total = sum(z.values()) / np.sqrt(len(z))
    yield (
        "sum of all innovations",
        stats.kstest(total @ angle / np.linalg.norm(angle), "norm", method="asymp").pvalue,
    )
    square = sum((v**2).sum(1) for v in z.values())
    yield "length of all innovations", stats.kstest(square, "chi2", (dim * len(z),), method="asymp").pvalue


def innovations(chain: Walk, path: np.ndarray) -> dict[int, np.ndarray]:
    """(x_{k+1} − mean)/std of transitions 1 … N−1 that have noise; the others are checked to have none."""
    found, before = {}, None
    for k in range(1, len(chain.noise_scale)):
        x, after = path[:, k - 1], path[:, k]
        if chain.previous is not None and k == 1:  # the prediction at x_0 was not kept
            before = chain.force(x, np.ones(len(x), dtype=int))
            continue
        mean, before = walk_mean(chain, k, x, before)
        if chain.noise_scale[k] > 0:
            found[k] = (after - mean) / chain.noise_scale[k]
        elif not np.allclose(after, mean, rtol=1e-12, atol=1e-12):
            raise AssertionError(f"the deterministic transition {k} is not")
    return found


def rank(values: np.ndarray) -> np.ndarray:
    rank = np.empty(len(values))
    rank[np.argsort(values, kind="stable")] = (np.arange(len(values)) + 0.5) / len(values)
    return rank


def given(level: np.ndarray, z: np.ndarray, bins: int = 8) -> float:
    """χ²: is z standard normal given `level`, which lies in (0, 1)?"""
    rows = np.minimum((bins * level).astype(int), bins - 1)
    columns = np.minimum((bins * stats.norm.cdf(z)).astype(int), bins - 1)
    table = np.bincount(rows * bins + columns, minlength=bins * bins).reshape(bins, bins)
    expected = table.sum(1, keepdims=True) / bins
    return float(stats.chi2.sf(((table - expected) ** 2 / np.maximum(expected, 1e-9)).sum(), bins * (bins - 1)))


def same_table(a: np.ndarray, b: np.ndarray, a_ref: np.ndarray, b_ref: np.ndarray, bins: int = 8) -> float:
    """χ² test that (a, b) has the reference's joint distribution, in bins of the reference's quantiles."""
    grid = np.arange(1, bins) / bins
    tables = [
        np.bincount(
            np.searchsorted(np.quantile(a_ref, grid), x) * bins + np.searchsorted(np.quantile(b_ref, grid), y),
            minlength=bins * bins,
        )
        for x, y in ((a, b), (a_ref, b_ref))
    ]
    one, two = (table[sum(tables) >= 20] for table in tables)
    return float(stats.chi2.sf(((one - two) ** 2 / (one + two)).sum(), len(one) - 1))


def _moment(values: np.ndarray, power: tuple[int, int]) -> float:
    """Is the mean of z^i z'^j zero, as it is for independent ones with i or j odd?"""
    variance = {1: 1.0, 2: 3.0}
    return float(
        2 * stats.norm.sf(abs(values.mean()) * np.sqrt(len(values) / (variance[power[0]] * variance[power[1]])))
    )


def smallest(chain: Walk, ours: np.ndarray, theirs: np.ndarray) -> tuple[float, str, int]:
    """The smallest p-value times the number of tests, the test it is of, and that number."""
    found = list(p_values(chain, ours, theirs))
    p, name = min((p, name) for name, p in found)
    return p * len(found), name, len(found)


def attack(case: Case, count: int = SAMPLES, seed: int = 1) -> tuple[float, str, int]:
    """`smallest` of a case."""
    chain = CHAINS[case.chain]()
    return smallest(chain, case.draw(count, seed), walk(chain, count, seed))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=SAMPLES)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--everything", action="store_true", help="every chain with every drafter")
    options = parser.parse_args()
    torch.set_num_threads(1)
    cases = list(everything() if options.everything else CASES)
    failed, tests = 0, 0
    for i, case in enumerate(cases):
        started = time.perf_counter()
        p, name, number = attack(case, options.samples, options.seed + i)
        failed, tests = failed + (p < LEVEL / len(cases)), tests + number
        verdict = "ok" if p >= LEVEL / len(cases) else "FAILED"
        print(f"{verdict:6} {p:8.1e} {time.perf_counter() - started:6.1f} s  {case}  ({name})", flush=True)
    total = len(cases) * options.samples
    print(f"{tests} tests of {total:,} samples at joint level {LEVEL:g}: {failed or 'none'} failed")
    raise SystemExit(failed > 0)


if __name__ == "__main__":
    main()
