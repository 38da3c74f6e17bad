"""The round once more, compiled for the CPU by Numba; the files are named as those for CUDA."""
