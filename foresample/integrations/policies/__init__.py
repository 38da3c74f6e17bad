"""Robot diffusion policies, drawn speculatively."""
