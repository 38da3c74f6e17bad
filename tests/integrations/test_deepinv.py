"""deepinv's real PosteriorDiffusion and DPS: their own loops with the same noise, one line, and what is refused."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import foresample as fs
from foresample.checks.kolmogorov import ks_two_sample
from foresample.integrations.packages import deepinv as adapter
from foresample.integrations.packages.loop import PackageLoop
from tests.support.deepinv import SHAPE, Softly, measured, package, physics


def posterior(
    sde: str = "vp",
    solver: str = "EulerSolver",
    fidelity: str | None = "DPSDataFidelity",
    steps: int = 30,
    end: float = 0.02,
    minus_one_one: bool = True,
    dtype: torch.dtype = torch.float64,
    alpha: Any = 1.0,
    guidance: dict[str, Any] | None = None,
    denoiser: nn.Module | None = None,
    **options: Any,
) -> Any:
    """A PosteriorDiffusion with a generator of its own."""
    sampling = package().sampling
    kinds: dict[str, Callable[[], Any]] = {
        "vp": lambda: sampling.VariancePreservingDiffusion(alpha=alpha, dtype=dtype),
        "ve": lambda: sampling.VarianceExplodingDiffusion(alpha=alpha, sigma_max=20, dtype=dtype),
        "flow": lambda: sampling.FlowMatching(alpha=alpha, dtype=dtype),
        "song": lambda: sampling.SongDiffusionSDE(
            beta_t=lambda t: 0.1 + 9 * t, xi_t=lambda t: 0.2 + 5 * t, alpha=alpha, dtype=dtype
        ),
        "edm": lambda: sampling.EDMDiffusionSDE(
            sigma_t=lambda t: 8 * t**2, variance_preserving=True, alpha=alpha, dtype=dtype
        ),
    }
    times = torch.linspace(0.98, end, steps + 1, dtype=dtype)
    return sampling.PosteriorDiffusion(
        data_fidelity=None if fidelity is None else getattr(sampling, fidelity)(**(guidance or {})),
        denoiser=denoiser or Softly(),
        sde=kinds[sde](),
        solver=getattr(sampling, solver)(times, rng=torch.Generator(), **options),
        minus_one_one=minus_one_one,
        dtype=dtype,
    ).eval()


def dps(**options: Any) -> Any:
    options = {"num_steps": 30, "rng": torch.Generator()} | options
    return package().sampling.DPS(Softly(), **options).eval()


def step_by_step(loop: PackageLoop, drawing: Any, window: int) -> Tensor:
    """In place of speculation: the target's own steps, with the noise that the package would draw."""
    target, row = drawing.target, torch.arange(drawing.count)
    x = target.start(torch.zeros(drawing.count, *target.shape), row)
    for k, std in enumerate(target.std):
        step = torch.full_like(row, k)
        x = target.mean(x, target.predict(x, step, row), step)
        if std > 0:
            x = x + std * torch.randn(x.shape, generator=loop.generator(), dtype=x.dtype)
    return x


def told(value: Any) -> str:
    """An id without addresses, the same in every process."""
    return re.sub(r" at 0x\w+", "", str(value))[:80]


ANCESTRAL: dict[str, Any] = {"solver": "AncestralSolver", "end": 0.0}
CASES: list[dict[str, Any]] = [
    {},
    {"alpha": 0.3, "fidelity": None},
    {"alpha": lambda t: 1.0 if t > 0.5 else 0.4, "guidance": {"guidance": "annealed"}},
    {"sde": "ve", "fidelity": "ALDDataFidelity", "alpha": 0.25},
    {"sde": "flow", "alpha": lambda t: t, "fidelity": "NoisyDataFidelity", "minus_one_one": False},
    {"sde": "song", "alpha": 0.7},
    {"sde": "edm", "alpha": 1.0, "fidelity": "PiGDMDataFidelity"},
    {"dtype": torch.float32},
    {"guidance": {"weight": 0.7, "clip": (0.1, 0.9)}, **ANCESTRAL},
    {"alpha": lambda t: 0.0 if 0.3 < t < 0.5 else 1.0, "solver": "AncestralSolver"},
    {"sde": "ve", "solver": "DDPMSolver", "variance": "large", "fidelity": None},
    {"solver": "DDIMSolver", "eta": 0.6, "end": 0.0, "minus_one_one": False},
    {"solver": "DDPMSolver", "variance": "large", "dtype": torch.float32, "end": 0.0},
]


@pytest.mark.parametrize("case", CASES, ids=told)
def test_their_loop_with_the_same_noise(case: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    model, y = posterior(**case), measured(3)
    theirs = model(y, physics(), seed=5)
    monkeypatch.setattr(PackageLoop, "_draw", step_by_step)
    with fs.accelerate(model, window=4):
        ours = model(y, physics(), seed=5)
    assert ours.dtype == theirs.dtype
    rounding = 1e-6 if model.dtype == torch.float64 else 1e-3  # its denoiser runs in float32
    torch.testing.assert_close(ours, theirs, rtol=rounding, atol=rounding)


@pytest.mark.parametrize(
    "options", [{}, {"solver": "euler", "schedule": "ve"}, {"guidance": "annealed"}], ids=str
)
def test_dps_with_the_same_noise(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    model, y = dps(**options), measured(2)
    theirs = model(y, physics(), seed=5)
    monkeypatch.setattr(PackageLoop, "_draw", step_by_step)
    with fs.accelerate(model, window=4):
        torch.testing.assert_close(model(y, physics(), seed=5), theirs, rtol=1e-6, atol=1e-6)


def test_all_its_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PackageLoop, "_draw", step_by_step)
    model, given = posterior(fidelity=None), {"y": None, "physics": None, "seed": 3}
    shifts = torch.linspace(-0.2, 0.2, 4).view(-1, 1, 1, 1)
    for more in (
        {"x_init": (4, *SHAPE), "denoise_output": False},
        {"x_init": torch.randn(4, *SHAPE), "timesteps": torch.linspace(0.6, 0.1, 9)},
        {"x_init": (4, *SHAPE), "timesteps": torch.linspace(0.6, 0.1, 9).numpy(), "shift": shifts},
    ):
        theirs = model(**given, **more)
        with fs.accelerate(model, window=4):
            torch.testing.assert_close(model(**given, **more), theirs, rtol=1e-6, atol=1e-6)


def test_the_trajectory_is_the_path_of_the_samples() -> None:
    model, y = dps(), measured(2)
    with fs.accelerate(model, window=4):
        last = model(y, physics(), seed=1)
        again, path = model(y, physics(), seed=1, get_trajectory=True)
    assert torch.equal(last, again)
    assert path.shape == (30, 2, *SHAPE)
    assert torch.equal(path[-1], last)
    assert path.isfinite().all()


# ------------------------------------------------------------------ one line, and the distribution

MANY = 20000


def both(model: Any, y: Tensor) -> tuple[Tensor, Tensor, fs.Report]:
    theirs = model(y, physics(), seed=1, denoise_output=False)
    with fs.accelerate(model, window=6):
        ours = model(y, physics(), seed=2, denoise_output=False)
        return ours, theirs.detach(), model.foresample_report


def law(ours: Tensor, theirs: Tensor) -> float:
    """The smallest p-value of four views."""
    views = [
        (v[:, 0, 0, 0], v[:, 0, 0, 1], v.sum((1, 2, 3)), v[:, 0, 0, 0] * v[:, 0, 0, 1]) for v in (ours, theirs)
    ]
    return min(ks_two_sample(a.numpy(), b.numpy()) for a, b in zip(*views, strict=True))


LAWS: list[Callable[[], Any]] = [
    lambda: posterior(guidance={"guidance": "annealed"}),
    lambda: posterior(sde="ve", alpha=0.5, fidelity="ALDDataFidelity"),
    lambda: dps(weight=0.5),
]


@pytest.mark.law
@pytest.mark.parametrize("make", LAWS, ids=["Euler", "VE", "DPS"])
def test_one_line_and_the_distribution_is_theirs(make: Callable[[], Any]) -> None:
    ours, theirs, report = both(make(), torch.tensor([0.8, 0.0]).expand(MANY, *SHAPE))
    assert report.calls_mean < report.steps / 1.8
    assert law(ours, theirs) > 1e-3 / 12


def louder(loop: PackageLoop, chain: Any) -> None:
    """15 % more std."""
    object.__setattr__(chain, "std", 1.15 * chain.std)


def weaker(loop: PackageLoop, chain: Any) -> None:
    """Two thirds of the guidance."""
    loop.served.data_fidelity.weight = 2 / 3


def later(loop: PackageLoop, chain: Any) -> None:
    """The noise level of two steps later."""
    object.__setattr__(chain, "time", torch.cat([chain.time[2:], chain.time[-1:].expand(2)]))


@pytest.mark.law
@pytest.mark.parametrize("twin", [louder, weaker, later])
def test_a_broken_twin_shows(twin: Callable[[Any, Any], None], monkeypatch: pytest.MonkeyPatch) -> None:
    """Each was found with p below 1e-10 for all of 8 other seeds."""
    own = adapter.DeepinvLoop.checked_chain

    def broken(loop: Any, timesteps: Any) -> Any:
        chain = own(loop, timesteps)
        twin(loop, chain)
        return chain

    model = LAWS[0]()
    monkeypatch.setattr(adapter.DeepinvLoop, "checked_chain", broken)
    monkeypatch.setattr(adapter.DeepinvLoop, "_require_rowwise", lambda *_: None)
    monkeypatch.setattr(adapter.DeepinvLoop, "refuse", lambda _: None)
    ours, theirs, _ = both(model, torch.tensor([0.8, 0.0]).expand(MANY, *SHAPE))
    assert law(ours, theirs) < 1e-3 / 12


@pytest.mark.law
def test_each_sample_has_its_own_measurement_and_keywords() -> None:
    model, count = posterior(guidance={"guidance": "annealed"}), 600
    with fs.accelerate(model, window=6):
        ours = model(measured(2).repeat(count // 2, 1, 1, 1), physics(), seed=2)[:, 0, 0, 0]
    assert ours[1::2].mean() > ours[::2].mean() + 0.1


@pytest.mark.law
def test_many_samples_of_one_measurement() -> None:
    model, given = (
        posterior(guidance={"guidance": "annealed"}),
        {"x_init": (4000, *SHAPE), "denoise_output": False},
    )
    theirs = model(measured(1), physics(), seed=1, **given)
    with fs.accelerate(model, window=6):
        ours = model(measured(1), physics(), seed=2, **given)
    assert law(ours, theirs) > 1e-3 / 4


def test_no_samples_are_no_samples() -> None:
    model = dps()
    with fs.accelerate(model, window=6):
        for given in ({}, {"denoise_output": False}):
            assert model(measured(0), physics(), **given).shape == (0, *SHAPE)
        assert model(measured(1), physics(), x_init=(0, *SHAPE)).shape == (0, *SHAPE)
        assert not hasattr(model, "foresample_report")


# ------------------------------------------------------------------ its state


def test_seeds_generators_and_restoring() -> None:
    model, y = dps(), measured(1)
    names, plain = set(vars(model)), model(y, physics(), seed=4)
    with fs.accelerate(model, window=4):
        one, other, same = (model(y, physics(), seed=seed) for seed in (1, 2, 1))
        follow = model(y, physics())
        twin = copy.deepcopy(model)
    assert torch.equal(one, same)
    assert not torch.equal(one, other)
    assert not torch.equal(follow, same)
    assert set(vars(model)) == set(vars(twin)) == names
    assert torch.equal(model(y, physics(), seed=4), plain)
    assert torch.equal(twin(y, physics(), seed=4), plain)


def test_where_no_window_gains_its_own_loop_draws_what_it_would_have(monkeypatch: pytest.MonkeyPatch) -> None:
    model, y = dps(), measured(2)
    model.solver.rng.manual_seed(3)
    plain = model(y, physics())
    monkeypatch.setattr(PackageLoop, "_window", lambda *_: None)
    with fs.accelerate(model):
        model.solver.rng.manual_seed(3)
        assert torch.equal(model(y, physics()), plain)
        assert model.foresample_report.window == 0


def test_steps_are_compared_again_only_where_something_changed() -> None:
    model, y = posterior(steps=12), measured(1)
    replayed = []
    with fs.accelerate(model, window=4):
        for change in (None, None, {"alpha": lambda t: 0.5}):
            for name, value in (change or {}).items():
                setattr(model.sde, name, value)
            model(y, physics(), seed=1)
            replayed.append(model.foresample_report.evidence.steps_replayed)
    assert replayed == [12, 0, 12]


# ------------------------------------------------------------------ what is refused

REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"alpha": 0.0}, r"with alpha=0 the solver adds no noise.*give the SDE an alpha above 0"),
    ({"alpha": lambda t: 0 * t, **ANCESTRAL}, r"with alpha=0 the solver adds no noise"),
    ({"solver": "DDIMSolver"}, r"with eta=0 the solver adds no noise.*use DDPMSolver, or eta=1\.0"),
    ({"solver": "HeunSolver"}, r"HeunSolver takes steps.*no exact coupling.*use deepinv's EulerSolver"),
    (
        {"fidelity": "ScoreSDEDataFidelity"},
        r"ScoreSDEDataFidelity draws noise at every step.*use DPSDataFidelity",
    ),
    ({"fidelity": "ILVRDataFidelity"}, r"ILVRDataFidelity draws noise at every step"),
]


@pytest.mark.parametrize(("case", "sentence"), REFUSED, ids=told)
def test_loops_that_are_no_chain_are_refused(case: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        fs.accelerate(posterior(**case))


@pytest.mark.parametrize("schedule", ["vp", "ve"])
def test_dps_with_ddim_is_refused(schedule: str) -> None:
    with pytest.raises(ValueError, match="with eta=0 the solver adds no noise"):
        fs.accelerate(dps(solver="ddim", schedule=schedule))


def test_changes_since_are_refused() -> None:
    model, y = posterior(**ANCESTRAL), measured(1)
    with fs.accelerate(model, window=4):
        model.sde.alpha = lambda t: 0 * t
        with pytest.raises(ValueError, match="with alpha=0"):
            model(y, physics())
    model = posterior()
    with fs.accelerate(model, window=4):
        model(y, physics())
        own = model.posterior.drift
        drifts: list[Callable[..., Tensor]] = [
            lambda x, t, **given: own(x, t, **given) + 0.01 * x,
            lambda x, t, **given: (
                own(x, t, **given) + model.score(x=x, t=0.9 * t, **given) - model.score(x=x, t=t, **given)
            ),
        ]
        for drift in drifts:
            model.posterior.drift = drift
            with pytest.raises(
                ValueError, match=r"step 0 of EulerSolver is not that of the chain.*undo what was"
            ):
                model(y, physics())
        model.posterior.drift = own
        for owner, name in ((model.solver, "step"), (model.solver, "sample"), (model, "score")):
            function = getattr(owner, name)
            setattr(owner, name, lambda *args, function=function, **given: function(*args, **given))
            with pytest.raises(ValueError, match=r"not deepinv's own function|takes steps for which"):
                model(y, physics())
            delattr(owner, name)
        model(y, physics())


def test_a_deep_copy_is_refused_because_its_sde_calls_the_score_of_the_first() -> None:
    for model in (posterior(), posterior(**ANCESTRAL), dps()):
        with pytest.raises(ValueError, match=r"does not call its score.*make a new one instead of a copy"):
            fs.accelerate(copy.deepcopy(model))


@pytest.mark.parametrize(
    ("timesteps", "sentence"),
    [([1.0], r"timesteps must be at least two"), ([0.1, 0.5, 1.0], r"timesteps rise: they must fall")],
)
def test_times_that_make_no_chain_are_refused(timesteps: list[float], sentence: str) -> None:
    model = dps()
    with fs.accelerate(model), pytest.raises(ValueError, match=sentence):
        model(measured(2), physics(), timesteps=torch.tensor(timesteps))


def test_a_solver_of_one_s_own_is_refused() -> None:
    model = posterior()
    solver = type(model.solver)
    kind = type("Mine", (solver,), {"step": lambda self, *args, **given: solver.step(self, *args, **given)})
    model.solver.__class__ = kind
    with pytest.raises(ValueError, match=r"Mine takes steps for which there is no exact coupling"):
        fs.accelerate(model)


def test_arguments_without_a_name_are_refused() -> None:
    model = posterior(fidelity=None)
    with fs.accelerate(model, window=4), pytest.raises(ValueError, match="by name only"):
        model(None, None, (1, *SHAPE), 1, None, True, False, 7)


class Scalar(Softly):
    """Knows one noise level a call."""

    def forward(self, x: Tensor, sigma: Tensor, shift: Tensor | float = 0.0) -> Tensor:
        return super().forward(x, sigma.flatten()[0], shift)


def test_a_denoiser_with_one_noise_level_a_call_is_refused() -> None:
    model = posterior(denoiser=Scalar())
    with (
        fs.accelerate(model, window=4),
        pytest.raises(ValueError, match=r"noise level for each row, \[B, 1, 1, 1\]"),
    ):
        model(measured(1), physics(), seed=1)


@pytest.mark.parametrize("count", [2, 4, 5])
@pytest.mark.parametrize("equal", [False, True], ids=["different masks", "equal masks"])
def test_a_physics_with_parameters_for_each_sample_is_refused(count: int, equal: bool) -> None:
    dinv, model = package(), posterior()
    mask = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0], [1.0, 0.0], [0.0, 1.0]])[:count]
    mask = (mask[:1].repeat(count, 1) if equal else mask).view(count, *SHAPE)
    blinds = dinv.physics.Inpainting(SHAPE, mask=mask, noise_model=dinv.physics.GaussianNoise(0.2))
    with fs.accelerate(model, window=4), pytest.raises(ValueError, match="draw from one measurement at a time"):
        model(measured(count), blinds, seed=1)


def test_the_score_is_compared_again_where_the_physics_changed() -> None:
    model, known = posterior(), physics()
    with fs.accelerate(model, window=4):
        model(measured(2), known, seed=1)
        known.update(mask=torch.tensor([[1.0, 0.0], [0.0, 1.0]]).view(2, *SHAPE))
        with pytest.raises(ValueError, match="draw from one measurement at a time"):
            model(measured(2), known, seed=1)


def test_an_sde_without_levels_is_refused() -> None:
    model = posterior(fidelity=None)
    model.sde = package().sampling.DiffusionSDE(lambda x, t: -x, lambda t: 1 + t, denoiser=Softly())
    with pytest.raises(ValueError, match=r"DiffusionSDE does not say its scale_t, sigma_t.*use a subclass of"):
        fs.accelerate(model)


@pytest.mark.parametrize("fidelity", ["PiGDMDataFidelity", "MomentMatchingDataFidelity"])
def test_conjugate_gradients_are_refused(fidelity: str) -> None:
    dinv, model = package(), posterior(fidelity=fidelity)
    blur = dinv.physics.Blur(torch.full((1, 1, 3, 3), 1 / 9), padding="circular")
    blur.noise_model = dinv.physics.GaussianNoise(0.2)
    with (
        fs.accelerate(model, window=4),
        pytest.raises(ValueError, match=rf"{fidelity} solves.*use DPSDataFidelity"),
    ):
        model(torch.rand(3, 1, 4, 4), blur, seed=1)


def test_guidance_that_mixes_rows_is_refused() -> None:
    own = package().sampling.NoisyDataFidelity
    model = posterior(fidelity="NoisyDataFidelity")
    mixing = type("Mixing", (own,), {"grad": lambda self, x, *args, **given: x - 0.5 * x.mean(0, keepdim=True)})
    model.data_fidelity = mixing()
    with (
        fs.accelerate(model, window=4),
        pytest.raises(ValueError, match=r"score of Mixing.*differs where rows"),
    ):
        model(measured(3), physics(), seed=1)


class Dropping(Softly):
    """Drops pixels in training mode."""

    def __init__(self) -> None:
        super().__init__()
        self.dropout = nn.Dropout(0.5)

    def forward(self, x: Tensor, sigma: Tensor, shift: Tensor | float = 0.0) -> Tensor:
        return self.dropout(super().forward(x, sigma, shift))


def test_a_denoiser_in_training_mode_is_refused() -> None:
    model = posterior(denoiser=Dropping())
    with fs.accelerate(model, window=4):
        model(measured(1), physics(), seed=1)
        model.train()
        with pytest.raises(ValueError, match="training mode and has Dropout"):
            model(measured(1), physics(), seed=1)
