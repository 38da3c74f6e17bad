"""Model folders and the main job, `foresample sample`, on real diffusers objects built from configs."""

from __future__ import annotations

import json
import os
import pty
import shutil
import signal
import subprocess
import sys
import termios
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

import foresample as fs
from foresample import pretrained
from foresample.selftest import rows_are_independent
from foresample.cli import app
from foresample.draw import Settings, draw
from foresample.core.noise import seeds_of

diffusers = pytest.importorskip("diffusers")
runner = CliRunner()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny class-conditional DDPM with random weights, saved by diffusers itself."""
    torch.manual_seed(0)
    unet = diffusers.UNet2DModel(
        sample_size=8,
        in_channels=1,
        out_channels=1,
        layers_per_block=1,
        block_out_channels=(8, 16),
        norm_num_groups=4,
        down_block_types=("DownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "UpBlock2D"),
        num_class_embeds=3,
    )
    scheduler = diffusers.DDPMScheduler(beta_schedule="squaredcos_cap_v2", prediction_type="v_prediction")
    path = tmp_path_factory.mktemp("models") / "tiny"
    diffusers.DDPMPipeline(unet.half(), scheduler).save_pretrained(path, safe_serialization=True)
    (path / "labels.json").write_text('["hat", "coat", "shoe"]')
    return path


def copy(folder: Path, to: Path, **scheduler: object) -> Path:
    shutil.copytree(folder, to)
    config = to / "scheduler" / "scheduler_config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), **scheduler}))
    return to


@pytest.mark.parametrize("kind", ["epsilon", "sample", "v_prediction"])
@pytest.mark.parametrize("spacing", ["leading", "trailing", "linspace"])
def test_the_chain_is_the_scheduler_s_own(folder: Path, tmp_path: Path, kind: str, spacing: str) -> None:
    """Replay `scheduler.step` with the same noise over the whole chain."""
    path = copy(folder, tmp_path / "model", prediction_type=kind, timestep_spacing=spacing)
    model = pretrained.load(path)
    target = model.target(13, [0, 1, 2], reuse="x0")
    scheduler, row = model.scheduler, torch.arange(3)
    x = torch.randn(3, 1, 8, 8, generator=torch.Generator().manual_seed(1))
    for k, timestep in enumerate(scheduler.timesteps):
        with torch.no_grad():
            output = model.unet(x, timestep, class_labels=row).sample
            theirs = scheduler.step(output, timestep, x, torch.Generator().manual_seed(k)).prev_sample
            noise = torch.randn(x.shape, generator=torch.Generator().manual_seed(k))
            step = torch.full((3,), k)
            ours = target.mean(x, target.predict(x, step, row), step) + target.std[k] * noise
        torch.testing.assert_close(ours, theirs, rtol=2e-5, atol=2e-5)
        x = theirs


def test_the_folder_is_a_plain_diffusers_pipeline(folder: Path) -> None:
    pipe = diffusers.DDPMPipeline.from_pretrained(folder)
    ours = pretrained.load(folder).unet.state_dict()
    for name, value in pipe.unet.state_dict().items():
        assert torch.equal(ours[name], value.float())


def test_labels_condition_the_samples(folder: Path) -> None:
    model = pretrained.load(folder)
    one, other = (fs.sample(model.target(5, [c]), 1, window=3, seed=0).samples for c in (0, 2))
    assert not torch.equal(one, other)


# ------------------------------------------------------------------ what is refused


def test_corrupt_weights(folder: Path, tmp_path: Path) -> None:
    path = copy(folder, tmp_path / "model")
    weights = path / "unet" / "diffusion_pytorch_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(ValueError, match=r"is corrupt .* copy or download it again"):
        pretrained.load(path)


def test_foreign_weights(folder: Path, tmp_path: Path) -> None:
    path = copy(folder, tmp_path / "model")
    config = path / "unet" / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "block_out_channels": [8, 24]}))
    with pytest.raises(ValueError, match=r"does not fit the network of config.json"):
        pretrained.load(path)


def test_pickled_weights_are_never_opened(folder: Path, tmp_path: Path) -> None:
    path = copy(folder, tmp_path / "model")
    weights = path / "unet" / "diffusion_pytorch_model.safetensors"
    weights.rename(weights.with_suffix(".bin"))
    with pytest.raises(FileNotFoundError, match="read from safetensors only"):
        pretrained.load(path)


@pytest.mark.parametrize(
    ("scheduler", "sentence"),
    [
        ({"variance_type": "learned_range"}, "use 'fixed_small'"),
        ({"thresholding": True}, "use clip_sample instead"),
        ({"prediction_type": "flow"}, "prediction_type='flow' is none of"),
    ],
)
def test_schedulers_without_an_exact_coupling(
    folder: Path, tmp_path: Path, scheduler: dict, sentence: str
) -> None:
    with pytest.raises(ValueError, match=sentence):
        pretrained.load(copy(folder, tmp_path / "model", **scheduler))


def test_other_pipelines_and_other_folders(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="not the folder of a diffusers DDPM pipeline"):
        pretrained.load(tmp_path)
    path = copy(folder, tmp_path / "model")
    (path / "model_index.json").write_text('{"_class_name": "FluxPipeline"}')
    with pytest.raises(ValueError, match="holds FluxPipeline"):
        pretrained.load(path)


# ------------------------------------------------------------------ foresample sample


def small(folder: Path, out: Path, *more: str) -> list[str]:
    fixed = ["--model", str(folder), "--count", "5", "--steps", "9", "--window", "3", "--out", str(out)]
    return ["sample", *fixed, *more]


def test_sample_writes_pictures_samples_and_report(folder: Path, tmp_path: Path) -> None:
    result = runner.invoke(app, small(folder, tmp_path, "--compare", "--label", "coat"))
    assert result.exit_code == 0, result.output
    assert "network calls" in result.output
    for name in ("samples.png", "compare.png", "run.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")
    saved = load_file(tmp_path / "samples.safetensors")
    assert saved["labels"].tolist() == [1] * 5
    model = pretrained.load(folder)
    again = fs.sample(model.target(9, [1] * 5), seeds=saved["seeds"], window=3)
    assert torch.equal(saved["samples"], again.samples)
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["sequential"]["calls_mean"] == 9
    assert report["speculative"]["calls_mean"] == pytest.approx(float(again.calls.double().mean()))
    assert {"command", "commit", "versions", "machine"} <= set(report)


def test_sample_estimates_the_sequential_time_without_compare(folder: Path, tmp_path: Path) -> None:
    result = runner.invoke(app, small(folder, tmp_path, "--json"))
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["sequential"]["seconds_estimated"] > 0


BAD_OPTIONS = [
    (["--label", "sock"], "unknown label 'sock': choose one of hat, coat, shoe"),
    (["--steps", "5000"], "trained with 1000 timesteps"),
    (["--reuse", "w"], "--reuse takes one of"),
    (["--model", "/nowhere"], "not the folder of a diffusers DDPM pipeline"),
    (["--device", "abacus"], "error:"),
]
"""Of every command that makes its target of a model folder, and what is said of them."""


@pytest.mark.parametrize(("more", "sentence"), BAD_OPTIONS)
def test_bad_input_to_sample(folder: Path, tmp_path: Path, more: list[str], sentence: str) -> None:
    result = runner.invoke(app, small(folder, tmp_path, *more))
    assert result.exit_code == 2
    assert sentence in result.output
    assert "Traceback" not in result.output


def test_an_unwritable_folder_is_refused_before_the_work(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    result = runner.invoke(app, small(folder, tmp_path / "file" / "out"))
    assert result.exit_code == 2
    assert "error:" in result.output


def test_an_interrupted_run_keeps_its_finished_samples(folder: Path, tmp_path: Path) -> None:
    model, done = pretrained.load(folder), 0
    settings = Settings(count=6, steps=9, window=3)

    def stop_after_the_first(name: str, commit: fs.Commit) -> None:
        nonlocal done
        done += int((commit.step + commit.committed == 9).sum())
        if done:
            raise KeyboardInterrupt

    drawing = draw(model, settings, tmp_path, stop_after_the_first)
    assert drawing.interrupted
    assert len(drawing.samples) == done > 0
    whole = draw(model, settings, tmp_path / "whole").samples
    kept = load_file(tmp_path / "samples.safetensors")
    everyone = load_file(tmp_path / "whole" / "samples.safetensors")
    for seed, picture in zip(kept["seeds"], kept["samples"], strict=True):
        torch.testing.assert_close(picture, whole[everyone["seeds"] == seed][0])


def test_control_c_in_a_real_process(folder: Path, tmp_path: Path) -> None:
    """On a terminal, where the bar tells when sampling is under way."""
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (24, 100))
    executable = Path(sys.executable).with_name("foresample")
    command = [executable, *small(folder, tmp_path, "--steps", "1000", "--count", "64")]
    process = subprocess.Popen(
        command, stdout=theirs, stderr=theirs, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    screen = b""
    while b"calls" not in screen:
        screen += os.read(ours, 1000)
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=60) == 130
    os.set_blocking(ours, False)
    screen += os.read(ours, 100_000)
    assert b"interrupted: 0 of 64 samples were finished" in screen
    assert b"Traceback" not in screen


# ------------------------------------------------------------------ foresample generate, foresample inspect


def dataset(folder: Path, out: Path, *more: str) -> list[str]:
    fixed = ["--model", str(folder), "--count", "7", "--steps", "9", "--window", "3", "--shard", "3"]
    return ["generate", *fixed, "--slots", "2", "--out", str(out), *more]


def test_generate_draws_resumes_and_refuses_other_settings(folder: Path, tmp_path: Path) -> None:
    result = runner.invoke(app, dataset(folder, tmp_path, "--law", "5"))
    assert result.exit_code == 0, result.output
    assert "7 of 7, 1×8×8, float32" in result.output
    assert "passed: 9 tests" in result.output
    files = [load_file(path) for path in sorted(tmp_path.glob("shard-*"))]
    assert [len(f["samples"]) for f in files] == [3, 3, 1]
    assert torch.cat([f["labels"] for f in files]).tolist() == [0, 1, 2, 0, 1, 2, 0]
    plain = fs.sample(pretrained.load(folder).target(9), 7, window=3)
    torch.testing.assert_close(torch.cat([f["samples"] for f in files]), plain.samples, rtol=1e-4, atol=1e-4)

    before = [path.stat().st_ino for path in sorted(tmp_path.glob("shard-*"))]
    assert runner.invoke(app, dataset(folder, tmp_path)).exit_code == 0
    assert [path.stat().st_ino for path in sorted(tmp_path.glob("shard-*"))] == before
    for more, sentence in (
        (["--label", "coat"], "labels [0, 1, 2] there and [1] here"),
        (["--half"], "network 'float32' there and 'bfloat16' here"),
        (["--reuse", "v"], "reuse 'x0' there and 'v' here"),
        (["--window", "4"], "window 3 there and 4 here"),
    ):
        result = runner.invoke(app, dataset(folder, tmp_path, *more))
        assert result.exit_code == 2
        assert sentence in result.output


def test_other_weights_are_other_settings(folder: Path, tmp_path: Path) -> None:
    path = copy(folder, tmp_path / "tiny")
    runner.invoke(app, dataset(folder, tmp_path / "out"))
    weights = path / "unet" / "diffusion_pytorch_model.safetensors"
    state = load_file(weights)
    state["conv_in.bias"] = state["conv_in.bias"] + 1
    save_file(state, weights)
    result = runner.invoke(app, dataset(path, tmp_path / "out"))
    assert result.exit_code == 2
    assert "holds a dataset with other settings (weights " in result.output


def test_generate_says_with_its_exit_status_that_samples_broke(folder: Path, tmp_path: Path) -> None:
    path = copy(folder, tmp_path / "model")
    weights = path / "unet" / "diffusion_pytorch_model.safetensors"
    state = load_file(weights)
    state["class_embedding.weight"][2] = torch.nan
    save_file(state, weights)
    result = runner.invoke(app, dataset(path, tmp_path / "out"))
    assert result.exit_code == 3
    assert "5 of 7" in result.output
    for sample in (2, 5):
        seed = int(seeds_of(0, 7)[sample])
        assert f"sample {sample} (seed {seed}) broke: the network returned NaN" in result.output
    assert runner.invoke(app, ["inspect", str(tmp_path / "out")]).exit_code == 1


def test_inspect_verifies_and_paints(folder: Path, tmp_path: Path) -> None:
    runner.invoke(app, dataset(folder, tmp_path))
    result = runner.invoke(app, ["inspect", str(tmp_path), "--pictures", "4"])
    assert result.exit_code == 0, result.output
    assert (tmp_path / "contact.png").read_bytes().startswith(b"\x89PNG")
    assert json.loads(runner.invoke(app, ["inspect", str(tmp_path), "--json"]).stdout)["costs"]["samples"] == 7
    shard = tmp_path / "shard-00001.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1])
    result = runner.invoke(app, ["inspect", str(tmp_path)])
    assert result.exit_code == 1
    assert "4 of 7" in result.output
    assert runner.invoke(app, ["inspect", str(tmp_path / "nowhere")]).exit_code == 2


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        *BAD_OPTIONS,
        (["--graph"], "graph=True needs a target on a CUDA device"),
        (["--cpus", "2"], "give ray='auto' as well"),
        (["--count", "0"], "greater than or equal to 1"),
    ],
)
def test_bad_input_to_generate(folder: Path, tmp_path: Path, more: list[str], sentence: str) -> None:
    result = runner.invoke(app, dataset(folder, tmp_path / "out", *more))
    assert result.exit_code == 2
    assert sentence in result.output
    assert "Traceback" not in result.output
    assert not list(tmp_path.glob("out/shard-*"))


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


def test_the_embedded_model_draws_what_is_asked_in_fewer_calls(embedded: pretrained.Pretrained) -> None:
    """Eight of ten garments recognised by the shipped classifier, in under half the calls."""
    from foresample.pretrained.classifier import load_classifier

    labels = torch.arange(10)
    run = fs.sample(embedded.target(50, labels), 10, window=6, seed=1)
    judge = load_classifier(pretrained.EMBEDDED.parent / "classifier.safetensors")
    assert (judge(run.samples).argmax(1) == labels).sum() >= 7
    assert run.speedup > 2
