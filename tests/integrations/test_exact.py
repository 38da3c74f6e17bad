"""The table of docs/diffusers.md: every row is a test of a real pipeline with random weights."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import foresample as fs
from foresample.chains import Chain
from foresample.checks.kolmogorov import ks_two_sample
from foresample.integrations.diffusers.again import Reevaluation
from foresample.integrations.diffusers.arguments import Recorded
from foresample.integrations.diffusers.session import Session
from foresample.integrations.diffusers.witnesses import Witnesses
from foresample.integrations.refusal import Refused

diffusers = pytest.importorskip("diffusers")
pytest.importorskip("transformers")
from tests import supported  # noqa: E402
from tests.integrations.forced import walk  # noqa: E402
from tests.support.pipelines import (  # noqa: E402
    CONTROL,
    DPM,
    EXACT,
    INPAINT_4,
    REFUSED,
    Case,
    a_scheduler,
    controlnet,
    generators,
    inpainting,
    sd,
    video,
    wan,
)

pytestmark = pytest.mark.filterwarnings("ignore")
diffusers.logging.set_verbosity_error()
PAGE = Path(__file__).parent.parent.parent / "docs" / "diffusers.md"


@pytest.mark.law
@pytest.mark.parametrize("case", EXACT, ids=str)
def test_the_untouched_pipeline_agrees_with_every_step(case: Case, tmp_path: Path) -> None:
    """The innovations of an accelerated run, by the untouched pipeline's own means. False alarm 1e-4."""
    run = walk(case.build(tmp_path), case.arguments(4))
    run.require_exact(1e-4 / len(EXACT))
    assert run.calls < 12


def two_sample(case: Case, folder: Path) -> list[float]:
    """P-values of equal numbers of latents from the untouched pipeline and the accelerated one."""
    pipe, count = case.build(folder), case.draws
    arguments = case.arguments(count) | {"num_inference_steps": case.steps}

    def draw(seed: int) -> Tensor:
        torch.manual_seed(seed)  # some pipelines do not pass their generator on
        return torch.as_tensor(pipe(**arguments, generator=torch.Generator().manual_seed(seed))[0])

    theirs = draw(0).flatten(1).double()
    with fs.accelerate(pipe, window=case.steps // 3):
        ours = draw(1).flatten(1).double()
        assert pipe.foresample_report.accepted > 10
    assert len(ours) == count
    size = ours.shape[1]
    directions = torch.randn(size, 8, generator=torch.Generator().manual_seed(0)).double()
    statistics: list[tuple[Tensor, Tensor]] = [
        *zip((ours @ directions).T, (theirs @ directions).T, strict=True),
        (ours.norm(dim=1), theirs.norm(dim=1)),
    ]
    statistics += [(ours[:, i], theirs[:, i]) for i in range(0, size, 9)]
    return [ks_two_sample(a.numpy(), b.numpy()) for a, b in statistics]


@pytest.mark.law
@pytest.mark.slow
@pytest.mark.parametrize("case", EXACT, ids=str)
def test_latents_have_the_pipeline_s_own_distribution(case: Case, tmp_path: Path) -> None:
    """Two-sample tests on projections, norms and single coordinates. False alarm 1e-4."""
    p_values = two_sample(case, tmp_path)
    assert min(p_values) > 1e-4 / len(EXACT) / len(p_values)


@pytest.mark.parametrize("case", REFUSED, ids=str)
def test_what_cannot_be_exact_is_refused_before_an_image_comes_out(case: Case, tmp_path: Path) -> None:
    pipe = case.build(tmp_path)
    with pytest.raises((ValueError, Refused)) as error, fs.accelerate(pipe, window=5):
        pipe(**case.arguments(4), generator=generators(4))
    assert case.refused is not None
    assert case.refused in str(error.value)
    assert "\n" not in str(error.value)


# ------------------------------------------------------------------ the tests can fail


@pytest.mark.law
@pytest.mark.parametrize(
    ("kind", "check", "build", "arguments"),
    [
        (Witnesses, "require_same_guidance", lambda: wan(two=True), lambda: video(4, guidance_scale_2=1.5)),
        (
            Recorded,
            "_argument",
            lambda: next(case for case in EXACT if "guidance_end" in case.note).build,
            lambda: next(case for case in EXACT if "guidance_end" in case.note).arguments(4),
        ),
    ],
)
def test_without_a_check_another_distribution_is_noticed(
    kind: type, check: str, build: Any, arguments: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Broken twins: a guard that is switched off, and a loop that differs at one step."""
    pipe = build()
    pipe = pipe(tmp_path) if not hasattr(pipe, "scheduler") else pipe
    original = getattr(kind, check)

    def careless(self: Any, *args: Any) -> Any:
        try:
            return original(self, *args)
        except Refused:
            return args[2] if check == "_argument" else None

    monkeypatch.setattr(kind, check, careless)
    monkeypatch.setattr(Reevaluation, "_require_alike", lambda *args: None)  # it notices, too
    with pytest.raises(AssertionError):
        walk(pipe, arguments()).require_exact()


@pytest.mark.law
def test_a_fixed_variance_in_the_place_of_a_learned_one_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A broken twin: the extra noise with its typical weight, whatever the network says."""
    own = Chain.predict

    def typical(chain: Chain, x: Tensor, output: Tensor, step: Tensor, extra: Tensor | None = None) -> Tensor:
        if extra is None or chain.low_variance is None:
            return own(chain, x, output, step, extra)
        return own(replace(chain, low_variance=None), x, output.chunk(2, dim=1)[0], step)

    monkeypatch.setattr(Chain, "predict", typical)
    case = next(case for case in EXACT if case.note == "learned variance")
    with pytest.raises(AssertionError):
        walk(case.build(Path()), case.arguments(4)).require_exact()


@pytest.mark.law
@pytest.mark.slow
def test_the_two_sample_tests_can_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A broken twin: a tenth more of the guided output."""
    settle = Session._settle
    monkeypatch.setattr(Session, "_settle", lambda self, x, output: settle(self, x, 1.1 * output))
    case = next(case for case in EXACT if case.pipeline == "FluxPipeline")
    p_values = two_sample(case, tmp_path)
    assert min(p_values) < 1e-4 / len(EXACT) / len(p_values)


# ------------------------------------------------------------------ a known region

KNOWN = [case for case in EXACT if "Inpaint" in case.pipeline and case.note != "9 channels"]


def known_error(case: Case, pipe: Any) -> float:
    """The distance of the known left half from the picture's own latents."""
    told = case.arguments(16)
    images = pipe(**told, generator=torch.Generator().manual_seed(0))[0]
    if images.ndim == 3:  # packed
        images = pipe._unpack_latents(images, 8, 8, pipe.vae_scale_factor)
    with torch.no_grad():
        mean = pipe.vae.encode(2 * told["image"] - 1).latent_dist.mean * pipe.vae.config.scaling_factor
    return float((images - mean)[..., :2].square().mean().sqrt())


@pytest.mark.slow
@pytest.mark.parametrize("case", KNOWN, ids=str)
def test_the_known_region_comes_out_as_it_does_without(case: Case, tmp_path: Path) -> None:
    """The error of the known region is that of the picture's own latents, which are drawn."""
    pipe = case.build(tmp_path)
    theirs = known_error(case, pipe)
    with fs.accelerate(pipe, window=4):
        ours = known_error(case, pipe)
    assert theirs > 0
    assert ours == pytest.approx(theirs, rel=1e-4)


def test_a_threshold_is_one_of_the_known_region_too(tmp_path: Path) -> None:
    """DDIM limits its estimate in the mean, and the threshold is a quantile of the whole picture."""
    limit = {"clip_sample": False, "thresholding": True, "sample_max_value": 100.0, "steps_offset": 1}
    pipe = sd(INPAINT_4, a_scheduler("DDIMScheduler", **limit))(tmp_path)
    walk(pipe, inpainting(16, eta=1.0) | {"num_inference_steps": 8}).require_exact()


class Levels(diffusers.UNet2DConditionModel):  # type: ignore[name-defined]
    """A network that records the known left half of its states, by their timesteps."""

    def forward(self, sample: Tensor, timestep: Any, **told: Any) -> tuple[Tensor]:
        for row, time in zip(sample, torch.as_tensor(timestep).expand(len(sample)), strict=True):
            self.seen.setdefault(int(time), set()).add(round(float(row[..., :2].sum()), 3))
        residuals = told.get("down_block_additional_residuals")
        return (0.5 * sample + (0.0 if residuals is None else 0.01 * residuals[0].mean()),)


@pytest.mark.parametrize(
    ("kind", "order", "more"),
    [(INPAINT_4, 2, {}), ("StableDiffusionControlNetInpaintPipeline", 1, {"control_guidance_end": 0.5})],
    ids=["repeated timesteps", "parts"],
)
def test_the_known_region_has_the_noise_of_its_own_step(
    kind: str, order: int, more: dict[str, Any], tmp_path: Path
) -> None:
    """Where rounded timesteps repeat, and at the first step of a part."""
    net: dict[str, Any] = {"controlnet": controlnet} if more else {}
    config = DPM | {"prediction_type": "sample", "solver_order": order, "use_exponential_sigmas": order == 2}
    betas = {"beta_schedule": "scaled_linear", "beta_start": 0.00085, "beta_end": 0.012}
    pipe = sd(kind, a_scheduler("DPMSolverMultistepScheduler", **config, **betas), **net)(tmp_path)
    pipe.unet = Levels(**{k: v for k, v in pipe.unet.config.items() if k[0] != "_"}).eval()
    told = inpainting(1, guidance_scale=1.0, **more) | ({"control_image": CONTROL} if more else {})
    told["num_inference_steps"] = 12 if more else 20

    def seen() -> dict[int, set[float]]:
        pipe.unet.seen = {}
        pipe(**told, generator=torch.Generator().manual_seed(0))
        return pipe.unet.__dict__.pop("seen")

    theirs = seen()
    with fs.accelerate(pipe, window=3, look=False):
        assert seen() == theirs


def test_a_callback_is_refused_where_a_region_is_overwritten(tmp_path: Path) -> None:
    pipe = sd("StableDiffusionInpaintPipeline")(tmp_path)
    with fs.accelerate(pipe, window=4), pytest.raises(Refused, match="known region is not yet overwritten"):
        pipe(**inpainting(2), callback_on_step_end=lambda p, i, t, k: k)


# ------------------------------------------------------------------ the page


def test_the_table_of_the_page_is_that_of_the_tests() -> None:
    """`python -m tests.supported` writes it."""
    assert supported.filled(PAGE.read_text()) == PAGE.read_text()
