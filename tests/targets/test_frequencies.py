"""Pictures by their frequencies: the same distribution when turned back, and priors with a response for each band."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

import foresample as fs
from foresample.chains import Chain
from foresample.checks.kolmogorov import ks_two_sample
from foresample.contracts import affine_chain
from foresample.targets import ChainTarget, FrequencyTarget, in_frequencies, replicated
from foresample.targets.frequencies import bands, cosines
from tests.law.test_law import SHARES, SUITE_LEVEL
from tests.support.small_chains import CHAINS, ddpm, multistep, turned, wells


def picture(base: ChainTarget, shape: tuple[int, ...]) -> ChainTarget:
    """A chain whose states are pictures, however flat."""

    def network(x: Tensor, time: Tensor, row: Tensor) -> Tensor:
        return base.network(x.flatten(1), time, row).view_as(x)

    return replace(base, shape=torch.Size(shape), network=network)


def smooth(steps: int = 40) -> ChainTarget:
    """DDPM of Gaussian pictures whose power falls with the frequency, denoised by Wiener's filter; a little bent."""
    shape = torch.Size([3, 8, 8])
    alpha_bar = torch.linspace(0.01, 0.99, steps, dtype=torch.float64)
    power = 4 / (1 + bands(shape).double().view(shape))
    turn = [cosines(n) for n in shape]

    def network(x: Tensor, time: Tensor, row: Tensor) -> Tensor:
        kept = time.view(-1, 1, 1, 1)
        share = kept.sqrt() * power / (kept * power + 1 - kept)
        waves = torch.einsum("ia,jb,kc,nabc->nijk", *turn, x)
        clean = torch.einsum("ia,jb,kc,nijk->nabc", *turn, share * waves)
        return clean + 0.1 * torch.sin(3 * clean)

    return fs.targets.vp(network, alpha_bar, shape, predicts="x0", dtype=torch.float64)


@pytest.mark.parametrize("size", [1, 2, 5, 32])
def test_cosines_are_orthonormal_and_go_from_slow_to_fast(size: int) -> None:
    waves = cosines(size)
    torch.testing.assert_close(waves @ waves.T, torch.eye(size, dtype=torch.float64))
    changes = (waves.sign().diff(dim=1) != 0).sum(1)
    assert changes.tolist() == list(range(size))


def test_bands_are_rings_of_like_frequency_in_each_mixture_of_channels() -> None:
    ring = bands(torch.Size([2, 8, 4])).view(2, 8, 4)
    assert not set(ring[0].flatten().tolist()) & set(ring[1].flatten().tolist())
    assert (ring[0, :, 0].diff() >= 0).all()
    assert (ring[0, 0].diff() >= 0).all()
    assert torch.equal(ring[0, ::2, 0], ring[0, 0])  # as many waves to the pixel, in a picture twice as high
    assert ring.unique().tolist() == list(range(int(ring.max()) + 1))
    assert (ring == ring[0, 0, 0]).sum() == 1  # the mean


@pytest.mark.parametrize("chain", CHAINS)
def test_the_chain_in_frequencies_is_the_turned_chain(chain: str) -> None:
    base = picture(CHAINS[chain](), (1, 1, 2))
    target = in_frequencies(base)
    assert affine_chain(target) is affine_chain(base)  # kernels serve it as they serve the other
    x, prediction = torch.randn(
        2, 9, *base.shape, dtype=base.std.dtype, generator=torch.Generator().manual_seed(1)
    )
    step, row = torch.arange(9), torch.arange(9)
    history = (prediction.flip(0),) if base.multistep else ()

    def close(turned: Tensor, plain: Tensor) -> None:
        torch.testing.assert_close(target.pictures(turned), plain)
        assert not torch.allclose(turned, plain)

    turned_history = tuple(target._turned(v) for v in history)
    row = torch.arange(len(x))
    close(target.start(target._turned(x), row), base.start(x, row))
    close(target.predict(target._turned(x), step, row), base.predict(x, step, row))
    close(
        target.mean(target._turned(x), target._turned(prediction), step, *turned_history),
        base.mean(x, prediction, step, *history),
    )


def smallest_p_value(target: FrequencyTarget, base: ChainTarget, *, back: bool = True) -> float:
    drafter = fs.Replay(prior=fs.fit_prior(target, window=6, pilots=40))
    samples = fs.sample(target, 20_000, window=6, seed=3, drafter=drafter).samples
    ours, theirs = target.pictures(samples) if back else samples, fs.sequential(base, 20_000, seed=4).samples
    along = torch.randn(2, 8, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    pairs = zip((ours.flatten(1) @ along).T.numpy(), (theirs.flatten(1) @ along).T.numpy(), strict=True)
    return 8 * min(ks_two_sample(one, two) for one, two in pairs)


@pytest.mark.law
@pytest.mark.parametrize("chain", [ddpm, multistep, wells], ids=lambda chain: chain.__name__)
def test_samples_turned_back_have_the_law(chain: object) -> None:
    base = picture(chain(), (1, 1, 2))  # type: ignore[operator]
    assert smallest_p_value(in_frequencies(base), base) > SUITE_LEVEL / SHARES


@pytest.mark.law
def test_samples_not_turned_back_are_caught() -> None:
    base = picture(ddpm(), (1, 1, 2))
    assert smallest_p_value(in_frequencies(base), base, back=False) < SUITE_LEVEL / SHARES


@pytest.mark.law
def test_a_basis_that_is_not_orthonormal_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("foresample.targets.frequencies.cosines", lambda size: 1.05 * cosines(size))
    base = picture(ddpm(), (1, 1, 2))
    assert smallest_p_value(in_frequencies(base), base) < SUITE_LEVEL / SHARES


def test_the_response_of_a_filter_is_found_by_bands() -> None:
    """A network that weighs frequencies: the fit is exact and every pilot gives the same result."""
    shape, one = torch.Size([2, 4, 4]), torch.ones(5, dtype=torch.float64)
    weights = 1 + bands(shape).double() / 10
    turn = torch.kron(torch.kron(cosines(2), cosines(4)), cosines(4))
    filtered = lambda x, step, row: (x.flatten(1) @ turn.T * weights @ turn).view_as(x)  # noqa: E731
    # A prediction that has no weight: states only walk, so that its change is its answer to the noise.
    walk = ChainTarget(Chain(one, one, 0 * one), shape, filtered)
    prior = fs.fit_prior(in_frequencies(walk), window=3, pilots=2)
    assert prior.slope is None
    assert prior.jacobian is not None
    torch.testing.assert_close(prior.jacobian[1:], weights.expand(4, 1, 32))
    assert not prior.jacobian[0].any()


def test_replicas_have_the_bands_of_the_first_one() -> None:
    waves = in_frequencies(smooth(6))
    several = replicated([waves, waves])
    priors = [fs.fit_prior(target, window=3, pilots=4) for target in (waves, several)]
    torch.testing.assert_close(priors[0].jacobian, priors[1].jacobian)
    drafter = fs.Replay(prior=priors[0])
    one, two = (fs.sample(target, 2, window=3, drafter=drafter).samples for target in (waves, several))
    torch.testing.assert_close(one, two)


def test_bands_save_calls_where_frequencies_matter() -> None:
    base = smooth()
    calls = []
    for target in (base, in_frequencies(base)):
        drafter = fs.Replay(prior=fs.fit_prior(target, window=16, pilots=24))
        calls.append(fs.sample(target, 24, window=16, seed=1, drafter=drafter).report.calls_mean)
    assert calls[1] < 0.9 * calls[0]


def test_refusals() -> None:
    with pytest.raises(
        ValueError, match=r"takes pictures \[channels, height, width\], not states of shape \(2,\)"
    ):
        in_frequencies(ddpm())
    flat = turned()  # whose mean depends on extra noise
    noisy = replace(flat, base=picture(flat.base, (1, 1, 2)))
    with pytest.raises(ValueError, match="not known to be affine in state and prediction"):
        in_frequencies(noisy)
    small, large = picture(ddpm(), (1, 1, 2)), smooth(6)  # with a matrix, and without
    for base in (small, large):
        waves = in_frequencies(base)
        for fitted, sampled in ((base, waves), (waves, base)):
            drafter = fs.Replay(prior=fs.fit_prior(fitted, window=3, pilots=4))
            with pytest.raises(ValueError, match="in this basis"):
                fs.sample(sampled, 2, window=3, drafter=drafter)
    with pytest.raises(TypeError, match="is not a target"):
        in_frequencies(3)  # type: ignore[arg-type]


def test_autocast_is_for_the_network_only() -> None:
    base = fs.targets.vp(lambda x, time, row: 0.5 * x, torch.linspace(0.01, 0.99, 20), (1, 4, 4))
    plain = fs.sample(in_frequencies(base), 4, window=6).samples
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(fs.sample(in_frequencies(base), 4, window=6).samples, plain)
