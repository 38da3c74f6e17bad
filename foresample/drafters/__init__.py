"""Drafters: where the guesses of a window come from."""

from foresample.drafters.frozen import Frozen
from foresample.drafters.model import DraftModel
from foresample.drafters.prior import Prior
from foresample.drafters.replay import Replay

__all__ = ["DraftModel", "Frozen", "Prior", "Replay"]
