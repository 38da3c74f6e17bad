"""Trained models: the embedded one, and any diffusers DDPM folder, as targets."""

from foresample.pretrained.model import EMBEDDED, Pretrained, load

__all__ = ["EMBEDDED", "Pretrained", "load"]
