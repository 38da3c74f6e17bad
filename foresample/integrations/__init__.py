"""One-line acceleration of other libraries' samplers: pipelines, policies, packages."""

from foresample.integrations.acceleration import accelerate, restore

__all__ = ["accelerate", "restore"]
