"""Noise is a pure function of its seed and its purpose, with the right distribution."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from foresample.core import noise

ONES = 0xFFFFFFFF
FALSE_ALARM = 1e-6  # of each statistical test; seeds are fixed, so it was paid once

SEEDS = noise.seeds_of(20260714, 100)


def words(*values):
    return tuple(torch.tensor(v) for v in values)


def normals(seed, size=1000, *, step=0, draw=0, stream=noise.STEP, dtype=torch.float64):
    """Rows of noise for these seeds, at one step and draw or one each."""
    full = torch.zeros_like(seed)
    return noise.normal(seed, torch.Size([size]), dtype, stream=stream, step=full + step, draw=full + draw)


def pvalue_of_correlation(a, b):
    return stats.pearsonr(a.flatten().numpy(), b.flatten().numpy()).pvalue


@pytest.mark.parametrize(
    ("counter", "key", "answer"),
    [
        ((0, 0, 0, 0), 0, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((ONES, ONES, ONES, ONES), -1, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),  # −1 is 64 ones
        (  # digits of π
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            0x299F31D0_A4093822,
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_gives_the_known_answers_of_its_authors(counter, key, answer):
    assert tuple(int(w) for w in noise._philox(words(*counter), torch.tensor(key))) == answer


def test_every_bit_of_a_seed_counts():
    seeds = torch.tensor([0, *(1 << i for i in range(63))])
    assert len(normals(seeds, 1).unique()) == 64


def test_philox_keeps_to_32_bit_words_for_any_counter_and_key():
    counters = torch.tensor(list(itertools.product([0, 1, 2**31, ONES], repeat=4))).unbind(1)
    assert len(counters) == 4
    for key in (0, 1, 2**32, 2**63 - 1):
        for word in noise._philox(counters, torch.tensor(key)):
            assert ((word >= 0) & (word <= ONES)).all()
            assert len(word.unique()) > 0.99 * len(word)  # each is 256 numbers of a bijection


def test_the_largest_words_make_the_float64_just_below_one():
    # An int64 tensor times a python float is float32, where this number rounds to 1, and Φ⁻¹ to infinity.
    top = noise._unit(*words(ONES, ONES))
    assert top.dtype == torch.float64
    assert top.item() == 1 - 2**-53
    assert torch.isfinite(torch.log1p(-top))
    assert noise._unit(*words(0, 0)).item() == 0


def test_every_one_of_the_53_bits_counts():
    # Bits 5…31 of the high word and 6…31 of the low one are the digits of the number.
    digits = [noise._unit(*words(1 << i, 0)).item() for i in range(31, 4, -1)]
    digits += [noise._unit(*words(0, 1 << i)).item() for i in range(31, 5, -1)]
    assert digits == [2.0**-k for k in range(1, 54)]


def test_uniforms_are_multiples_of_two_to_the_minus_53_below_one():
    u = noise.uniform(SEEDS, 1000, round=torch.arange(100))
    assert u.dtype == torch.float64
    assert ((u >= 0) & (u < 1)).all()
    multiples = u * 2**53
    assert torch.equal(multiples, multiples.round())
    assert 0.49 < (multiples.long() % 2).double().mean() < 0.51  # the last bit is random: none is missing


def test_uniforms_are_uniform():
    u = noise.uniform(SEEDS, 1000, round=torch.arange(100)).flatten().numpy()
    assert stats.kstest(u, "uniform").pvalue > FALSE_ALARM


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("stream", [noise.START, noise.STEP])
def test_normals_are_standard_normal(dtype, stream):
    z = normals(SEEDS, step=torch.arange(100), stream=stream, dtype=dtype)
    assert z.dtype == dtype
    assert torch.isfinite(z).all()
    assert stats.kstest(z.double().flatten().numpy(), "norm").pvalue > FALSE_ALARM


def test_the_two_normals_of_a_pair_are_independent():
    # Box–Muller makes elements i and i + size/2 of one radius and one angle.
    cosine, sine = normals(SEEDS).chunk(2, dim=1)
    square = (cosine**2 + sine**2).flatten().numpy()
    assert stats.kstest(square, stats.chi2(2).cdf).pvalue > FALSE_ALARM
    angle = torch.atan2(sine, cosine).flatten().numpy()
    assert stats.kstest(angle, stats.uniform(-torch.pi, 2 * torch.pi).cdf).pvalue > FALSE_ALARM
    assert stats.pearsonr(square, abs(angle)).pvalue > FALSE_ALARM


def test_another_seed_step_draw_or_stream_is_other_noise():
    seed, other = SEEDS[:50], SEEDS[50:]
    mine = normals(seed)
    others = {
        "seed": normals(other),
        "next seed": normals(seed + 1),
        "high word of the seed": normals(seed ^ (1 << 40)),
        "step": normals(seed, step=1),
        "draw": normals(seed, draw=1),
        "stream": normals(seed, stream=noise.START),
        "element": mine.roll(1, dims=1),
        "row": mine.roll(1, dims=0),
    }
    for name, theirs in others.items():
        assert not (mine == theirs).any(), name
        assert pvalue_of_correlation(mine, theirs) > FALSE_ALARM, name
        assert pvalue_of_correlation(mine**2, theirs**2) > FALSE_ALARM, name


def test_step_draw_and_stream_do_not_stand_in_for_one_another():
    # Counters that agree up to order are different counters.
    seed = SEEDS[:1]
    counters = itertools.product((noise.START, noise.STEP), range(4), range(4))
    rows = [normals(seed, 8, stream=s, step=k, draw=d) for s, k, d in counters]
    assert len(torch.cat(rows).unique()) == 32 * 8


def test_every_number_has_the_counter_of_the_table():
    """Kernels, other versions and later calls then draw the same numbers."""
    seed, step = SEEDS[:3], torch.tensor([0, 5, 2**20])

    def words(key, element, step, draw, stream):
        counter = torch.broadcast_tensors(element, step, torch.tensor(draw), torch.tensor(stream))
        return noise._philox(counter, key)

    each = seed.unsqueeze(1), torch.arange(4), step.unsqueeze(1)
    high, low, *_ = words(*each, 0, noise.TEST)
    assert torch.equal(noise.uniform(seed, 4, round=step), noise._unit(high, low))
    for stream, draw in itertools.product((noise.START, noise.STEP, noise.EXTRA), (0, 3)):
        high, low, *angle = words(*each, draw, stream)
        radius, angle = (-2 * (-noise._unit(high, low)).log1p()).sqrt(), 2 * torch.pi * noise._unit(*angle)
        z = torch.cat([radius * angle.cos(), radius * angle.sin()], 1)
        torch.testing.assert_close(normals(seed, 8, step=step, draw=draw, stream=stream), z, rtol=0, atol=1e-12)
    high, low, *_ = words(torch.tensor(11), torch.tensor(0), torch.arange(7, 10), 0, noise.SEED)
    assert noise.seeds_of(11, 3, 7).tolist() == ((high % 2**31) * 2**32 + low).tolist()


def test_uniforms_differ_between_rounds_seeds_and_elements_and_from_the_normals():
    u = noise.uniform(SEEDS[:2].repeat_interleave(20), 50, round=torch.arange(20).repeat(2))
    assert len(u.unique()) == u.numel()
    tests, steps = noise.uniform(SEEDS, 500, round=SEEDS * 0), normals(SEEDS)[:, :500]
    assert pvalue_of_correlation(tests, steps) > FALSE_ALARM
    assert pvalue_of_correlation(tests, steps**2) > FALSE_ALARM


@settings(derandomize=True, deadline=None, max_examples=60)
@given(st.data(), st.integers(1, 33), st.integers(1, 40), st.sampled_from([torch.float32, torch.float64]))
def test_noise_is_the_same_bits_in_any_batch(data, batch, size, dtype):
    seed, step, draw = SEEDS[:batch], torch.arange(batch) % 7, torch.arange(batch) % 3
    chosen = data.draw(st.lists(st.integers(0, batch - 1), min_size=1, max_size=batch))
    whole = noise.normal(seed, torch.Size([size]), dtype, step=step, draw=draw)
    part = noise.normal(seed[chosen], torch.Size([size]), dtype, step=step[chosen], draw=draw[chosen])
    assert torch.equal(whole[chosen], part)
    tests = noise.uniform(seed, size, round=step)
    assert torch.equal(tests[chosen], noise.uniform(seed[chosen], size, round=step[chosen]))
    # A wider window asks for more uniforms of a round; the first ones stay.
    assert torch.equal(tests, noise.uniform(seed, size + 3, round=step)[:, :size])


@pytest.mark.parametrize("shape", [(1,), (2,), (3,), (7,), (3, 5), (1, 3, 3), (0,), ()])
def test_a_state_of_any_size_gets_its_noise(shape):
    zero = torch.zeros_like(SEEDS)
    z = noise.normal(SEEDS, torch.Size(shape), torch.float64, step=zero, draw=zero)
    assert z.shape == (100, *shape)
    assert len(z.unique()) == z.numel()


def test_float32_noise_is_the_float64_noise_rounded():
    assert torch.equal(normals(SEEDS, 33, dtype=torch.float32), normals(SEEDS, 33).float())


def test_seeds_of_a_run_are_distinct_and_do_not_depend_on_their_number():
    seeds = noise.seeds_of(0, 10_000)
    assert len(seeds.unique()) == 10_000
    assert (seeds >= 0).all()
    assert torch.equal(noise.seeds_of(0, 10), seeds[:10])
    assert torch.equal(noise.seeds_of(0, 10, 990), seeds[990:1000])
    # Runs with neighbouring seeds share no sample.
    assert (
        len(torch.cat([seeds, noise.seeds_of(1, 10_000), noise.seeds_of(2**63 - 1, 10_000)]).unique()) == 30_000
    )


@pytest.mark.parametrize("seed", [-1, 2**63, 1.0, "1", None, True])
def test_invalid_seeds_are_refused(seed):
    with pytest.raises(ValueError, match=r"must be a whole number from 0 to 2\*\*63 - 1"):
        noise.seeds_of(seed, 3)


@pytest.mark.parametrize("bad", [-1, 2**63])
def test_the_one_bad_seed_of_a_list_is_named(bad):
    with pytest.raises(ValueError, match=f"not {bad}"):
        noise.as_seeds([1, bad, 2])


def test_the_one_bad_seed_of_a_tensor_is_named():
    with pytest.raises(ValueError, match="-1"):
        noise.as_seeds(torch.tensor([1, -1, 2]))


def test_seeds_may_be_a_list_or_a_tensor():
    assert noise.as_seeds([0, 5, 2**63 - 1]).tolist() == [0, 5, 2**63 - 1]
    assert torch.equal(noise.as_seeds(SEEDS), SEEDS)


def test_seeds_of_any_integer_type_become_64_bit_integers() -> None:
    for some in ([3, 5], torch.tensor([3, 5]), torch.tensor([3, 5], dtype=torch.int32)):
        seeds = noise.as_seeds(some)
        assert seeds.dtype == torch.int64
        assert seeds.tolist() == [3, 5]
    with pytest.raises(ValueError, match="a seed must be a whole number"):
        noise.as_seeds(torch.tensor([[3, 5], [7, 9]]))
