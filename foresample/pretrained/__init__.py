"""Trained models: the embedded one, and any diffusers DDPM folder, as targets."""

from foresample.pretrained.model import EMBEDDED, Pretrained, Recipe, load

__all__ = ["EMBEDDED", "Pretrained", "Recipe", "load"]
