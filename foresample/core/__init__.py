"""The mathematics and one round of it, in plain PyTorch: coupling → verify → round."""
