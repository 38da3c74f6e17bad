"""diffusers pipelines, drawn speculatively inside their own loop."""
