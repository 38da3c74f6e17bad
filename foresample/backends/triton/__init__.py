"""Work as Triton kernels, for CUDA; nothing here is imported where Triton is not installed."""
