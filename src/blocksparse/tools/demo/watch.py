"""Looking on while a model attends: seconds spent in attention, and one layer's q, k, v."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast, final
from uuid import uuid4

import torch
from attrs import define, field
from torch import Tensor

from blocksparse.execute.auto import AutoExecutor
from blocksparse.layers.head_groups import AnyPipeline
from blocksparse.layers.schedule import Schedule, base_model
from blocksparse.observe.density_recorder import DensityRecorder
from blocksparse.order.permutation import Identity
from blocksparse.pipeline import Pipeline
from blocksparse.score.scorer import NoScorer
from blocksparse.select.top_k import Threshold
from blocksparse.spec import AttentionOptions

QKV = tuple[Tensor, Tensor, Tensor]  # [1, Hq, N, D], [1, Hkv, N, D], [1, Hkv, N, Dv]
OwnAttention = Callable[[Tensor, Tensor, Tensor], Any]
# A selector that says beforehand that it keeps everything would be left out for dense attention.
EVERYTHING: AnyPipeline = Pipeline(Identity(), NoScorer(128), Threshold(-1.0), AutoExecutor(dense_below=0))
"""Keeps every block, so what it loses is the noise of another kernel."""


@final
@define(eq=False)
class Sight:
    """Measurements of `watch`."""

    kept: QKV | None = None
    asked: AttentionOptions = field(factory=AttentionOptions)  # of the call with `kept`, but for its sinks
    _seconds: float = field(default=0.0, init=False)
    _spans: list[tuple[torch.cuda.Event, torch.cuda.Event]] = field(factory=list, init=False)

    def seconds(self) -> float:
        """Time spent in attention, summed over layers. Waits for the GPU."""
        for start, end in self._spans:
            end.synchronize()
            self._seconds += start.elapsed_time(end) / 1000
        self._spans.clear()
        return self._seconds

    @contextmanager
    def timed(self, device: torch.device) -> Iterator[None]:
        """Count what runs inside; on a GPU by events, so that nothing waits."""
        if device.type == "cuda":
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            yield
            end.record()
            self._spans.append((start, end))
        else:
            begin = time.perf_counter()
            yield
            self._seconds += time.perf_counter() - begin


@contextmanager
def watch(
    network: Any,
    *,
    keep_layer: int | None = None,
    on_call: Callable[[], None] | None = None,
    on_qkv: Callable[[int, QKV, dict[str, Any], OwnAttention], None] | None = None,
) -> Iterator[Sight]:
    """Watch the attention function that `network` uses now, whichever it is.

    Args:
        keep_layer: the layer whose q, k, v to keep, as attention gets them (RoPE applied). None keeps none.
        on_call: called after every call of attention.
        on_qkv: called before every call of attention. It gets the layer, q, k, v, the model's other arguments, and
            the function that is called.
    """
    from transformers import AttentionInterface, AttentionMaskInterface

    from blocksparse.hosts.transformers import attach
    from blocksparse.hosts.transformers.attach import configs_of
    from blocksparse.hosts.transformers.call import layer_of

    before = [(config, config._attn_implementation) for config in configs_of(network)]
    used, *others = {str(name) for _, name in before}
    if others or used == "eager":  # each model has its own such function, under no name
        dense = attach(network, Schedule(None))
        with dense, watch(network, keep_layer=keep_layer, on_call=on_call, on_qkv=on_qkv) as sight:
            yield sight
        return
    sight, attention, mask = Sight(), AttentionInterface()[used], AttentionMaskInterface()[used]

    def watched(module: Any, q: Tensor, k: Tensor, v: Tensor, *rest: Any, **options: Any) -> Any:
        def own(q: Tensor, k: Tensor, v: Tensor) -> Any:
            return attention(module, q, k, v, *rest, **options)

        layer = layer_of(module)
        if layer == keep_layer:
            sight.kept = q.detach(), k.detach(), v.detach()
            names = {"scale": "scaling", "window": "sliding_window", "softcap": "softcap"}
            sight.asked = cast(AttentionOptions, {name: options.get(its) for name, its in names.items()})
        if on_qkv is not None:
            on_qkv(layer, (q, k, v), options, own)
        with sight.timed(q.device):
            output = own(q, k, v)
        if on_call is not None:
            on_call()
        return output

    name = f"{used}-watched-{uuid4().hex}"  # another model may be watched at once
    AttentionInterface.register(name, watched)
    AttentionMaskInterface.register(name, mask)
    try:
        for config, _ in before:
            config._attn_implementation_internal = name
        yield sight
    finally:
        for config, own in before:
            config._attn_implementation_internal = own
        # transformers registers class-wide but deletes per instance only.
        AttentionInterface._global_mapping.pop(name)
        AttentionMaskInterface._global_mapping.pop(name)


@torch.inference_mode()
def never_sparse(network: Any, ids: Tensor) -> dict[int, str]:
    """The layers in which a pipeline does not attend to `ids` `[1, N]` just once, and why. It reads `ids` once."""
    from blocksparse.hosts.transformers import attach

    recorder = DensityRecorder()
    with attach(network, EVERYTHING, min_tokens=1, min_queries=1, min_window=None, recorder=recorder):
        base_model(network)(ids, use_cache=False)
    calls = recorder.sparse_calls()
    found = {layer: f"it attends {times} times" for layer, times in calls.items() if times > 1}
    found |= {layer: f"it stays dense: {', '.join(why)}" for layer, why in recorder.dense_calls().items()}
    if -1 in calls:
        found[-1] = "its attention does not say in which layer it is"
    return found
