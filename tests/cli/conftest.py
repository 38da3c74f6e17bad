"""Fixtures of tests of commands: a model folder, a user's target, a tuning that needs no clock."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import foresample as fs
from foresample.engine.tuning import Trial
from foresample.settings import Settings
from tests.support.tiny_model import save_tiny_model


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model."""
    pytest.importorskip("diffusers")
    return save_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A module in the working directory, with good and bad targets."""
    (tmp_path / "mine.py").write_text(
        "import foresample as fs\n"
        "import torch\n"
        "def make():\n    return fs.GaussianMixture.of_draft_trees(2).langevin(6, 0.01)\n"
        "target = make()\n"
        "def breaks():\n    raise KeyError('weights')\n"
        "class Walk:\n"
        "    shape, std = torch.Size([2]), torch.full((6,), 0.1)\n"
        "    def start(self, noise, row):\n        return noise\n"
        "    def predict(self, x, step, row):\n        return 0.9 * x\n"
        "    def mean(self, x, prediction, step):\n        return prediction\n"
        "class Mixing(Walk):\n"
        "    def predict(self, x, step, row):\n        return 0.9 * x + x.sum(0)\n"
        "class Crashes(Walk):\n"
        "    def predict(self, x, step, row):\n        raise KeyError('\\x1b[31mweights')\n"
        "class Fails(Walk):\n"
        "    def predict(self, x, step, row):\n        return x @ torch.ones(3, 3)\n"
        "def narrow():\n"
        "    return fs.targets.vp(lambda x, t: x, torch.linspace(0.01, 0.99, 4), (2,))\n"
        "def leaves():\n    raise SystemExit(0)\n"
        "class Broken(Walk):\n"
        "    def predict(self, x, step, row):\n"
        "        return torch.where((row == 1).unsqueeze(1), torch.nan, 0.9 * x)\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield "mine"
    sys.modules.pop("mine", None)


@pytest.fixture
def tunes(monkeypatch: pytest.MonkeyPatch) -> Callable[[int | None], list[int]]:
    """Fix what `--window auto` measures: this window, or None if the sequential sampler is faster."""

    def fix(window: int | None) -> list[int]:
        asked: list[int] = []

        def measure(target: fs.Target, settings: Settings, **how: Any) -> fs.Tuning:
            slots = settings.slots or 1
            asked.append(slots)
            gain = 0.5 if window is None else 2.0
            trials = [
                Trial(2, 3 * slots, 1e-3, 1e-3, 9.0, 0.4),
                Trial(window or 3, 4 * slots, 1e-3, 1e-3, 5.0, gain),
            ]
            return fs.Tuning(len(target.std), slots, 1e-3, trials, window, window and 1.9)

        def tune(target: fs.Target, *, progress: Any = None, **settings: Any) -> fs.Tuning:
            return measure(target, Settings.of(settings))

        monkeypatch.setattr("foresample.cli.targets.tune", tune)
        monkeypatch.setattr("foresample.datasets.workers.measure", measure)
        return asked

    return fix
