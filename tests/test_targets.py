"""Each transition formula against a derivation that shares nothing with the library's."""

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import integrate

from foresample.targets import GaussianMixture, flow, langevin, vp

f64 = torch.float64
KINDS = ("x0", "eps", "v")
few = settings(derandomize=True, deadline=None, max_examples=60)

# DDPM's own schedule, from data to noise; chains run on any part of it, from noise to data.
LINEAR = torch.cumprod(1 - torch.linspace(1e-4, 0.02, 1000, dtype=f64), 0)
alpha_bars = st.lists(st.integers(0, 999), min_size=2, max_size=12, unique=True).map(
    lambda index: LINEAR[sorted(index, reverse=True)]
)
levels = st.lists(st.integers(1, 999), min_size=2, max_size=12, unique=True).map(
    lambda index: torch.tensor(sorted(index, reverse=True), dtype=f64) / 1000
)


def unused(x, time, row):
    raise AssertionError("a transition's mean must not call the network")


def every_step(target):
    return torch.arange(len(target.std))


def weights(target):
    """The mean is A x + B prediction: (A, B), found by asking."""
    step = every_step(target)
    one, zero = torch.ones(len(step), 1, dtype=f64), torch.zeros(len(step), 1, dtype=f64)
    return target.mean(one, zero, step).squeeze(1), target.mean(zero, one, step).squeeze(1)


def states(steps, size=3, seed=0):
    return torch.randn(steps, size, dtype=f64, generator=torch.Generator().manual_seed(seed))


# --- variance preserving ---


@few
@given(alpha_bars, st.integers(0, 100))
def test_ddpm_is_bayes_rule_for_the_forward_process(alpha_bar, seed):
    target = vp(unused, alpha_bar, (3,), predicts="x0", dtype=f64)
    x, x0 = states(len(alpha_bar), seed=seed), states(len(alpha_bar), seed=seed + 1000)
    mean = target.mean(x, x0, every_step(target))
    for k in range(len(alpha_bar) - 1):
        noisy, cleaner = alpha_bar[k].item(), alpha_bar[k + 1].item()
        # q(x_s | x_t, x0) ∝ q(x_t | x_s) q(x_s | x0): as functions of x_s, two Gaussians. Precisions add.
        shrink = noisy / cleaner
        precision_likelihood, at_likelihood = shrink / (1 - shrink), x[k] / math.sqrt(shrink)
        precision_prior, at_prior = 1 / (1 - cleaner), math.sqrt(cleaner) * x0[k]
        precision = precision_likelihood + precision_prior
        expected = (precision_likelihood * at_likelihood + precision_prior * at_prior) / precision
        torch.testing.assert_close(mean[k], expected, rtol=1e-9, atol=1e-11)
        assert target.std[k].item() == pytest.approx(precision**-0.5, rel=1e-9)
    torch.testing.assert_close(mean[-1], x0[-1])  # the last transition goes to the denoised estimate
    assert target.std[-1] == 0


@few
@given(alpha_bars, st.floats(0.01, 1))
def test_ddim_keeps_the_marginals_of_the_forward_process(alpha_bar, eta):
    target = vp(unused, alpha_bar, (1,), eta=eta, predicts="x0", dtype=f64)
    on_state, on_x0 = weights(target)
    to = torch.cat([alpha_bar[1:], torch.ones(1, dtype=f64)])
    # x_t ~ N(√ᾱ_t x0, 1 − ᾱ_t) goes to N(√ᾱ_s x0, 1 − ᾱ_s).
    torch.testing.assert_close(on_state * alpha_bar.sqrt() + on_x0, to.sqrt())
    torch.testing.assert_close(on_state**2 * (1 - alpha_bar) + target.std**2, 1 - to, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(target.std, eta * vp(unused, alpha_bar, (1,), dtype=f64).std)


# --- flow ---


@few
@given(levels, st.floats(0.01, 2), st.booleans(), st.integers(0, 100))
def test_flow_is_euler_maruyama_on_the_churned_flow(sigmas, churn, from_noise, seed):
    if from_noise:
        sigmas = torch.cat([torch.ones(1, dtype=f64), sigmas])
    target = flow(unused, sigmas, (3,), churn=churn, dtype=f64)
    x, v = states(len(sigmas), seed=seed), states(len(sigmas), seed=seed + 1000)
    mean = target.mean(x, v, every_step(target))
    grid = [*sigmas.tolist(), 0.0]
    for k, (s, to) in enumerate(itertools.pairwise(grid)):
        dt = to - s
        if s == 1 or to == 0:
            drift, noise = v[k], 0.0
        else:
            g = math.sqrt(2 * s / (1 - s))
            score = -(x[k] + (1 - s) * v[k]) / s
            drift = v[k] - 0.5 * churn**2 * g**2 * score
            noise = churn * g * math.sqrt(-dt)
        torch.testing.assert_close(mean[k], x[k] + dt * drift, rtol=1e-9, atol=1e-11)
        assert target.std[k].item() == pytest.approx(noise, rel=1e-12)


def test_flow_score_and_velocity_belong_to_one_interpolant():
    # What the churn formula assumes, on data that is one point: x = (1 − σ) x0 + σ ξ has score −ξ/σ.
    s, (x0, xi) = 0.3, states(2)
    x = (1 - s) * x0 + s * xi
    v = (x - x0) / s
    torch.testing.assert_close(v, xi - x0)
    torch.testing.assert_close(-(x + (1 - s) * v) / s, -xi / s)


# --- langevin ---


def test_langevin_follows_the_score():
    sizes = torch.tensor([0.1, 0.02, 0.3], dtype=f64)
    x, score = states(3), states(3, seed=1)
    target = langevin(unused, (3,), step_size=sizes, dtype=f64)
    mean = target.mean(x, score, torch.arange(3))
    for k, h in enumerate((0.1, 0.02, 0.3)):
        torch.testing.assert_close(mean[k], x[k] + h * score[k])
        assert target.std[k].item() == pytest.approx(math.sqrt(2 * h))
    torch.testing.assert_close(langevin(unused, (3,), step_size=0.02, steps=4).std, torch.full((4,), 0.2))


def test_langevin_keeps_a_gaussian_up_to_its_step_size():
    # On N(0, 1) the chain's stationary variance is 1/(1 − h/2), from A² V + std² = V.
    h = 0.1
    target = langevin(lambda x, step, row: -x, (1,), step_size=h, steps=1, dtype=f64)
    x = torch.ones(1, 1, dtype=f64)
    step = torch.zeros(1, dtype=torch.int64)
    slope = target.mean(x, target.predict(x, step, step), step).item()
    assert target.std.item() ** 2 / (1 - slope**2) == pytest.approx(1 / (1 - h / 2))


# --- what the network predicts, what drafters reuse ---


def denoised(x):
    """Some denoised estimate, beyond ±0.5 at times."""
    return torch.sin(3 * x) + 0.2 * x


def network(kind, process, squash=None):
    """A network that returns `kind`, by the definitions of eps and v."""

    def call(x, level, row):
        level = level.view(-1, 1)
        alpha, sigma = (level.sqrt(), (1 - level).sqrt()) if process is vp else (1 - level, level)
        x0 = denoised(x) if squash is None else denoised(x).clamp(-squash, squash)
        xi = (x - alpha * x0) / sigma
        return {"x0": x0, "eps": xi, "v": alpha * xi - sigma * x0 if process is vp else xi - x0}[kind]

    return call


CHAINS = {
    vp: (LINEAR[[900, 500, 100, 10]], {}),
    flow: (torch.tensor([0.9, 0.5, 0.2, 0.01], dtype=f64), {"churn": 0.4}),
}


def transition(target, x):
    step = every_step(target)
    return target.mean(x, target.predict(x, step, torch.zeros_like(step)), step)


@pytest.mark.parametrize("process", [vp, flow])
@pytest.mark.parametrize("predicts", KINDS)
@pytest.mark.parametrize("reuse", KINDS)
def test_the_transition_does_not_depend_on_what_is_predicted_or_reused(process, predicts, reuse):
    grid, options = CHAINS[process]

    def chain(predicts, reuse):
        return process(
            network(predicts, process), grid, (3,), predicts=predicts, reuse=reuse, dtype=f64, **options
        )

    x, target = states(len(grid)), chain(predicts, reuse)
    torch.testing.assert_close(transition(target, x), transition(chain("x0", "x0"), x), rtol=1e-9, atol=1e-11)
    assert torch.equal(target.std, chain("x0", "x0").std)
    # And the prediction is the quantity that was asked for.
    step = every_step(target)
    torch.testing.assert_close(target.predict(x, step, step), network(reuse, process)(x, grid, step))


@pytest.mark.parametrize("predicts", KINDS)
@pytest.mark.parametrize("reuse", KINDS)
def test_clip_clamps_the_denoised_estimate(predicts, reuse):
    grid, _ = CHAINS[vp]
    x = states(len(grid))
    assert (denoised(x).abs() > 0.5).any()
    clipped = vp(network(predicts, vp), grid, (3,), predicts=predicts, reuse=reuse, clip=0.5, dtype=f64)
    squashed = vp(network("x0", vp, squash=0.5), grid, (3,), predicts="x0", dtype=f64)
    torch.testing.assert_close(transition(clipped, x), transition(squashed, x), rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("process", [vp, flow])
def test_the_network_is_told_the_time_of_each_row(process):
    grid, options = CHAINS[process]
    heard = []

    def listening(x, time, row):
        heard.append((time.tolist(), row.tolist()))
        return x

    step, row = torch.tensor([2, 0, 3]), torch.tensor([7, 8, 9])
    process(listening, grid, (3,), dtype=f64, **options).predict(states(3), step, row)
    times = torch.tensor([999, 500, 20, 0])
    process(listening, grid, (3,), time=times, dtype=f64, **options).predict(states(3), step, row)
    assert heard == [(grid[step].tolist(), [7, 8, 9]), ([20, 999, 0], [7, 8, 9])]


def test_the_chain_has_the_dtype_it_was_given_whatever_the_network_returns():
    grid, _ = CHAINS[vp]
    target = vp(lambda x, time, row: x.bfloat16(), grid, (3,), dtype=torch.float32)
    x, step = states(4).float(), every_step(target)
    prediction = target.predict(x, step, step)
    assert {target.std.dtype, prediction.dtype, target.mean(x, prediction, step).dtype} == {torch.float32}


# --- the mixture ---


def some_mixture(dim, components=3, seed=0):
    rng = np.random.default_rng(seed)
    weights = rng.uniform(0.2, 1, components)
    parts = rng.normal(size=(components, dim)), rng.uniform(0.1, 0.8, components), weights / weights.sum()
    return GaussianMixture(*(torch.from_numpy(v) for v in parts))


def log_density(mixture, x, alpha, sigma):
    """ln p(x) of α x0 + σ ξ, one component and one dimension after the other."""
    terms = []
    for mean, std, weight in zip(mixture.means, mixture.stds, mixture.weights, strict=True):
        component = torch.distributions.Normal(alpha * mean, ((alpha * std) ** 2 + sigma**2).sqrt())
        terms.append(weight.log() + component.log_prob(x).sum())
    return torch.stack(terms).logsumexp(0)


def gradient(f, x):
    x = x.clone().requires_grad_()
    return torch.autograd.grad(f(x), x)[0]


@pytest.mark.parametrize(("alpha", "sigma"), [(0.7, 0.3), (0.1, 0.99), (0.99, 0.05), (0.5, 1.5)])
def test_mixture_denoiser_is_the_posterior_mean(alpha, sigma):
    mixture = some_mixture(1)
    means, stds, weights = mixture.means[:, 0].numpy(), mixture.stds.numpy(), mixture.weights.numpy()
    level = torch.tensor([alpha], dtype=f64), torch.tensor([sigma], dtype=f64)
    for x in (-1.5, -0.2, 0.0, 0.8, 2.0):

        def joint(x0, x=x):
            prior = (weights / stds * np.exp(-0.5 * ((x0 - means) / stds) ** 2)).sum()
            return prior * math.exp(-0.5 * ((x - alpha * x0) / sigma) ** 2)

        options = {"limit": 400, "epsabs": 1e-14, "epsrel": 1e-12, "points": [x / alpha, *means]}
        bounds = min(-12, x / alpha - 1), max(12, x / alpha + 1)
        mass, _ = integrate.quad(joint, *bounds, **options)
        moment, _ = integrate.quad(lambda x0, joint=joint: x0 * joint(x0), *bounds, **options)
        found = mixture.denoise(torch.tensor([[x]], dtype=f64), *level).item()
        assert found == pytest.approx(moment / mass, rel=1e-8, abs=1e-8)


@few
@given(st.integers(1, 6), st.integers(1, 4), st.floats(0.05, 1), st.floats(0.05, 2), st.integers(0, 100))
def test_mixture_denoiser_obeys_tweedie(dim, components, alpha, sigma, seed):
    # E[x0 | x] = (x + σ² ∇ ln p(x))/α
    mixture = some_mixture(dim, components, seed)
    x = states(1, dim, seed)
    slope = gradient(lambda v: log_density(mixture, v[0], alpha, sigma), x)
    level = torch.tensor([alpha], dtype=f64), torch.tensor([sigma], dtype=f64)
    expected = (x + sigma**2 * slope) / alpha
    torch.testing.assert_close(mixture.denoise(x, *level), expected, rtol=1e-7, atol=1e-7)


@few
@given(st.integers(1, 6), st.integers(1, 4), st.integers(0, 100))
def test_mixture_score_is_the_gradient_of_its_log_density(dim, components, seed):
    mixture = some_mixture(dim, components, seed)
    x = states(1, dim, seed)
    slope = gradient(lambda v: log_density(mixture, v[0], 1.0, 0.0), x)
    torch.testing.assert_close(mixture.score(x), slope)


@few
@given(st.data(), st.integers(1, 30), st.sampled_from([1, 2, 3, 17, 64, 500]), st.integers(1, 5))
def test_mixture_is_the_same_bits_in_any_batch(data, batch, dim, components):
    mixture, x = GaussianMixture.of_draft_trees(dim, components), states(batch, dim)
    alpha = torch.linspace(0.01, 0.99, batch, dtype=f64)
    sigma = (1 - alpha**2).sqrt()
    chosen = data.draw(st.lists(st.integers(0, batch - 1), min_size=1, max_size=batch))
    whole = mixture.denoise(x, alpha, sigma)
    assert torch.equal(whole[chosen], mixture.denoise(x[chosen], alpha[chosen], sigma[chosen]))
    assert torch.equal(mixture.score(x)[chosen], mixture.score(x[chosen]))


def test_mixture_of_the_draft_trees_is_drawn_means_first():
    rng = np.random.default_rng(20260714)
    means = rng.uniform(-2.0, 2.0, size=(5, 500))
    stds = rng.uniform(0.10, 0.25, size=5)
    mixture = GaussianMixture.of_draft_trees(500)
    assert np.array_equal(mixture.means.numpy(), means)
    assert np.array_equal(mixture.stds.numpy(), stds)
    assert mixture.weights.tolist() == [0.2] * 5


def test_mixture_flow_is_the_chain_of_the_draft_tree_papers():
    mixture = some_mixture(2)
    target = mixture.flow(30, 0.1)
    x, step = states(30, 2), torch.arange(30)
    assert ((target.std == 0).nonzero().flatten() == torch.tensor([0, 29])).all()  # 28 stochastic steps
    sigma = torch.linspace(1, 0.001, 30, dtype=f64)
    velocity = (x - mixture.denoise(x, 1 - sigma, sigma)) / sigma.unsqueeze(1)
    torch.testing.assert_close(target.predict(x, step, step), velocity)
    plain = flow(unused, sigma, (2,), churn=0.1, dtype=f64)
    torch.testing.assert_close(target.mean(x, velocity, step), plain.mean(x, velocity, step))


def test_mixture_vp_and_langevin_use_its_denoiser_and_its_score():
    mixture, grid = some_mixture(2), CHAINS[vp][0]
    x, step = states(4, 2), torch.arange(4)
    target = mixture.vp(grid, eta=0.5)
    torch.testing.assert_close(
        target.predict(x, step, step), mixture.denoise(x, grid.sqrt(), (1 - grid).sqrt())
    )
    assert torch.equal(target.std, vp(unused, grid, (2,), eta=0.5, dtype=f64).std)
    assert torch.equal(mixture.langevin(4, 0.01).predict(x, step, step), mixture.score(x))


# --- refusals ---


@pytest.mark.parametrize(
    "alpha_bar",
    [[0.9, 0.5, 0.1], [0.1, 0.1, 0.5], [0.0, 0.5], [0.5, 1.0], [-0.1, 0.5], [0.1, math.nan], [[0.1, 0.5]]],
)
def test_vp_refuses_an_alpha_bar_that_does_not_rise_within_zero_and_one(alpha_bar):
    with pytest.raises(ValueError, match="flip the schedule"):
        vp(unused, torch.tensor(alpha_bar), (2,))


@pytest.mark.parametrize("eta", [0, -0.5, 1.01, math.nan])
def test_vp_refuses_an_eta_outside_zero_to_one(eta):
    with pytest.raises(ValueError, match="eta must be in"):
        vp(unused, LINEAR[[900, 100]], (2,), eta=eta)


@pytest.mark.parametrize(
    "sigmas", [[0.1, 0.5], [0.5, 0.5], [1.0, 0.5, 0.0], [1.1, 0.5], [math.nan, 0.5], [[0.5, 0.1]]]
)
def test_flow_refuses_sigmas_that_do_not_fall_within_zero_and_one(sigmas):
    with pytest.raises(ValueError, match="without the final 0"):
        flow(unused, torch.tensor(sigmas), (2,), churn=0.1)


@pytest.mark.parametrize("churn", [0, -1, math.nan])
def test_flow_refuses_a_chain_without_noise(churn):
    with pytest.raises(ValueError, match="churn must be positive"):
        flow(unused, torch.tensor([0.9, 0.5]), (2,), churn=churn)


@pytest.mark.parametrize(
    ("options", "remedy"),
    [
        ({"step_size": 0.0, "steps": 3}, "positive and finite"),
        ({"step_size": -0.1, "steps": 3}, "positive and finite"),
        ({"step_size": math.nan, "steps": 3}, "positive and finite"),
        ({"step_size": math.inf, "steps": 3}, "positive and finite"),
        ({"step_size": torch.tensor([0.1, 0.0])}, "positive and finite"),
        ({"step_size": 0.1}, "needs steps=N"),
        ({"step_size": 0.1, "steps": 0}, "needs steps=N"),
        ({"step_size": torch.tensor([0.1, 0.2]), "steps": 3}, "leave steps out"),
    ],
)
def test_langevin_refuses_step_sizes_that_make_no_chain(options, remedy):
    with pytest.raises(ValueError, match=remedy):
        langevin(unused, (2,), **options)


@pytest.mark.parametrize("process", [vp, flow])
@pytest.mark.parametrize("argument", ["predicts", "reuse"])
def test_an_unknown_kind_of_prediction_is_refused_with_the_known_ones(process, argument):
    grid, options = CHAINS[process]
    with pytest.raises(ValueError, match="one of x0, eps, v, not 'epsilon'"):
        process(unused, grid, (2,), **{argument: "epsilon"}, **options)


def test_an_eps_network_is_refused_at_pure_noise():
    with pytest.raises(ValueError, match="start the grid below it, or use v"):
        flow(unused, torch.tensor([1.0, 0.5]), (2,), churn=0.1, predicts="eps")
