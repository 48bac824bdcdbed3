"""TriangleMix: dense attention in the first layers, tri-shape in the others (arXiv 2507.21526)."""

from __future__ import annotations

from blocksparse.checks.validators import count
from blocksparse.layers.schedule import Schedule
from blocksparse.presets.preset import BlockExecutor, kept
from blocksparse.presets.tri_shape import tri_shape


@kept
def triangle_mix(
    starting_layer: int,
    sink: int = 128,  # this and the others as in `tri_shape`: the released code runs the same kernel
    local: int = 3968,
    last: int = 100,
    *,
    block: int = 64,
    executor: BlockExecutor | None = None,
) -> Schedule:
    """A schedule: dense before `starting_layer`, then the first and the last keys, and dense last queries.

    Args:
        starting_layer: the first sparse layer, by index. It depends on the model: the paper finds it by what the
            last queries lose.
        sink: how many tokens at the start of the prompt are kept.
        local: tokens in the window that ends with the query, at least 1.
        last: how many queries at the end of the call see every key.
        block: tokens per block.
        executor: `AutoExecutor()` if None.
    """
    count.check(starting_layer=starting_layer)
    return Schedule(tri_shape(sink, local, last, block=block, executor=executor), dense=range(int(starting_layer)))
