"""The examples run, on tiny models; nothing is downloaded."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest
import torch


def example(name: str) -> ModuleType:
    path = Path(__file__).parents[2] / "examples" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_own_network(capsys: pytest.CaptureFixture[str]) -> None:
    run = example("own_network").main(steps=20, count=8)
    assert run.speedup > 1.5
    assert "ok    distribution" in capsys.readouterr().out


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning", "ignore::UserWarning")
def test_stable_diffusion(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    from tests.support import pipelines

    images, report = example("stable_diffusion").draw(
        pipelines.stable_diffusion(tmp_path),
        "a cat",
        num_inference_steps=12,
        height=8,
        width=8,
        generator=[torch.Generator().manual_seed(0)],
    )
    assert len(images) == 1
    assert report.calls_mean < 12


def test_policy() -> None:
    pytest.importorskip("diffusers")
    calls = example("policy").main(plans=2)
    assert len(calls) == 2
    assert max(calls) < 70


def test_edm() -> None:
    run = example("edm").main(steps=24, count=8)
    assert run.samples.shape == (8, 16)
    assert run.speedup > 1.2
