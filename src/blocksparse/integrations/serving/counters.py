"""`Counters`: how many prompts went sparse, and why others did not, for Prometheus."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from functools import lru_cache
from typing import Any, final

from blocksparse.integrations.serving.split import Split

PROMPTS, TOKENS = "blocksparse_prompts", "blocksparse_prompt_tokens"


@lru_cache(maxsize=1)
def _exported() -> tuple[Any, Any]:
    """Counters of this process; None in their places without `prometheus_client`, which servers bring.

    Where PROMETHEUS_MULTIPROC_DIR is set, the counters of all processes of a server are added up in that folder.
    """
    try:
        from prometheus_client import Counter as Exported
    except ModuleNotFoundError:
        return None, None
    what = "in one step, by whether they were sparse, or why not"
    return (
        Exported(PROMPTS, f"Prompts, or chunks of them, {what}", ["attention"]),
        Exported(TOKENS, f"Their tokens {what}", ["attention"]),
    )


@final
class Counters:
    """What the steps of one engine did that read prompts. The host knows all of it before the layers run.

    It is kept once per step, not per layer. Steps that only decode are not seen.
    """

    def __init__(self) -> None:
        self.prompts = Counter[str]()  # by "sparse", or why they were not
        self.tokens = Counter[str]()
        self._owner: str | None = None

    def is_of(self, layer: str) -> bool:
        """Whether this layer's group counts: the first that asks, since several groups see the same steps."""
        self._owner = self._owner or layer
        return self._owner == layer

    def saw(self, splits: Iterable[Split]) -> None:
        """Add the prompts of one step, by the kind of layers in which most of them are sparse."""
        split = max(splits, key=lambda split: len(split.sparse))
        prompts, tokens = split.reasons + Counter(sparse=len(split.sparse)), split.queries
        exported = _exported()
        for mine, found, metric in zip((self.prompts, self.tokens), (prompts, tokens), exported, strict=True):
            for attention, n in found.items():
                if n and attention != "decode":
                    mine[attention] += n
                    if metric is not None:
                        metric.labels(attention).inc(n)

    def __str__(self) -> str:
        found = (f"{n} x {what} ({self.tokens[what]} tokens)" for what, n in self.prompts.most_common())
        return f"prompts: {', '.join(found) or 'none'}"
