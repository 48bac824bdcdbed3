"""What vLLM asks for in one step: prompts that go sparse, and why others do not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any, final

import torch
from attrs import field, frozen
from torch.nn.functional import pad

from blocksparse.hosts.serving.runs import Prefills, Runs, Split
from blocksparse.inputs import MAX_HEAD_DIM

_KINDS = {"encoder": "not causal", "encoder_only": "not causal", "encoder_decoder": "cross attention"}
# Arguments that must be None, or 0, and the reasons that a DensityRecorder gets for others.
_NOT_PLAIN = {"alibi_slopes": "position bias", "sliding_window": "sliding window"}


_KNOWN = ("logits_soft_cap", "sinks")  # a pipeline takes them


def dense_because(
    *, head_size: int, dtype: torch.dtype, kv_cache_dtype: str, attn_type: str, options: Mapping[str, Any]
) -> str | None:
    """The first reason why a layer is dense, or None.

    Args:
        dtype: that of the model. vLLM calls a cache in it "auto", or by its name.
        options: all arguments that change what attention means. One that is unknown here is a reason by its name.
    """
    if attn_type != "decoder":
        return _KINDS.get(attn_type, attn_type)
    for name, value in options.items():
        if value is not None and name not in _KNOWN:
            return _NOT_PLAIN.get(name, name)
    if kv_cache_dtype not in ("auto", str(dtype).removeprefix("torch.")):
        return f"KV cache in {kv_cache_dtype}"
    return f"head dim above {MAX_HEAD_DIM}" if head_size > MAX_HEAD_DIM else None


# Fields of vLLM's CommonAttentionMetadata with an entry per request, and per token. Versions lack some of them.
_PER_REQUEST = (
    "seq_lens",
    "block_table_tensor",
    "is_prefilling",
    "seq_lens_cpu_upper_bound",
    "req_idx",
    "rswa_prefix_lens",
    "encoder_seq_lens",
    "encoder_seq_lens_cpu",
    "dcp_local_seq_lens",
    "dcp_local_seq_lens_cpu_upper_bound",
    "replayssm_decode_base_cpu",
)
_PER_TOKEN = ("slot_mapping", "positions")


@final
@frozen(eq=False)
class SplitMetadata:
    """One step of the engine, as an attribute of the native metadata of the whole batch."""

    reasons: Counter[str]  # of the dense requests
    prefills: Prefills | None = None
    rest: Runs = field(factory=Runs)  # the tokens of the dense requests
    rest_metadata: Any = None  # with which the native backend attends to `rest` alone

    @classmethod
    def of(
        cls,
        common: Any,
        split: Split,
        keys: list[int],
        *,
        page_size: int,
        build: Callable[[Any], Any],
        remaining: list[int] | None = None,
    ) -> SplitMetadata:
        """From vLLM's CommonAttentionMetadata of the whole batch; `build` makes native metadata of a batch."""
        if not split.sparse.ranges:
            return cls(split.reasons)
        starts = common.query_start_loc_cpu.tolist()
        pages = split.sparse.take(common.block_table_tensor)
        prefills = Prefills.of(
            split.sparse, pages, starts=starts, keys=keys, page_size=page_size, remaining=remaining
        )
        rest = split.rest.of_tokens(starts)
        return cls(
            split.reasons, prefills, rest, build(part_of(common, split.rest, rest)) if rest.ranges else None
        )


def part_of(common: Any, requests: Runs, tokens: Runs) -> Any:
    """vLLM's CommonAttentionMetadata of some requests of a batch. No number on a GPU is read."""
    changed: dict[str, Any] = {}
    for names, rows in ((_PER_REQUEST, requests), (_PER_TOKEN, tokens)):
        for name in names:
            if (value := getattr(common, name, None)) is not None:
                changed[name] = rows.take(value)
    for name in ("query_start_loc", "query_start_loc_cpu"):
        starts = getattr(common, name)
        lengths = requests.take(starts[1:] - starts[:-1])
        changed[name] = pad(lengths.cumsum(0, dtype=starts.dtype), (1, 0))
    if ranges := getattr(common, "mm_req_doc_ranges", None):
        changed["mm_req_doc_ranges"] = {
            new: ranges[old] for new, old in enumerate(requests) if ranges.get(old) is not None
        }
    ends = changed["query_start_loc_cpu"].tolist()
    return common.replace(
        num_reqs=len(requests),
        num_actual_tokens=len(tokens),
        max_query_len=max(stop - start for start, stop in pairwise(ends)),
        _num_computed_tokens_cache=None,
        _token_to_req_indices_cache=None,
        **changed,
    )
