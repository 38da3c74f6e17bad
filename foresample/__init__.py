"""Exact speculative sampling for diffusion models: fewer network calls, the same distribution."""

from foresample import pretrained, targets
from foresample.check import check
from foresample.contracts import Before, Drafter, Memory, Path, Target
from foresample.drafters import Frozen, Model, Replay
from foresample.engine import Engine, Sample
from foresample.generate import Dataset, generate, inspect
from foresample.integrations.diffusers import accelerate, restore
from foresample.integrations.policies import accelerate_policy, restore_policy
from foresample.report import Report, Run
from foresample.sampling import sample, stream
from foresample.sequential import sequential
from foresample.speculate import Commit
from foresample.targets import GaussianMixture
from foresample.tuning import Tuning, tune

__version__ = "0.1.0"
__all__ = [
    "Before",
    "Commit",
    "Dataset",
    "Drafter",
    "Engine",
    "Frozen",
    "GaussianMixture",
    "Memory",
    "Model",
    "Path",
    "Replay",
    "Report",
    "Run",
    "Sample",
    "Target",
    "Tuning",
    "accelerate",
    "accelerate_policy",
    "check",
    "generate",
    "inspect",
    "pretrained",
    "restore",
    "restore_policy",
    "sample",
    "sequential",
    "stream",
    "targets",
    "tune",
]
