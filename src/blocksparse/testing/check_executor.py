"""A check of what every executor must guarantee."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from blocksparse.class_line import Declared, check_gave, declared
from blocksparse.executors.attention_output import AttentionOutput
from blocksparse.executors.executor import Executor
from blocksparse.geometry import Grid
from blocksparse.permuters.permutation import Permutation
from blocksparse.selectors.block_mask import BlockMask, RankedBlockMask
from blocksparse.testing.budget import assert_within_budget, masked_attention
from blocksparse.testing.requirements import (
    LENGTHS,
    SCALE,
    Case,
    about,
    cases,
    orders,
    require,
    unchanged,
    uniform,
)


def check_executor(
    executor: Executor[Any, Any],
    *,
    causal: bool | None = None,
    lengths: tuple[tuple[int, int], ...] = LENGTHS,
    head_dim: int = 64,
    block: int = 64,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    relative_error: float | None = None,
) -> None:
    """Call `executor` with random masks of prompts and chunks, in every order that it takes, and check results.

    The output must be softmax attention over exactly the pairs of the mask, or of the blocks that it reports as
    `visited`, compared with float64; in a sliding window, too, if the executor takes windows. A query without a
    kept key must give 0 and `lse` -inf. A key that is NaN must reach only the queries that attend to it, and later
    tokens must change no bit of an earlier row. The layout of q in memory must not matter, and nothing may be
    written into the inputs. `attend_into` must write the same output, to the part of a tensor that it is given.

    Args:
        causal: whether calls are causal; None for both kinds.
        lengths: `(N, M)`, the keys and queries of each case.
        block: slots per block of the masks, on both sides.
        relative_error: bound on `sum|o - o'| / sum|o'|` for an executor that approximates; None asks for the
            budget of `assert_within_budget`.

    Raises:
        AssertionError: says in one sentence what is wrong and in which case.
    """
    ran, reasons = 0, ["no case"]
    needed = tuple(each.value for each in declared(executor, Executor, 0))
    for case in cases(lengths, causal):
        q, k, v = case.inputs(D=head_dim, dtype=dtype, device=device)
        for permutation in orders(q, k, needed, causal=case.causal):
            mask = _random_mask(q, k, permutation, block, causal=case.causal)
            if case.causal and executor.takes_windows and case.M < case.N:
                windowed = _random_mask(q, k, permutation, block, causal=True, window=block + 7)
                with about(executor, (case, permutation, "a sliding window")):
                    if not executor.unsupported(q, k, v, windowed):
                        _check_meaning(executor, q, k, v, permutation, windowed, relative_error)
            with about(executor, (case, permutation)), unchanged(q=q, k=k, v=v):
                if reasons := executor.unsupported(q, k, v, mask):
                    _check_that_it_refuses(executor, q, k, v, permutation, mask)
                    continue
                ran += 1
                _check_meaning(executor, q, k, v, permutation, mask, relative_error)
                _check_part(executor, q, k, v, permutation, mask)
                # Blocks of a negative rank are visited in any case, so an early stop cannot drop any of them.
                held = RankedBlockMask(mask.keep, mask.grid, torch.full_like(mask.rank, -1))
                _check_bad_keys(executor, q, k, v, permutation, held, relative_error)
                if case.causal:
                    _check_causality(executor, case, q, k, v, permutation, held)
    require(
        ran > 0, f"{executor!r} ran no case with blocks of {block} in {dtype} on {device}: {'; '.join(reasons)}"
    )


def _random_mask(
    q: Tensor, k: Tensor, permutation: Permutation, block: int, *, causal: bool, window: int | None = None
) -> RankedBlockMask:
    """A mask that keeps two blocks in five and nothing in some rows, with random ranks."""
    grid = Grid.of(q, k, permutation, q_block=block, k_block=block, causal=causal, window=window)
    draw = uniform(2)
    shape = (*q.shape[:2], grid.rows, grid.cols)
    keep = (draw(shape) < 0.4).to(q.device) | grid.diagonal
    keep &= grid.reachable & (draw(shape[:3]) < 0.9).to(q.device).unsqueeze(-1)
    return RankedBlockMask(keep, grid, draw(shape).argsort(-1).int().to(q.device))


def _check_part(
    executor: Executor[Any, Any], q: Tensor, k: Tensor, v: Tensor, permutation: Permutation, mask: RankedBlockMask
) -> None:
    B, Hq, M, _ = q.shape
    whole = q.new_full((B, Hq, M + 9, v.shape[3]), 7.0)
    part = whole[:, :, 8:-1]
    executor.attend_into(part, q, k, v, permutation, mask, scale=SCALE)
    same = torch.equal(part, executor(q, k, v, permutation, mask, scale=SCALE).out)
    require(same, "'attend_into' must write what a call gives")
    part.fill_(7.0)
    require(bool((whole == 7.0).all()), "'attend_into' must write nothing but the rows that it is given")


def _check_that_it_refuses(
    executor: Executor[Any, Any], q: Tensor, k: Tensor, v: Tensor, permutation: Permutation, mask: RankedBlockMask
) -> None:
    try:
        executor(q, k, v, permutation, mask, scale=SCALE)
    except ValueError:
        return
    raise AssertionError(
        "unsupported() gives reasons against these inputs, but the executor ran them; begin __call__ with "
        "self.check(...)"
    )


def _check_meaning(
    executor: Executor[Any, Any],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    permutation: Permutation,
    mask: RankedBlockMask,
    relative_error: float | None,
) -> None:
    given = executor(q, k, v, permutation, mask, scale=SCALE)
    check_gave((Declared(executor, AttentionOutput),), given)
    shape = (*q.shape[:3], v.shape[-1])
    require(
        given.out.shape == shape and given.out.dtype == v.dtype,
        f"'out' must be {shape} of {v.dtype}: {tuple(given.out.shape)} of {given.out.dtype}",
    )
    visited = mask if given.visited is None else given.visited
    require(~(visited.keep & ~mask.keep).any(), "it reports blocks as visited that the mask does not keep")
    pairs = _pairs(visited)
    want = masked_attention(q.double(), k.double(), v.double(), pairs, SCALE)
    if relative_error is None:
        assert_within_budget(given.out, want, masked_attention(q, k, v, pairs, SCALE))
    else:
        error = float((given.out.double() - want).abs().sum() / want.abs().sum().clamp_min(1e-300))
        require(error <= relative_error, f"the relative error is {error:.3g}, over {relative_error}")
    alone = ~pairs.any(-1)
    require((given.out[alone] == 0).all(), "a query with nothing kept must give 0")
    if given.lse is not None:
        require((given.lse[alone] == -float("inf")).all(), "a query with nothing kept must give lse -inf")
        require(given.lse[~alone].isfinite().all(), "lse must be finite where something is kept")
    again = executor(q.mT.contiguous().mT, k, v, permutation, mask, scale=SCALE).out
    require(torch.equal(again, given.out), "q laid out otherwise in memory gives another result")


def _check_bad_keys(
    executor: Executor[Any, Any],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    permutation: Permutation,
    held: RankedBlockMask,
    relative_error: float | None,
) -> None:
    """Require that a key which is NaN reaches only the queries that attend to it.

    An executor that approximates may round the other keys otherwise, for example because their mean is another.
    """
    pairs = _pairs(held)
    before = executor(q, k, v, permutation, held, scale=SCALE).out
    for j in sorted({0, k.shape[2] // 2, k.shape[2] - 1}):
        spoilt = k.clone()
        spoilt[:, :, j] = float("nan")
        after = executor(q, spoilt, v, permutation, held, scale=SCALE).out
        blind = ~pairs[..., j]
        if relative_error is None:
            same = torch.equal(before[blind], after[blind])
        else:
            was, now = before[blind].double(), after[blind].double()
            same = bool((now - was).abs().sum() <= 2 * relative_error * was.abs().sum())  # false if it is NaN
        require(same, f"key {j}, when NaN, reaches queries that do not attend to it")


def _check_causality(
    executor: Executor[Any, Any],
    case: Case,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    permutation: Permutation,
    held: RankedBlockMask,
) -> None:
    """Require that, with the same mask, other tokens after a query change no bit of its output."""
    t = case.N - (case.M + 1) // 2  # the position from which tokens change
    if t <= case.N - case.M:
        return
    parts = [x.split((x.shape[2] - case.N + t, case.N - t), dim=2) for x in (q, k, v)]
    later_q, later_k, later_v = (torch.cat((earlier, 0.5 * later.flip(2)), dim=2) for earlier, later in parts)
    before = executor(q, k, v, permutation, held, scale=SCALE).out
    after = executor(later_q, later_k, later_v, permutation, held, scale=SCALE).out
    rows = t - (case.N - case.M)
    require(
        torch.equal(before[:, :, :rows], after[:, :, :rows]), "later tokens change the result of earlier queries"
    )


def _pairs(mask: BlockMask) -> Tensor:
    """Which keys each query attends to, `[B, Hq, M, N]` bool, both in original order."""
    grid = mask.grid
    pairs = torch.zeros(
        grid.batch, grid.q_heads, grid.q_len, grid.k_len, dtype=torch.bool, device=mask.keep.device
    )
    for row in range(grid.rows):
        index = mask.queries(row).unsqueeze(-1).expand(-1, -1, -1, grid.k_len)
        pairs.scatter_(2, index, mask.pairs(row))
    return pairs
