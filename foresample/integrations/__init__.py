"""Other people's samplers, served in one line: pipelines, policies, packages."""

from foresample.integrations.acceleration import accelerate, restore

__all__ = ["accelerate", "restore"]
