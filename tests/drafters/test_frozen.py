"""Frozen: which prediction it keeps, and when it has one."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import foresample as fs


@pytest.mark.parametrize(
    ("source", "kept", "reach"),
    [
        ("head", [0, 0, 3, 2], [5, 0, 5, 0]),  # known only where the next window starts
        ("parent", [0, 0, 3, 2], [5, 5, 5, 5]),
        ("nearest", [0, 1, 3, 3], [5, 5, 5, 5]),  # the next window's first step, where a draft was there
    ],
)
def test_one_prediction_is_kept_for_the_whole_window(source: Any, kept: list[int], reach: list[int]) -> None:
    """Rows: a bare call; nothing kept of three drafts; all; two of three."""
    drafter, row = fs.Frozen(source), torch.arange(4)
    predictions = torch.arange(16.0).view(4, 4, 1)
    memory = drafter.begin(4, 5, torch.zeros(1))
    assert drafter.reach(memory, 5).tolist() == [0, 0, 0, 0]
    length, committed = torch.tensor([0, 3, 3, 3]), torch.tensor([1, 1, 4, 3])
    path = fs.drafters.DraftPath(torch.zeros(4, 4, 1), predictions, torch.zeros(4, 3, 1), length, 0 * length)
    memory = drafter.learn(memory, path, committed)
    assert drafter.reach(memory, 5).tolist() == reach
    for position in range(5):
        guess = drafter.guess(memory, torch.ones(4, 1), position, row, row, None)
        assert torch.equal(guess, predictions[row, torch.tensor(kept)])
