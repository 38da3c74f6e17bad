"""The numbers of the distribution tests (tests/law/test_law.py). A test holds this page to the suite."""

from __future__ import annotations

SUITE_LEVEL = 1e-3
SHARES = 530
SAMPLES = 5_000
MANY_SAMPLES = 100_000
CHAINS = ("flow", "ddpm", "ddim", "langevin", "wells", "interrupted", "multistep", "single precision")
DRAFTERS = ("head", "parent", "nearest", "replay", "secant", "warm", "model")
BLOCKS = ("per step", "blocks of 4", "whole window")

BROKEN = {
    "redraw from the target": "after a rejection it draws from the target itself, ignoring the residual",
    "first failure": "it stops at the first draft that fails instead of keeping up to the last that passes",
    "per-step residual": "after a block's rejection it corrects as if the step had been tested alone",
    "noise reused": "it spends noise again that the test has used, without recycling it",
    "old scalar kept": "its corrected state is the rejected draft",
    "last h like an inner one": "it treats the window's last draft as if another followed",
    "window ends by its own noise": "whether a draft is tested at all depends on the noise it is tested with",
}
"""Broken verifications that the suite must catch, and what each does wrong."""
PEEKING = {
    "a draft that peeks": "its guess contains the very noise it is tested with",
    "a drafter that looks ahead": "it replays the next step's prediction, which knows this step's noise",
}
"""Broken drafts that it must catch."""
