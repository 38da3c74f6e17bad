"""Exact speculative sampling for diffusion models: fewer network calls, the same distribution.

A public name is imported when it is first used, so that `import foresample` and wrong commands do not wait for torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
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
    from foresample.targets.mixture import GaussianMixture

_HOMES = {
    "baseline": "sequential",
    "checks.exactness": "check",
    "contracts": "Drafter Target",
    "core.report": "Commit Report Run",
    "datasets": "Dataset generate inspect_dataset",
    "drafters": "DraftModel Frozen Prior Replay",
    "engine": "Engine Frontier Sample Tuning fit_prior sample stream tune",
    "integrations": "accelerate restore",
    "provenance": "__version__",
    "targets.mixture": "GaussianMixture",
}
"""Module of each public name that is not a module itself."""
_HOME = {name: home for home, names in _HOMES.items() for name in names.split()}

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


if not TYPE_CHECKING:  # a type checker that sees __getattr__ takes any name for a public one

    def __getattr__(name: str) -> Any:
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        home = import_module(f"{__name__}.{_HOME.get(name, name)}")
        value = globals()[name] = getattr(home, name) if name in _HOME else home
        return value

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})
