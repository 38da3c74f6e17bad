"""Caches of diffusers, refused by name before any work is done.

MagCache, TaylorSeer, pyramid attention broadcast, FasterCache and the others answer for a state with what they kept of
earlier calls, so the answer is not a function of the state. They all sit in diffusers' hook registries, and say there
that they keep state. Hooks that do not (offloading, layerwise casting) are served.
"""

from __future__ import annotations

from typing import Any

import torch


def require_no_cache(networks: dict[str, Any]) -> None:
    """Refuse networks that answer from a cache, with the call that disables it."""
    for name, network in networks.items():
        network = getattr(network, "_orig_mod", network)
        config = getattr(network, "_cache_config", None)
        if config is not None:
            kind = type(config).__name__.removesuffix("Config")
            raise ValueError(_sentence(name, kind, f"pipe.{name}.disable_cache()"))
        for hook in _stateful_hooks(network):
            registry = f"pipe.{name}._diffusers_hook"
            raise ValueError(_sentence(name, hook, f"{registry}.remove_hook({hook!r}, recurse=True)"))


def _sentence(name: str, kind: str, remedy: str) -> str:
    return (
        f"the pipeline's {name} has a cache ({kind}), so its answers depend on earlier calls and cannot be drafted "
        f"exactly: call {remedy} first"
    )


def _stateful_hooks(network: torch.nn.Module) -> list[str]:
    """Names of the hooks that keep something from one call to the next."""
    registries = [vars(module).get("_diffusers_hook") for module in network.modules()]
    return [
        name
        for registry in registries
        if registry is not None
        for name, hook in registry.hooks.items()
        if getattr(hook, "_is_stateful", False)
    ]
