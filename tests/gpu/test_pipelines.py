"""Pipelines drawn on a GPU, against the same ones on the CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import foresample as fs

pytest.importorskip("diffusers")
pytest.importorskip("transformers")
from tests.support.pipelines import EXACT, Case, generators

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning", "ignore::UserWarning"),
]


def moved(value: Any, device: str) -> Any:
    if isinstance(value, list):
        return [moved(item, device) for item in value]
    return value.to(device) if isinstance(value, Tensor) else value


@pytest.mark.parametrize("case", EXACT, ids=str)
def test_a_gpu_draws_the_same(case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fused rounds there, plain ones here: the same streams, so the same latents up to rounding.

    In norm: where a draft was nearly right, the line along which its noise is recycled is itself mostly rounding
    (`tests.support.agreement`), and one coordinate may be off by more than the others.
    """
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    pipe, drawn, calls = case.build(tmp_path), [], []
    for device in ("cpu", "cuda"):
        pipe.to(device)
        told = {name: moved(value, device) for name, value in case.arguments(4).items()}
        with fs.accelerate(pipe, window=5):
            drawn.append(torch.as_tensor(pipe(**told, generator=generators(4))[0]).cpu())
            calls.append(pipe.foresample_report.calls_mean)
            assert (
                pipe.foresample_report.look_calls <= 8
            )  # of two networks: rounding depends on the size of a call
    assert calls[0] == calls[1]
    assert (drawn[1] - drawn[0]).norm() <= 1e-3 * drawn[0].norm()
