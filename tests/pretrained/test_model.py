"""Model folders, on real diffusers objects built from configs; `tests/cli` has the commands that use them."""

from __future__ import annotations

import json
import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounter

import foresample as fs
from foresample import pretrained
from foresample.checks.rows import rows_are_independent
from foresample.integrations.diffusers.calls import stream_seeds
from tests.support.tiny_model import copy_model, save_tiny_model

diffusers = pytest.importorskip("diffusers")


def generators(count: int) -> list[torch.Generator]:
    return [torch.Generator().manual_seed(i) for i in range(count)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


KINDS = [{"prediction_type": kind} for kind in ("epsilon", "sample", "v_prediction")]
SPACINGS = [{"timestep_spacing": spacing} for spacing in ("leading", "trailing", "linspace")]
OTHERS = [{"variance_type": "fixed_large"}, {"thresholding": True, "clip_sample": False}]


@pytest.mark.parametrize("scheduler", [*({**a, **b} for a in KINDS for b in SPACINGS), *OTHERS], ids=str)
def test_the_chain_is_the_scheduler_s_own(folder: Path, tmp_path: Path, scheduler: dict[str, object]) -> None:
    """Replay `scheduler.step` with the same noise over the whole chain."""
    model = pretrained.load(copy_model(folder, tmp_path / "model", **scheduler))
    target, row = model.target(13, [0, 1, 2], reuse="x0"), torch.arange(3)
    x = torch.randn(3, 1, 8, 8, generator=torch.Generator().manual_seed(1))
    for k, timestep in enumerate(model.scheduler.timesteps):
        with torch.no_grad():
            output = model.unet(x, timestep, class_labels=row).sample
            theirs = model.scheduler.step(output, timestep, x, torch.Generator().manual_seed(k)).prev_sample
            noise = torch.randn(x.shape, generator=torch.Generator().manual_seed(k))
            step = torch.full((3,), k)
            ours = target.mean(x, target.predict(x, step, row), step) + target.std[k] * noise
        torch.testing.assert_close(ours, theirs, rtol=2e-5, atol=2e-5)
        x = theirs


@pytest.mark.parametrize("scheduler", [{}, *OTHERS], ids=str)
def test_a_folder_draws_what_its_accelerated_pipeline_draws(
    folder: Path, tmp_path: Path, scheduler: dict[str, object]
) -> None:
    """One reader of schedulers: the same settings work either way, from the same noise to the same pictures."""
    path = copy_model(folder, tmp_path / "model", **scheduler)
    pipe = diffusers.DDPMPipeline.from_pretrained(path)
    pipe.set_progress_bar_config(disable=True)
    network = pipe.unet.forward
    pipe.unet.forward = lambda sample, timestep: network(
        sample, timestep, class_labels=torch.ones(len(sample), dtype=torch.int64)
    )
    with fs.accelerate(pipe, window=4):
        theirs = pipe(3, generators(3), num_inference_steps=14, output_type="np").images
        calls = pipe.foresample_report.rounds
    sources = generators(3)  # the seeds are drawn after the first latents
    start = torch.cat([torch.randn(1, 1, 8, 8, generator=source) for source in sources])
    target = replace(pretrained.load(path).target(14, [1]), start_states=start)
    run = fs.sample(target, seeds=stream_seeds(sources)(3), window=4)
    pictures = (run.samples / 2 + 0.5).clamp(0, 1).permute(0, 2, 3, 1)
    torch.testing.assert_close(torch.from_numpy(theirs), pictures, rtol=1e-3, atol=1e-3)
    assert calls == int(run.calls.sum()) < 3 * 14


def test_the_folder_is_a_plain_diffusers_pipeline(folder: Path) -> None:
    pipe = diffusers.DDPMPipeline.from_pretrained(folder)
    ours = pretrained.load(folder).unet.state_dict()
    for name, value in pipe.unet.state_dict().items():
        assert torch.equal(ours[name], value.float())


def test_labels_condition_the_samples(folder: Path) -> None:
    model = pretrained.load(folder)
    one, other = (fs.sample(model.target(5, [c]), 1, window=3, seed=0).samples for c in (0, 2))
    assert not torch.equal(one, other)


def test_a_compiled_network_is_compiled_at_most_twice(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For one state and for any other number; on a CPU torch's convolutions need another graph from 16 states on."""
    torch._dynamo.reset()
    counter, own = CompileCounter(), torch.compile
    monkeypatch.setattr(torch, "compile", lambda module, **options: own(module, backend=counter, **options))
    target = pretrained.load(folder, compiled=True).target(10)
    for window in (3, 9, 5):
        fs.sample(target, 3, window=window, slots=1)
    fs.sequential(target, 3)
    assert counter.frame_count == 2


def test_a_cpu_evaluates_a_few_states_at_a_time(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts have like sizes, each state keeps its time and class, and results differ by rounding only."""
    model = pretrained.load(folder)
    target, sizes = model.target(20, [2, 0, 1]), list[int]()
    x = torch.randn(23, 1, 8, 8, generator=torch.Generator().manual_seed(1))
    step, row = torch.arange(23) % 20, torch.arange(23)
    model.unet.register_forward_pre_hook(lambda unet, given: sizes.append(len(given[0])))
    whole = target.predict(x, step, row)
    layer = 8 * 8 * 8 * 4  # bytes, of a state
    for cached, parts in (
        (10 * layer, [8, 8, 7]),
        (23 * layer - 1, [12, 11]),
        (23 * layer, [23]),
        (1, [1] * 23),
    ):
        monkeypatch.setattr("foresample.pretrained.model._CACHED", cached)
        sizes.clear()
        torch.testing.assert_close(target.predict(x, step, row), whole, rtol=1e-4, atol=1e-5)
        assert sizes == parts


# ------------------------------------------------------------------ what is refused


def test_corrupt_weights_are_refused(folder: Path, tmp_path: Path) -> None:
    path = copy_model(folder, tmp_path / "model")
    weights = path / "unet" / "diffusion_pytorch_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(ValueError, match=r"diffusers cannot read .*unet \(.*safetensors"):
        pretrained.load(path)


def test_weights_of_another_network_are_refused(folder: Path, tmp_path: Path) -> None:
    path = copy_model(folder, tmp_path / "model")
    config = path / "unet" / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "block_out_channels": [8, 24]}))
    with pytest.raises(ValueError, match=r"diffusers cannot read .*unet \("):
        pretrained.load(path)


def test_pickled_weights_are_never_opened(folder: Path, tmp_path: Path) -> None:
    path = copy_model(folder, tmp_path / "model")
    weights = path / "unet" / "diffusion_pytorch_model.safetensors"
    weights.rename(weights.with_suffix(".bin"))
    with pytest.raises(FileNotFoundError, match="read from safetensors only"):
        pretrained.load(path)


@pytest.mark.parametrize(
    ("scheduler", "sentence"),
    [
        ({"variance_type": "learned_range"}, "use variance_type='fixed_small'"),
        ({"prediction_type": "flow"}, "prediction_type='flow' is not one of"),
    ],
)
def test_schedulers_without_an_exact_coupling_are_refused(
    folder: Path, tmp_path: Path, scheduler: dict[str, object], sentence: str
) -> None:
    with pytest.raises(ValueError, match=sentence):
        pretrained.load(copy_model(folder, tmp_path / "model", **scheduler))


def test_other_pipelines_and_other_folders_are_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="not the folder of a diffusers DDPM pipeline"):
        pretrained.load(tmp_path)
    path = copy_model(folder, tmp_path / "model")
    (path / "model_index.json").write_text('{"_class_name": "FluxPipeline"}')
    with pytest.raises(ValueError, match="holds FluxPipeline"):
        pretrained.load(path)


NESTED: Any = 0
for _ in range(100):
    NESTED = [NESTED]


@pytest.mark.parametrize(
    ("file", "document", "sentence"),
    [
        ("model_index.json", [], "holds None with None and None"),
        ("model_index.json", {"unet": None}, "with None and DDPMScheduler"),
        ("model_index.json", {"unet": "UNet2DModel", "scheduler": 3}, "with UNet2DModel and 3"),
        ("model_index.json", {"unet": NESTED}, "nested more than 32 deep"),
        ("unet/config.json", None, "diffusers cannot read .*unet"),
        ("unet/config.json", {"block_out_channels": 3}, "diffusers cannot read .*unet"),
        ("unet/config.json", {"sample_size": [8]}, r"sample_size is \(?\[?8.*, not the pixels"),
        ("unet/config.json", {"sample_size": None}, "sample_size is None, not the pixels"),
        ("unet/config.json", {"out_channels": 2}, "diffusers cannot read .*unet"),
        ("unet/config.json", {"layers_per_block": 2}, "diffusers cannot read .*state_dict"),
        ("unet/config.json", {"add_attention": False}, "its weights do not fit the network of config.json"),
        ("unet/config.json", {"norm_num_groups": 0}, r"diffusers cannot read .*unet \(ZeroDivisionError"),
        ("unet/config.json", {"act_fn": "x"}, r"diffusers cannot read .*unet \(.*x"),
        ("unet/config.json", {"act_fn": "x" * 5000}, r"diffusers cannot read .*unet \(.*x"),
        ("scheduler/scheduler_config.json", {"trained_betas": [0.5, 2]}, "diffusers cannot read .*scheduler"),
        ("scheduler/scheduler_config.json", {"beta_schedule": "x"}, "diffusers cannot read .*scheduler"),
        ("labels.json", {"0": "hat"}, "labels.json is not a list of names: give one name for each class"),
        ("labels.json", ["hat"], "labels.json has 1 names, and the network has 3 classes: give one for each"),
        ("labels.json", ["hat", "coat", "hat"], "labels.json has 2 names, and the network has 3 classes"),
        ("labels.json", ["hat", "coat", 3], "labels.json is not a list of names"),
    ],
)
def test_a_folder_with_wrong_contents_is_refused(
    folder: Path, tmp_path: Path, file: str, document: Any, sentence: str
) -> None:
    path = copy_model(folder, tmp_path / "model")
    sound = json.loads((path / file).read_text())
    document = {**sound, **document} if isinstance(document, dict) and isinstance(sound, dict) else document
    (path / file).write_text(json.dumps(document))
    with pytest.raises(ValueError, match=sentence) as raised:
        pretrained.load(path)
    assert len(str(raised.value).splitlines()) == 1
    assert len(str(raised.value)) < 1000


@pytest.mark.parametrize(
    "file", ["model_index.json", "labels.json", "unet/diffusion_pytorch_model.safetensors"]
)
def test_a_named_pipe_in_place_of_a_file_is_refused(folder: Path, tmp_path: Path, file: str) -> None:
    path = copy_model(folder, tmp_path / "model")
    (path / file).unlink()
    os.mkfifo(path / file)
    signal.alarm(300)  # a guard: who waits for it, waits for ever
    with pytest.raises(OSError, match=r"not a plain file|does not exist"):
        pretrained.load(path)
    signal.alarm(0)


def test_a_missing_device_is_refused(folder: Path) -> None:
    with pytest.raises(ValueError, match=r"there is no cuda:99 here: .* load the model on the CPU"):
        pretrained.load(folder, "cuda:99")


# ------------------------------------------------------------------ the embedded model


@pytest.fixture(scope="module")
def embedded() -> pretrained.Pretrained:
    return pretrained.load()


def test_the_embedded_model_fits_its_limit_and_is_only_safetensors() -> None:
    files = [path for path in pretrained.EMBEDDED.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) <= 6_000_000
    assert {path.suffix for path in files} <= {".json", ".safetensors"}


def test_the_embedded_model_treats_rows_independently(embedded: pretrained.Pretrained) -> None:
    assert rows_are_independent(embedded.target(10)).passed


@pytest.mark.slow
def test_the_embedded_model_draws_the_label_asked_for_in_fewer_calls(embedded: pretrained.Pretrained) -> None:
    """Seven of ten garments recognised by the shipped classifier, in under half the calls."""
    from recipes.classifier import load_classifier

    labels = torch.arange(10)
    run = fs.sample(embedded.target(50, labels), 10, window=6, seed=1)
    judge = load_classifier()
    assert (judge(run.samples).argmax(1) == labels).sum() >= 7
    assert run.speedup > 2
