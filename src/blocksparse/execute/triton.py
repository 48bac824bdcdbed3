"""Block-sparse attention by Triton kernels, on GPUs of any vendor that Triton compiles for."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator
from importlib.util import find_spec
from typing import final

import torch
from attrs import Factory, field, frozen
from torch import Tensor

from blocksparse.check.per_head import PerHead, by_head, maybe_per_head, negative, wrong_heads
from blocksparse.check.validators import a, optional
from blocksparse.execute.executor import AttentionOutput, Executor, one_order
from blocksparse.execute.launched import BlockPlan, OpaqueExecutor, execute_op, first_launched, never_launched
from blocksparse.kernels.attention.sparse_attention import EXACT, sparse_attention
from blocksparse.kernels.common.hardware import hardware_of
from blocksparse.kernels.common.sizes import copies_in_bulk
from blocksparse.kernels.common.tiles import MOST_SOFTCAP, HopperTiles, Tiles, TritonTiles, tuned
from blocksparse.kernels.masks.arguments import Approximation
from blocksparse.kernels.masks.visibility import visited_columns
from blocksparse.launch.failures import noted
from blocksparse.launch.torch_modes import is_transformed
from blocksparse.order.permutation import GlobalPermutation
from blocksparse.select.block_mask import BlockMask
from blocksparse.spec import AttentionSpec

_HINT = "Use AutoExecutor(), or CpuExecutor() on a CPU."


@final
@frozen(cache_hash=True)
class TritonExecutor(Executor[GlobalPermutation, BlockMask]):
    """Gather keys and values once per KV head, then attend to the kept blocks of each row in one kernel.

    It takes fp16, bf16 and fp32, and head dims up to 256 (padded to a power of two on chip). Grouped query heads
    need no copies of keys. It runs compiled on a GPU, and on CPU tensors under Triton's interpreter (fp16 and
    fp32). GPUs of compute capability 9.0 (Hopper) have their own kernel for half precision and head dims that are
    multiples of 8. It takes sliding windows, attention sinks and softcaps up to 100.

    Args:
        tiles: which kernel runs and how it is launched, `HopperTiles` or `TritonTiles`. By default the fastest.
        pv_skip: lambda of SpargeAttn 3.4, negative, a difference of logits. One for all query heads or one for
            each. In blocks without a masked pair, a query leaves out each tile of keys whose greatest logit is
            more than `-pv_skip` below the greatest one so far. If `m` keys are left out, at most the share `m
            e^pv_skip` of the query's mass is lost. The result is approximate then, in the portable kernel
            (docs/reference/numerics.md has the bounds). With None, the default, it is exact.

    Raises:
        ValueError: `pv_skip` is not negative.
    """

    tiles: Tiles | None = field(default=None, validator=optional(a(HopperTiles, TritonTiles)))
    pv_skip: PerHead | None = field(
        default=None, kw_only=True, converter=maybe_per_head, validator=optional(negative)
    )
    _opaque: OpaqueExecutor = field(
        init=False, repr=False, eq=False, default=Factory(lambda self: OpaqueExecutor(self), takes_self=True)
    )

    def unsupported(self, q: Tensor, k: Tensor, v: Tensor, mask: BlockMask, spec: AttentionSpec) -> list[str]:
        reasons = portable_reasons(q, k, v, mask, self.tiles)
        if isinstance(self.tiles, HopperTiles) and self.pv_skip is not None:
            reasons.append(f"{self.tiles} cannot be combined with 'pv_skip', but TritonTiles can")
        if isinstance(self.tiles, HopperTiles) and (spec.softcap or 0) > MOST_SOFTCAP:
            reasons.append(f"{self.tiles} takes softcaps up to {MOST_SOFTCAP:g}, but TritonTiles take any")
        reasons += wrong_heads("pv_skip", self.pv_skip, mask.grid.q_heads)
        return reasons or never_launched(self._kernels(q, k, v, mask, spec), self._tried(q, v, mask, spec))

    def kernel(self, q: Tensor, k: Tensor, v: Tensor, mask: BlockMask, spec: AttentionSpec) -> str:
        """The kernel that a call would run, and its tiles, in words."""
        kernels, of = self._kernels(q, k, v, mask, spec), self._tried(q, v, mask, spec)
        tiles = next(tiles for tiles in kernels if not noted((tiles, of)))
        return (
            f"{'the kernel for Hopper' if isinstance(tiles, HopperTiles) else 'the portable kernel'} with {tiles}"
        )

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, mask: BlockMask, spec: AttentionSpec, out: Tensor | None = None
    ) -> AttentionOutput:
        if is_transformed():
            return execute_op(self._opaque, q, k, v, mask, spec).written_to(out)
        self.check(q, k, v, mask, spec, out, hint=_HINT)
        grid = mask.grid
        permutation = one_order(mask)
        queries, slots, visited = permutation.gather_queries(q), permutation.key_slots, None
        if slots is not None and grid.q_len < grid.k_len:
            # A chunk of a prompt visits a part of its keys. To ask for it costs a whole prompt more than it saves.
            visited = visited_columns(mask.keep, min(slots.shape[1], mask.keep.shape[1]))
        there = out is not None and permutation.q_index is None and copies_in_bulk(out)
        plan, change = BlockPlan.of(mask), spec.for_kernel(q)
        approximation = EXACT if self.pv_skip is None else Approximation(by_head(self.pv_skip, q))

        def attend(tiles: Tiles) -> tuple[Tensor, Tensor]:
            return sparse_attention(
                queries,
                k,
                v,
                plan,
                grid.positions,
                tiles,
                scale=spec.scale,
                key_slots=slots,
                visited=visited,
                approximation=approximation,
                change=change,
                out=out if there else None,
            )

        kernels: Iterable[Tiles] = self._kernels(queries, k, v, mask, spec)
        of = self._tried(q, v, mask, spec)
        result, lse = first_launched(kernels, of, attend, lambda: self.check(q, k, v, mask, spec, out, hint=_HINT))
        return AttentionOutput(permutation.restore(result), permutation.restore(lse)).written_to(out)

    def _kernels(self, q: Tensor, k: Tensor, v: Tensor, mask: BlockMask, spec: AttentionSpec) -> Iterator[Tiles]:
        """The tiles given, or else those of every kernel that takes these inputs, the fastest first."""
        if self.tiles is not None:
            yield self.tiles
            return
        grid = mask.grid
        plain = self.pv_skip is None and (spec.softcap or 0) <= MOST_SOFTCAP
        yield (tiles := tuned(q, k, v, grid.q_block, grid.k_block, plain=plain))
        if isinstance(tiles, HopperTiles):
            yield tuned(q, k, v, grid.q_block, grid.k_block, plain=False)

    def _tried(self, q: Tensor, v: Tensor, mask: BlockMask, spec: AttentionSpec) -> Hashable:
        """Everything except the tiles that decides whether a kernel can be launched."""
        asked = mask.grid.window is None, spec.softcap is None, spec.sinks is None, self.pv_skip is None
        return q.device, q.dtype, q.shape[-1], v.shape[-1], asked


def without_tensor_cores(q: Tensor) -> list[str]:
    """The reason against GPUs on which Triton has no tensor cores to multiply with."""
    has = hardware_of(q)
    if not has.is_nvidia or has.capability >= (8, 0):
        return []
    return [
        f"below compute capability 8.0 Triton multiplies without tensor cores, and this GPU has {has.name[3:-1]}."
        f"{has.name[-1]}"
    ]


def portable_reasons(q: Tensor, k: Tensor, v: Tensor, mask: BlockMask, tiles: Tiles | None) -> list[str]:
    """The reasons why Triton's kernels, or those with `tiles` if given, cannot run these inputs."""
    if find_spec("triton") is None:
        return ["triton is not installed"]
    from blocksparse.kernels.attention.sparse_attention_triton import runs_interpreted

    reasons = []
    if not q.is_cuda and not runs_interpreted():
        reasons.append(f"Triton compiles for GPUs, and these tensors are on {q.device.type}")
    if runs_interpreted() and q.dtype == torch.bfloat16:
        reasons.append("Triton's interpreter computes bfloat16 wrongly")
    reasons += without_tensor_cores(q)
    if q.dtype not in (torch.float16, torch.bfloat16, torch.float32):
        reasons.append(f"the kernel takes float16, bfloat16 and float32, not {q.dtype}")
    grid = mask.grid
    if grid.q_block % 16 or grid.k_block % 16:
        reasons.append(f"blocks must be multiples of 16, not {grid.q_block} x {grid.k_block}")
    elif tiles is not None:
        reasons += tiles.unsupported(q, k, v, grid.q_block, grid.k_block)
    return reasons
