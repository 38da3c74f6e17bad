"""The handwriting policy's recipe: moments of demonstrations, training, saving and loading."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

pytest.importorskip("diffusers")

from recipes import lasa


def test_the_recipe_s_moments_retrace_the_demonstrations() -> None:
    paths = torch.randn(2, 3, 30, 2, generator=torch.Generator().manual_seed(0)).cumsum(2)
    moments = lasa.moments(paths, 16)
    assert moments.future.shape == (180, 16, 2)
    retraced = moments.position.view_as(paths)[:, :, 10] + moments.future.view(2, 3, 30, 16, 2)[:, :, 10].sum(2)
    torch.testing.assert_close(retraced, paths[:, :, 26])
    assert (moments.future.view(2, 3, 30, 16, 2)[:, :, -1] == 0).all()
    assert (moments.velocity.view_as(paths)[:, :, 0] == 0).all()
    assert moments.shape.view(2, -1).unique(dim=1).flatten().tolist() == [0, 1]


def test_the_recipe_trains_saves_and_loads(tmp_path: Path) -> None:
    paths = torch.linspace(-1, 1, 30).view(1, 1, 30, 1).expand(4, 2, 30, 2)
    policy, losses = lasa.train(paths, steps=3, batch=8, quiet=True)
    assert len(losses) == 3
    lasa.save(policy, tmp_path / "policy", steps=3)
    loaded = lasa.load(tmp_path / "policy")
    start = torch.zeros(2, 2), torch.zeros(2, 2), torch.zeros(2).long()
    plans = [
        p.predict_action_chunk(*start, generator=torch.Generator().manual_seed(0)) for p in (policy, loaded)
    ]
    assert torch.equal(*plans)
