"""sbi's posteriors: their own loop with the same noise, the distribution, whose loop is faster, refusals."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

import foresample as fs
from foresample.checks.kolmogorov import ks_two_sample
from foresample.integrations.packages import sbi as ours_of_sbi
from foresample.integrations.packages.loop import PackageLoop
from foresample.integrations.packages.sbi import SbiLoop, sde_steps
from tests.support.posteriors import Net, box, posterior, sbi

X = torch.tensor([[0.4, -0.6]])
SEVERAL = torch.tensor([[0.4, -0.6], [-1.0, 1.0], [2.0, 0.0]])
LANGEVIN = {"corrector": "langevin"}
GUIDED = {
    "guidance_method": "interval",
    "guidance_params": {"lower_bound": -0.3, "upper_bound": 0.9},
}


def drawn(one: Any, count: int, x: Tensor = X, reject: bool = False, steps: int = 60, **options: Any) -> Tensor:
    """Samples for one observation, or for each of several, [count, …]."""
    options |= {"steps": steps, "show_progress_bars": False, "reject_outside_prior": reject}
    if len(x) > 1:
        return one.sample_batched(torch.Size([count]), x, **options)
    return one.sample((count,), x=x, **options)


# ------------------------------------------------------------------ its own loop

CASES: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("VE", {}, {}),
    ("VE", {}, {"steps": 500}),
    ("VE", {"solve_schedule": "power_law", "sigma_min": 1e-2}, {}),
    ("VE", {}, LANGEVIN),
    ("VE", {"sigma_min": 1e-2}, LANGEVIN),
    ("VP", {}, {}),
    ("VP", {}, {"x": SEVERAL}),
    ("VP", {}, {"predictor_params": {"eta": 0.5}}),
    ("VP", {}, LANGEVIN | {"corrector_params": {"step_size": 1e-3, "num_steps": 2}}),
    ("VP", {}, {"ts": torch.linspace(1, 0.1, 30) ** 2}),
    ("VP", {}, GUIDED),
    ("VP", {}, {"guidance_method": "affine_classifier_free", "guidance_params": {"likelihood_scale": 2.0}}),
    ("VP", {"beta_min": 0.1, "beta_max": 20.0}, LANGEVIN | {"x": SEVERAL}),
    ("sub-VP", {}, {}),
    ("sub-VP", {}, LANGEVIN),
    ("sub-VP", {"t_min": 1e-2}, LANGEVIN),
]


@pytest.mark.parametrize(
    ("process", "made", "options"), CASES, ids=lambda v: v if isinstance(v, str) else "".join(v)
)
def test_its_loop_with_the_same_noise(process: str, made: dict[str, Any], options: dict[str, Any]) -> None:
    one = posterior(process, made=made)
    numbers: list[Tensor] = []

    def noise(shape: tuple[int, ...]) -> Tensor:
        numbers.append(torch.randn(shape, generator=torch.Generator().manual_seed(len(numbers))))
        return numbers[-1].view(-1, 2)

    def walk(loop: PackageLoop, drawing: Any, window: int) -> Tensor:
        target, row = drawing.target, torch.arange(drawing.count)
        shape = (4, drawing.count // 4, 2)
        x = target.start(noise(shape), row)
        for k, std in enumerate(target.std):
            step = torch.full_like(row, k)
            x = target.mean(x, target.predict(x, step, row), step) + std * noise(shape)
        return x

    with fs.accelerate(one), mock.patch.object(SbiLoop, "_draw", walk):
        ours = drawn(one, 4, **options)
    given = iter(numbers)

    def next_noise(shape: Any, **_: Any) -> Tensor:
        return next(given)

    with mock.patch("torch.randn", next_noise), mock.patch("torch.randn_like", next_noise):
        theirs = drawn(one, 4, **options)
    assert next(given, None) is None
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def test_standardised_parameters_come_back_in_their_own_units() -> None:
    one, plain = (posterior(made={"mean_0": 0.0, "std_0": 1.0}) for _ in range(2))
    estimator = one.vector_field_estimator
    estimator._theta_shift, estimator._theta_scale = torch.tensor([[5.0, 0.0]]), torch.tensor([[2.0, 1.0]])
    estimator._compose_standardization = torch.tensor(True)
    torch.manual_seed(2)
    with fs.accelerate(one, window=6):
        ours = drawn(one, 3)
    torch.manual_seed(2)
    with fs.accelerate(plain, window=6):
        z = drawn(plain, 3)
    torch.testing.assert_close(ours, estimator.from_z(z))
    assert (ours[:, 0] > 2).all()


# ------------------------------------------------------------------ the distribution

MANY = 4000


def law(ours: Tensor, theirs: Tensor) -> float:
    """The smallest p of two-sample tests: both parameters, their sum and their product."""
    views = [(v[..., 0], v[..., 1], v.sum(-1), v.prod(-1)) for v in (ours, theirs)]
    return min(ks_two_sample(a.numpy(), b.numpy()) for a, b in zip(*views, strict=True))


LAWS = [
    ("VE", {"sigma_min": 1e-2}, {}),
    ("VP", {}, {"reject": True}),
    ("VP", {}, LANGEVIN | {"corrector_params": {"step_size": 1e-2, "num_steps": 1}}),
    ("sub-VP", {}, {}),
]


@pytest.mark.law
@pytest.mark.parametrize(("process", "made", "options"), LAWS, ids=["VE", "VP rejected", "corrected", "sub-VP"])
def test_one_line_and_the_distribution_is_its_own(process: str, made: Any, options: dict[str, Any]) -> None:
    one = posterior(process, prior=box(0.8 if "reject" in options else 20.0), made=made)
    torch.manual_seed(0)
    theirs = drawn(one, MANY, **options)
    with fs.accelerate(one, window=6):
        ours = drawn(one, MANY, **options)
        report = one.foresample_report
    assert report.calls_mean < report.steps / 2
    assert law(ours, theirs) > 1e-3 / 16


@pytest.mark.law
def test_each_observation_has_its_own_distribution() -> None:
    one = posterior()
    torch.manual_seed(0)
    theirs = drawn(one, MANY // 2, SEVERAL)
    with fs.accelerate(one, window=6):
        ours = drawn(one, MANY // 2, SEVERAL)
    found = [[law(ours[:, a], theirs[:, b]) for b in range(3)] for a in range(3)]
    assert min(found[a][a] for a in range(3)) > 1e-3 / 12
    assert max(found[a][b] for a in range(3) for b in range(3) if a != b) < 1e-6


def noisier(*given: Any) -> fs.chains.Chain:
    chain = sde_steps(*given)
    return replace(chain, std=1.15 * chain.std)


def noiseless_end(*given: Any) -> fs.chains.Chain:
    chain = sde_steps(*given)
    std = chain.std.clone()
    std[-1] = 0
    return replace(chain, std=std)


@pytest.mark.law
@pytest.mark.parametrize(
    ("broken", "steps"), [(noisier, 40), (noiseless_end, 5)], ids=["15 % more noise", "no noise at the end"]
)
def test_another_chain_shows_in_the_distribution_and_is_refused(
    broken: Callable[..., Any], steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The broken twins of the tests above. 15 % more noise gives p < 1e-11; 10 %, about 1e-6."""
    one = posterior()
    torch.manual_seed(0)
    theirs = drawn(one, MANY, steps=steps)
    with fs.accelerate(one, window=4):
        assert law(drawn(one, MANY, steps=steps), theirs) > 1e-3 / 8
    monkeypatch.setattr(ours_of_sbi, "sde_steps", broken)
    with fs.accelerate(one), pytest.raises(ValueError, match="takes other steps than"):
        drawn(one, 1, steps=steps)
    monkeypatch.setattr(SbiLoop, "compare", lambda *_, **__: None)
    with fs.accelerate(one, window=4):
        assert law(drawn(one, MANY, steps=steps), theirs) < 1e-6


def test_samples_lie_within_the_prior_and_the_acceptance_is_sbi_s() -> None:
    one = posterior(prior=box(0.3))
    with fs.accelerate(one, window=6):
        samples = drawn(one, 50, reject=True)
    assert samples.shape == (50, 2)
    assert samples.abs().max() <= 0.3


# ------------------------------------------------------------------ whose loop is faster


def clocks(monkeypatch: pytest.MonkeyPatch, theirs: Callable[[int], float]) -> list[int]:
    """sbi's own loop takes so many seconds for a number of samples; the numbers it was timed for."""
    timed: list[int] = []

    def seconds(loop: Any, asked: dict[str, Any], times: Tensor) -> float:
        timed.append(torch.Size(asked["sample_shape"]).numel())
        return theirs(timed[-1])

    monkeypatch.setattr(SbiLoop, "_theirs", seconds)
    return timed


def test_large_batches_go_to_sbi_s_own_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    one = posterior()
    timed = clocks(monkeypatch, lambda count: 100.0 if count < 20 else 0.0)
    torch.manual_seed(5)
    plain = drawn(one, 40)
    with fs.accelerate(one):
        for count in (5, 9, 5, 30):
            replayed = 0 if timed else 59
            drawn(one, count)
            assert one.foresample_report.calls_mean < 59  # measured with the draw itself
            assert one.foresample_report.evidence.steps_replayed == replayed
        torch.manual_seed(5)
        assert torch.equal(drawn(one, 40), plain)
        assert one.foresample_report.method == "sequential, because no window was faster"
        drawn(one, 30)
        assert one.foresample_report.calls_mean == 59
        drawn(one, 9)
        assert one.foresample_report.calls_mean < 59
    assert timed == [5, 9, 30]


def test_timing_uses_no_random_numbers_and_a_window_that_was_given_is_not_timed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    one = posterior()
    with fs.accelerate(one, window=12):
        timed = clocks(monkeypatch, lambda count: 0.0)
        drawn(one, 5)
        assert timed == []
    states = []
    for theirs in ({5: 0.0}, {5: 100.0}):  # with a second draw, and without
        clocks(monkeypatch, theirs.__getitem__)
        with fs.accelerate(one):
            torch.manual_seed(4)
            states.append((drawn(one, 5), torch.rand(1)))
    assert all(torch.equal(a, b) for a, b in zip(*states, strict=True))


def test_the_time_of_sbi_s_loop_is_extrapolated_from_a_few_steps() -> None:
    one = posterior()
    with fs.accelerate(one, window=12):
        drawn(one, 5)
        loop, net = one._sample_via_diffusion, one.vector_field_estimator.net
        net.calls = 0
        one.potential_fn.set_x(X)
        asked = loop._asked(((5,),), {})
        assert loop._theirs(asked, torch.linspace(1, 1e-3, 500)) > 0
    assert net.calls == 8


def test_max_sampling_batch_size_is_kept() -> None:
    one = posterior()
    with fs.accelerate(one, window=6):
        drawn(one, 30, max_sampling_batch_size=7)
        assert one.foresample_report.slots == 7
        drawn(one, 30, SEVERAL, max_sampling_batch_size=7)
        assert one.foresample_report.slots == 21


# ------------------------------------------------------------------ refusals, and leaving no trace


class Mine:
    """A part of one's own."""


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"corrector": "gibbs"}, r"corrector='gibbs' is not known here: use 'langevin' or none"),
        ({"corrector": Mine()}, r"corrector=Mine is not known here: use 'langevin' or none"),
        ({"predictor": Mine()}, r"predictor=Mine is not known here: leave it out"),
        ({"predictor_params": {"order": 2}}, r"predictor_params may have eta here, not order: leave order out"),
        ({"predictor_params": {"eta": 0.0}}, r"predictor_params must have a positive eta, not 0"),
        (
            LANGEVIN | {"corrector_params": {"snr": 0.1}},
            r"corrector_params may have step_size and num_steps here, not snr: leave snr out",
        ),
        (LANGEVIN | {"corrector_params": {"step_size": -0.1}}, r"step_size of at least 0.*not -0\.1"),
        (
            LANGEVIN | {"corrector_params": {"num_steps": 1.5}},
            r"whole num_steps of at least 0, not .* and 1\.5",
        ),
        ({"steps": 1}, r"give steps=2 or more"),
        ({"ts": torch.linspace(0, 1, 9)}, r"times must fall strictly from t_max to t_min.*another ts"),
    ],
)
def test_loops_that_are_no_chain_are_refused(options: dict[str, Any], sentence: str) -> None:
    one = posterior()
    with fs.accelerate(one), pytest.raises(ValueError, match=sentence):
        drawn(one, 2, **options)
    assert one.vector_field_estimator.net.calls == 0


def test_further_refusals() -> None:
    with pytest.raises(ValueError, match=r"sample_with='ode' adds no noise.*sample_with='sde'"):
        fs.accelerate(posterior(sample_with="ode"))
    one = posterior()
    with fs.accelerate(one):
        one.potential_fn.set_x(X)
        with pytest.raises(ValueError, match=r"keeps no states on the way: leave save_intermediate out"):
            one._sample_via_diffusion((2,), save_intermediate=True)
        with pytest.raises(ValueError, match=r"several observations x of one parameter.*sample_batched"):
            one.sample((2,), x=SEVERAL)
        with pytest.raises(ValueError, match=r"several observations x of one parameter"):
            one.sample((2,), x=SEVERAL, iid_method="fnpe")
        one.vector_field_estimator.train().net.dropout = torch.nn.Dropout(0.1)
        with pytest.raises(ValueError, match=r"has Dropout: call its eval\(\)"):
            drawn(one, 2)


@pytest.mark.parametrize("steps", [3, 60])
def test_a_score_of_one_time_is_refused(steps: int) -> None:
    """Two states of two numbers: their times would pass for the numbers'."""
    one = posterior("flow")
    with fs.accelerate(one):
        for _ in range(2):
            with pytest.raises(
                ValueError, match=r"FlowMatchingEstimator for a sample depends.*\(NPSE\) without"
            ):
                drawn(one, 2, steps=steps)


def test_guidance_that_knows_one_time_only_is_refused() -> None:
    """Also where it comes after samples without guidance, and every time it is asked for."""
    prior = torch.distributions.MultivariateNormal(torch.zeros(2), torch.eye(2))
    one = posterior(prior=prior)
    guided: dict[str, Any] = {
        "guidance_method": "affine_classifier_free",
        "guidance_params": {"likelihood_scale": 2.0},
    }
    drawn(one, 2, **guided)
    with fs.accelerate(one):
        drawn(one, 2)
        for _ in range(2):
            with pytest.raises(
                ValueError, match=r"affine_classifier_free for a sample depends on.*their times"
            ):
                drawn(one, 2, **guided)


def test_changed_steps_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A predictor registered under sbi's name, and a start of another width."""
    predictors, one = sbi("samplers.score.predictors"), posterior()
    own = predictors.EulerMaruyama

    class Damped(own):  # type: ignore[misc, valid-type]
        def predict(self, theta: Tensor, t1: Tensor, t0: Tensor) -> Tensor:
            return 0.999 * super().predict(theta, t1, t0)

    with fs.accelerate(one):
        monkeypatch.setitem(predictors.PREDICTORS, "euler_maruyama", Damped)
        with pytest.raises(
            ValueError, match=r"VectorFieldPosterior takes other steps than.*at step 1 its state"
        ):
            drawn(one, 2)
        monkeypatch.setitem(predictors.PREDICTORS, "euler_maruyama", own)
        one.potential_fn.iid_method = "fnpe"  # whose start is narrower
        with pytest.raises(ValueError, match=r"takes other steps than.*at step 0 its state"):
            drawn(one, 2, SEVERAL)
        drawn(one, 2)


def test_a_patch_is_refused() -> None:
    one = posterior()
    one._sample_via_diffusion = lambda *args, **options: torch.zeros(1, 1, 2)
    with pytest.raises(ValueError, match=r"_sample_via_diffusion is not .*own function"):
        fs.accelerate(one)


def test_a_network_that_mixes_rows_is_refused() -> None:
    class Mixing(Net):
        def forward(self, theta: Tensor, x: Tensor, time: Tensor) -> Tensor:
            return super().forward(theta, x, time) + theta.mean()

    one = posterior(net=Mixing())
    with fs.accelerate(one, window=6), pytest.raises(ValueError, match="depends on the other samples"):
        drawn(one, 4)


def test_its_attributes_are_read_again_and_compared_again() -> None:
    one = posterior()
    with fs.accelerate(one, window=6):
        drawn(one, 2)
        assert one.foresample_report.evidence.steps_replayed == 59
        drawn(one, 2)
        assert one.foresample_report.evidence.steps_replayed == 0
        one.vector_field_estimator.beta_max = 5.0
        drawn(one, 2)
        assert one.foresample_report.evidence.steps_replayed == 59


@pytest.mark.parametrize("copied", [copy.deepcopy, copy.copy, lambda one: pickle.loads(pickle.dumps(one))])
def test_restoring_leaves_no_trace_and_copies_are_plain(copied: Callable[[Any], Any]) -> None:
    one = posterior()
    drawn(one, 1)
    before = set(vars(one))
    torch.manual_seed(1)
    plain = drawn(one, 3)
    with fs.accelerate(one, window=6):
        torch.manual_seed(1)
        assert not torch.equal(drawn(one, 3), plain)
        twin = copied(one)
    for other in (one, twin):
        assert set(vars(other)) == before
        torch.manual_seed(1)
        assert torch.equal(drawn(other, 3), plain)


def test_ode_samples_stay_sbi_s_own() -> None:
    one = posterior()
    one.potential_fn.set_x(X)
    with fs.accelerate(one):
        assert one.sample_via_ode((2,)).shape[-1] == 2
