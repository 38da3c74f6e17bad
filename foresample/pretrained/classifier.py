"""A small Fashion-MNIST classifier, with 128 features for a Fréchet distance.

`recipes/classifier.py` trains it; this module has only what inference needs.
"""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn


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


def load_classifier(path: str | Path, device: str | torch.device = "cpu") -> FashionClassifier:
    """The trained classifier, in float32 and ready to evaluate. Only safetensors are read."""
    model = FashionClassifier()
    try:
        model.load_state_dict({name: value.float() for name, value in load_file(path).items()})
    except FileNotFoundError:
        raise FileNotFoundError(f"{path} does not exist: train it with python -m recipes.classifier") from None
    except (SafetensorError, RuntimeError) as error:
        raise ValueError(f"{path} does not hold the weights of FashionClassifier ({error})") from None
    return model.to(device).eval()
