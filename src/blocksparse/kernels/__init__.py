"""The kernels, in folders by what they compute; no module here imports a stage.

A file has a few operations in plain torch, the reference implementation, which computes in fp32 or better. Decorators name
the calls that a kernel takes instead (`common/dispatch.py`): a Triton kernel on GPUs, and one that this machine compiles from
C++ on CPUs. So float64, CPUs without a compiler and whatever else a decorator leaves out take the plain torch. Attention
over lists picks its kernel by itself, and its reference implementation is `tests/kernels/attention/references.py`. The
Triton kernel and its launch are in the file of the same name with `_triton` at the end. Kernels for Hopper have `_hopper`,
and share the code in `hopper/`.
"""
