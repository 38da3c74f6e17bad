"""`generate` on a GPU: queued and captured, resumed, and checked."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import foresample as fs
from foresample.chains import Chain
from foresample.targets import ChainTarget

pytestmark = pytest.mark.gpu


def wandering() -> ChainTarget:
    """Element by element, so that no answer depends on the size of a call."""

    def network(x: Tensor, step: Tensor, row: Tensor) -> Tensor:
        return torch.sin(3 * x) + (row % 2).unsqueeze(1)

    one = torch.ones(20, device="cuda")
    return ChainTarget(Chain(0.3 * one, 0.9 * one, 0.2 * one), torch.Size([5]), network)


def drawn(folder: Path) -> dict[str, Tensor]:
    """All that does not depend on who sat in the slot beside, as the width of padded rounds does."""
    parts = [load_file(path) for path in sorted(folder.glob("shard-*"))]
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0] if name != "evaluations"}


@pytest.mark.parametrize("graph", [False, True], ids=["queued", "captured"])
def test_a_dataset_is_resumed_where_a_shard_is_gone(tmp_path: Path, graph: bool) -> None:
    speculation: dict[str, Any] = {
        "out": tmp_path,
        "window": 4,
        "shard": 50,
        "labels": [0, 1],
        "graph": graph,
        "law": 200,
    }
    dataset = fs.generate(wandering, 230, slots=32, **speculation)
    assert dataset.complete
    assert dataset.law is not None
    assert dataset.law.passed
    before = drawn(tmp_path)
    kept = (tmp_path / "shard-00000.safetensors").stat().st_ino
    (tmp_path / "shard-00002.safetensors").unlink()
    again = fs.generate(wandering, 230, slots=7, **speculation)
    assert again.manifest["runs"][-1]["drawn"] == 50
    assert (tmp_path / "shard-00000.safetensors").stat().st_ino == kept
    after = drawn(tmp_path)
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
