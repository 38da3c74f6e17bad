"""Work compiled by Numba, for CPUs; nothing here is imported where Numba is not installed."""
