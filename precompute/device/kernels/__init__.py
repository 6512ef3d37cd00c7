"""Kernels of the fused top-K, in Triton, and in CUDA C++ for Hopper GPUs.

Without a GPU Triton's run by its interpreter (TRITON_INTERPRET=1 before it is imported). In their order: `above`
multiplies and writes entries of groups, `keep` has the best of them, `keys` scores their items. `.cu` files of the same
names do the same (`exact.cu` what `keys.exact` does), and `encode.cu` prepares users.
"""
