"""What authors of stages need to test them: inputs, budgets, and the presets."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from blocksparse.pipeline import Pipeline
from blocksparse.presets.a_shape import a_shape
from blocksparse.presets.bfla import bfla
from blocksparse.presets.flex_prefill import flex_prefill
from blocksparse.presets.mean_pooling import mean_pooling
from blocksparse.presets.minference import minference
from blocksparse.presets.pbs_attn import pbs_attn
from blocksparse.presets.pbs_attn_plus import pbs_attn_plus
from blocksparse.presets.s2o import s2o
from blocksparse.presets.sparge import sparge
from blocksparse.presets.tri_shape import tri_shape
from blocksparse.presets.xattention import xattention

every_preset: dict[str, Callable[..., Pipeline[Any, Any, Any]]] = {
    "pbs_attn": pbs_attn,
    "pbs_attn_plus": pbs_attn_plus,
    "mean_pooling": mean_pooling,
    "bfla": bfla,
    "s2o": s2o,
    "sparge": sparge,
    "xattention": xattention,
    "flex_prefill": flex_prefill,
    "minference": minference,
    "a_shape": a_shape,
    "tri_shape": tri_shape,
}
"""Every preset by name; each takes its defaults, and `executor=`."""


def make_qkv(
    *,
    B: int = 1,
    Hq: int = 4,
    Hkv: int = 2,
    M: int | None = None,
    N: int = 200,
    D: int = 64,
    Dv: int | None = None,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    seed: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Random `q` `[B, Hq, M, D]`, `k` `[B, Hkv, N, D]`, `v` `[B, Hkv, N, Dv]` with something to select.

    Nearby tokens look alike, a few keys draw every query, and the first key is a sink, so that block scores
    differ as they do in a real model. Drawn in fp32 on the CPU and rounded once to `dtype`.
    """
    generator = torch.Generator().manual_seed(seed)

    def randn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    topics = (N + 39) // 40
    topic = randn(B, Hkv, topics, D).repeat_interleave(40, dim=2)[:, :, :N]
    k = topic + 0.7 * randn(B, Hkv, N, D)
    shared = randn(B, Hkv, 1, D)
    k[:, :, torch.randint(N, (1 + N // 50,), generator=generator)] += shared
    k[:, :, :1] += 1.5 * shared
    q = (topic + 0.8 * shared).repeat_interleave(Hq // Hkv, dim=1) + 0.7 * randn(B, Hq, N, D)
    v = randn(B, Hkv, N, D if Dv is None else Dv)
    q = q[:, :, N - (N if M is None else M) :]
    q, k, v = (x.to(device, dtype) for x in (q, k, v))
    return q, k, v


def assert_within_budget(got: Tensor, want: Tensor, yardstick: Tensor) -> None:
    """`got` may err at most twice as much as `yardstick`, plus one rounding of the largest value.

    Args:
        got: what is tested, in its own precision.
        want: the truth, float64, from the same low-precision inputs.
        yardstick: plain torch in the precision of `got`.

    Raises:
        AssertionError: the error is over the budget, or something is not finite where `want` is.
    """
    if got.shape != want.shape:
        raise AssertionError(f"shapes differ: {tuple(got.shape)} against {tuple(want.shape)}")
    finite = want.isfinite()
    if not bool((got.isfinite() == finite).all()):
        raise AssertionError("finite and non-finite values are not where they should be")
    error, allowed = (
        float((x.double() - want)[finite].abs().max()) if bool(finite.any()) else 0.0 for x in (got, yardstick)
    )
    largest = float(want[finite].abs().max()) if bool(finite.any()) else 0.0
    budget = 2 * allowed + torch.finfo(got.dtype).eps * largest
    if not error <= budget:
        raise AssertionError(f"error {error:.3e} is over the budget {budget:.3e} (plain torch errs {allowed:.3e})")


def masked_attention(q: Tensor, k: Tensor, v: Tensor, pairs: Tensor, scale: float) -> Tensor:
    """Plain torch in the precision of the inputs: softmax attention over `pairs` `[B, Hq, M, N]` bool."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    logits = (q @ k.transpose(-1, -2) * scale).masked_fill(~pairs, float("-inf"))
    return logits.softmax(-1).nan_to_num(0.0) @ v
