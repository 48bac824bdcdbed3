"""Launches of kernels, calls that repeat them, and the private names of PyTorch and Triton."""
