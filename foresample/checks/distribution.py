"""Tests that speculative and sequential samples have the same distribution, along the whole chain."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence

import numpy as np
import torch
from torch import Tensor

from foresample.backends import extra_noise
from foresample.checks.findings import Finding
from foresample.checks.kolmogorov import critical_distance, ks_normal, ks_two_sample, smallest_shift
from foresample.contracts import Target, earlier_predictions, no_history, predict, remember, transition_mean
from foresample.core.report import Commit

_TESTS = 18  # tests of each step


class Recorder:
    """Keeps the states around chosen steps, in float64: x_k and x_{k+1} for each k, and the states before x_k whose
    predictions its mean needs."""

    def __init__(
        self, steps: Sequence[int], target: Target, samples: int, *, seeds: Tensor | None = None
    ) -> None:
        self.steps = list(steps)
        shape = (len(self.steps), 2 + earlier_predictions(target), samples, *target.shape)
        self.states = torch.full(shape, torch.nan, dtype=torch.float64)
        self.row = torch.zeros(samples, dtype=torch.int64)  # row of each sample in its own run
        self.seeds = torch.zeros_like(self.row) if seeds is None else seeds  # for extra noise

    def from_sample(
        self, first: int, progress: Callable[[int], None] | None = None
    ) -> Callable[[Commit], None]:
        """An observer for a run whose samples are first, first + 1, …"""

        def observe(commit: Commit) -> None:
            for i, k in enumerate(self.steps):
                sides = self.states.shape[1]
                for side in range(sides):  # x_k is committed by transition k − 1, at position k − 1 − step
                    position = k + side - (sides - 1) - commit.step
                    hit = (position >= 0) & (position < commit.committed)
                    row = commit.sample[hit].cpu()
                    self.states[i, side, first + row] = commit.states[hit, position[hit]].double().cpu()
                    self.row[first + row] = row
            if progress is not None:
                progress(int(commit.committed.sum()))

        return observe


def same_law(target: Target, ours: Recorder, theirs: Recorder, seed: int, level: float) -> list[Finding]:
    """Compare two sets of recorded states by Kolmogorov–Smirnov tests at one joint level."""
    coarse = _too_coarse(target, ours, level)
    results = law_tests(target, ours, theirs, seed, without=coarse)
    if not results:
        return [Finding("distribution", False, f"not tested: {_coarse(target, coarse)}")]
    smallest, worst = min((p_value, name) for name, p_value in results)
    tests, samples = len(results), len(ours.row)
    passed, shift = smallest >= level / tests, smallest_shift(level / tests, samples)
    state = smallest_shift(level / tests, samples / 2)
    if shift is None:
        power = (
            f"with {samples} sample{'s' * (samples > 1)} these tests have no power, not even against the largest "
            "error: draw 1000 or more"
        )
    else:
        power = (
            f"{samples} samples reveal, 95 times in 100, a mean that is off by {shift:.2g} of a step's noise along a "
            "tested direction" + (f", or by {state:.2g} of a state's std" if state is not None else "")
        )
    detail = f"{tests} tests at joint level {level:g}, smallest p-value {smallest:.1e} ({worst}); {power}"
    note = passed and shift is None
    found = [Finding("distribution", passed, detail, tests, smallest, note=note, smallest_shift=shift)]
    if coarse:
        found.append(Finding("precision", True, f"{_coarse(target, coarse)}; not tested there", note=True))
    return found


def _too_coarse(target: Target, recorder: Recorder, level: float) -> dict[int, float]:
    """Steps whose noise is lost in rounding, with their std in spacings of floating-point numbers there.

    With u = spacing/std the distribution function of an innovation has jumps of up to u/√(2π), and differs from the
    normal one by up to half a jump. A step is left out if that exceeds half the distance that fails a test.
    """
    eps = torch.finfo(target.std.dtype).eps
    distance = critical_distance(level / (_TESTS * len(recorder.steps)), len(recorder.row))
    found = {}
    for k, states in zip(recorder.steps, recorder.states, strict=True):
        held = float(target.std[k]) / max(eps * float(states[-1].abs().mean()), 1e-300)
        if 1 / (held * math.sqrt(2 * math.pi)) > min(distance, 1.0):
            found[k] = held
    return found


def _coarse(target: Target, coarse: dict[int, float]) -> str:
    kind = str(target.std.dtype).removeprefix("torch.")
    steps = ", ".join(map(str, coarse))
    return (
        f"{kind} cannot represent the noise of step{'s' * (len(coarse) > 1)} {steps}: its std is "
        f"{min(coarse.values()):.2g} times the distance of two neighbouring numbers of the states' size; use a chain "
        "in float64"
    )


def law_tests(
    target: Target, ours: Recorder, theirs: Recorder, seed: int = 0, *, without: Collection[int] = ()
) -> list[tuple[str, float]]:
    """(name, p-value) of every test; the tests are dependent, so use Bonferroni's bound."""
    generator = torch.Generator().manual_seed(seed)
    results = []
    for i, k in enumerate(ours.steps):
        if k in without:
            continue
        (*_, x, y), (*_, x_seq, y_seq) = ours.states[i].flatten(2), theirs.states[i].flatten(2)
        directions = torch.randn(x.shape[1], 3, generator=generator, dtype=torch.float64)
        directions /= directions.norm(dim=0)

        def compare(name: str, one: Tensor, two: Tensor, k: int = k) -> None:
            results.append((f"{name} at step {k}", ks_two_sample(one.numpy(), two.numpy())))

        for along in directions.T:
            one, two = [(a @ along, (b - a) @ along) for a, b in ((x, y), (x_seq, y_seq))]
            compare("state", one[0] + one[1], two[0] + two[1])
            compare("increment", one[1], two[1])
            # The same centre on both sides: narrow distributions would show a difference of the two sample means.
            centre = [torch.cat(pair).mean() for pair in zip(one, two, strict=True)]
            products = [(a - centre[0]) * (b - centre[1]) for a, b in (one, two)]
            compare("state × increment", *products)
        compare("norm of the state", y.norm(dim=1), y_seq.norm(dim=1))
        compare("norm of the increment", (y - x).norm(dim=1), (y_seq - x_seq).norm(dim=1))
        innovation = _innovations(target, ours, i)
        for along in directions.T:
            z = innovation @ along
            results.append((f"innovation at step {k}", ks_normal(z.numpy())))
            product = torch.sign(x @ along - (x @ along).median()) * z
            results.append((f"innovation given the state at step {k}", ks_normal(product.numpy())))
        compare("norm of the innovation", innovation.norm(dim=1), _innovations(target, theirs, i).norm(dim=1))
    return results


def steps_to_test(target: Target, at_most: int = 5) -> list[int]:
    """Stochastic steps spread over the chain, beginning with the first after which all states needed are recorded."""
    std = target.std
    first = 1 + earlier_predictions(target)
    candidates = [k for k in range(first, len(std)) if std[k] > 0]
    if not candidates:
        raise ValueError(
            f"no step from {first} on adds noise, and only those can be tested: check the same sampler with more steps"
            if (std[1:] > 0).any()
            else "no transition of this chain adds noise, except perhaps the first: there is nothing to speculate on"
        )
    return sorted({candidates[round(i)] for i in np.linspace(0, len(candidates) - 1, at_most)})


def _innovations(target: Target, recorder: Recorder, i: int, batch: int = 1024) -> Tensor:
    """(x_{k+1} − mean_k(x_k))/std_k, [samples, size]."""
    k, std, found = recorder.steps[i], target.std, []
    parts = (*recorder.states[i], recorder.row, recorder.seeds)
    for *states, y, row, seed in zip(*(part.split(batch) for part in parts), strict=True):
        mean = _mean_along([x.to(std) for x in states], target, k, row.to(std.device), seed.to(std.device))
        found.append(((y - mean.double().cpu()) / float(std[k])).flatten(1))
    return torch.cat(found)


@torch.no_grad()
def _mean_along(states: list[Tensor], target: Target, k: int, row: Tensor, seed: Tensor) -> Tensor:
    """The mean of transition k at x_k, the last of these states; the others are those whose predictions it needs."""
    previous = no_history(target, states[-1])
    for x, at in zip(states, range(k - len(states) + 1, k + 1), strict=True):
        step = torch.full_like(row, at)
        extra = extra_noise(target, seed, step)
        prediction = predict(target, x.clone(), step, row, extra)  # a target may write into its states
        if at < k:
            previous = remember(target, prediction, previous)
    return transition_mean(target, states[-1], prediction, step, previous, extra)
