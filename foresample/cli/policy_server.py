"""`foresample policy-server`: LeRobot's asynchronous server with accelerated policies."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer


def policy_server_command(
    context: typer.Context,
    window: Annotated[int, typer.Option(min=1, help="Transitions drafted in a round.")] = 16,
    warm: Annotated[bool, typer.Option(help="Draft a plan's first window from the last plan.")] = True,
    graph: Annotated[bool, typer.Option("--graph", help="On a GPU, replay rounds as CUDA graphs.")] = False,
    prior: Annotated[Path | None, typer.Option(help="A prior saved by Prior.save.")] = None,
    pilots: Annotated[int | None, typer.Option(min=2, help="Fit a prior on so many first plans.")] = None,
) -> None:
    """Start LeRobot's policy server, its diffusion policies accelerated; what follows -- goes to LeRobot."""
    for name in ("lerobot", "grpc"):
        if find_spec(name) is None:
            raise _missing(name)
    try:
        from lerobot.async_inference import policy_server
    except ModuleNotFoundError as error:
        raise _missing(error.name) from None

    from foresample.integrations.policies.server import accelerated_server

    policy_server.PolicyServer = accelerated_server(
        policy_server.PolicyServer, window=window, warm=warm, graph=graph, prior=prior, pilots=pilots
    )
    sys.argv = ["lerobot.async_inference.policy_server", *context.args]
    policy_server.serve()


def _missing(name: str | None) -> ImportError:
    """LeRobot imports everything it may need, so all of its dependencies must be there."""
    return ImportError(
        f"the policy server needs {name}, which is not installed: pip install 'lerobot[async]' brings LeRobot, its "
        "server and everything they import (docs/robots.md)"
    )
