"""Packages with a sampling loop of their own, drawn speculatively."""
