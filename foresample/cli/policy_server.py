"""`foresample policy-server`: LeRobot's asynchronous server with accelerated policies."""

from __future__ import annotations

import sys

import torch

from foresample.cli.options import PolicyServer, no_server
from foresample.cli.targets import read_window
from foresample.drafters.learned import load_prior
from foresample.integrations.policies.server import accelerated_server


def run(options: PolicyServer) -> None:
    if options.graph and not torch.cuda.is_available():
        raise ValueError("--graph needs a GPU, and torch sees none here: leave --graph out")
    prior = None if options.prior is None else load_prior(options.prior)
    try:
        from lerobot.async_inference import policy_server
    except ModuleNotFoundError as error:
        raise no_server(error.name) from None

    policy_server.PolicyServer = accelerated_server(
        policy_server.PolicyServer,
        window=read_window(options.window),
        warm=options.warm,
        graph=options.graph,
        prior=prior,
        pilots=options.pilots,
    )
    sys.argv = ["lerobot.async_inference.policy_server", *(options.lerobot or [])]
    policy_server.serve()
