"""Exact speculative sampling for diffusion models: fewer network calls, the same distribution."""

from foresample import chains, drafters, pretrained, samplers, targets
from foresample.baseline import sequential
from foresample.checks.exactness import check
from foresample.contracts import Drafter, Target
from foresample.core.report import Commit, Report, Run
from foresample.datasets import Dataset, generate, inspect_dataset
from foresample.drafters import DraftModel, Frozen, Prior, Replay
from foresample.engine import Engine, Frontier, Sample, Tuning, fit_prior, sample, stream, tune
from foresample.integrations import accelerate, restore
from foresample.provenance import __version__
from foresample.targets import GaussianMixture

__all__ = [
    "Commit",
    "Dataset",
    "DraftModel",
    "Drafter",
    "Engine",
    "Frontier",
    "Frozen",
    "GaussianMixture",
    "Prior",
    "Replay",
    "Report",
    "Run",
    "Sample",
    "Target",
    "Tuning",
    "__version__",
    "accelerate",
    "chains",
    "check",
    "drafters",
    "fit_prior",
    "generate",
    "inspect_dataset",
    "pretrained",
    "restore",
    "sample",
    "samplers",
    "sequential",
    "stream",
    "targets",
    "tune",
]
