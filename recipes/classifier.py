"""The small judge of Fashion-MNIST samples, and its training: `python -m recipes.classifier fashion-mnist`.

It checks whether a sample shows the wanted garment, and its 128 features are the space of the Fréchet distance.
Training is short by design (about 50 epochs of a 0.3 M network), so it needs no checkpoints.
"""

from __future__ import annotations

import json
import math
import time
from pathlib import Path
from typing import Annotated

import torch
import typer
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, pad
from tqdm import tqdm

from recipes import data
from recipes.train import batch_indices, seeded

WEIGHTS = Path(__file__).parents[1] / "assets" / "fashion_mnist_classifier.safetensors"


def _block(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()
    )


class FashionClassifier(nn.Module):
    """Six 3×3 convolutions, 28 → 14 → 7 → mean; 0.29 M parameters. Pictures are [n, 1, 28, 28] in [-1, 1]."""

    def __init__(self, classes: int = 10) -> None:
        super().__init__()
        first = _block(1, 32), _block(32, 32), nn.MaxPool2d(2)
        second = _block(32, 64), _block(64, 64), nn.MaxPool2d(2)
        self.body = nn.Sequential(*first, *second, _block(64, 128), _block(128, 128))
        self.head = nn.Linear(128, classes)

    def features(self, images: Tensor) -> Tensor:
        """The penultimate layer, [n, 128]: the space in which distributions of pictures are compared."""
        return self.body(images).mean(dim=(2, 3))

    def forward(self, images: Tensor) -> Tensor:
        """Log-odds of the classes up to a constant, [n, classes]."""
        return self.head(self.features(images))


def load_classifier(device: str | torch.device = "cpu", path: str | Path = WEIGHTS) -> FashionClassifier:
    """The trained classifier, in float32 and ready to evaluate. Only safetensors are read."""
    model = FashionClassifier()
    try:
        model.load_state_dict({name: value.float() for name, value in load_file(path).items()})
    except FileNotFoundError:
        raise FileNotFoundError(f"{path} does not exist: train it with python -m recipes.classifier") from None
    except (SafetensorError, RuntimeError) as error:
        raise ValueError(f"{path} does not hold the weights of FashionClassifier ({error})") from None
    return model.to(device).eval()


def normalise(images: Tensor) -> Tensor:
    """uint8 pictures to [-1, 1], as the diffusion model draws them."""
    return images.float() / 127.5 - 1


def augment(images: Tensor, generator: torch.Generator) -> Tensor:
    """Shift each picture by up to two pixels either way and mirror half of them."""
    count, _, height, width = images.shape
    u = torch.rand(3, count, generator=generator, device=images.device)
    padded = pad(images, (2, 2, 2, 2))
    rows = (u[0] * 5).long()[:, None] + torch.arange(height, device=images.device)
    columns = (u[1] * 5).long()[:, None] + torch.arange(width, device=images.device)
    columns = torch.where((u[2] < 0.5)[:, None], columns.flip(1), columns)
    each = torch.arange(count, device=images.device)[:, None, None]
    return padded[each, 0, rows[:, :, None], columns[:, None, :]][:, None]


def train(
    split: data.Split, epochs: int, batch: int, seed: int, lr: float, device: torch.device, quiet: bool = False
) -> FashionClassifier:
    """AdamW with a one-cycle learning rate and smoothed labels; an average of the weights is kept."""
    torch.manual_seed(seed)
    model = FashionClassifier().to(device).train()
    average = torch.optim.swa_utils.AveragedModel(
        model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.99), use_buffers=True
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.05)
    images, labels = split.images.to(device), split.labels.to(device)
    indices = batch_indices(len(images), batch, seed, device)
    total = epochs * max(1, len(images) // batch)
    mixed = device.type == "cuda"
    for step in tqdm(range(total), desc="classifier", unit="step", disable=quiet, mininterval=2.0):
        done = step / total
        rate = lr * (min(1.0, done / 0.1) if done < 0.1 else 0.5 * (1 + math.cos(math.pi * (done - 0.1) / 0.9)))
        optimizer.param_groups[0]["lr"] = rate
        chosen = indices(step)
        pictures = augment(images[chosen], seeded(device, seed, "augment", step))
        with torch.autocast(device.type, torch.bfloat16, enabled=mixed):
            logits = model(normalise(pictures))
        cross_entropy(logits.float(), labels[chosen], label_smoothing=0.05).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        average.update_parameters(model)
    kept = average.module
    assert isinstance(kept, FashionClassifier)
    return kept.eval()


@torch.no_grad()
def accuracy(model: FashionClassifier, split: data.Split, device: torch.device) -> float:
    """The share of pictures whose most likely class is their label."""
    hits = 0
    for images, labels in zip(split.images.split(1000), split.labels.split(1000), strict=True):
        hits += int((model(normalise(images.to(device))).argmax(1) == labels.to(device)).sum())
    return hits / len(split.labels)


def save(model: FashionClassifier, path: Path) -> None:
    """Safetensors in fp16; whole numbers, such as batch counts, keep their type."""
    path.parent.mkdir(parents=True, exist_ok=True)
    state = {k: v.detach().cpu().contiguous() for k, v in model.state_dict().items()}
    save_file({k: v.half() if v.is_floating_point() else v for k, v in state.items()}, path)


def main(
    name: Annotated[str, typer.Argument(help="fashion-mnist")] = "fashion-mnist",
    epochs: Annotated[int, typer.Option(help="passes over the training pictures")] = 50,
    batch: Annotated[int, typer.Option(help="pictures a step")] = 512,
    seed: Annotated[int, typer.Option(help="of the first weights, the data's order and the shifts")] = 0,
    lr: Annotated[float, typer.Option(help="highest learning rate")] = 4e-3,
    out: Annotated[Path, typer.Option(help="folder of the weights")] = Path("out/train/classifier"),
    folder: Annotated[
        Path | None, typer.Option("--data", help="folder of the data [default: .data/NAME]")
    ] = None,
) -> None:
    """Train the classifier and save it as out/classifier.safetensors."""
    began = time.monotonic()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        if name != "fashion-mnist":
            raise data.DataError(
                f"there is no classifier recipe for {name!r}: the one there is is fashion-mnist."
            )
        train_split, test_split = data.load(name, folder), data.load(name, folder, train=False)
    except data.DataError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(1) from None
    model = train(train_split, epochs, batch, seed, lr, device)
    path = out / "classifier.safetensors"
    save(model, path)
    shipped = load_classifier(device, path)  # judged as it is shipped, after rounding to fp16
    summary = {
        "kind": "training-classifier",
        "parameters": sum(p.numel() for p in shipped.parameters()),
        "bytes": path.stat().st_size,
        "epochs": epochs,
        "train_accuracy": accuracy(shipped, train_split, device),
        "test_accuracy": accuracy(shipped, test_split, device),
        "seconds": round(time.monotonic() - began, 1),
    }
    (out / "summary.json").write_text(json.dumps(summary, indent=1) + "\n")
    typer.echo(json.dumps(summary))


if __name__ == "__main__":
    typer.run(main)
