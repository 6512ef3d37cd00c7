"""Kernels of the fused top-K, in Triton, and in CUDA C++ for Hopper GPUs."""
