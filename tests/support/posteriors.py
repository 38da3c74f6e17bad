"""Posteriors of sbi around a small network in closed form, without sbi's training loop."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tests.support.packages import load

UNUSED = (
    "sklearn",
    "sklearn.mixture",
    "sklearn.neighbors",
    "sklearn.base",
    "sklearn.metrics",
    "sklearn.model_selection",
    "sklearn.neural_network",
    "sklearn.preprocessing",
    "joblib",
    "tensorboard",
    "tensorboard.backend.event_processing",
    "tensorboard.backend.event_processing.event_accumulator",
    "torch.utils.tensorboard",
    "torch.utils.tensorboard.writer",
    "skorch",
    "pyro",
    "pymc",
)
ESTIMATORS = {
    "VE": "score_estimator.VEScoreEstimator",
    "VP": "score_estimator.VPScoreEstimator",
    "sub-VP": "score_estimator.SubVPScoreEstimator",
    "flow": "flowmatching_estimator.FlowMatchingEstimator",
}
"""Estimators by the names of their processes."""


def sbi(module: str) -> Any:
    """A module of sbi."""
    load("sbi.inference.posteriors.vector_field_posterior", without=UNUSED)
    return load(f"sbi.{module}")


class Net(nn.Module):
    """Pulls θ softly towards a point that depends on x, and counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.held, self.calls = nn.Parameter(torch.zeros(1)), 0

    def forward(self, theta: Tensor, x: Tensor, time: Tensor) -> Tensor:
        self.calls += 1
        return 0.8 * torch.tanh(2 * theta - x) + 0.2 * torch.sin(3 * theta.roll(1, -1)) + 0 * time.unsqueeze(-1)


def box(size: float) -> Any:
    """A uniform prior of two parameters."""
    return sbi("utils.torchutils").BoxUniform(-size * torch.ones(2), size * torch.ones(2))


def posterior(process: str = "VP", prior: Any = None, net: nn.Module | None = None, **options: Any) -> Any:
    """A posterior of two parameters given two numbers; options of the posterior, and `made` for the estimator."""
    module, _, name = ESTIMATORS[process].partition(".")
    made = {} if process == "flow" else {"mean_0": torch.tensor([0.3, -0.2]), "std_0": torch.tensor([0.9, 0.5])}
    estimator = getattr(sbi(f"neural_nets.estimators.{module}"), name)(
        net or Net(),
        input_shape=torch.Size([2]),
        condition_shape=torch.Size([2]),
        embedding_net=nn.Identity(),
        **made | options.pop("made", {}),
    )
    kind = sbi("inference.posteriors.vector_field_posterior").VectorFieldPosterior
    return kind(estimator, prior or box(20.0), device="cpu", **options)
