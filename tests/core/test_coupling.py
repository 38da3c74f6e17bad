"""The 1-D maths against arbitrary precision, and the identities the sampler rests on."""

import math
from functools import cache

import mpmath
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from foresample.core import coupling

mp = mpmath.MPContext()  # our own context: other code may change the precision of the global one
mp.dps = 100

TOLERANCE = 1e-9
UNREACHABLE = 2.0**-53  # no uniform falls below an acceptance probability this small

DELTAS = [0, 1e-12, 1e-8, 1e-5, 1e-3, 0.1, 0.3, 0.499999, 0.5, 0.7, 1, 2, 5, 10, 17, 40, 100, 1e3, 1e4]
LOG_PS = [0, -1e-15, -1e-12, -1e-6, -1e-3, -0.1, -0.5, -1, -2, -5, -10, -20, -36, -100, -690]
LEVELS = [
    1e-17,
    1e-12,
    1e-6,
    0.01,
    0.1,
    0.3,
    0.5,
    0.7,
    0.74,
    0.76,
    0.9,
    0.99,
    1 - 1e-6,
    1 - 1e-9,
    1 - 1e-12,
    1 - 2**-53,
]
COORDINATES = [
    -8.5,
    -8,
    -6,
    -4,
    -2,
    -1,
    -0.5,
    -0.1,
    -1e-3,
    -1e-9,
    0,
    1e-9,
    0.01,
    0.1,
    0.3,
    0.7,
    1,
    2,
    3,
    5,
    7,
    8,
]

exhaustive = settings(derandomize=True, deadline=None, max_examples=200)
deltas = st.floats(-12, 4).map(lambda e: 10**e) | st.floats(1e-3, 5)
log_ps = st.floats(-16, math.log10(690)).map(lambda e: -(10**e)) | st.floats(-5, -1e-3)
levels = st.floats(-17, -0.1).map(lambda e: 10**e) | st.floats(-15.9, 0).map(lambda e: 1 - 0.999 * 10**e)
coordinates = st.floats(-8.5, 8.5)
anything = st.floats(allow_nan=False, allow_infinity=False)


def row(*values):
    return torch.tensor(values, dtype=torch.float64)


def f64(*values):
    """One 0-d tensor per value."""
    return row(*values).unbind()


def cdf(x):
    return mp.erfc(-x / mp.sqrt(2)) / 2


def density(x):
    return mp.exp(-x * x / 2) / mp.sqrt(2 * mp.pi)


@cache
def oracle(delta, log_p):
    """p, t, S and c from their definitions; c not by way of S."""
    delta, p = mp.mpf(delta), mp.exp(mp.mpf(log_p))
    if delta == 0:
        return p, mp.inf if log_p else mp.mpf(0), mp.mpf(0), 1 - p
    t = delta / 2 - mp.mpf(log_p) / delta
    return p, t, p * cdf(delta - t) - cdf(-t), cdf(t) - p * cdf(t - delta)


def tilted_cdf(s, delta, log_p):
    p, _, _, deficit = oracle(delta, log_p)
    s = mp.mpf(s)
    return (cdf(s) - p * cdf(s - delta)) / deficit if deficit else cdf(s)


def reachable(delta, log_p):
    """True if a block can end here: elsewhere S and the residual are never used."""
    _, _, surplus, deficit = oracle(delta, log_p)
    return surplus > UNREACHABLE * deficit


def error(value, exact):
    """Relative error of a float64."""
    return float(abs(mp.mpf(float(value)) - exact) / exact) if exact else abs(float(value))


def backward_error(s, level, delta, log_p):
    """|G(s) − U|/U for the residual's survival function G, as exact as mpmath."""
    p, _, surplus, _ = oracle(delta, log_p)
    s, level = mp.mpf(float(s)), mp.mpf(level)
    return float(abs((p * cdf(delta - s) - cdf(-s)) / surplus - level) / level)


@pytest.mark.parametrize(("delta", "log_p"), [(0.3, -0.2), (1, 0), (2, -3), (0.05, -0.01)])
def test_surplus_and_deficit_are_the_integrals_of_positive_parts(delta, log_p):
    # The oracle itself, against the definition it was derived from.
    p, t, surplus, deficit = oracle(delta, log_p)
    quad = mpmath.MPContext()
    quad.dps = 30
    above = quad.quad(lambda s: p * density(s - delta) - density(s), [t, t + 4, t + 12, t + 30])
    below = quad.quad(lambda s: density(s) - p * density(s - delta), [t - 30, t - 12, t - 4, t])
    assert abs(above - surplus) < 1e-20
    assert abs(below - deficit) < 1e-20


@pytest.mark.parametrize("delta", DELTAS)
def test_threshold_surplus_deficit_and_acceptance_match_the_oracle(delta):
    grid = row(delta), row(*LOG_PS)
    functions = coupling.threshold, coupling.surplus, coupling.deficit, coupling.acceptance
    for log_p, *values in zip(LOG_PS, *(f(*grid).tolist() for f in functions), strict=True):
        threshold, surplus, deficit, acceptance = values
        _, t, exact_surplus, exact_deficit = oracle(delta, log_p)
        assert threshold == t or error(threshold, t) < 1e-15, log_p
        assert error(deficit, exact_deficit) < TOLERANCE, log_p
        if reachable(delta, log_p):
            assert error(surplus, exact_surplus) < TOLERANCE, log_p
            assert error(acceptance, exact_surplus / exact_deficit) < TOLERANCE, log_p
        elif log_p:
            assert acceptance <= 2 * UNREACHABLE, log_p


@pytest.mark.parametrize("delta", DELTAS)
def test_tilted_cdf_matches_the_oracle(delta):
    for log_p in LOG_PS:
        t = oracle(delta, log_p)[1]
        inside = [s for s in COORDINATES if s <= t]
        for s, value in zip(inside, coupling.tilted_cdf(row(*inside), row(delta), row(log_p)), strict=True):
            assert error(value, tilted_cdf(s, delta, log_p)) < TOLERANCE, (s, log_p)


@pytest.mark.parametrize("delta", DELTAS[1:])
def test_residual_is_at_its_survival_level(delta):
    for log_p in (v for v in LOG_PS if reachable(delta, v)):
        found = coupling.residual(row(*LEVELS), row(delta), row(log_p))
        for level, s in zip(LEVELS, found, strict=True):
            assert backward_error(s, level, delta, log_p) < TOLERANCE, (level, log_p)


@exhaustive
@given(deltas, log_ps, levels)
def test_residual_is_at_its_survival_level_anywhere(delta, log_p, level):
    assume(reachable(delta, log_p))
    found = coupling.residual(*f64(level, delta, log_p))
    assert backward_error(found, level, delta, log_p) < TOLERANCE


@exhaustive
@given(deltas, log_ps, coordinates)
def test_surplus_and_tilted_cdf_match_the_oracle_anywhere(delta, log_p, s):
    _, t, surplus, _ = oracle(delta, log_p)
    if reachable(delta, log_p):
        assert error(coupling.surplus(*f64(delta, log_p)), surplus) < TOLERANCE
    if s <= t:
        assert error(coupling.tilted_cdf(*f64(s, delta, log_p)), tilted_cdf(s, delta, log_p)) < TOLERANCE


def test_normal_cdf_keeps_the_tail_that_torch_loses():
    x = torch.linspace(-37, 5, 169, dtype=torch.float64)
    exact = [cdf(mp.mpf(float(v))) for v in x]
    assert max(map(error, coupling.normal_cdf(x), exact)) < 1e-12
    # The reason normal_cdf exists. Should this fail, torch has mended its tail: use ndtr again.
    assert max(map(error, torch.special.ndtr(x), exact)) > 1e-3


@exhaustive
@given(deltas, log_ps)
def test_surplus_and_deficit_differ_by_what_is_lost(delta, log_p):
    # c − S = 1 − p and (1 − h) c = 1 − p: the two lines the proof of noise recycling stands on.
    delta, log_p = f64(delta, log_p)
    lost = -torch.expm1(log_p)
    surplus, deficit = coupling.surplus(delta, log_p), coupling.deficit(delta, log_p)
    accepted = coupling.acceptance(delta, log_p)
    torch.testing.assert_close(deficit - surplus, lost, rtol=1e-12, atol=1e-15)
    torch.testing.assert_close((1 - accepted) * deficit, lost, rtol=1e-12, atol=1e-15)


@exhaustive
@given(deltas | st.just(0.0), log_ps, log_ps)
def test_acceptance_is_a_probability_that_rises_with_p(delta, one, other):
    low, high = (coupling.acceptance(*f64(delta, v)) for v in sorted((one, other)))
    assert 0 <= low <= high * (1 + 1e-9) + UNREACHABLE
    assert high <= 1


@pytest.mark.parametrize("delta", DELTAS)
def test_block_length_one_accepts_with_twice_the_tail_at_half_the_mismatch(delta):
    # 1 − S = 2 Φ(−δ/2) at p = 1: the classical speculative test.
    delta, zero = f64(delta, 0)
    accepted = 2 * coupling.normal_cdf(-delta / 2)
    torch.testing.assert_close(1 - coupling.surplus(delta, zero), accepted, rtol=0, atol=1e-15)


def test_an_exact_draft_changes_nothing():
    s = torch.linspace(-8, 8, 33, dtype=torch.float64)
    zero, log_p = torch.zeros_like(s), torch.full_like(s, -0.3)
    assert (coupling.log_ratio(zero, s) == 0).all()
    assert (coupling.acceptance(zero, zero) == 1).all()
    assert (coupling.acceptance(zero, log_p) == 0).all()  # p < 1 and nothing left that could make up for it
    for level in (zero, log_p):
        torch.testing.assert_close(coupling.tilted_cdf(s, zero, level), coupling.normal_cdf(s))


@exhaustive
@given(deltas, coordinates)
def test_log_ratio_is_that_of_the_densities_and_odd_under_reflection(delta, s):
    delta, s = f64(delta, s)
    value, scale = coupling.log_ratio(delta, s), float(delta * (s.abs() + delta))
    torch.testing.assert_close(value, 0.5 * s**2 - 0.5 * (s - delta) ** 2, rtol=0, atol=1e-15 * (100 + scale))
    torch.testing.assert_close(coupling.log_ratio(delta, delta - s), -value, rtol=0, atol=1e-15 * scale)
    assert coupling.log_ratio(delta, delta / 2) == 0


@exhaustive
@given(deltas, log_ps)
def test_the_weighted_target_meets_the_draft_at_the_threshold(delta, log_p):
    delta, log_p = f64(delta, log_p)
    t = coupling.threshold(delta, log_p)
    rounding = 1e-15 * float(delta * t.abs())
    torch.testing.assert_close(coupling.log_ratio(delta, t), -log_p, rtol=1e-14, atol=rounding)


@exhaustive
@given(deltas, log_ps | st.just(0.0), coordinates, coordinates)
def test_tilted_cdf_rises_to_one_at_the_threshold(delta, log_p, one, other):
    t = float(coupling.threshold(*f64(delta, log_p)))
    low, high = sorted((min(one, t), min(other, t)))
    lower, upper, top = (coupling.tilted_cdf(*f64(s, delta, log_p)) for s in (low, high, t))
    assert 0 < lower <= upper * (1 + 1e-12)
    assert upper < 1
    assert top == pytest.approx(1, abs=1e-12)


@exhaustive
@given(deltas, log_ps | st.just(0.0), levels, levels)
def test_residual_lies_above_the_threshold_and_falls_with_its_level(delta, log_p, one, other):
    assume(reachable(delta, log_p))
    low, high = (coupling.residual(*f64(level, delta, log_p)) for level in sorted((one, other)))
    assert high >= coupling.threshold(*f64(delta, log_p))  # equal where the distance is below one ulp
    assert low >= high - 1e-6  # as functions of s both are good to sqrt(1e-16) near the threshold


@exhaustive
@given(deltas, st.floats(0, 1))
def test_residual_at_p_one_is_the_reflection(delta, place):
    # s from −8 to δ/2, off the threshold, where the general formula is ill-conditioned, and not where 1 − F
    # is lost to rounding.
    s = -8 + place * (min(delta / 2 - 1e-2, 4) + 8)
    delta, s, zero = f64(delta, s, 0)
    reflected = coupling.residual(coupling.tilted_cdf(s, delta, zero), delta, zero)
    torch.testing.assert_close(reflected, delta - s, rtol=1e-13, atol=1e-10)


@exhaustive
@given(anything.map(abs), anything.map(lambda v: -abs(v)), anything, st.floats(0, 1))
def test_any_finite_input_has_a_finite_answer(delta, log_p, s, level):
    delta, log_p, s = f64(delta, log_p, s)
    level = row(level).clamp(torch.finfo(torch.float64).tiny, 1 - UNREACHABLE)  # as tilted_cdf returns it
    assert 0 <= coupling.surplus(delta, log_p) <= 1
    assert 0 <= coupling.deficit(delta, log_p) <= 1
    assert 0 <= coupling.acceptance(delta, log_p) <= 1
    assert 0 < coupling.tilted_cdf(s, delta, log_p) < 1
    if coupling.acceptance(delta, log_p) > 0 and delta > 0:  # else it is never asked for
        assert torch.isfinite(coupling.residual(level, delta, log_p))


def test_surplus_is_never_negative_where_it_is_lost_to_rounding():
    """A difference of two tails of which only the last denormal numbers are left."""
    delta = torch.linspace(0.5, 5, 500, dtype=torch.float64).unsqueeze(1)
    t = torch.linspace(37, 39, 500, dtype=torch.float64)
    assert (coupling.surplus(delta, delta * (0.5 * delta - t)) >= 0).all()


@settings(exhaustive, max_examples=50)
@given(st.integers(1, 40), st.randoms(use_true_random=False))
def test_a_value_is_the_same_bits_in_any_batch(size, random):
    # Vectorised kernels must not treat the last few elements of a batch in another way.
    values = [
        (10 ** random.uniform(-6, 2), -(10 ** random.uniform(-6, 2)), random.uniform(-5, 5))
        for _ in range(size)
    ]
    delta, log_p, s = torch.tensor(values, dtype=torch.float64).unbind(1)
    chosen = random.sample(range(size), random.randint(1, size))
    level = coupling.tilted_cdf(s, delta, log_p)
    assert torch.equal(level[chosen], coupling.tilted_cdf(s[chosen], delta[chosen], log_p[chosen]))
    for function, taken in (
        (coupling.acceptance, (delta, log_p)),
        (coupling.residual, (level, delta, log_p)),
    ):
        assert torch.equal(function(*taken)[chosen], function(*(value[chosen] for value in taken)))
