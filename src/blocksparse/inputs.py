"""Checks of q, k, v and the scale, made once per call before any work."""

from __future__ import annotations

import math
import sys
import warnings

import torch
from torch import Tensor

from blocksparse.batch.sequences import Sequences
from blocksparse.launch.torch_modes import AUTOCAST_TAKES, DTYPES, refuse_tracing
from blocksparse.launch.torch_private import has_tangent
from blocksparse.spec import AttentionOptions, AttentionSpec, checked_scale

MAX_HEAD_DIM = 256
_LAYOUT = "The layout is [B, H, N, D], heads before tokens."
_MOST_HEADS = 128  # more than models have, and fewer than prompts have tokens that are worth a mask


class UnsupportedError(ValueError):
    """Valid inputs that this pipeline cannot run. `because` is the reason alone."""

    def __init__(self, message: str, because: str) -> None:
        super().__init__(message)
        self.because = because


def check_inputs(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float | None, sequences: Sequences | None = None
) -> tuple[Tensor, Tensor, Tensor, float]:
    """Check the inputs of a call, and return q, k, v and the scale in the form that stages take.

    In that form q, k and v have one dtype and the scale is above 0. Where the dtypes differ and autocast is on for
    the device, all become autocast's dtype, as in `scaled_dot_product_attention`. For a negative scale the queries
    are negated, and for a scale of 0 they become zeros. All other inputs come back as they are. A scale of None
    means `1 / sqrt(D)`. It warns of more than 128 KV heads if they outnumber the keys, since they are most often
    tokens. Whether `sequences` fit q and k is checked when they are cut (`Sequences.parts`).

    Raises:
        TypeError: an input is not a plain floating-point tensor, or dtypes differ without autocast. Or the scale
            is not a number, `causal` is not a bool, or `sequences` is not a `Sequences`.
        ValueError: ranks, sizes or devices do not fit, an input requires grad, the scale is out of range, or
            torch.jit.trace follows the call.
    """
    refuse_tracing()
    for name, x in (("q", q), ("k", k), ("v", v)):
        _check_kind(name, x)
    if not q.device == k.device == v.device:
        raise ValueError(
            f"q, k and v must be on one device: {q.device}, {k.device}, {v.device}. Move them with .to()."
        )
    if q.is_meta:
        raise ValueError("q, k and v must hold numbers: they are on the meta device. Move them with .to_empty().")
    (B, Hq, M, D), (_, Hkv, N, _) = q.shape, k.shape
    if k.shape[0] != B or v.shape[0] != B:
        raise ValueError(
            f"q, k and v must have one batch size: {B}, {k.shape[0]}, {v.shape[0]}. Expand them. {_LAYOUT}"
        )
    if v.shape[1:3] != k.shape[1:3]:
        raise ValueError(
            f"'v' must have the heads and tokens of 'k': {tuple(v.shape)} against {tuple(k.shape)}. {_LAYOUT}"
        )
    if k.shape[3] != D:
        raise ValueError(f"'k' must have the head dim of 'q' ({D}): {k.shape[3]}. {_LAYOUT}")
    if max(D, v.shape[3]) > MAX_HEAD_DIM:
        raise ValueError(
            f"the head dim must be at most {MAX_HEAD_DIM}: {max(D, v.shape[3])}. Attend densely instead. {_LAYOUT}"
        )
    if Hq % Hkv:
        raise ValueError(
            f"the query heads must be a multiple of the KV heads ({Hkv}): {Hq}. Do not repeat k and v. {_LAYOUT}"
        )
    if not isinstance(causal, bool):
        raise TypeError(f"'causal' must be a bool: {causal!r}")
    if sequences is not None and not isinstance(sequences, Sequences):
        raise TypeError(
            f"'sequences' must be a Sequences or None: {type(sequences).__name__}. "
            "Sequences.packed(lengths) makes one."
        )
    if causal and M > N and sequences is None:
        raise ValueError(
            f"causal attention needs at least as many keys as queries, the queries being the last ones: "
            f"Nq={M}, Nk={N}. Pass the cached keys too. {_LAYOUT}"
        )
    refuse_gradients(q, k, v)
    if Hkv > max(N, _MOST_HEADS) and Hq > M and not torch.compiler.is_compiling():
        _warn_of_heads(tuple(k.shape))
    value = 1 / math.sqrt(D) if scale is None else checked_scale(scale)
    if not q.dtype == k.dtype == v.dtype:
        q, k, v = _of_one_dtype(q, k, v)
    # In views such as the imaginary part of z.conj(), PyTorch stores the minus sign apart from the numbers, and
    # kernels would miss it. An op inside a compiled graph never gets such a view.
    if not torch.compiler.is_compiling() and (q.is_neg() or k.is_neg() or v.is_neg()):
        q, k, v = q.resolve_neg(), k.resolve_neg(), v.resolve_neg()
    if value <= 0:
        q, value = (-q, -value) if value < 0 else (torch.zeros_like(q), 1.0)
    return q, k, v, value


def checked(
    q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions, sequences: Sequences | None = None
) -> tuple[Tensor, Tensor, Tensor, AttentionSpec]:
    """Checked q, k and v, and the other arguments of the call as the spec that stages take."""
    causal, scale = options.get("causal", True), options.get("scale")
    q, k, v, scale = check_inputs(q, k, v, causal=causal, scale=scale, sequences=sequences)
    return q, k, v, AttentionSpec.of(q.shape[1], scale, options)


def check_out(out: Tensor, q: Tensor, k: Tensor, v: Tensor) -> None:
    """Refuse a tensor that cannot hold the output `[B, Hq, M, Dv]` of a call with these inputs."""
    _check_kind("out", out)
    shape = (*q.shape[:3], v.shape[3])
    if out.dtype != q.dtype:
        raise TypeError(f"'out' must have the dtype of q ({q.dtype}): {out.dtype}. Make it by q.new_empty().")
    if out.shape != shape or out.device != q.device:
        raise ValueError(
            f"'out' must have the shape {shape}, on {q.device}: {tuple(out.shape)} on {out.device}. Give the part "
            "of a tensor that is for these queries."
        )
    if (out.shape[3] > 1 and out.stride(3) != 1) or _entries_meet(out):
        raise ValueError(
            "'out' must have its last axis innermost in memory, and no entries that share memory: "
            f"strides {out.stride()}. Make it by q.new_empty()."
        )
    if torch.is_grad_enabled() and out.requires_grad:
        raise ValueError("'out' must not require a gradient. Call under torch.no_grad(), or detach it.")
    if out.is_neg():
        raise ValueError("'out' must hold its numbers as they are, and is a view that negates them. Clone it.")
    for name, x in (("q", q), ("k", k), ("v", v)):
        if _share_memory(out, x):
            raise ValueError(f"'out' must not share memory with '{name}'. Make it by q.new_empty().")


def _entries_meet(x: Tensor) -> bool:
    """Whether entries of `x` may share memory: an axis steps by less than those inside of it reach."""
    reach = 1
    for step, size in sorted(zip(x.stride(), x.shape, strict=True)):
        if size > 1 and step < reach:
            return True
        reach += (size - 1) * step
    return False


def _share_memory(x: Tensor, y: Tensor) -> bool:
    """Whether `x` and `y` may share memory: they are not separate column ranges of rows of any length."""
    apart, bytes_each = y.data_ptr() - x.data_ptr(), x.element_size()
    for row in (2**62, *(step * bytes_each for step in x.stride() if step)):
        if _reach(x, row) <= apart % row <= row - _reach(y, row):
            return False
    return True


def _reach(x: Tensor, row: int) -> int:
    """Over how many bytes of every row of so many bytes `x` reaches, from where its first entry is in one."""
    reach = bytes_each = x.element_size()
    for step, size in zip(x.stride(), x.shape, strict=True):
        if step * bytes_each % row:
            reach += (size - 1) * step * bytes_each
    return reach


def refuse_mask(attn_mask: object) -> None:
    """Refuse an attention mask, the fourth argument of `scaled_dot_product_attention`."""
    if attn_mask is not None:
        raise TypeError(
            "a pipeline takes no attention mask, its selector makes one. Give "
            "sequences=Sequences.padded(mask [B, N]) to leave padding out, sequences=Sequences.packed(lengths) to "
            "separate prompts, or window=tokens for a sliding window."
        )


def differentiates(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether PyTorch records operations on these tensors for a backward pass, or tracks tangents."""
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        return True
    return has_tangent(q, k, v)


def refuse_gradients(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Refuse tensors that differentiation follows: outputs of kernels have no gradients, and tangents of 0."""
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        raise ValueError("blocksparse computes no gradients. Call it under torch.no_grad(), or detach q, k and v.")
    if torch.compiler.is_compiling():
        return
    if has_tangent(q, k, v):
        raise ValueError("blocksparse computes no forward-mode gradients. Detach q, k and v.")


def _check_kind(name: str, x: Tensor) -> None:
    """Refuse anything but a plain tensor of floats with the shape `[B, H, N, D]`."""
    if not isinstance(x, Tensor):
        raise TypeError(f"'{name}' must be a tensor: {type(x).__name__}")
    if x.is_nested:
        raise TypeError(f"'{name}' must not be a nested tensor. Call once for the prompts of each length.")
    if x.layout != torch.strided:
        raise TypeError(f"'{name}' must be a dense tensor: {x.layout}. Convert it with .to_dense().")
    # While a graph is traced, the inputs are fake tensors, a subclass that is fine here.
    if type(x).__torch_dispatch__ is not Tensor.__torch_dispatch__ and not torch.compiler.is_compiling():
        raise TypeError(
            f"'{name}' must be a plain tensor: {type(x).__name__}. "
            "Pass the tensor that it wraps, as .to_local() of a DTensor gives it."
        )
    if x.dtype not in DTYPES:
        raise TypeError(
            f"'{name}' must be a floating-point tensor: {x.dtype}. "
            "Convert it to float16, bfloat16, float32 or float64."
        )
    if x.ndim != 4:
        raise ValueError(f"'{name}' must have the shape [B, H, N, D]: {tuple(x.shape)}. {_LAYOUT}")
    if 0 in x.shape[1:]:
        raise ValueError(f"'{name}' must not be empty: {tuple(x.shape)}. {_LAYOUT}")


def _warn_of_heads(shape: tuple[int, ...]) -> None:
    """Warn, at the line that called this package, that the tensors look like `[B, N, H, D]`."""
    level, frame = 1, sys._getframe()
    while frame.f_back is not None and frame.f_globals["__name__"].partition(".")[0] == "blocksparse":
        level, frame = level + 1, frame.f_back
    warnings.warn(
        f"'k' has more heads than tokens: {shape}. {_LAYOUT} "
        "If q, k and v are [B, N, H, D], transpose(1, 2) them.",
        stacklevel=level,
    )


def _of_one_dtype(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Convert q, k and v to autocast's dtype, or refuse them where autocast would not."""
    device, dtypes = q.device.type, (q.dtype, k.dtype, v.dtype)
    if not torch.is_autocast_enabled(device) or any(dtype not in AUTOCAST_TAKES for dtype in dtypes):
        given = ", ".join(map(str, dtypes))
        raise TypeError(f"q, k and v must have one dtype: {given}. Convert them with .to().")
    dtype = torch.get_autocast_dtype(device)
    return q.to(dtype), k.to(dtype), v.to(dtype)
