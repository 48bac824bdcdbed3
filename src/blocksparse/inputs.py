"""Check q, k, v once, before any work."""

from __future__ import annotations

import math

import torch
from torch import Tensor

MAX_HEAD_DIM = 256


def check_inputs(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float | None) -> float:
    """Refuse what no pipeline can run; give the softmax scale, `1 / sqrt(D)` unless given.

    Raises:
        TypeError: an input is not a floating-point tensor, dtypes differ, or `causal` is not a bool.
        ValueError: ranks, sizes or devices do not fit, an input requires grad, or the scale is not finite.
    """
    named = {"q": q, "k": k, "v": v}
    for name, x in named.items():
        if not isinstance(x, Tensor):
            raise TypeError(f"'{name}' must be a tensor: {type(x).__name__}")
        if not x.is_floating_point():
            raise TypeError(
                f"'{name}' must be a floating-point tensor: {x.dtype}; convert it with .to(torch.float32)"
            )
        if x.ndim != 4:
            raise ValueError(f"'{name}' must have the shape [B, H, N, D]: {tuple(x.shape)}")
        if 0 in x.shape:
            raise ValueError(f"'{name}' must not be empty: {tuple(x.shape)}")
    if not q.dtype == k.dtype == v.dtype:
        raise TypeError(
            f"q, k and v must have one dtype: {q.dtype}, {k.dtype}, {v.dtype}; convert them with .to()"
        )
    if not q.device == k.device == v.device:
        raise ValueError(
            f"q, k and v must be on one device: {q.device}, {k.device}, {v.device}; move them with .to()"
        )
    (B, Hq, M, D), (_, Hkv, N, _) = q.shape, k.shape
    if k.shape[0] != B or v.shape[0] != B:
        raise ValueError(f"q, k and v must have one batch size: {B}, {k.shape[0]}, {v.shape[0]}")
    if v.shape[1:3] != k.shape[1:3]:
        raise ValueError(f"'v' must have the heads and tokens of 'k': {tuple(v.shape)} against {tuple(k.shape)}")
    if k.shape[3] != D:
        raise ValueError(f"'k' must have the head dim of 'q' ({D}): {k.shape[3]}")
    if max(D, v.shape[3]) > MAX_HEAD_DIM:
        raise ValueError(f"the head dim must be at most {MAX_HEAD_DIM}: {max(D, v.shape[3])}")
    if Hq % Hkv:
        raise ValueError(
            f"the query heads must be a multiple of the KV heads ({Hkv}): {Hq}; do not repeat k and v"
        )
    if not isinstance(causal, bool):
        raise TypeError(f"'causal' must be a bool: {causal!r}")
    if causal and M > N:
        raise ValueError(
            f"causal attention needs at least as many keys as queries, the queries being the last ones: "
            f"Nq={M}, Nk={N}; pass the cached keys too"
        )
    if torch.is_grad_enabled() and any(x.requires_grad for x in named.values()):
        raise ValueError("blocksparse computes no gradients: call it under torch.no_grad(), or detach q, k and v")
    if scale is None:
        return 1 / math.sqrt(D)
    if isinstance(scale, bool) or not isinstance(scale, int | float):
        raise TypeError(f"'scale' must be a number: {scale!r}")
    if not math.isfinite(scale):
        raise ValueError(f"'scale' must be finite: {scale}")
    return float(scale)
