"""LeRobot's asynchronous policy server, its plans drawn speculatively.

The server loads the policy that a client requests and accelerates it. Queues, protocol and client are LeRobot's.
"""

from __future__ import annotations

import inspect
import ipaddress
import sys
from typing import Any

import torch

from foresample.integrations.acceleration import accelerate

_OPEN = (
    "warning: LeRobot's server unpickles what it receives, so anyone who reaches {host} over the network can run code "
    "on this machine: use --host=127.0.0.1, through an SSH tunnel if the robot is elsewhere"
)


def accelerated_server(server: Any, **options: Any) -> Any:
    """A subclass of LeRobot's `PolicyServer` whose policies are accelerated; `options` goes to `foresample.accelerate`.

    A policy that cannot be accelerated is refused, and the client gets the reason.
    """

    class AcceleratedPolicyServer(server):
        def __init__(self, config: Any) -> None:
            if not _is_loopback(config.host):
                print(_OPEN.format(host=config.host), file=sys.stderr, flush=True)
            super().__init__(config)

        def SendPolicyInstructions(self, request: Any, context: Any) -> Any:
            answer = super().SendPolicyInstructions(request, context)
            if self.policy is not None:
                accelerate(self.policy, **options)
            return answer

        def _get_action_chunk(self, observation: dict[str, Any]) -> Any:
            return super()._get_action_chunk(_remembered(self.policy, observation))

    return AcceleratedPolicyServer


def _is_loopback(host: str) -> bool:
    """Whether only this machine can reach an address; the only name accepted is localhost."""
    try:
        return host == "localhost" or ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def _remembered(policy: Any, observation: dict[str, Any]) -> dict[str, Any]:
    """The observation, put into the queues that the policy plans from.

    `DiffusionPolicy.select_action` fills them, and LeRobot 0.4's server does not call it: its plans fail without this.
    """
    own = type(policy).predict_action_chunk
    if not hasattr(policy, "_queues") or "populate_queues" in inspect.getsource(own):
        return observation
    from lerobot.policies.utils import populate_queues

    seen = {name: value for name, value in observation.items() if name != "action"}  # LeRobot adds None
    if policy.config.image_features:
        seen["observation.images"] = torch.stack([seen[name] for name in policy.config.image_features], dim=-4)
    policy._queues = populate_queues(policy._queues, seen)
    return seen
