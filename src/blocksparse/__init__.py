"""Training-free block-sparse prefill attention as a pipeline of four typed stages, with a preset for each paper.

q, k --Permuter--> Permutation --Scorer--> BlockScores --Selector--> BlockMask --Executor--> AttentionOutput
"""

from blocksparse.batch.pages import PageTable
from blocksparse.batch.sequences import Sequences, Span
from blocksparse.check.per_head import HeadValues
from blocksparse.execute.auto import AutoExecutor, ExecutorChoice
from blocksparse.execute.cpu import CpuExecutor
from blocksparse.execute.executor import AttentionOutput, Executor
from blocksparse.execute.flex import FlexExecutor
from blocksparse.execute.gather import GatherExecutor
from blocksparse.execute.int8 import Int8Executor
from blocksparse.execute.launched import BlockPlan
from blocksparse.execute.mean_correction import MeanCorrectionExecutor
from blocksparse.execute.packages import CudnnExecutor, FlashAttention4Executor
from blocksparse.execute.reference import ReferenceExecutor
from blocksparse.execute.skip_softmax import SkipSoftmaxExecutor
from blocksparse.execute.triton import TritonExecutor
from blocksparse.grid import Grid
from blocksparse.inputs import UnsupportedError
from blocksparse.kernels.common.tiles import HopperTiles, TritonTiles
from blocksparse.kernels.masks.grid import AlwaysKept
from blocksparse.launch.failures import LaunchError
from blocksparse.layers.head_groups import Attention, HeadGroups, HeadGroupsTrace
from blocksparse.layers.schedule import Schedule
from blocksparse.layers.sdpa import scaled_dot_product_attention
from blocksparse.order.content_orders import GlobalIndexMap, KMeansOrder, SegmentKeySort, SegmentQuerySort
from blocksparse.order.grid_orders import (
    ColumnOrder,
    GivenOrder,
    GridOrder,
    HilbertOrder,
    RasterOrder,
    TileOrder,
    TimeOrder,
)
from blocksparse.order.permutation import GlobalPermutation, Identity, Permutation, Permuter
from blocksparse.pipeline import Pipeline
from blocksparse.presets.auto import AutoChoice, Quality, auto
from blocksparse.presets.text import (
    a_shape,
    bfla,
    flash_prefill,
    flex_prefill,
    mean_pooling,
    minference,
    pbs_attn,
    pbs_attn_plus,
    prism,
    s2o,
    skip_softmax,
    stem,
    tri_shape,
    triangle_mix,
    xattention,
)
from blocksparse.presets.video import dfs_attn, lva, nabla, radial, sol_attn, sparge, subblock, svg2
from blocksparse.score.combined import (
    SampledQueriesScorer,
    ScorerByCausality,
    ScorerPair,
    ScoresPair,
    SimilarityGatedScorer,
)
from blocksparse.score.key_history import KeyHistory
from blocksparse.score.pooled import MeanLogitScorer, MeanPoolScorer, PrefixOrderScorer, RotaryBandScorer
from blocksparse.score.scorer import (
    BlockLogits,
    BlockMass,
    BlockScores,
    NoScorer,
    Scorer,
    ScorerTraits,
    ValueScorer,
)
from blocksparse.score.strided import AntidiagonalScorer, FlattenMaxPoolScorer, OutputAwareScorer, QueryRowsScorer
from blocksparse.score.vertical_slash import VerticalSlashScorer, VerticalSlashScores
from blocksparse.select.block_mask import BlockMask, RankedBlockMask
from blocksparse.select.combined import OnTiles, Ranked, Refined, SelectorByCausality, SelectorPair, SharedByGroup
from blocksparse.select.grid_rules import Frames, GridSelector, Radial, TileWindow
from blocksparse.select.mass import GlobalTopCdf, PeakShare, RowShare, TopCdf
from blocksparse.select.positions import Band, Everything, LastKeys, LastQueries, Random, Sink, Stride
from blocksparse.select.selector import PositionSelector, Selector, SelectorTraits
from blocksparse.select.top_k import DecayingTopK, MeanStd, Threshold, TopK
from blocksparse.select.vertical_slash import RoutedByDivergence, VerticalSlashCdf, VerticalSlashTopK
from blocksparse.spec import AttentionOptions, AttentionSpec
from blocksparse.values import Choice, Trace

__all__ = [
    "AlwaysKept",
    "AntidiagonalScorer",
    "Attention",
    "AttentionOptions",
    "AttentionOutput",
    "AttentionSpec",
    "AutoChoice",
    "AutoExecutor",
    "Band",
    "BlockLogits",
    "BlockMask",
    "BlockMass",
    "BlockPlan",
    "BlockScores",
    "Choice",
    "ColumnOrder",
    "CpuExecutor",
    "CudnnExecutor",
    "DecayingTopK",
    "Everything",
    "Executor",
    "ExecutorChoice",
    "FlashAttention4Executor",
    "FlattenMaxPoolScorer",
    "FlexExecutor",
    "Frames",
    "GatherExecutor",
    "GivenOrder",
    "GlobalIndexMap",
    "GlobalPermutation",
    "GlobalTopCdf",
    "Grid",
    "GridOrder",
    "GridSelector",
    "HeadGroups",
    "HeadGroupsTrace",
    "HeadValues",
    "HilbertOrder",
    "HopperTiles",
    "Identity",
    "Int8Executor",
    "KMeansOrder",
    "KeyHistory",
    "LastKeys",
    "LastQueries",
    "LaunchError",
    "MeanCorrectionExecutor",
    "MeanLogitScorer",
    "MeanPoolScorer",
    "MeanStd",
    "NoScorer",
    "OnTiles",
    "OutputAwareScorer",
    "PageTable",
    "PeakShare",
    "Permutation",
    "Permuter",
    "Pipeline",
    "PositionSelector",
    "PrefixOrderScorer",
    "Quality",
    "QueryRowsScorer",
    "Radial",
    "Random",
    "Ranked",
    "RankedBlockMask",
    "RasterOrder",
    "ReferenceExecutor",
    "Refined",
    "RotaryBandScorer",
    "RoutedByDivergence",
    "RowShare",
    "SampledQueriesScorer",
    "Schedule",
    "Scorer",
    "ScorerByCausality",
    "ScorerPair",
    "ScorerTraits",
    "ScoresPair",
    "SegmentKeySort",
    "SegmentQuerySort",
    "Selector",
    "SelectorByCausality",
    "SelectorPair",
    "SelectorTraits",
    "Sequences",
    "SharedByGroup",
    "SimilarityGatedScorer",
    "Sink",
    "SkipSoftmaxExecutor",
    "Span",
    "Stride",
    "Threshold",
    "TileOrder",
    "TileWindow",
    "TimeOrder",
    "TopCdf",
    "TopK",
    "Trace",
    "TritonExecutor",
    "TritonTiles",
    "UnsupportedError",
    "ValueScorer",
    "VerticalSlashCdf",
    "VerticalSlashScorer",
    "VerticalSlashScores",
    "VerticalSlashTopK",
    "a_shape",
    "auto",
    "bfla",
    "dfs_attn",
    "flash_prefill",
    "flex_prefill",
    "lva",
    "mean_pooling",
    "minference",
    "nabla",
    "pbs_attn",
    "pbs_attn_plus",
    "prism",
    "radial",
    "s2o",
    "scaled_dot_product_attention",
    "skip_softmax",
    "sol_attn",
    "sparge",
    "stem",
    "subblock",
    "svg2",
    "tri_shape",
    "triangle_mix",
    "xattention",
]
__version__ = "0.1.0.dev0"
