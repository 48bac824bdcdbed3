"""The kernels, in rooms by what they do; nothing here imports a stage.

A file has one operation: a public function, which picks an implementation, and `..._reference`, the same in plain torch
(that of attention over lists is `tests/kernels/attention/references.py`). Its Triton kernel and the launch are in the file
of the same name with `_triton` at the end; kernels for Hopper have `_hopper`, and what they share is in `attention/hopper/`.
"""
