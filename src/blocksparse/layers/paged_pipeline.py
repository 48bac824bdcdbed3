"""`PagedPipeline`: calls of a pipeline with keys and values where they lie, in the pages of a cache."""

from __future__ import annotations

from functools import partial
from typing import Any, final

import torch
from attrs import Factory, field, frozen
from torch import Tensor
from torch.autograd.graph import increment_version

from blocksparse.batch.pages import PagedKV
from blocksparse.check.class_line import Declared, check_gave
from blocksparse.check.validators import a
from blocksparse.custom_op import laid_out_as
from blocksparse.execute.executor import AttentionOutput, PagedExecutor
from blocksparse.four_stages import seen, tail_of
from blocksparse.inputs import UnsupportedError, check_out, checked
from blocksparse.launch.repeated import repeated
from blocksparse.launch.torch_modes import refuse_transforms, without_autocast
from blocksparse.pipeline import Pipeline
from blocksparse.score.key_history import KeyHistory
from blocksparse.spec import Asked, AttentionSpec

_in_pages = a(PagedKV).or_else("PageTable.in_place(request, keys, values) makes one")


@final
@frozen(cache_hash=True)
class PagedPipeline:
    """A pipeline that reads keys and values where they lie, in the pages of a cache, and gathers nothing.

        kv = table.in_place(request, keys, values)
        out = PagedPipeline(pipeline)(q, kv)

    The result has the bits of a call of the pipeline with `table.gather_one(...)`. Calls are causal, and their
    stages always run.

    Raises:
        TypeError: `pipeline` is not a `Pipeline`.
    """

    pipeline: Pipeline[Any, Any, Any] = field(validator=a(Pipeline))
    _tail: int | None = field(
        init=False, repr=False, eq=False, default=Factory(lambda self: _tail_of(self.pipeline), takes_self=True)
    )

    def __call__(
        self,
        q: Tensor,
        kv: PagedKV,
        *,
        scale: float | None = None,
        window: int | None = None,
        softcap: float | None = None,
        sinks: Any = None,
        remaining: int = 0,
        out: Tensor | None = None,
    ) -> Tensor:
        """Attend to one request: `[1, Hq, M, Dv]`. torch.compile takes no such call.

        Args:
            q: `[1, Hq, M, D]`, the last M of the tokens in `kv`.
            kv: `PageTable.in_place(...)`.
            scale: as in a call of the pipeline, and so are `window`, `softcap`, `sinks`,
                `remaining` and `out`.

        Raises:
            TypeError, ValueError: as in a call of the pipeline.
            UnsupportedError: these inputs are right, but a stage reads no pages (`gathers_because`), or the
                executor has no kernel for them.
        """
        refuse_transforms("PagedPipeline")
        _in_pages.check(kv=kv)
        asked: Asked = {
            "scale": scale, "window": window, "softcap": softcap, "sinks": sinks, "remaining": remaining
        }  # fmt: skip
        if (because := self.gathers_because(q.device)) is not None:
            raise UnsupportedError(f"{because}: gather the keys and values first", because)
        q, _, _, spec = checked(q, kv.k, kv.v, asked)
        if q.dtype != kv.keys.dtype:
            raise TypeError(f"a cache must have the dtype of q: {kv.keys.dtype}, {q.dtype}; convert q")
        if out is not None:
            check_out(out, q, kv.keys, kv.values)
        attend = partial(repeated, self._attend) if self.pipeline.repeats else self._attend
        with without_autocast(q):
            given: Tensor = attend(q, kv.keys, kv.values, kv.slots, kv.run, seen(spec, self._tail), out)
        if out is None:
            return laid_out_as(q, given)
        increment_version(out)
        return out

    def gathers_because(self, device: torch.device) -> str | None:
        """The reason why a cache on this device cannot be read where it lies, or None."""
        permuter, scorer, executor = self.pipeline.permuter, self.pipeline.scorer, self.pipeline.executor
        if permuter.moves_keys:
            return f"{type(permuter).__name__} moves keys"
        if not scorer.takes_paged_keys:
            return f"{type(scorer).__name__} needs the keys themselves"
        if not isinstance(executor, PagedExecutor):
            return f"{type(executor).__name__} reads no pages"
        return executor.gathers_because(device)

    def _attend(
        self,
        q: Tensor,
        keys: Tensor,
        values: Tensor,
        slots: Tensor,
        run: int,
        spec: AttentionSpec,
        out: Tensor | None,
    ) -> Tensor:
        """The output for checked inputs. Tensors of `kv` are separate arguments, as `repeated` wants them."""
        kv, executor = PagedKV(keys, values, slots, run=run), self.pipeline.executor
        # Scorers that read no keys get no history, as ever.
        history = KeyHistory(kv) if self.pipeline.scorer.keeps_history else None
        mask = self.pipeline.choose(q, kv.k, history=history, **spec.arguments()).mask
        assert isinstance(executor, PagedExecutor)
        output = executor.attend_paged(q, kv, mask, spec, out)
        check_gave((Declared(type(executor), AttentionOutput),), output)
        return output.out


def _tail_of(pipeline: Pipeline[Any, Any, Any]) -> int | None:
    if not isinstance(pipeline, Pipeline):  # which the validator refuses after this
        return None
    return tail_of(pipeline.permuter, pipeline.scorer, pipeline.selector, pipeline.executor)
