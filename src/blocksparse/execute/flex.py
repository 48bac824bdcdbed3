"""The plan handed to PyTorch's compiled FlexAttention."""

from __future__ import annotations

import functools
import sysconfig
from collections.abc import Callable, Hashable
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

import torch
from attrs import frozen
from torch import Tensor
from torch.nn.functional import pad

from blocksparse.execute.executor import (
    AttentionOutput,
    Executor,
    knows_no_logit_change,
    one_order,
    refuse_several_orders,
)
from blocksparse.execute.launched import BlockPlan, first_launched, never_launched
from blocksparse.kernels.common.hardware import hardware_of
from blocksparse.kernels.common.tiles import portable
from blocksparse.launch.failures import launches
from blocksparse.launch.launch_graph import refuse_capture
from blocksparse.launch.torch_modes import without_autocast
from blocksparse.launch.torch_private import (
    compile_disabled,
    cpp_compiler,
    many_variants,
    of_static_shape,
    under_a_dispatch_mode,
)
from blocksparse.order.permutation import GlobalPermutation
from blocksparse.select.block_mask import BlockMask
from blocksparse.spec import AttentionSpec

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask as FlexBlockMask


def uncompiled_because() -> str | None:
    """The reason why torch.compile would not compile a function called now, or None. Takes some microseconds."""
    if under_a_dispatch_mode():
        # Do not test this by a call: torch.compile never compiles a function that it once met under such a mode.
        return "under an active TorchDispatchMode torch.compile does nothing"
    if torch.compiler.is_compiling():
        return None
    if not compile_disabled() and _compiled_question()():
        return None
    return "torch.compile is switched off (by TORCHDYNAMO_DISABLE=1 or torch.compiler.set_stance)"


@functools.cache
def _compiled_question() -> Callable[[], bool]:
    # The answer does not depend on anything that guards watch. Without guards it is compiled only once.
    unguarded: dict[str, Any] = {"guard_filter_fn": lambda guards: [False] * len(guards)}
    return torch.compile(_is_compiled, backend="eager", fullgraph=True, options=unguarded)


def _is_compiled() -> bool:
    """True if Dynamo has traced this function, False if it runs as plain Python."""
    return torch.compiler.is_compiling()


_PYTHON_HEADER = Path(sysconfig.get_path("include"), "Python.h")

MAX_VARIANTS = 128
_LEAST_HEAD_DIM = 24  # on a CPU


_HINT = "Use ReferenceExecutor(), which needs no compiler."
_KERNELS = ("FlexAttention",)


@final
@frozen(cache_hash=True)
class FlexExecutor(Executor[GlobalPermutation, BlockMask]):
    """Compiled FlexAttention over the block lists: fast on a CPU with AVX2 and a C++ compiler, and on a GPU.

    The first call of a kind compiles, for seconds; where torch.compile is switched off, a call is refused. On a
    CPU FlexAttention gives no lse, so `lse` is None.
    """

    def unsupported(self, q: Tensor, k: Tensor, v: Tensor, mask: BlockMask, spec: AttentionSpec) -> list[str]:
        reasons = knows_no_logit_change(spec)
        if q.device.type == "cpu" and cpp_compiler() is None:
            reasons.append("FlexAttention must be compiled, and no C++ compiler is found (g++, or what CXX names)")
        elif q.device.type == "cpu" and not _PYTHON_HEADER.exists():
            reasons.append(f"FlexAttention must be compiled, and Python's headers are missing ({_PYTHON_HEADER})")
        elif q.device.type == "cpu" and not torch.backends.cpu.get_cpu_capability().startswith("AVX"):
            reasons.append(
                "FlexAttention must be compiled, and PyTorch does so for CPUs with AVX2 or AVX-512 alone"
            )
        if because := uncompiled_because():
            reasons.append(f"FlexAttention must be compiled, and {because}")
        if q.device.type not in ("cpu", "cuda"):
            reasons.append(f"FlexAttention is compiled for CPUs and GPUs, not for {q.device.type}")
        if q.dtype not in (torch.float16, torch.bfloat16, torch.float32):
            reasons.append(f"FlexAttention takes float16, bfloat16 and float32, not {q.dtype}")
        if q.device.type == "cpu" and q.shape[-1] in (8, 16) and mask.grid.k_block % 16 == 8:
            # Inductor's product of 16 keys at a time writes 8 too many there, where vectors have 8 numbers (AVX2).
            reasons.append(
                f"on a CPU FlexAttention computes wrongly for a head dim of {q.shape[-1]} with key blocks of "
                f"{mask.grid.k_block}, an odd multiple of 8"
            )
        if q.is_cuda and (mask.grid.q_block % 16 or mask.grid.k_block % 16):
            blocks = f"{mask.grid.q_block} x {mask.grid.k_block}"
            reasons.append(f"on a GPU FlexAttention needs blocks in multiples of 16, not {blocks}")
        return reasons or never_launched(_KERNELS, _tried(q, v, mask))

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, mask: BlockMask, spec: AttentionSpec, out: Tensor | None = None
    ) -> AttentionOutput:
        from torch.nn.attention.flex_attention import AuxRequest

        refuse_capture("torch.compile runs")
        self.check(q, k, v, mask, spec, out, hint=_HINT)
        permutation = one_order(mask)
        lead = mask.grid.q_lead
        queries = pad(permutation.gather_queries(q), (0, 0, lead, 0))
        keys, values = permutation.gather_keys_and_values(k, v)
        if q.device.type == "cpu":
            # FlexAttention's CPU kernel is a third faster in fp32 than in half precision.
            queries, keys, values = queries.float(), keys.float(), values.float()
            # Under this head dim, Inductor's kernel for CPUs writes whole pairs of vectors where a block's keys
            # fill half of one, over its own buffers (torch 2.13, AVX2: blocks of 8 keys). Zeros add nothing to a
            # product.
            if (missing := _LEAST_HEAD_DIM - q.shape[-1]) > 0:
                queries, keys = pad(queries, (0, missing)), pad(keys, (0, missing))
        # Compiled, the lists decide which blocks are visited: only positions are left to test.
        block_mask = _block_mask(mask, _by_position(mask), q_len=queries.shape[2], k_len=keys.shape[2])
        aux = None if q.device.type == "cpu" else AuxRequest(lse=True)
        gqa = queries.shape[1] != keys.shape[1]

        def attend(kernel: str) -> Any:
            # Each block size, causality and table length compiles once; torch's own limit of 8 would soon be met.
            with without_autocast(q), many_variants(MAX_VARIANTS), launches(kernel):
                return _compiled()(
                    queries,
                    keys,
                    values,
                    block_mask=block_mask,
                    scale=spec.scale,
                    enable_gqa=gqa,
                    return_aux=aux,
                    kernel_options=_tiles(q, v, mask) if q.is_cuda else None,
                )

        result = first_launched(
            _KERNELS, _tried(q, v, mask), attend, lambda: self.check(q, k, v, mask, spec, out, hint=_HINT)
        )
        attended, lse = (result, None) if aux is None else (result[0], result[1].lse)
        attended = permutation.restore(attended[:, :, lead:].to(v.dtype))
        lse = None if lse is None else permutation.restore(lse[:, :, lead:])
        return AttentionOutput(attended, lse).written_to(out)


def _tried(q: Tensor, v: Tensor, mask: BlockMask) -> Hashable:
    """Properties of a call that decide whether FlexAttention can be compiled."""
    grid = mask.grid
    return q.device, q.dtype, q.shape[-1], v.shape[-1], grid.q_block, grid.k_block


def _tiles(q: Tensor, v: Tensor, mask: BlockMask) -> dict[str, Any]:
    """Tiles for FlexAttention on a GPU, which must divide the blocks, and exact products of fp32."""
    q_block, k_block = mask.grid.q_block, mask.grid.k_block
    options: dict[str, Any] = {"BACKEND": "TRITON", "FLOAT32_PRECISION": "'ieee'"}
    if not (has := hardware_of(q)).multiplies_from_shared:  # FlexAttention's kernel needs what our own does
        tiles = portable(q_block, k_block, max(q.shape[-1], v.shape[-1]), q.element_size(), has)
        block_m, block_n = tiles.block_m, tiles.block_n
        options |= {"num_warps": tiles.num_warps, "num_stages": tiles.num_stages}
    else:
        limit = 128 if q.element_size() == 2 and q.shape[-1] <= 128 else 32
        block_m, block_n = (min(block & -block, limit) for block in (q_block, k_block))
    return {**options, "BLOCK_M": block_m, "BLOCK_N": block_n}


MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def to_flex(mask: BlockMask) -> FlexBlockMask:
    """FlexAttention's `BlockMask` for queries padded in front by `grid.q_lead` and keys in slot order.

    Uncompiled FlexAttention ignores block lists and looks only at `mask_mod`. So `mask_mod` has all conditions:
    the block is kept, and the key stands at or before the query, and inside its window.

    Raises:
        ValueError: rows of the mask have different key orders.
    """
    refuse_several_orders(mask, "FlexAttention")
    grid, keep = mask.grid, mask.per_query_head()
    q_block, k_block, by_position = grid.q_block, grid.k_block, _by_position(mask)

    def allowed(b: Tensor, h: Tensor, q_place: Tensor, k_slot: Tensor) -> Tensor:
        return keep[b, h, q_place // q_block, k_slot // k_block] & by_position(b, h, q_place, k_slot)

    return _block_mask(mask, allowed, q_len=grid.q_lead + grid.q_len, k_len=grid.k_len)


def _block_mask(mask: BlockMask, mask_mod: MaskMod, *, q_len: int, k_len: int) -> FlexBlockMask:
    from torch.nn.attention.flex_attention import BlockMask as FlexBlockMask

    plan = BlockPlan.of(mask)
    per_head = mask.grid.q_heads // plan.full_count.shape[1]
    return FlexBlockMask.from_kv_blocks(
        plan.partial_count.repeat_interleave(per_head, dim=1),
        plan.partial_index.repeat_interleave(per_head, dim=1),
        plan.full_count.repeat_interleave(per_head, dim=1),
        plan.full_index.repeat_interleave(per_head, dim=1),
        BLOCK_SIZE=(plan.q_block, plan.k_block),
        mask_mod=mask_mod,
        seq_lengths=(q_len, k_len),
        compute_q_blocks=False,
    )


def _by_position(mask: BlockMask) -> MaskMod:
    """A slot holds a key, and when causal the key stands at or before the query, and inside of its window."""
    grid = mask.grid
    B, Hq = mask.keep.shape[0], grid.q_heads
    q_table, k_table = _table(grid.q_position, B, Hq), _table(grid.k_position[:, :, 0], B, Hq)
    causal, window = grid.causal, grid.window
    # The last position before the window of each query, in a table too: an int would become a symbol.
    before = None if window is None else _table(grid.q_position - window, B, Hq)

    def allowed(b: Tensor, h: Tensor, q_place: Tensor, k_slot: Tensor) -> Tensor:
        k_at = k_table[b, h, k_slot]
        seen = (k_at >= 0) & (k_at <= q_table[b, h, q_place]) if causal else k_at >= 0
        return seen if before is None else seen & (k_at > before[b, h, q_place])

    return allowed


def _table(position: Tensor, batch: int, q_heads: int) -> Tensor:
    """Positions by batch and query head, padded to a power of two and of static shape.

    Few lengths then need another compilation, and the mask uses no symbolic size: Inductor's CPU template confuses
    their names (torch 2.13), and takes even Python integers for symbols.
    """
    length = 1 << (position.shape[-1] - 1).bit_length()
    table = pad(position, (0, length - position.shape[-1]), value=-1)
    table = table.repeat_interleave(q_heads // table.shape[1], dim=1).expand(batch, -1, -1).contiguous()
    return of_static_shape(table)


@functools.cache
def _compiled() -> Callable[..., Any]:
    """Compiled FlexAttention. Uncompiled, it ignores the lists and attends to dropped blocks."""
    from torch.nn.attention.flex_attention import flex_attention

    def over_lists(*args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling():
            raise ValueError(
                "FlexExecutor needs compiled FlexAttention, but torch.compile ran it uncompiled. "
                "Reset torch.compiler.set_stance to 'default', or use ReferenceExecutor()."
            )
        return flex_attention(*args, **kwargs)

    return torch.compile(over_lists, dynamic=True, fullgraph=True)
