"""The kernels, in rooms by what they do; nothing here imports a stage.

A file has a few operations, written in plain torch, with decorators that say which calls a kernel takes instead
(`common/twins.py`); attention over lists picks its kernel by itself, and its twin is `tests/kernels/attention/references.py`.
The Triton kernel and the launch are in the file of the same name with `_triton` at the end; kernels for Hopper have
`_hopper`, and what they share is in `hopper/`.
"""
