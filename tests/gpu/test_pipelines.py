"""Pipelines drawn on a GPU, against the same ones on the CPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

import foresample as fs

pytest.importorskip("diffusers")
pytest.importorskip("transformers")
from tests.pipelines import EXACT, Case, generators

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning", "ignore::UserWarning"),
]


@pytest.mark.parametrize("case", EXACT, ids=str)
def test_a_gpu_draws_the_same(case: Case, tmp_path: Path) -> None:
    """Fused rounds there, plain ones here: the same streams, so the same latents up to rounding."""
    pipe, arguments, drawn, calls = case.build(tmp_path), case.arguments(4), [], []
    for device in ("cpu", "cuda"):
        pipe.to(device)
        told = {k: v.to(device) if isinstance(v, Tensor) else v for k, v in arguments.items()}
        with fs.accelerate(pipe, window=5):
            drawn.append(pipe(**told, generator=generators(4))[0].cpu())
            calls.append(pipe.foresample_report.calls_mean)
    assert calls[0] == calls[1]
    torch.testing.assert_close(drawn[1], drawn[0], rtol=1e-3, atol=1e-3 * float(drawn[0].abs().max()))
