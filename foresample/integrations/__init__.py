"""Other people's samplers, served in one line: pipelines and policies."""

from foresample.integrations.acceleration import accelerate, restore

__all__ = ["accelerate", "restore"]
