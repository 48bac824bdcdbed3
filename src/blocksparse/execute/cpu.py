"""The default on a CPU: a compiled kernel, or without one, dense attention to the gathered kept keys."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import final

import torch
from attrs import frozen
from torch import Tensor
from torch.nn.functional import pad

from blocksparse.check.validators import UserError
from blocksparse.execute.executor import AttentionOutput, Executor
from blocksparse.inputs import differentiates
from blocksparse.kernels.attention.cpu_attention import (
    SOURCE,
    Kept,
    cpu_attention,
    cpu_kernel,
    cpu_kernel_refuses,
    cpu_products,
)
from blocksparse.kernels.common.compiled import UnavailableError, compile_for_wheel, load
from blocksparse.kernels.common.sizes import FAR
from blocksparse.kernels.gemm.products import LARGE_LSE, flash_dtype, flash_on_cpu, products, wide_dtype
from blocksparse.kernels.score import cpu_scores
from blocksparse.order.permutation import Permutation
from blocksparse.select.block_mask import BlockMask
from blocksparse.spec import AttentionSpec

_WORKSPACE = 2**19  # numbers that each thread holds at a time, so that they stay in its caches
_QUERIES = 256  # queries whose logits are held at a time; and up to which neighbouring rows attend together


@final
@frozen(cache_hash=True)
class CpuExecutor(Executor[Permutation, BlockMask]):
    """Attention by a C++ kernel that is compiled for this CPU at the first call, in seconds.

    The kernel takes fp32, bf16 and fp16, head dims up to 256, and any permutation, window, softcap and sinks. It
    sums in fp32, and multiplies bf16 as it is where the CPU can. The number of threads changes no bit of its
    output. `runs_by` says whether it is in use, and `blocksparse build` compiles it beforehand.

    For float64, and where nothing can be compiled (logged once), keys are gathered for rows of blocks, and
    PyTorch's flash kernel attends to them. A row attends to keys in three parts, which are merged by their lse.
    The first part is its own tokens, in plain products if some of them are dropped or stand in another order. The
    second part is earlier blocks that the other heads with the same keys in the same order keep as well. These
    heads run together, and with few queries neighbouring rows do too. The third part is the other blocks that the
    row keeps. With a sliding window there is a fourth part: keys that only the first queries of a row still see,
    in plain products. It takes any permutation, dtype and head dim, and holds the keys of a few rows at a time. It
    computes in fp32 or better. Where the CPU has matrix units for bf16 (Intel's AMX), bf16 is multiplied as it is
    and summed in fp32, as in dense attention there. The flash kernel does not support softcaps, so with one all
    products are plain, which takes longer.
    """

    def unsupported(self, q: Tensor, k: Tensor, v: Tensor, mask: BlockMask, spec: AttentionSpec) -> list[str]:
        return [f"it runs on a CPU, and these tensors are on {q.device.type}"] * (q.device.type != "cpu")

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, mask: BlockMask, spec: AttentionSpec, out: Tensor | None = None
    ) -> AttentionOutput:
        self.check(q, k, v, mask, spec, out, hint="Use TritonExecutor() or AutoExecutor() on a GPU.")
        if not cpu_kernel_refuses(q, k, v):
            kept, change = Kept(mask.keep, mask.grid.q_block, mask.grid.k_block), spec.for_kernel(q)
            written = cpu_attention(q, k, v, kept, mask.grid.positions, scale=spec.scale, change=change, out=out)
            return AttentionOutput(*written).written_to(out)
        permutation = mask.grid.permutation
        queries, tokens_first = permutation.gather_queries(q), q.transpose(1, 2).is_contiguous()
        result, lse, large = _attended(mask, queries, k, v, spec, tokens_first=tokens_first)
        if bool(large.any()):  # each query decides for itself, so no bit of it depends on others
            wide_result, wide_lse, _ = _attended(
                mask, queries.double(), k.double(), v.double(), spec, tokens_first=tokens_first
            )
            result = torch.where(large.unsqueeze(3), wide_result.to(result.dtype), result)
            lse = torch.where(large, wide_lse.to(lse.dtype), lse)
        output = AttentionOutput(permutation.restore(result.to(v.dtype)), permutation.restore(lse))
        return output.written_to(out)

    def runs_by(self, q: Tensor, k: Tensor, v: Tensor) -> str:
        """The implementation that runs these inputs: the compiled kernel or PyTorch's, and why."""
        if reasons := cpu_kernel_refuses(q, k, v):
            return f"PyTorch's kernel, since the compiled one cannot: {'; '.join(reasons)}"
        return "the compiled kernel"


def _attended(
    mask: BlockMask, queries: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, *, tokens_first: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Output and lse in the mask's order, and which queries `[B, Hq, M]` need merging in float64."""
    rows = _Rows(mask, queries, k, v, spec)
    rows.attend()
    lse = rows.by_head(rows.lse.unsqueeze(2)).squeeze(3)
    size = lse.abs()
    large = (size > LARGE_LSE) & (size < float("inf"))
    return *spec.with_sinks(rows.by_head(rows.out, tokens_first=tokens_first), lse), large


class _Rows:
    """The rows of a mask in stacks: those of all heads that read the same keys, and neighbours of short ones.

    There are S stacks of n rows each, and R = S n rows in all. The queries of a stack lie one behind another.
    """

    def __init__(self, mask: BlockMask, queries: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> None:
        grid, self.spec = mask.grid, spec
        B, Hkv, N, _ = k.shape
        maps_b, maps_h, maps = grid.k_position.shape[:3]
        # A mask of one row, or of one column, has blocks that may be far longer than the prompt.
        self.q_block = grid.q_block if grid.rows > 1 else grid.q_lead + grid.q_len
        k_block = grid.k_block if grid.cols > 1 else grid.slots
        heads, per = max(Hkv, maps_h), grid.q_heads // max(Hkv, maps_h)
        high = max(_QUERIES // (per * self.q_block), 1) if grid.group_of_row is None else 1
        stacks = -(-grid.rows // high)
        self.shape = B, heads, per, stacks, high
        self.n, after = per * high, stacks * high - grid.rows
        self.inside = slice(grid.q_lead, grid.q_lead + grid.q_len)

        # Blocks that all rows of a stack keep and see whole, [S, cols]; what else a row keeps, [R, cols].
        keep, full = (x.repeat_interleave(grid.q_heads // x.shape[1], 1) for x in (mask.keep, grid.full))
        full = full.expand(keep.shape)
        common = self.by_row(pad(keep & full, (0, 0, 0, after), value=True), 1).view(-1, self.n, grid.cols).all(1)
        keep, full = (self.by_row(pad(x, (0, 0, 0, after)), 1).squeeze(1) for x in (keep, full))
        self.common, self.common_count = _lists(common, common)
        keep &= ~common.repeat_interleave(self.n, 0)
        self.rest, self.rest_count = _lists(keep, full)  # full blocks first
        self.full_count = (keep & full).sum(1)

        # The key in every slot of the blocks of all maps, [maps * cols, k_block], -1 where empty; for each stack
        # its first block there, and the first key of its head in `k` and `v`.
        self.k_at = grid.k_position[..., : grid.cols * k_block].unflatten(-1, (-1, k_block)).flatten(0, 3)
        b, h, row = torch.meshgrid(*(torch.arange(n, device=k.device) for n in (B, heads, stacks)), indexing="ij")
        group = 0 * row if grid.group_of_row is None else grid.group_of_row.expand_as(row)
        self.first_block = ((b % maps_b * maps_h + h * maps_h // heads) * maps + group).flatten() * grid.cols
        self.first_key = ((b * Hkv + h * Hkv // heads) * N).flatten()

        # The original position of every slot, [R, q_block], -1 where empty, and of the first and the last query
        # of each row. When not causal, every query sees as much as one that stands behind all keys.
        q_at = grid.q_position[..., : grid.rows * self.q_block].expand(B, grid.q_heads, -1)
        if not grid.causal:
            q_at = torch.full_like(q_at, FAR)
        self.q_at = self.by_row(pad(q_at, (0, after * self.q_block), value=-1), self.q_block)
        self.first, self.last = self.q_at.where(self.q_at >= 0, FAR).amin(1), self.q_at.amax(1)
        self.first += self.first == self.last  # all keys that a lone query sees stand "before" it
        # Keys up to `dim` are hidden by the window from the last query of a row, up to `dark` from all of them.
        self.window = grid.window
        if self.window is not None:
            self.dim, self.dark = ((x - self.window).clamp_min(-1) for x in (self.last, self.first))

        behind = (grid.rows + after) * self.q_block - self.inside.stop
        if grid.q_lead or behind:
            queries = pad(queries, (0, 0, grid.q_lead, behind))
        self.q = self.by_row(queries, self.q_block).to(flash_dtype(k))  # [R, q_block, D]
        self.k, self.v = (x.flatten(0, 2).to(flash_dtype(k)) for x in (k, v))  # [B Hkv N, D], [B Hkv N, Dv]
        self.out = self.q.new_zeros(*self.q.shape[:2], v.shape[-1], dtype=wide_dtype(k))
        self.lse = self.out.new_full(self.out.shape[:2], float("-inf"))

    def by_row(self, x: Tensor, length: int) -> Tensor:
        """`[B, Hq, rows * length, ...]` as `[R, length, ...]`, with rows stacked."""
        B, heads, per, stacks, high = self.shape
        x = x.reshape(B, heads, per, stacks, high * length, *x.shape[3:]).transpose(2, 3)
        return x.reshape(-1, length, *x.shape[5:])

    def by_head(self, x: Tensor, *, tokens_first: bool = False) -> Tensor:
        """`[R, q_block, E]` as `[B, Hq, M, E]`; in memory tokens are before heads if `tokens_first`."""
        B, heads, per, stacks, high = self.shape
        x = x.view(B, heads, stacks, per, high * self.q_block, -1)
        if tokens_first:
            x = x.permute(0, 2, 4, 1, 3, 5).flatten(3, 4).flatten(1, 2).transpose(1, 2)
        else:
            x = x.transpose(2, 3).flatten(3, 4).flatten(1, 2)
        return x[:, :, self.inside]

    def attend(self) -> None:
        """Compute `out` and `lse`: of the own tokens of rows, of what stacks share, and of what else rows keep."""
        k_block, width, R = self.k_at.shape[1], self.k.shape[1] + self.v.shape[1], len(self.q)
        in_stack = torch.arange(R, device=self.q.device) // self.n
        block, key = self.first_block[in_stack], self.first_key[in_stack]  # where each row's begin
        before, own, edge = self._counts(block)

        each = self.first[:, None] + torch.arange(self.q_block, dtype=torch.int32, device=block.device)
        in_order = (self.q_at == each).all(1) & (own == self.q_block) & (self.spec.softcap is None)
        if self.window is not None:
            in_order &= self.first > self.dim
        for keys, some in _alike(own.where(in_order, 0), width):
            at = self.first[some, None] + torch.arange(keys, device=some.device)
            out, lse = self._flash(self.q.index_select(0, some), key[some], at, causal=True)
            self.out.index_copy_(0, some, out)
            self.lse.index_copy_(0, some, lse)
        for keys, some in _alike(own.where(~in_order, 0), width + min(self.q_block, _QUERIES)):
            parts = self._partial(some, keys, block, key, self.first - 1, self.last)
            self.out[some], self.lse[some] = parts
        if edge is not None:
            for keys, some in _alike(edge, width + min(self.q_block, _QUERIES)):
                last = torch.minimum(self.dim, self.first - 1)
                _add(self.out, self.lse, some, *self._partial(some, keys, block, key, self.dark, last))

        q, out, lse = (x.unflatten(0, (-1, self.n)).flatten(1, 2) for x in (self.q, self.out, self.lse))
        for blocks, some in _alike(self.common_count, width * k_block):
            at = self._slots(self.first_block[some], self.common[some, :blocks]).flatten(1)
            _add(out, lse, some, *self._flash(q.index_select(0, some), self.first_key[some], at))

        for keys, some in _alike(before, width):
            first, full, kept = (x[some, None, None] for x in (self.first, self.full_count, self.rest_count))
            nth = torch.arange(int(kept.max()), device=some.device).unsqueeze(1)
            at = self._slots(block[some], self.rest[some, : len(nth)])
            hidden = -1 if self.window is None else self.dim[some, None, None]
            at = at[(nth < full) | ((nth < kept) & (at > hidden) & (at < first))].view(-1, keys)
            _add(self.out, self.lse, some, *self._flash(self.q.index_select(0, some), key[some], at))

    def _counts(self, block: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """Number of remaining keys before the first query of each row, and after it, `[R]`.

        Keys after the last query of a row do not count. With a window, a third tensor counts the keys before the
        first query that the window hides from the last query. Keys that it hides from all queries are not counted.
        """
        partial, k_block = self.rest_count - self.full_count, self.k_at.shape[1]
        before, own = self.full_count * k_block, torch.zeros_like(partial)
        edge = None if self.window is None else torch.zeros_like(partial)
        for blocks, some in _alike(partial, k_block):
            full, first, last = (x[some, None] for x in (self.full_count, self.first, self.last))
            nth = full + torch.arange(blocks, device=some.device)
            at = self._slots(block[some], self.rest[some].gather(1, nth)).flatten(1)
            hidden: int | Tensor = -1
            if edge is not None:
                hidden = self.dim[some, None]
                edge[some] = ((at > self.dark[some, None]) & (at <= hidden) & (at < first)).sum(1)
            before[some] += ((at > hidden) & (at < first)).sum(1)
            own[some] = ((at >= first) & (at <= last)).sum(1)
        return before, own, edge

    def _partial(
        self, some: Tensor, keys: int, block: Tensor, key: Tensor, after: Tensor, last: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Attention of rows to the `keys` of their partial blocks behind `after`, up to `last`, all `[R]`."""
        full, kept, after, last = (x[some, None, None] for x in (self.full_count, self.rest_count, after, last))
        nth = torch.arange(int(kept.max()), device=some.device).unsqueeze(1)
        at = self._slots(block[some], self.rest[some, : len(nth)])
        at = at[(nth >= full) & (nth < kept) & (at > after) & (at <= last)].view(-1, keys)
        k, v = self._gathered(key[some], at)
        query = self.q_at[some].unsqueeze(2)
        hidden = at.unsqueeze(1) > query
        if self.window is not None:
            hidden |= at.unsqueeze(1) <= query - self.window
        return _plain(self.q[some], k, v, hidden, self.spec)

    def _flash(self, q: Tensor, first_key: Tensor, at: Tensor, *, causal: bool = False) -> tuple[Tensor, Tensor]:
        """Attention of `q` `[n, M, D]` to the keys at the positions `at` `[n, keys]` of heads, and its lse."""
        k, v = self._gathered(first_key, at)
        if self.spec.softcap is not None:
            return _plain(q, k, v, _hidden(q, k, causal=causal), self.spec)
        one_q, one_k, one_v = (x.unsqueeze(1) for x in (q, k, v))
        out, lse = (x.squeeze(1) for x in flash_on_cpu(one_q, one_k, one_v, self.spec.scale, causal=causal))
        # PyTorch's kernel takes a few logits that are all NaN for no key at all, for which it gives an lse of 0. A
        # logit of infinity, which should make its row NaN, has the weight 0 in bf16, and gives an lse of infinity.
        if bool(((lse == 0) | (lse == float("inf"))).any()):
            return _plain(q, k, v, _hidden(q, k, causal=causal), self.spec)
        return out.to(self.out.dtype), lse

    def _slots(self, first_block: Tensor, blocks: Tensor) -> Tensor:
        """The keys in the slots of `blocks` `[n, blocks]`, `[n, blocks, k_block]`, -1 where empty."""
        block = (first_block.unsqueeze(1) + blocks).flatten()
        at: Tensor = self.k_at.index_select(0, block).view(*blocks.shape, -1)
        return at

    def _gathered(self, first_key: Tensor, at: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values at the positions `at` `[n, keys]`, `[n, keys, D]` and `[n, keys, Dv]`."""
        token = (at + first_key.unsqueeze(1)).flatten()
        k, v = (x.index_select(0, token).view(*at.shape, -1) for x in (self.k, self.v))
        return k, v


def _lists(keep: Tensor, first: Tensor) -> tuple[Tensor, Tensor]:
    """The kept columns of each row `[X, cols]`, those of `first` at the front, and how many they are, `[X]`."""
    return (keep.to(torch.uint8) + (keep & first)).argsort(dim=1, descending=True, stable=True), keep.sum(1)


def _alike(counts: Tensor, wide: int) -> Iterator[tuple[int, Tensor]]:
    """Rows with the same count, of `counts` `[X]` and not 0: the count, and which rows, some at a time."""
    threads = torch.get_num_threads()
    for count in counts.unique().tolist():
        if count:
            at_once = threads * _WORKSPACE // (count * wide)
            at_once = at_once // threads * threads or max(at_once, 1)
            for some in (counts == count).nonzero().flatten().split(at_once):
                yield count, some


def _add(out: Tensor, lse: Tensor, some: Tensor, more: Tensor, more_lse: Tensor) -> None:
    """Merge attention of some rows to further keys into `out` `[X, M, D]` and `lse` `[X, M]`."""
    before = lse[some]
    share = torch.sigmoid(more_lse - before).masked_fill_(before == float("-inf"), 1.0)
    lse[some] = torch.logaddexp(before, more_lse)
    share = share.unsqueeze(2)
    out.index_copy_(0, some, more.mul_(share).addcmul_(out.index_select(0, some), 1 - share))


def _hidden(q: Tensor, k: Tensor, *, causal: bool) -> Tensor:
    """The pairs of `q` `[n, M, D]` and `k` `[n, keys, D]` that a flash kernel leaves out, `[1, M, keys]`."""
    shape = 1, q.shape[1], k.shape[1]
    return torch.ones(shape, dtype=torch.bool, device=q.device).triu(1 if causal else k.shape[1])


def _plain(q: Tensor, k: Tensor, v: Tensor, hidden: Tensor, spec: AttentionSpec) -> tuple[Tensor, Tensor]:
    """Attention of `q` `[n, M, D]` to `k` `[n, keys, D]` but for hidden pairs `[n|1, M, keys|1]`, and its lse."""
    parts, v = [], v.to(wide_dtype(v))
    for some, their_hidden in zip(q.split(_QUERIES, 1), hidden.split(_QUERIES, 1), strict=True):
        logits = spec.capped(products(some.unsqueeze(0), k.unsqueeze(0))[0].mul_(spec.scale))  # [n, M, keys]
        logits.masked_fill_(their_hidden, float("-inf"))
        peak = logits.amax(-1, keepdim=True)
        weight = logits.softmax(-1)
        lse = peak - weight.amax(-1, keepdim=True).log()  # the greatest weight is 1 / sum(exp(logits - peak))
        nothing = peak == float("-inf")  # queries that see none of these keys
        weight.masked_fill_(nothing, 0.0)
        lse.masked_fill_(nothing, float("-inf"))
        out = products(weight.unsqueeze(0), v.mT.unsqueeze(0))[0].masked_fill_(nothing, 0.0)  # 0 * inf is not 0
        parts.append((out, lse.squeeze(-1)))
    outs, lses = zip(*parts, strict=True)
    return torch.cat(outs, 1), torch.cat(lses, 1)


_SOURCES = SOURCE, cpu_scores.SOURCE

# Queries of a call from which the kernel is faster than PyTorch's: it packs keys first, which pays off with many.
_QUERIES = 64


def takes_dense(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether the kernel runs dense attention on these inputs, where it is faster than PyTorch's."""
    return q.shape[2] >= _QUERIES and not differentiates(q, k, v) and not cpu_kernel_refuses(q, k, v)


def about_kernel() -> str:
    """A phrase for error messages: attention on this CPU runs by the compiled kernel, or the reason why not."""
    found = cpu_kernel()
    if found.why_not is not None:
        return f"no compiled kernel: {found.why_not}"
    return f"compiled kernel, which multiplies bf16 as {cpu_products()}"


def compile_kernels() -> list[tuple[Path | None, float]]:
    """Compile the kernels again. Return the path of each, None if it cannot be kept, and the seconds it took."""
    made = []
    for source in _SOURCES:
        found = load(source, anew=True)
        if found.why_not is not None:
            raise UserError(f"{source.name} cannot be compiled: {found.why_not}")
        made.append((found.path, found.seconds))
    return made


def compile_kernels_for_wheel(package: Path) -> list[Path]:
    """Compile the kernels for every kind of CPU that a wheel serves, into `package`, this package's folder."""
    home = SOURCE.parents[2]
    try:
        return [
            path
            for source in _SOURCES
            for path in compile_for_wheel(source, package / source.relative_to(home).parent / "compiled")
        ]
    except UnavailableError as error:
        raise UserError(f"the kernels cannot be compiled: {error}") from None
