"""`Attention`, all that attends in a layer, and pipelines for groups of its heads."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol, Unpack, final, overload

import torch
from attrs import Factory, field, frozen
from torch import Tensor

from blocksparse.batch.sequences import Sequences
from blocksparse.check.validators import a, is_whole, shown, whole
from blocksparse.custom_op import OpaqueCall, attend
from blocksparse.execute.dense_attention import dense_attention
from blocksparse.execute.executor import AttentionOutput
from blocksparse.inputs import checked
from blocksparse.launch.torch_modes import refuse_transforms, without_autocast
from blocksparse.pipeline import Pipeline
from blocksparse.spec import AttentionOptions, AttentionSpec
from blocksparse.values import Trace

AnyTrace = Trace[Any, Any, Any]
Heads = tuple[int, ...]
"""KV heads, in the order in which a pipeline gets them."""


@final
@frozen(eq=False)
class HeadGroupsTrace:
    """The traces of all groups of heads in one call. The methods measure when they are called, as in a `Trace`."""

    traces: Mapping[Heads, AnyTrace | None]  # None for a dense group
    output: AttentionOutput
    dense_because: str | None  # why the executor of a group attended densely, if none of the groups was sparse

    def density(self) -> Tensor:
        """The work done, as a share of the work of dense attention, `[B, Hq]`; 1 for heads of a dense group."""
        return self._per_query_head(lambda trace: trace.density(), dense=1.0)

    def covered_mass(self) -> Tensor:
        """The share of the dense attention weights on visited pairs, `[B, Hq]`; 1 for heads of a dense group."""
        return self._per_query_head(lambda trace: trace.covered_mass(), dense=1.0)

    def error(self) -> Tensor:
        """The relative L1 distance of the output from the dense one, `[B, Hq]`; 0 for heads of a dense group."""
        return self._per_query_head(lambda trace: trace.error(), dense=0.0)

    def _per_query_head(self, measure: Callable[[AnyTrace], Tensor], *, dense: float) -> Tensor:
        out = self.output.out
        size = out.shape[1] // sum(map(len, self.traces))
        ones = torch.ones(out.shape[:2], dtype=torch.float64, device=out.device)
        return put_back(
            {
                heads: dense * ones[:, : size * len(heads)] if trace is None else measure(trace)
                for heads, trace in self.traces.items()
            },
            size,
        )


def put_back(parts: Mapping[Heads, Tensor], size: int) -> Tensor:
    """The tensor `[B, Hkv * size, ...]` of which these are the parts."""
    by_head = {
        head: one for heads, part in parts.items() for head, one in zip(heads, part.split(size, 1), strict=True)
    }
    return torch.cat([by_head[head] for head in range(len(by_head))], dim=1)


AnyPipeline = Pipeline[Any, Any, Any]


def _groups(groups: Mapping[Heads, AnyPipeline | None]) -> Mapping[Heads, AnyPipeline | None]:
    if not isinstance(groups, Mapping):
        raise TypeError(
            f"'groups' must be a mapping of KV heads to pipelines: {type(groups).__name__}. "
            f"Write {{(0, 1): pipeline, (2, 3): None}}."
        )
    return {
        tuple(map(whole, heads)) if isinstance(heads, tuple) else heads: pipeline
        for heads, pipeline in groups.items()
    }


@final
@frozen(cache_hash=True)
class HeadGroups:
    """Several pipelines for one layer. Each runs for some KV heads and their query heads; None is dense.

        HeadGroups({(0, 1, 3): pbs_attn(0.9), (2,): None})(q, k, v)

    It is called like a `Pipeline`. The heads of a group run in one call, in the order in which the group names
    them. If an option of its pipeline has one number per query head, these are the query heads of the group alone.

    Args:
        groups: the pipelines by KV heads.
    """

    groups: Mapping[Heads, AnyPipeline | None] = field(
        converter=_groups, eq=lambda groups: frozenset(groups.items())
    )
    _call: OpaqueCall = field(
        init=False, repr=False, eq=False, default=Factory(lambda self: OpaqueCall(self._attend), takes_self=True)
    )

    @groups.validator
    def _check_groups(self, _: object, groups: Mapping[Any, Any]) -> None:
        if not groups:
            raise ValueError("'groups' must have at least one group: {}. Give (0, 1): pipeline, say.")
        for heads, pipeline in groups.items():
            if not isinstance(heads, tuple) or not all(map(is_whole, heads)):
                raise TypeError(
                    f"'groups' must name heads in tuples of whole numbers, (2,) for one head: {shown(heads)}. "
                    "The value is its pipeline."
                )
            if not heads or min(heads) < 0:
                raise ValueError(f"'groups' must name KV heads from 0 on: {shown(heads)}. Count from 0.")
            if pipeline is not None and not isinstance(pipeline, Pipeline):
                raise TypeError(
                    f"'groups' must have a Pipeline or None (dense) for {shown(heads)}: {type(pipeline).__name__}"
                )
        if twice := named_twice(head for heads in groups for head in heads):
            raise ValueError(
                f"'groups' must name each KV head once, but names these more than once: {twice}. Remove one."
            )

    @classmethod
    def dense_where(cls, dense: Sequence[bool], pipeline: AnyPipeline) -> HeadGroups:
        """Dense attention in the KV heads where `dense` `[Hkv]` is true, and `pipeline` in the others."""
        a(Pipeline).check(pipeline=pipeline)
        if not isinstance(dense, Sequence) or not all(isinstance(is_dense, bool) for is_dense in dense):
            raise TypeError(
                f"'dense' must be a sequence of True and False, one per KV head: {shown(dense)}. "
                "A tensor becomes one by .tolist()."
            )
        split: dict[bool, list[int]] = {True: [], False: []}
        for head, is_dense in enumerate(dense):
            split[is_dense].append(head)
        parts = ((split[True], None), (split[False], pipeline))
        return cls({tuple(heads): attention for heads, attention in parts if heads})

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        sequences: Sequences | None = None,
        out: Tensor | None = None,
        **options: Unpack[AttentionOptions],
    ) -> Tensor:
        """Attend `q` `[B, Hq, M, D]` to `k` `[B, Hkv, N, D]` and `v` `[B, Hkv, N, Dv]`: `[B, Hq, M, Dv]`.

        Args:
            sequences: as for a `Pipeline`.
            out: as for a `Pipeline`.
            options: `causal`, `scale`, `window`, `softcap`, `sinks` and `remaining`, as for a `Pipeline`. Sinks
                are those of all query heads, in the order of the model.

        Raises:
            TypeError, ValueError: a pipeline cannot run its inputs, or the groups do not name each KV head of `k`.
        """
        return attend(self._call, q, k, v, options, sequences, out=out)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> Tensor:
        parts = {
            heads: dense_attention(*part, its) if pipeline is None else pipeline(*part, **its.arguments())
            for heads, pipeline, part, its in self._parts(q, k, v, spec)
        }
        return put_back(parts, q.shape[1] // k.shape[1])

    @overload
    def trace(
        self, q: Tensor, k: Tensor, v: Tensor, *, sequences: None = None, **options: Unpack[AttentionOptions]
    ) -> HeadGroupsTrace: ...
    @overload
    def trace(
        self, q: Tensor, k: Tensor, v: Tensor, *, sequences: Sequences, **options: Unpack[AttentionOptions]
    ) -> list[HeadGroupsTrace | None]: ...
    def trace(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        sequences: Sequences | None = None,
        **options: Unpack[AttentionOptions],
    ) -> HeadGroupsTrace | list[HeadGroupsTrace | None]:
        """Make the same call with the same arguments, and return every value of it.

        Of `sequences` it returns a list with the trace of each one, and None for one without queries or keys.
        """
        refuse_transforms("trace")
        q, k, v, spec = checked(q, k, v, options, sequences)
        with without_autocast(q):
            if sequences is None:
                return self._trace(q, k, v, spec)
            return [None if part is None else self._trace(*part) for part in sequences.parts(q, k, v, spec)]

    def _trace(self, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> HeadGroupsTrace:
        size = q.shape[1] // k.shape[1]
        traces: dict[Heads, AnyTrace | None] = {}
        outputs: dict[Heads, AttentionOutput] = {}
        for heads, pipeline, part, its in self._parts(q, k, v, spec):
            if pipeline is None:
                traces[heads], outputs[heads] = None, AttentionOutput(dense_attention(*part, its), None)
            else:
                traces[heads] = trace = pipeline.trace(*part, **its.arguments())
                outputs[heads] = trace.output
        lse = {heads: output.lse for heads, output in outputs.items() if output.lse is not None}
        visited = {heads: output.visited_lse for heads, output in outputs.items()}
        exact = {heads: each for heads, each in visited.items() if each is not None}
        reasons = [trace.dense_because for trace in traces.values() if trace is not None]
        has_more = any(output.exact_lse is not None for output in outputs.values())
        output = AttentionOutput(
            put_back({heads: output.out for heads, output in outputs.items()}, size),
            put_back(lse, size) if len(lse) == len(outputs) else None,
            exact_lse=put_back(exact, size) if len(exact) == len(outputs) and has_more else None,
        )
        return HeadGroupsTrace(traces, output, next(iter(reasons), None) if all(reasons) else None)

    def _parts(
        self, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec
    ) -> Iterator[tuple[Heads, AnyPipeline | None, tuple[Tensor, Tensor, Tensor], AttentionSpec]]:
        """Each group, its pipeline, its queries, keys and values, and what the layer asks for in its heads."""
        size, kv_heads = q.shape[1] // k.shape[1], k.shape[1]
        self._refuse_other_heads(kv_heads)
        for heads, pipeline in self.groups.items():
            part = _take(q, heads, size), _take(k, heads, 1), _take(v, heads, 1)
            yield heads, pipeline, part, spec.of_heads(heads, kv_heads)

    def _refuse_other_heads(self, kv_heads: int) -> None:
        named, there = {head for heads in self.groups for head in heads}, set(range(kv_heads))
        wrong = [
            f"{what} {', '.join(map(str, sorted(heads)))}"
            for what, heads in (("missing:", there - named), ("not there:", named - there))
            if heads
        ]
        if wrong:
            raise ValueError(f"the groups must name each of the {kv_heads} KV heads; {'; '.join(wrong)}")


def named_twice(values: Iterable[int]) -> str:
    """The values that occur more than once, as text."""
    return ", ".join(str(value) for value, times in Counter(values).items() if times > 1)


def _take(x: Tensor, heads: Heads, size: int) -> Tensor:
    """The heads of `x` `[B, Hkv * size, ...]` that belong to these KV heads; a view if they are consecutive."""
    if heads == tuple(range(heads[0], heads[0] + len(heads))):
        return x[:, heads[0] * size : (heads[-1] + 1) * size]
    # Indexing would need a tensor of indices on the device, and the host would wait for its copy.
    return torch.cat([x[:, head * size : (head + 1) * size] for head in heads], dim=1)


LayerTrace = AnyTrace | HeadGroupsTrace
"""Every value of one call in a layer."""


class Attention(Protocol):
    """What attends in a layer: a `Pipeline`, `HeadGroups`, or a class that wraps one of them."""

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, **options: Unpack[AttentionOptions]) -> Tensor:
        """Attend `q` `[B, Hq, M, D]` to `k` `[B, Hkv, N, D]` and `v` `[B, Hkv, N, Dv]`: `[B, Hq, M, Dv]`.

        Args:
            options: `causal`, `scale`, `window`, `softcap`, `sinks` and `remaining`, as for a `Pipeline`.
        """
        ...

    def trace(self, q: Tensor, k: Tensor, v: Tensor, **options: Unpack[AttentionOptions]) -> LayerTrace:
        """Make the same call with the same arguments, and return every value of it."""
        ...
