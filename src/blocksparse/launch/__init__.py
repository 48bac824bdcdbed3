"""Kernel launches, their replay, and the private names of PyTorch and Triton."""
