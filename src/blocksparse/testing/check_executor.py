"""A test of the guarantees of every executor."""

from __future__ import annotations

from typing import Any, final

import torch
from attrs import frozen
from torch import Tensor

from blocksparse.check.per_head import HeadValues
from blocksparse.check.stage import Declared, check_gave, declared
from blocksparse.check.validators import shown
from blocksparse.execute.executor import AttentionOutput, Executor
from blocksparse.grid import Grid
from blocksparse.order.permutation import Permutation
from blocksparse.select.block_mask import BlockMask, RankedBlockMask
from blocksparse.spec import AttentionSpec
from blocksparse.testing.inputs import (
    LENGTHS,
    Case,
    about,
    assert_within_budget,
    cases,
    error_of_logits,
    masked_attention,
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
    `visited`, compared with float64. This includes a sliding window, a softcap and sinks, unless `unsupported` has
    a reason against them. A query without a kept key must give 0 and `lse` -inf. A key that is NaN must reach only
    the queries that attend to it, and later tokens must change no bit of an earlier row. The layout of q in memory
    must not matter, and nothing may be written into the inputs. With `out` the same output must lie there, in the
    part of a tensor that it is given.

    Args:
        causal: whether calls are causal. None for both kinds.
        lengths: `(N, M)`, the keys and queries of each case.
        block: slots per block of the masks. On both sides.
        relative_error: bound on `sum|o - o'| / sum|o'|` for an executor that approximates. None asks for the
            budget of `assert_within_budget`.

    Raises:
        AssertionError: says in one sentence what is wrong and in which case.
    """
    ran, reasons = 0, ["no case"]
    needed = tuple(each.value for each in declared(executor, Executor, 0))
    for case in cases(lengths, causal):
        q, k, v = case.inputs(D=head_dim, dtype=dtype, device=device)
        for permutation in orders(q, k, needed, causal=case.causal):
            for more in ({}, *_more(case, block)):
                spec = case.spec(**more)
                call = _Call(executor, q, k, v, _random_mask(q, k, permutation, spec, block), spec, relative_error)
                options = (f"{name}={shown(x)}" for name, x in more.items())
                with about(executor, (case, permutation, *options)), unchanged(q=q, k=k, v=v):
                    if why := executor.unsupported(q, k, v, call.mask, spec):
                        reasons = reasons if more else why
                        call.check_that_it_refuses()
                        continue
                    ran += 1
                    call.check_meaning()
                    if not more:
                        call.check_bad_keys()
                        call.check_causality(case)
                        call.check_part()
    require(
        ran > 0, f"{executor!r} ran no case with blocks of {block} in {dtype} on {device}: {'; '.join(reasons)}"
    )


def _more(case: Case, block: int) -> list[dict[str, Any]]:
    """Attention options of a layer, in chunks of prompts."""
    if not case.M < case.N:
        return []
    windows = [{"window": block + 7}] if case.causal else []
    return [*windows, {"softcap": 2.0}, {"sinks": [0.5, -1.0, 2.0, 0.0]}]


def _random_mask(
    q: Tensor, k: Tensor, permutation: Permutation, spec: AttentionSpec, block: int
) -> RankedBlockMask:
    """A mask that keeps two blocks in five and nothing in some rows, with random ranks."""
    grid = Grid.of(q, k, permutation, spec, q_block=block, k_block=block)
    draw = uniform(2)
    shape = (*q.shape[:2], grid.rows, grid.cols)
    keep = (draw(shape) < 0.4).to(q.device) | grid.diagonal
    keep &= grid.visible & (draw(shape[:3]) < 0.9).to(q.device).unsqueeze(-1)
    return RankedBlockMask(keep, grid, draw(shape).argsort(-1).int().to(q.device))


@final
@frozen(eq=False)
class _Call:
    """One call of an executor, and what must hold of it."""

    executor: Executor[Any, Any]
    q: Tensor
    k: Tensor
    v: Tensor
    mask: RankedBlockMask
    spec: AttentionSpec
    relative_error: float | None

    def run(self, **changed: Any) -> AttentionOutput:
        """The call with other tensors, or another mask."""
        given = {name: getattr(self, name) for name in ("q", "k", "v", "mask", "spec")}
        return self.executor(**given | changed)

    @property
    def held(self) -> RankedBlockMask:
        """The mask with blocks that are visited in any case, so that an early stop cannot drop any of them."""
        return RankedBlockMask(self.mask.keep, self.mask.grid, torch.full_like(self.mask.rank, -1))

    def check_part(self) -> None:
        B, Hq, M, _ = self.q.shape
        whole = self.q.new_full((B, Hq, M + 9, self.v.shape[3]), 7.0)
        part = whole[:, :, 8:-1]
        given = self.run(out=part)
        require(given.out.data_ptr() == part.data_ptr(), "with 'out', that must be the output")
        require(torch.equal(part, self.run().out), "with 'out', a call must give what it gives without")
        part.fill_(7.0)
        require(bool((whole == 7.0).all()), "nothing but the rows of 'out' may be written to")

    def check_that_it_refuses(self) -> None:
        try:
            self.run()
        except ValueError:
            return
        raise AssertionError(
            "unsupported() gives reasons against these inputs, but the executor ran them. Begin __call__ with "
            "self.check(...)."
        )

    def check_meaning(self) -> None:
        given, q, k, v, spec = self.run(), self.q, self.k, self.v, self.spec
        check_gave((Declared(type(self.executor), AttentionOutput),), given)
        shape = (*q.shape[:3], v.shape[-1])
        require(
            given.out.shape == shape and given.out.dtype == v.dtype,
            f"'out' must be {shape} of {v.dtype}: {tuple(given.out.shape)} of {given.out.dtype}",
        )
        visited = self.mask if given.visited is None else given.visited
        require(
            ~(visited.keep & ~self.mask.keep).any(), "it reports blocks as visited that the mask does not keep"
        )
        pairs = _pairs(visited)
        sinks = spec.sinks.values if isinstance(spec.sinks, HeadValues) else None
        rest: dict[str, Any] = {"pairs": pairs, "scale": spec.scale, "softcap": spec.softcap, "sinks": sinks}
        want = masked_attention(q.double(), k.double(), v.double(), **rest)
        if self.relative_error is None:
            least = error_of_logits(q, k, v, **rest)
            assert_within_budget(given.out, want, masked_attention(q, k, v, **rest), least=least)
        else:
            error = float((given.out.double() - want).abs().sum() / want.abs().sum().clamp_min(1e-300))
            require(error <= self.relative_error, f"the relative error is {error:.3g}, over {self.relative_error}")
        alone = ~pairs.any(-1)
        require((given.out[alone] == 0).all(), "a query with nothing kept must give 0")
        if given.lse is not None and sinks is None:
            require((given.lse[alone] == -float("inf")).all(), "a query with nothing kept must give lse -inf")
            require(given.lse[~alone].isfinite().all(), "lse must be finite where something is kept")
        again = self.run(q=q.mT.contiguous().mT).out
        require(torch.equal(again, given.out), "q laid out otherwise in memory gives another result")

    def check_bad_keys(self) -> None:
        """Require that a key which is NaN reaches only the queries that attend to it."""
        held, k = self.held, self.k
        pairs, before = _pairs(held), self.run(mask=held).out
        for j in sorted({0, k.shape[2] // 2, k.shape[2] - 1}):
            spoilt = k.clone()
            spoilt[:, :, j] = float("nan")
            after, blind = self.run(k=spoilt, mask=held).out, ~pairs[..., j]
            if self.relative_error is None:
                same = torch.equal(before[blind], after[blind])
            else:
                was, now = before[blind].double(), after[blind].double()
                same = bool((now - was).abs().sum() <= 2 * self.relative_error * was.abs().sum())  # false if NaN
            require(same, f"key {j}, when NaN, reaches queries that do not attend to it")

    def check_causality(self, case: Case) -> None:
        """Require that later tokens change no bit of a query's output, with one mask."""
        t = case.N - (case.M + 1) // 2  # the position from which tokens change
        if not case.causal or t <= case.N - case.M:
            return
        given = self.q, self.k, self.v
        parts = [x.split((x.shape[2] - case.N + t, case.N - t), dim=2) for x in given]
        q, k, v = (torch.cat((earlier, 0.5 * later.flip(2)), dim=2) for earlier, later in parts)
        before, after = self.run(mask=self.held).out, self.run(q=q, k=k, v=v, mask=self.held).out
        rows = t - (case.N - case.M)
        require(
            torch.equal(before[:, :, :rows], after[:, :, :rows]),
            "later tokens change the result of earlier queries",
        )


def _pairs(mask: BlockMask) -> Tensor:
    """Mask of the keys that each query attends to, `[B, Hq, M, N]` bool, both in original order."""
    grid = mask.grid
    pairs = torch.zeros(
        grid.batch, grid.q_heads, grid.q_len, grid.k_len, dtype=torch.bool, device=mask.keep.device
    )
    for row in range(grid.rows):
        index = mask.queries(row).unsqueeze(-1).expand(-1, -1, -1, grid.k_len)
        pairs.scatter_(2, index, mask.pairs(row))
    return pairs
