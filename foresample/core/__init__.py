"""The mathematics and one round of it: coupling → verify → round, beside the sequential sampler (`baseline`)."""
