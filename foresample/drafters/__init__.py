"""Drafters, which guess the predictions of a window, and the types that authors of drafters use."""

from foresample.contracts import DrafterMemory, DraftPath, PreviousDraft
from foresample.drafters.frozen import Frozen
from foresample.drafters.learned import LearnedPrior
from foresample.drafters.model import DraftModel
from foresample.drafters.prior import Prior
from foresample.drafters.replay import Replay

__all__ = [
    "DraftModel",
    "DraftPath",
    "DrafterMemory",
    "Frozen",
    "LearnedPrior",
    "PreviousDraft",
    "Prior",
    "Replay",
]
