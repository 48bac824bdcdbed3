"""Random inputs whose attention is concentrated on some blocks."""

from __future__ import annotations

import torch
from torch import Tensor

from blocksparse.check.validators import a, hash_seed, multiple, size


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
    device: str | torch.device = "cpu",
    seed: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Random `q` `[B, Hq, M, D]`, `k` `[B, Hkv, N, D]`, `v` `[B, Hkv, N, Dv]` whose blocks differ in importance.

    Nearby tokens are similar, all queries attend strongly to the same few keys, and the first key is a sink, so
    that block scores differ as in a real model. Numbers are drawn in fp32 on the CPU and rounded once to `dtype`.
    `M` is `N` and `Dv` is `D` if None. The queries are the last `M` of `N` tokens; if there are more queries than
    keys, which only calls that are not causal take, the keys are the first `N` of `M`.

    Raises:
        TypeError, ValueError: a size is not a whole number, at least 1; `Hq` is not a multiple of `Hkv`; or
            `dtype` is not a floating-point dtype.
    """
    size.check(B=B, Hq=Hq, Hkv=Hkv, N=N, D=D)
    M, Dv = N if M is None else M, D if Dv is None else Dv
    size.check(M=M, Dv=Dv)
    hash_seed.check(seed=seed)
    a(torch.dtype).check(dtype=dtype)
    a(str, torch.device).check(device=device)
    multiple("Hq", Hq, "Hkv", Hkv)
    if not dtype.is_floating_point:
        raise ValueError(f"'dtype' must be a floating-point dtype: {dtype}")
    generator = torch.Generator("cpu").manual_seed(seed)

    def randn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu")

    T = max(M, N)
    topic = randn(B, Hkv, (T + 39) // 40, D).repeat_interleave(40, dim=2)[:, :, :T]
    k = topic[:, :, :N] + 0.7 * randn(B, Hkv, N, D)
    shared = randn(B, Hkv, 1, D)
    k[:, :, torch.randint(N, (1 + N // 50,), generator=generator, device="cpu")] += shared
    k[:, :, :1] += 1.5 * shared
    q = (topic + 0.8 * shared).repeat_interleave(Hq // Hkv, dim=1) + 0.7 * randn(B, Hq, T, D)
    v = randn(B, Hkv, N, Dv)
    q = q[:, :, T - M :]
    q, k, v = (x.to(device, dtype) for x in (q, k, v))
    return q, k, v
