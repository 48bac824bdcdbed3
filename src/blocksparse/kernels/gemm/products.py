"""Matrix products in the precision that a choice of blocks needs: of tokens, of blocks and of cells.

`products`: this is the only place where plain torch multiplies matrices.

    products[b, h, i, j] = q[b, h, i] . k[b, h // (Hq / H), j]

The result depends on the inputs alone. Autocast does not change it, nor do torch's settings that allow fp32 to be rounded
(to TF32 on GPUs, to bf16 or TF32 on CPUs). Since cuBLAS obeys such settings, fp32 takes the kernel in `products_triton.py`
on GPUs. On CPUs with such products oneDNN obeys them, so fp32 is multiplied in float64 while the settings are on.

`block_products`: Pooled queries times pooled keys, for blocks in which some query may see some key.

    logits[b, h, row, col] = pooled_q[b, h, row] . pooled_k[b, h // G, col]

The kernel leaves out launch tiles in which causality allows no block, so entries there hold anything. Each of its products
is made of three tf32 products on the tensor cores, and as exact as one in fp32.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from attrs import frozen
from torch import Tensor
from torch.nn.functional import pad

from blocksparse.kernels.common.dispatch import on_gpus
from blocksparse.kernels.common.sizes import Heads
from blocksparse.kernels.masks.grid import BlockGrid
from blocksparse.launch.torch_modes import without_autocast


def wide_dtype(x: Tensor) -> torch.dtype:
    """The dtype that sums over `x` are taken in: fp32 or better."""
    return torch.promote_types(x.dtype, torch.float32)


def products(q: Tensor, k: Tensor) -> Tensor:
    """Every row of `q` `[B, Hq, rows, E]` with every row of `k` `[B, H, cols, E]`: `[B, Hq, rows, cols]`.

    `H` divides `Hq`; keys are not repeated. Rows of weights times values are `products(weights, values.mT)`. They
    are in fp32 or better, since half precision would round long sums, and fp16 may not hold them. A GPU's tensor
    cores take half precision as it is; elsewhere it is converted first.
    """
    dtype = wide_dtype(q)
    if q.dtype != dtype and (not q.is_cuda or torch.version.hip is not None):
        q, k = q.to(dtype), k.to(dtype)
    if q.dtype == torch.float32:
        if q.is_cuda:
            from blocksparse.kernels.gemm.products_triton import products_triton

            return products_triton(q, k)
        if rounds_fp32():
            return products(q.double(), k.double()).float()
    rows = q.shape[2]
    queries = q.unflatten(1, (k.shape[1], -1)).flatten(2, 3).flatten(0, 1)  # [B H, G rows, E]
    keys = k.flatten(0, 1).transpose(-1, -2)
    with without_autocast(q):
        sums = torch.bmm(queries, keys) if q.dtype == dtype else torch.bmm(queries, keys, dtype)
    return sums.view(q.shape[0], q.shape[1], rows, -1)


def rounds_fp32() -> bool:
    """Whether a CPU would round fp32 before it multiplies, as `torch.set_float32_matmul_precision` may ask for."""
    can = _roundings()
    products: Any = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
    return bool(can) and products.fp32_precision in can


@functools.cache
def _roundings() -> frozenset[str]:
    """The formats that oneDNN can round fp32 to on this CPU."""
    if not torch.backends.mkldnn.is_available():
        return frozenset()
    can = {
        "bf16": torch.ops.mkldnn._is_mkldnn_bf16_supported(),
        "tf32": torch.cpu.get_capabilities().get("amx_fp16", False),
    }
    return frozenset(name for name, there in can.items() if there)


@on_gpus(torch.float32)
def block_products(pooled_q: Tensor, pooled_k: Tensor, grid: BlockGrid, *, heads: Heads = None) -> Tensor:
    """Logits `[B, Hq, rows, cols]` of `pooled_q` `[B, Hq, rows, D]` and `pooled_k` `[B, H, cols, D]`.

    `H` divides `Hq`. Entries of blocks that are not visible have no meaning, and may be NaN; nor have those of heads
    that are not among `heads`.
    """
    return products(pooled_q, pooled_k)


@on_gpus(torch.float32)
def run_sums(x: Tensor, run: int) -> Tensor:
    """The sums of `x` `[B, H, n]` over runs of `run` entries, `[B, H, ceil(n / run)]`; the last run may be shorter."""
    short = -x.shape[-1] % run
    sums: Tensor = (pad(x, (0, short)) if short else x).unflatten(-1, (-1, run)).sum(-1)
    return sums


@frozen(eq=False)
class StridedPooling:
    """How tokens are cut into strided pooling tiles (cells), cells into blocks, and which pairs of cells may meet.

    A cell is some consecutive tokens, taken as one long vector.
    """

    slots: int  # tokens per cell
    q_lead: int  # empty slots before the first query, in its cell or in its row of blocks
    high: int  # query cells per block
    wide: int  # key cells per block
    causal: bool  # if not, every query meets every key, and positions are not looked at
    padded_tail: bool  # what takes no part counts as zeros, not as the mean of the tokens of its cell
    first_cell: int = 0  # index of the first query cell in the whole prompt
    segment: int | None = None  # cells per segment: a query cell then looks at earlier segments only
    flipped: bool = False  # the last slot of a query cell meets the first one of a key cell, and so on
    joint: bool = False  # one softmax over all query cells of a row of blocks, not one for each
    # Where all is in order, a query cell reaches the key cells up to number `(cell + 1) * every - 1`, for one query in `every`.
    every: int = 1
    q_last: Tensor | None = None  # [B|1, Hm, query cells or rows of blocks] int32, the last position in each
    k_first: Tensor | None = (
        None  # [B|1, Hm, key cells] int32, the first position in each; both None: all in order
    )
    # With a sliding window. In order: how many key cells before its own, or before the first of its row of blocks, a
    # query cell reaches. Else a query cell, or a row, reaches only key cells whose last position is above its floor.
    behind: int | None = None
    q_floor: Tensor | None = None  # as `q_last`
    k_last: Tensor | None = None  # as `k_first`

    @property
    def windowed(self) -> bool:
        """Whether a window hides cells, which only the implementations in plain torch leave out."""
        return self.behind is not None or self.q_floor is not None


def fillers(
    q: Tensor, k: Tensor, of: StridedPooling, means: Callable[[Tensor, int, int], Tensor | None]
) -> tuple[Tensor | None, Tensor | None]:
    """What empty slots of queries and of keys hold, for `strided_view`: the means of their cells, or zeros."""
    return (None, None) if of.padded_tail else (means(q, of.slots, of.q_lead), means(k, of.slots, 0))


def strides_behind(window: int, slots: int) -> int:
    """How many cells of `slots` tokens before its own cell a token sees at most, if it is the first of its cell."""
    return (window + slots - 2) // slots


def strided_view(x: Tensor, slots: int, lead: int, filler: Tensor | None = None) -> Tensor:
    """Tokens `[B, H, N, D]` in cells, `[B, H, cells, slots, D]`; `lead` empty slots come first.

    Args:
        filler: `[B, H, 2, D]`, what empty slots at the start and at the end hold. Zeros unless given.
    """
    missing = -(lead + x.shape[2]) % slots
    if filler is not None and (lead or missing):
        before, after = (filler[:, :, i : i + 1].expand(-1, -1, n, -1) for i, n in ((0, lead), (1, missing)))
        with without_autocast(x):  # autocast refuses to join tensors of another half precision than its own
            x = torch.cat((before, x, after), dim=2)
    elif lead or missing:
        x = pad(x, (0, 0, lead, missing))
    cells: Tensor = x.unflatten(2, (-1, slots))
    return cells


def edge_means(x: Tensor, slots: int, lead: int) -> Tensor | None:
    """The mean of the tokens in the first and in the last cell, `[B, H, 2, D]`; None if no cell lacks tokens."""
    missing = -(lead + x.shape[2]) % slots
    if not (lead or missing):
        return None
    ends = (x[:, :, : slots - lead], x[:, :, -(slots - missing) :])
    return torch.stack([end.mean(2, dtype=wide_dtype(x)) for end in ends], dim=2).to(x.dtype)
