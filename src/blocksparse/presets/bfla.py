"""BFLA: Block-Filtered Long-Context Attention."""

from __future__ import annotations

from blocksparse.checks.validators import block_size, count, flag, hash_seed, multiple, optional, size, whole
from blocksparse.permuters.identity import Identity
from blocksparse.presets.preset import BlockExecutor, Numbers, Preset, kept, preset
from blocksparse.scorers.block_scores import BlockMass
from blocksparse.scorers.flatten_max_pool import FlattenMaxPoolScorer
from blocksparse.selectors.band import Band
from blocksparse.selectors.block_mask import BlockMask
from blocksparse.selectors.on_tiles import OnTiles
from blocksparse.selectors.position_selector import PositionSelector
from blocksparse.selectors.random import Random
from blocksparse.selectors.refined import Refined
from blocksparse.selectors.selector import Selector
from blocksparse.selectors.shared_by_group import SharedByGroup
from blocksparse.selectors.sink import Sink
from blocksparse.selectors.stride import Stride
from blocksparse.selectors.top_cdf import TopCdf


@kept
def bfla(
    mass: Numbers = 0.99,  # gamma; section 4.5, the "strong operating point"
    *,
    block: int = 256,  # b; section 4.5
    g: int = 64,  # section 3.3; table 5
    tile: int = 64,  # T, the tile of the paper's kernel, is 32 in its code; our kernels are fast from 64 on
    n_local: int | None = None,
    n_local_tiles: int | None = None,
    sink: int = 32,  # eq. 16: the first tile, which has 32 tokens in the released code
    eta: int | None = 16,  # section 4.5
    rho: Numbers | None = None,  # section 4.5: rho = 0
    seed: int = 1,  # released code; the paper names none
    per_token: bool = False,
    coarse_rescue: bool = False,
    as_released: bool = False,
    executor: BlockExecutor | None = None,
) -> Preset[BlockMass]:
    """Keep the heaviest coarse blocks for all query heads of a KV head, then also keep tiles by position.

    A tile is a block of the final mask. A rescue keeps tiles that the scores dropped: one of every `eta`, or
    random ones. The local band, the sink and both rescues are added to the blocks that `mass` asks for, and are
    not counted.

    Args:
        mass: share of a row's block mass to keep; a number, or one per query head.
        block: tokens per coarse block.
        g: tokens per group that is compared as one vector; divides `block`.
        tile: tokens per tile; divides `block`.
        n_local: tokens in the local band: tiles with a key at most so far before a query of the row are kept. If
            neither this nor `n_local_tiles` is given, it is 256 (8 tiles of 32; table 5).
        n_local_tiles: the same as a number of tiles, `n_local / tile`.
        sink: tokens at the start of the prompt whose tiles are kept.
        eta: keep one tile of every `eta` in a row; None for no stride rescue.
        rho: keep a tile with this probability, a number or one per query head; None for no random rescue.
        seed: seed of both rescues.
        per_token: divide the products of groups by their tokens, so that the softmax over blocks is not one-hot.
        coarse_rescue: apply band, sink and rescues to coarse blocks, as the released code does, not to tiles.
        as_released: choose as the authors' code does for chunks that start at a block: band, sink and rescues work
            on coarse blocks, rescues by linear hashes with rows counted from the start of the chunk; the band has
            at least one block; and scores include padding.
        executor: `AutoExecutor()` if None.

    Raises:
        ValueError: `n_local` and `n_local_tiles` are both given, or `tile` does not divide `block`.
    """
    block_size.check(block=block, tile=tile)
    block, tile = whole(block), whole(tile)
    multiple("block", block, "tile", tile)
    optional(count).check(n_local=n_local, n_local_tiles=n_local_tiles)
    size.check(sink=sink)
    hash_seed.check(seed=seed)
    flag.check(coarse_rescue=coarse_rescue, as_released=as_released)
    if n_local is not None and n_local_tiles is not None:
        raise ValueError(f"give 'n_local' or 'n_local_tiles', not both: {n_local} and {n_local_tiles}")
    if n_local is None:
        n_local = 256 if n_local_tiles is None else whole(n_local_tiles) * tile  # table 5: 8 tiles of 32
    rescue: PositionSelector = Band(max(n_local, 1) if as_released else n_local) | Sink(sink)
    if eta is not None:
        rescue = rescue | Stride(eta, seed, released=as_released)
    if rho is not None:
        rescue = rescue | Random(rho, seed, released=as_released)

    n = block // tile
    selector: Selector[BlockMass, BlockMask]
    if coarse_rescue or as_released:
        selector = Refined(SharedByGroup(TopCdf(mass) | rescue), n)
    else:
        selector = Refined(SharedByGroup(TopCdf(mass)), n) | OnTiles(rescue, n)
    return preset(
        Identity(),
        FlattenMaxPoolScorer(block, g, per_token=per_token, padded_tail=as_released),
        selector,
        executor,
    )
