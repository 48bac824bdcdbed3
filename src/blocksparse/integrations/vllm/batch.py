"""`Batch`: where the sparse prompts of one step lie, and the rest of the step as a batch of its own."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from typing import Any, final

from attrs import field, frozen
from torch.nn.functional import pad

from blocksparse.integrations.serving.prefills import Prefills
from blocksparse.integrations.serving.runs import Runs
from blocksparse.integrations.serving.split import Split

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
class Batch:
    """One step of the engine. It travels on what the stock backend's builder made of the whole batch."""

    reasons: Counter[str]  # of the dense requests
    prefills: Prefills | None = None
    rest: Runs = field(factory=Runs)  # the tokens of the dense requests
    rest_metadata: Any = None  # with which the stock backend attends to `rest` alone

    @classmethod
    def of(
        cls, common: Any, split: Split, keys: list[int], *, page_size: int, build: Callable[[Any], Any]
    ) -> Batch:
        """
        Args:
            common: vLLM's CommonAttentionMetadata of the whole batch.
            keys: the tokens of each request, its context and its queries together.
            build: makes the stock backend's metadata of a batch.
        """
        if not split.sparse.ranges:
            return cls(split.reasons)
        starts = common.query_start_loc_cpu.tolist()
        pages = split.sparse.take(common.block_table_tensor)
        prefills = Prefills.of(split.sparse, pages, starts=starts, keys=keys, page_size=page_size)
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
