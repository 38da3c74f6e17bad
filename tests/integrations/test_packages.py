"""Real classes of denoising-diffusion-pytorch, MONAI and boltz: their own loops with the same noise, and one line."""

from __future__ import annotations

import copy
import pickle
import sys
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import foresample as fs
from foresample.checks.kolmogorov import ks_two_sample
from foresample.engine import tuning
from foresample.integrations.packages.gaussian import gaussian_chain, gaussian_target
from foresample.integrations.packages.loop import PackageLoop
from foresample.settings import Settings
from foresample.targets.atoms import rotations
from tests.support.packages import load

UNUSED = (
    "denoising_diffusion_pytorch.fid_evaluation",
    "torchvision",
    "ema_pytorch",
    "accelerate",
    "scipy",
    "scipy.optimize",
    "PIL",
    "tqdm",
    "tqdm.auto",
)


class Net(nn.Module):
    """A network of one pixel's size that estimates softly; channels double for a variance."""

    def __init__(self, objective: str = "pred_x0", learns: bool = False, self_condition: bool = False) -> None:
        super().__init__()
        self.channels, self.out_dim, self.self_condition = 1, 2 if learns else 1, self_condition
        self.objective, self.learns = objective, learns
        self.levels: Tensor | None = None
        self.calls = 0

    def forward(self, x: Tensor, time: Tensor, condition: Tensor | None = None) -> Tensor:
        self.calls += 1
        assert self.levels is not None
        level = self.levels[time].view(-1, *(1,) * (x.ndim - 1))
        alpha, sigma = level.sqrt(), (1 - level).sqrt()
        x0 = 0.9 * torch.tanh(alpha * x / (sigma**2 + 0.5))
        noise = (x - alpha * x0) / sigma
        output = {"pred_x0": x0, "pred_noise": noise, "pred_v": alpha * noise - sigma * x0}[self.objective]
        return torch.cat([output, 0.9 * torch.sin(3 * x)], 1) if self.learns else output


def gaussian(
    learns: bool = False, objective: str = "pred_x0", self_condition: bool = False, **more: Any
) -> Any:
    module = "learned_gaussian_diffusion" if learns else "denoising_diffusion_pytorch"
    package = load(f"denoising_diffusion_pytorch.{module}", without=UNUSED)
    net = Net(objective, learns, self_condition)
    make = package.LearnedGaussianDiffusion if learns else package.GaussianDiffusion
    diffusion = make(net, image_size=(1, 2), timesteps=more.pop("timesteps", 12), objective=objective, **more)
    net.levels = diffusion.alphas_cumprod
    return diffusion.eval()


CASES: list[dict[str, Any]] = [
    {"objective": "pred_x0"},
    {"objective": "pred_noise", "beta_schedule": "linear", "timesteps": 60},
    {"objective": "pred_v", "beta_schedule": "cosine"},
    {"objective": "pred_noise", "learns": True},
    {"objective": "pred_x0", "timesteps": 30, "sampling_timesteps": 9, "ddim_sampling_eta": 0.7},
    {"objective": "pred_v", "timesteps": 30, "sampling_timesteps": 9, "ddim_sampling_eta": 1.0},
]


@pytest.mark.parametrize("options", CASES, ids=str)
def test_their_loop_with_the_same_noise(options: dict[str, Any]) -> None:
    diffusion = gaussian(**dict(options))
    chain = gaussian_chain(diffusion)
    start = torch.randn(3, 1, 1, 2, generator=torch.Generator().manual_seed(1))
    target = gaussian_target(diffusion, chain, start)
    noise = [
        torch.randn(start.shape, generator=torch.Generator().manual_seed(9 + k)) for k in range(len(chain.std))
    ]
    x, row, drawn = start, torch.arange(3), []
    for k, std in enumerate(target.std):
        step, extra = torch.full_like(row, k), noise[k].roll(1, 0)
        prediction = target.predict(x, step, row, extra)
        mean = target.mean(x, prediction, step, None, extra)
        total = std * noise[k]
        if chain.low_variance is not None:  # what theirs must draw to come to the same
            output = target.network(x, target.chain.time[step], row)  # type: ignore[index]
            variance = target.chain.variance(output, step)
            both = (variance - std**2).clamp(min=0).sqrt() * extra + total
            drawn.append(both / variance.sqrt() if std > 0 else both)
        else:
            drawn.append(noise[k])
        x = mean + total
    with mock.patch("torch.randn_like", side_effect=drawn), mock.patch("torch.randn", return_value=start):
        theirs = diffusion.sample(batch_size=3)
    torch.testing.assert_close(diffusion.unnormalize(x), theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.law
@pytest.mark.parametrize("options", [CASES[2], CASES[3], CASES[5]], ids=str)
def test_one_line_and_the_distribution_is_theirs(options: dict[str, Any]) -> None:
    diffusion = gaussian(**dict(options))
    torch.manual_seed(0)
    theirs = diffusion.sample(batch_size=5000).flatten(1)
    with fs.accelerate(diffusion, window=6):
        diffusion.model.calls = 0
        ours = diffusion.sample(batch_size=5000).flatten(1)
        report = diffusion.foresample_report
    assert report.calls_mean < report.steps / 1.4
    views = [(v[:, 0], v[:, 1], v.sum(1)) for v in (ours, theirs)]
    assert min(ks_two_sample(a.numpy(), b.numpy()) for a, b in zip(*views, strict=True)) > 1e-3 / 9


def test_all_timesteps_are_states_of_the_chain_and_the_last_is_the_sample() -> None:
    diffusion = gaussian()
    fs.accelerate(diffusion, window=4)
    torch.manual_seed(3)
    last = diffusion.sample(batch_size=2)
    torch.manual_seed(3)
    every = diffusion.sample(batch_size=2, return_all_timesteps=True)
    assert every.shape == (2, 13, 1, 1, 2)
    assert torch.equal(every[:, -1], last)
    assert torch.isfinite(every).all()


def test_restoring_leaves_no_trace() -> None:
    diffusion = gaussian()
    before = set(vars(diffusion))
    torch.manual_seed(0)
    plain = diffusion.sample(batch_size=2)
    with fs.accelerate(diffusion):
        diffusion.sample(batch_size=2)
    assert set(vars(diffusion)) == before
    torch.manual_seed(0)
    assert torch.equal(diffusion.sample(batch_size=2), plain)


STEPS_OF_ITS_LOOP = [
    "p_sample",
    "p_mean_variance",
    "model_predictions",
    "q_posterior",
    "predict_start_from_noise",
]


@pytest.mark.parametrize("learns", [False, True])
@pytest.mark.parametrize("name", [*STEPS_OF_ITS_LOOP, "p_sample_loop"])
def test_a_subclass_or_a_patch_that_may_step_in_another_way_is_refused(name: str, learns: bool) -> None:
    """Refused before the first sample and after it: a patch may do something else at the next sample."""
    own = gaussian(learns=learns, objective="pred_noise")
    network, theirs = own.model, getattr(own, name)
    sentence = rf"Diffusion\.{name} is not denoising_diffusion_pytorch's own function.*make a target"
    stranger = gaussian(learns=learns, objective="pred_noise")
    stranger.__class__ = type("MyDiffusion", (type(stranger),), {name: lambda self, *a, **k: theirs(*a, **k)})
    with pytest.raises(ValueError, match=f"My{sentence}"):
        fs.accelerate(stranger)
    fs.accelerate(own, window=4)
    if name != "p_sample_loop":
        own.sample(batch_size=1)
        setattr(own, name, lambda *a, **k: theirs(*a, **k))
        with pytest.raises(ValueError, match=sentence):
            own.sample(batch_size=1)
        delattr(own, name)
    own.sample(batch_size=1)
    assert own.model is network


def test_a_subclass_that_trains_in_another_way_is_accelerated() -> None:
    diffusion = gaussian()
    diffusion.__class__ = type("MyDiffusion", (type(diffusion),), {"p_losses": lambda self, *a: None})
    with fs.accelerate(diffusion, window=4):
        assert torch.isfinite(diffusion.sample(batch_size=2)).all()


def test_a_loop_patched_on_its_class_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    diffusion = gaussian()
    own = type(diffusion).p_sample_loop
    fs.accelerate(diffusion, window=4)
    monkeypatch.setattr(type(diffusion), "p_sample_loop", lambda *a, **k: own(*a, **k))
    with pytest.raises(ValueError, match="was replaced since it was accelerated"):
        diffusion.sample(batch_size=1)
    fs.restore(diffusion)
    with pytest.raises(ValueError, match="is not denoising_diffusion_pytorch's own function"):
        fs.accelerate(diffusion)


def test_its_attributes_are_read_again_at_every_sample() -> None:
    """As if it had been accelerated after the change; tables that contradict each other are refused."""

    def drawn(diffusion: Any) -> Tensor:
        torch.manual_seed(3)
        return diffusion.sample(batch_size=2)

    def change(diffusion: Any) -> None:
        diffusion.objective = diffusion.model.objective = "pred_noise"
        diffusion.posterior_mean_coef1.mul_(0.9)

    late, early = gaussian(), gaussian()
    fs.accelerate(late, window=4)
    before = drawn(late)
    assert late.foresample_report.evidence.steps_replayed == 12
    drawn(late)
    evidence = late.foresample_report.evidence
    assert (evidence.steps_replayed, evidence.trusted) == (
        0,
        ["denoising-diffusion-pytorch's own GaussianDiffusion.p_sample_loop"],
    )
    change(late)
    change(early)
    fs.accelerate(early, window=4)
    assert torch.equal(drawn(late), drawn(early))
    assert late.foresample_report.evidence.steps_replayed == 12
    assert not torch.equal(before, drawn(late))
    late.sqrt_recip_alphas_cumprod.mul_(1.1)
    with pytest.raises(ValueError, match="takes other steps than"):
        drawn(late)


def test_the_other_loop_is_not_drawn_in_place_of_this_one() -> None:
    diffusion = gaussian(timesteps=30)
    fs.accelerate(diffusion, window=4)
    diffusion.is_ddim_sampling, diffusion.sampling_timesteps, diffusion.ddim_sampling_eta = True, 9, 1.0
    with pytest.raises(ValueError, match="p_sample_loop is no longer the loop that sample takes"):
        diffusion.p_sample_loop((1, 1, 1, 2))


@pytest.mark.parametrize("copied", [copy.deepcopy, copy.copy, lambda one: pickle.loads(pickle.dumps(one))])
def test_copies_are_plain(copied: Any) -> None:
    diffusion, inferer = gaussian(), monai_inferer(monai_ddpm())
    names = [set(vars(diffusion)), set(vars(inferer))]
    torch.manual_seed(0)
    plain = diffusion.sample(batch_size=2)
    with fs.accelerate(diffusion, window=4), fs.accelerate(inferer):
        diffusion.sample(batch_size=2)
        twins = [copied(diffusion), copied(inferer)]
    assert [set(vars(twin)) for twin in twins] == names
    torch.manual_seed(0)
    assert torch.equal(twins[0].sample(batch_size=2), plain)


LINE = "denoising_diffusion_pytorch_1d"


def _of(module: str, name: str, **options: Any) -> Any:
    package = load(f"denoising_diffusion_pytorch.{module}", without=UNUSED)
    net = Net("pred_noise", False, False)
    net.channels = 2 if module == LINE else 1
    net.random_or_learned_sinusoidal_cond = False  # type: ignore[assignment]  # torch says all are modules
    return getattr(package, name)(net, timesteps=12, objective="pred_noise", **options).eval()


@pytest.mark.law
def test_the_one_of_sequences_takes_its_conditions_along() -> None:
    """Each row keeps its own class in any call; the starting noise is returned on request."""
    diffusion = _of(LINE, "GaussianDiffusion1D", seq_length=3)
    diffusion.model.levels = diffusion.alphas_cumprod
    net = diffusion.model.forward
    diffusion.model.forward = lambda x, time, shift: net(x - shift, time)
    given = {"shift": torch.tensor([-1.0, 0.0, 1.0]).repeat_interleave(1000).view(3000, 1, 1)}
    torch.manual_seed(0)
    theirs = diffusion.sample(3000, model_forward_kwargs=given)
    fs.accelerate(diffusion, window=6)
    ours, start = diffusion.sample(3000, return_noise=True, model_forward_kwargs=given)
    assert ours.shape == start.shape == (3000, 2, 3)
    assert diffusion.foresample_report.calls_mean < 12
    levels = []
    for a, b in zip(ours.split(1000), theirs.split(1000), strict=True):
        levels += [ks_two_sample(a[:, i, j].numpy(), b[:, i, j].numpy()) for i in range(2) for j in range(3)]
    assert min(levels) > 1e-3 / len(levels)
    levels = [ks_two_sample(a[:, 0, 0].numpy(), theirs[:1000, 0, 0].numpy()) for a in ours[1000:].split(1000)]
    assert max(levels) < 1e-3  # had rows changed places it would show


@pytest.mark.parametrize("objective", ["pred_noise", "pred_x0"])
def test_ddim_of_sequences_with_the_same_noise(objective: str) -> None:
    """Its direction is the network's own noise, whose estimate is clipped: this one's leaves ±1."""
    given = {"seq_length": 3, "sampling_timesteps": 6, "ddim_sampling_eta": 0.8}
    diffusion = _of(LINE, "GaussianDiffusion1D", **given)
    diffusion.objective, diffusion.model.forward = objective, lambda x, time: 1.5 * torch.tanh(x)
    torch.manual_seed(5)
    theirs = diffusion.sample(3)
    torch.manual_seed(5)
    _, *noise = [torch.randn(3, 2, 3) for _ in range(7)]
    torch.manual_seed(5)
    with fs.accelerate(diffusion), walking(noise):
        torch.testing.assert_close(diffusion.sample(3), theirs, rtol=1e-4, atol=1e-4)


def test_another_objective_is_another_direction_of_ddim() -> None:
    """Where the estimate gives the noise again, the noise is that of the clipped estimate."""
    diffusion = _of(LINE, "GaussianDiffusion1D", seq_length=3, sampling_timesteps=6, ddim_sampling_eta=0.8)
    diffusion.model.forward = lambda x, time: 1.5 * torch.tanh(x)
    with fs.accelerate(diffusion):
        for objective in ("pred_x0", "pred_noise", "pred_v"):
            diffusion.objective = objective
            diffusion.sample(2)
            assert diffusion.foresample_report.evidence.steps_replayed == 6


def test_loops_that_are_no_chain_are_refused() -> None:
    with pytest.raises(ValueError, match=r"self-conditioning.*train with self_condition=False"):
        fs.accelerate(gaussian(self_condition=True))
    with pytest.raises(ValueError, match=r"ddim_sampling_eta=1\.0"):
        fs.accelerate(gaussian(timesteps=30, sampling_timesteps=5))
    with pytest.raises(
        ValueError, match=r"sample is RePaint's, which goes back and forth.*use GaussianDiffusion"
    ):
        fs.accelerate(_of("repaint", "GaussianDiffusion", image_size=2))
    noisy = gaussian()
    noisy.model.dropout = nn.Dropout(0.1)
    fs.accelerate(noisy.train())
    with pytest.raises(ValueError, match=r"has Dropout: call its eval\(\)"):
        noisy.sample(batch_size=1)


@pytest.mark.parametrize("found", [6, None])
def test_a_window_is_chosen_once_for_each_kind_of_call(
    found: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Samples as with that window given; where none gains, the package's own, with the numbers it would have drawn."""

    def drawn(count: int) -> Tensor:
        torch.manual_seed(3)
        return diffusion.sample(batch_size=count)

    diffusion, measured = gaussian(), []
    sequential = drawn(3)
    with fs.accelerate(diffusion, window=6):
        given = drawn(3)

    def measured_window(target: fs.Target, settings: Settings) -> Any:
        measured.append(settings.slots)
        real(target, settings, windows=[2], samples=2)  # the real one, but for what its clock says
        return SimpleNamespace(window_for=lambda steps, slots: found)

    real = tuning.measure
    monkeypatch.setattr(tuning, "measure", measured_window)
    with fs.accelerate(diffusion, window="auto"):
        for _ in range(2):
            assert torch.equal(drawn(3), sequential if found is None else given)
        report = diffusion.foresample_report
        assert report.method.startswith("sequential, because no window was faster") == (found is None)
        assert (report.count, report.steps, report.window) == (3, 12, found or 0)
        drawn(2)
    assert measured == [3, 2]


@pytest.mark.parametrize("window", [2, None])
def test_a_saved_tuning_is_a_window(window: int | None) -> None:
    def drawn(window: Any) -> Tensor:
        torch.manual_seed(3)
        with fs.accelerate(diffusion, window=window):
            samples = diffusion.sample(batch_size=3)
            assert diffusion.foresample_report.window == (getattr(window, "window", window) or 0)
        return samples

    diffusion = gaussian()
    torch.manual_seed(3)
    sequential = diffusion.sample(batch_size=3)
    measured = fs.tune(fs.pretrained.load().target(steps=12), windows=[2], samples=1, slots=3)
    known = replace(measured, window=window, achieved=1.5)
    assert torch.equal(drawn(known), sequential if window is None else drawn(window))
    with (
        fs.accelerate(diffusion, window=known),
        pytest.raises(ValueError, match="of 12 steps with 3 samples at a time, not of 12 steps with 2"),
    ):
        diffusion.sample(batch_size=2)


# ------------------------------------------------------------------ MONAI


class MonaiNet(nn.Module):
    def __init__(self, kind: str, levels: Tensor) -> None:
        super().__init__()
        self.kind, self.levels = kind, levels

    def forward(self, x: Tensor, timesteps: Tensor, context: Tensor | None = None) -> Tensor:
        level = self.levels[timesteps.long()].expand(len(x)).view(-1, 1, 1)
        alpha, sigma = level.sqrt(), (1 - level).sqrt()
        state = x[:, :1] + (0 if x.shape[1] == 1 else 0.3 * x[:, 1:])
        shift = 0 if context is None else 0.2 * context.view(-1, 1, 1)
        x0 = 0.8 * torch.tanh(alpha * state / (sigma**2 + 0.5)) + shift
        noise = (state - alpha * x0) / sigma
        return {"sample": x0, "epsilon": noise, "v_prediction": alpha * noise - sigma * x0}[self.kind]


def monai_inferer(scheduler: Any) -> Any:
    """MONAI's own, without what else its module imports, which takes longer than all these tests."""
    without = (
        "monai.apps.utils monai.data monai.data.meta_tensor monai.data.thread_buffer monai.inferers.merger "
        "monai.inferers.splitter monai.inferers.utils monai.networks.nets monai.transforms monai.visualize"
    )
    return load("monai.inferers.inferer", without=tuple(without.split())).DiffusionInferer(scheduler)


def monai_ddpm(steps: int = 12, train: int = 30, **options: Any) -> Any:
    scheduler = load("monai.networks.schedulers").DDPMScheduler(num_train_timesteps=train, **options)
    scheduler.set_timesteps(steps)
    return scheduler


MONAI: list[dict[str, Any]] = [
    {},
    {"prediction_type": "v_prediction", "variance_type": "fixed_large", "steps": 30},
    {"prediction_type": "sample", "clip_sample_min": -0.5, "clip_sample_max": 2.0},
    {"clip_sample": False, "schedule": "cosine"},
]


@pytest.mark.parametrize("options", MONAI, ids=str)
@pytest.mark.parametrize("given", ["nothing", "crossattn", "concat", "guided"])
def test_monai_s_sample_with_the_same_noise(options: dict[str, Any], given: str) -> None:
    scheduler = monai_ddpm(**options)
    inferer, net = (
        monai_inferer(scheduler),
        MonaiNet(options.get("prediction_type", "epsilon"), scheduler.alphas_cumprod),
    )
    generator = torch.Generator().manual_seed(2)
    start, condition = torch.randn(3, 1, 2, generator=generator), torch.rand(3, 1, 2, generator=generator)
    asked: dict[str, Any] = {"input_noise": start, "diffusion_model": net, "verbose": False}
    if given == "concat":
        asked |= {"mode": "concat", "conditioning": condition}
    elif given != "nothing":
        asked |= {"conditioning": condition[:, :, :1], "cfg": 1.5 if given == "guided" else None}
    torch.manual_seed(5)
    theirs = inferer.sample(**asked)

    # The same through our chain, step by step, the noise being what theirs drew.
    fs.accelerate(inferer)
    torch.manual_seed(5)
    noise = [torch.randn(start.shape) for _ in scheduler.timesteps]
    with walking(noise):
        ours = inferer.sample(**asked)
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def walking(noise: list[Tensor]) -> Any:
    """Takes the steps of a loop's target with this noise, in place of speculation."""
    return mock.patch.object(PackageLoop, "_draw", side_effect=lambda drawing, _: walk(drawing.target, noise))


def walk(target: Any, noise: list[Tensor]) -> Tensor:
    x = target.start(torch.zeros(3, *target.shape), torch.arange(3))
    row = torch.arange(3)
    for k, std in enumerate(target.std):
        step = torch.full_like(row, k)
        x = target.mean(x, target.predict(x, step, row), step) + std * noise[k]
    return x


@pytest.mark.law
def test_monai_in_one_line_has_its_own_distribution() -> None:
    scheduler = monai_ddpm(steps=30)
    inferer, net = monai_inferer(scheduler), MonaiNet("epsilon", scheduler.alphas_cumprod)
    generator = torch.Generator().manual_seed(2)
    starts = [torch.randn(4000, 1, 2, generator=generator) for _ in range(2)]
    theirs = inferer.sample(starts[0], net, verbose=False)
    with fs.accelerate(inferer, window=8):
        ours = inferer.sample(starts[1], net, verbose=False)
        assert inferer.foresample_report.speedup > 1.5
    assert ks_two_sample(ours.flatten().numpy(), theirs.flatten().numpy()) > 1e-3
    assert not isinstance(inferer.sample, PackageLoop)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
def test_monai_s_network_gets_the_timesteps_of_its_own_loop(dtype: torch.dtype) -> None:
    """In bfloat16 the timestep 999 would be 1000."""
    inferer, start = monai_inferer(monai_ddpm(train=1000)), torch.randn(2, 1, 2).to(dtype)

    def times() -> set[tuple[float, torch.dtype]]:
        seen = set[tuple[float, torch.dtype]]()

        def network(x: Tensor, timesteps: Tensor, context: Any) -> Tensor:
            seen.update((time, timesteps.dtype) for time in timesteps.tolist())
            return 0.5 * x

        inferer.sample(start, network, verbose=False)
        return seen

    theirs = times()
    with fs.accelerate(inferer):
        assert times() == theirs


@pytest.mark.parametrize("cfg", [None, 1.5])
def test_only_monai_s_spade_networks_are_given_a_segmentation(cfg: float | None) -> None:
    inferer = monai_inferer(monai_ddpm())
    levels, start = inferer.scheduler.alphas_cumprod, torch.randn(3, 1, 2)
    seg = torch.tensor([0.0, 0.1, 0.2]).view(3, 1, 1)
    own = sys.modules[type(inferer).__module__].SPADEDiffusionModelUNet

    class Spade(MonaiNet, own):  # type: ignore[misc, valid-type]
        def forward(self, x: Tensor, timesteps: Tensor, context: Any = None, seg: Any = None) -> Tensor:
            output = super().forward(x, timesteps, context)
            return output + (torch.cat([seg, seg]) if len(seg) < len(x) else seg)

    for kind in (MonaiNet, Spade):
        asked = {"input_noise": start, "diffusion_model": kind("epsilon", levels), "seg": seg, "cfg": cfg}
        torch.manual_seed(5)
        theirs = inferer.sample(**asked, verbose=False)
        torch.manual_seed(5)
        noise = [torch.randn(start.shape) for _ in inferer.scheduler.timesteps]
        with fs.accelerate(inferer), walking(noise):
            torch.testing.assert_close(inferer.sample(**asked, verbose=False), theirs, rtol=1e-4, atol=1e-4)


def test_monai_s_steps_are_compared_again_after_a_change() -> None:
    """Tables that contradict each other are read as MONAI's step reads them; another end is refused."""
    scheduler = monai_ddpm()
    inferer, net = monai_inferer(scheduler), MonaiNet("epsilon", scheduler.alphas_cumprod)
    start = torch.randn(3, 1, 2)

    def replayed() -> int:
        inferer.sample(start, net, verbose=False)
        return inferer.foresample_report.evidence.steps_replayed

    with fs.accelerate(inferer):
        assert (replayed(), replayed()) == (12, 0)
        scheduler.betas = 0.2 * scheduler.betas
        scheduler.alphas_cumprod = torch.cumprod(1 - scheduler.betas, 0)
        assert (replayed(), replayed()) == (12, 0)
        scheduler.one = torch.tensor(0.9)
        with pytest.raises(ValueError, match="DiffusionInferer takes other steps than"):
            replayed()


def test_monai_s_other_modes_are_refused() -> None:
    scheduler = load("monai.networks.schedulers").DDIMScheduler(num_train_timesteps=30)
    with pytest.raises(ValueError, match=r"DDIMScheduler adds no noise in an inferer.*use its DDPMScheduler"):
        fs.accelerate(monai_inferer(scheduler))
    with pytest.raises(ValueError, match="state-dependent std; use 'fixed_small'"):
        fs.accelerate(monai_inferer(monai_ddpm(variance_type="learned_range")))
    inferer = monai_inferer(monai_ddpm())
    fs.accelerate(inferer)
    net = MonaiNet("epsilon", inferer.scheduler.alphas_cumprod)
    with pytest.raises(ValueError, match="leave save_intermediates out"):
        inferer.sample(torch.zeros(1, 1, 2), net, save_intermediates=True)


def test_only_monai_s_own_functions_are_trusted() -> None:
    """Its latent and ControlNet inferers do more than the one that is known, with arguments of the same names."""
    inferers = sys.modules[type(monai_inferer(monai_ddpm())).__module__]
    sentence = r"\.sample is not monai\.inferers\.inferer\.DiffusionInferer's own function.*use the package's own class"
    mine = type(
        "MyInferer",
        (inferers.DiffusionInferer,),
        {"sample": lambda self, input_noise, diffusion_model, scheduler: 0},
    )
    for kind in (inferers.LatentDiffusionInferer, inferers.ControlNetDiffusionInferer, mine):
        with pytest.raises(ValueError, match=sentence):
            fs.accelerate(kind(monai_ddpm()))
    inferer = monai_inferer(monai_ddpm())
    net, start = MonaiNet("epsilon", inferer.scheduler.alphas_cumprod), torch.zeros(1, 1, 2)
    with fs.accelerate(inferer):
        inferer.sample(start, net, verbose=False)
        evidence = inferer.foresample_report.evidence
        assert evidence.trusted == ["MONAI's own DiffusionInferer.sample", "MONAI's own DDPMScheduler"]
        own = inferer.scheduler.step
        inferer.scheduler.step = lambda *args, **options: own(*args, **options)
        with pytest.raises(ValueError, match=r"not MONAI's own \(DDPMScheduler\.step\)"):
            inferer.sample(start, net, verbose=False)
        kind = type("DDPMScheduler", (type(inferer.scheduler),), {})
        inferer.scheduler = monai_ddpm()
        inferer.scheduler.__class__ = kind
        with pytest.raises(ValueError, match=r"not MONAI's own \(DDPMScheduler\)"):
            inferer.sample(start, net, verbose=False)


# ------------------------------------------------------------------ boltz

ATOMS, SAMPLES = 5, 3
NO_STEERING = {"fk_steering": False, "physical_guidance_update": False, "contact_guidance_update": False}


def atom_diffusion(version: str, align: bool = False, steps: int = 16) -> Any:
    """The real class and its loop around a network of our own, which is not equivariant: rotations matter."""
    modules = ("encoders", "transformers", "encodersv2", "transformersv2")
    without: tuple[str, ...] = (
        "boltz.data",
        "boltz.model.layers",
        "boltz.model.layers.initialize",
        "boltz.model.potentials",
    )
    without += (
        "einx",
        "boltz.model.potentials.potentials",
        *(f"boltz.model.modules.{name}" for name in modules),
    )
    package = load(f"boltz.model.modules.diffusion{version}", without=without)

    class Loop(package.AtomDiffusion):  # type: ignore[name-defined]
        device = torch.device("cpu")

        def preconditioned_network_forward(
            self, x: Tensor, sigma: Any, network_condition_kwargs: dict[str, Any], training: bool = False
        ) -> Any:
            assert network_condition_kwargs["multiplicity"] == len(x)
            level = torch.as_tensor(sigma).expand(len(x)).view(-1, 1, 1)
            x0 = (x + 0.3 * x.roll(1, 2).tanh() + network_condition_kwargs["pull"]) * 9 / (9 + level**2)
            return x0 if version else (x0, torch.zeros(len(x), 2, 2))

    diffusion = Loop.__new__(Loop)
    nn.Module.__init__(diffusion)
    schedule = {"sigma_min": 0.01, "sigma_max": 5.0, "sigma_data": 4.0, "rho": 7, "num_sampling_steps": steps}
    churn = {"gamma_0": 0.8, "gamma_min": 1.0, "noise_scale": 1.003, "step_scale": 1.5}
    more = {"alignment_reverse_diff": align, "accumulate_token_repr": False, "use_inference_model_cache": False}
    for name, value in (schedule | churn | more | {"token_s": 1, "step_scale_random": None}).items():
        setattr(diffusion, name, value)
    return diffusion.eval()


def arguments(version: str) -> dict[str, Any]:
    mask = torch.ones(1, ATOMS)
    common = {"atom_mask": mask, "multiplicity": SAMPLES, "max_parallel_samples": SAMPLES, "pull": 0.5}
    return common | (
        {"steering_args": NO_STEERING} if version else {"feats": {"token_index": torch.zeros(1, 2)}}
    )


@pytest.mark.parametrize("align", [False, True], ids=["as it is", "aligned"])
@pytest.mark.parametrize("version", ["", "v2"])
def test_boltz_s_loop_with_the_same_noise(version: str, align: bool) -> None:
    diffusion, asked = atom_diffusion(version, align), arguments(version)
    generator = torch.Generator().manual_seed(4)
    steps = diffusion.num_sampling_steps
    first, *noise = [torch.randn(SAMPLES, ATOMS, 3, generator=generator) for _ in range(steps + 2)]
    extra = [torch.randn(SAMPLES, 7, generator=generator) for _ in range(steps)]
    frames = [rotations(xi[:, :4]) for xi in extra]

    # Theirs turns further at every step, and draws its noise in the frame it has turned to.
    turns = [frames[0], *(a.mT @ b for a, b in pairwise(frames))]
    augmented = [(turn, xi[:, None, 4:]) for turn, xi in zip(turns, extra, strict=True)]
    drawn = [first, *(z @ frame for z, frame in zip(noise, frames, strict=False))]
    module = sys.modules[f"boltz.model.modules.diffusion{version}"]
    with (
        mock.patch.object(module, "compute_random_augmentation", side_effect=augmented),
        mock.patch("torch.randn", side_effect=drawn),
    ):
        theirs = diffusion.sample(**asked)["sample_atom_coords"]

    def walk_frames(drawing: Any, *_: Any) -> Tensor:
        target = drawing.target
        added = target.steps.start_added
        sigma = (target.steps.start_scale**2 - added**2) ** 0.5
        x, row = sigma * (first - first.mean(1, keepdim=True)) + added * noise[0], torch.arange(SAMPLES)
        for k, std in enumerate(target.std):
            step = torch.full_like(row, k)
            x = target.mean(x, target.predict(x, step, row, extra[k]), step, extra[k]) + std * noise[k + 1]
        return x

    fs.accelerate(diffusion)
    with mock.patch.object(PackageLoop, "_draw", side_effect=walk_frames):
        ours = diffusion.sample(**asked)["sample_atom_coords"]
    torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-3)


@pytest.mark.law
@pytest.mark.parametrize("align", [False, True], ids=["as it is", "aligned"])
def test_boltz_in_one_line_has_its_own_distribution(align: bool) -> None:
    diffusion = atom_diffusion("v2", align)
    asked = arguments("v2") | {"multiplicity": 4000, "max_parallel_samples": 4000}
    torch.manual_seed(1)
    theirs = diffusion.sample(**asked)["sample_atom_coords"]
    with fs.accelerate(diffusion, window=6):
        ours = diffusion.sample(**asked)["sample_atom_coords"]
        report = diffusion.foresample_report
    assert 1 < report.speedup < 4  # a quarter of the steps and more is its deterministic tail
    views = [(v[:, 0, 0], v[:, 1, 2], (v[:, 0] - v[:, 1]).norm(dim=1), v.mean((1, 2))) for v in (ours, theirs)]
    assert min(ks_two_sample(a.numpy(), b.numpy()) for a, b in zip(*views, strict=True)) > 1e-3 / 8


def test_boltz_s_steps_beyond_a_chain_are_refused() -> None:
    diffusion, asked = atom_diffusion("v2"), arguments("v2")
    fs.accelerate(diffusion)
    with pytest.raises(ValueError, match=r"steering \(fk_steering\) couples samples"):
        diffusion.sample(**asked | {"steering_args": NO_STEERING | {"fk_steering": True}})
    with pytest.raises(ValueError, match="one structure at a time"):
        diffusion.sample(**asked | {"atom_mask": torch.ones(2, ATOMS)})
    diffusion.train().step_scale_random = [1.0, 2.0]
    with pytest.raises(ValueError, match="step_scale_random draws a step scale in training mode"):
        diffusion.sample(**asked)
    diffusion.eval()
    assert type(copy.deepcopy(diffusion).sample(**asked | {"multiplicity": 1})) is dict  # its own loop
    stranger = atom_diffusion("v2")
    stranger.__class__ = type("MyDiffusion", (type(stranger),), {"sample": lambda self, **given: 0})
    with pytest.raises(ValueError, match=r"MyDiffusion\.sample is not boltz\..*AtomDiffusion's own"):
        fs.accelerate(stranger)
    diffusion.accumulate_token_repr = True
    with pytest.raises(ValueError, match="accumulates no token representation"):
        diffusion.sample(**asked)
