"""Training-free block-sparse prefill attention as a pipeline of four typed stages, with a preset for each paper.

q, k --Permuter--> Permutation --Scorer--> BlockScores --Selector--> BlockMask --Executor--> AttentionOutput
"""

from blocksparse.attention_spec import Asked, AttentionSpec
from blocksparse.batches.page_table import PageTable
from blocksparse.batches.paged_kv import PagedKV
from blocksparse.batches.sequences import Sequences, Span
from blocksparse.calls.inputs import UnsupportedError
from blocksparse.checks.per_head import HeadValues
from blocksparse.choice import Choice
from blocksparse.executors.attention_output import AttentionOutput
from blocksparse.executors.auto import AutoExecutor, ExecutorChoice
from blocksparse.executors.block_plan import BlockPlan
from blocksparse.executors.cpu import CpuExecutor
from blocksparse.executors.cudnn import CudnnExecutor
from blocksparse.executors.executor import Executor
from blocksparse.executors.flash_attention_4 import FlashAttention4Executor
from blocksparse.executors.flex import FlexExecutor
from blocksparse.executors.gather import GatherExecutor
from blocksparse.executors.int8 import Int8Executor
from blocksparse.executors.reference import ReferenceExecutor
from blocksparse.executors.remainder import RemainderExecutor
from blocksparse.executors.skip_softmax import SkipSoftmaxExecutor
from blocksparse.executors.tiles import HopperTiles, TritonTiles
from blocksparse.executors.triton import TritonExecutor
from blocksparse.geometry import Grid
from blocksparse.kernels.positions.places import Places
from blocksparse.layers.head_groups import HeadGroups, HeadGroupsTrace
from blocksparse.layers.schedule import Schedule
from blocksparse.paged_pipeline import PagedPipeline
from blocksparse.permuters.column_order import ColumnOrder
from blocksparse.permuters.given_order import GivenOrder
from blocksparse.permuters.global_index_map import GlobalIndexMap
from blocksparse.permuters.grid_order import GridOrder
from blocksparse.permuters.hilbert_order import HilbertOrder
from blocksparse.permuters.identity import Identity
from blocksparse.permuters.kmeans_order import KMeansOrder
from blocksparse.permuters.permutation import GlobalPermutation, Permutation
from blocksparse.permuters.permuter import Permuter
from blocksparse.permuters.raster_order import RasterOrder
from blocksparse.permuters.segment_key_sort import SegmentKeySort
from blocksparse.permuters.segment_query_sort import SegmentQuerySort
from blocksparse.permuters.tile_order import TileOrder
from blocksparse.permuters.time_order import TimeOrder
from blocksparse.pipeline import Pipeline
from blocksparse.presets.a_shape import a_shape
from blocksparse.presets.auto import AutoChoice, Quality, auto
from blocksparse.presets.bfla import bfla
from blocksparse.presets.dfs_attn import dfs_attn
from blocksparse.presets.flash_prefill import flash_prefill
from blocksparse.presets.flex_prefill import flex_prefill
from blocksparse.presets.lva import lva
from blocksparse.presets.mean_pooling import mean_pooling
from blocksparse.presets.minference import minference
from blocksparse.presets.nabla import nabla
from blocksparse.presets.pbs_attn import pbs_attn
from blocksparse.presets.pbs_attn_plus import pbs_attn_plus
from blocksparse.presets.prism import prism
from blocksparse.presets.radial import radial
from blocksparse.presets.s2o import s2o
from blocksparse.presets.skip_softmax import skip_softmax
from blocksparse.presets.sol_attn import sol_attn
from blocksparse.presets.sparge import sparge
from blocksparse.presets.stem import stem
from blocksparse.presets.subblock import subblock
from blocksparse.presets.svg2 import svg2
from blocksparse.presets.tri_shape import tri_shape
from blocksparse.presets.triangle_mix import triangle_mix
from blocksparse.presets.xattention import xattention
from blocksparse.runtime.failures import LaunchError
from blocksparse.scorers.antidiagonal import AntidiagonalScorer
from blocksparse.scorers.block_scores import BlockLogits, BlockMass, BlockScores
from blocksparse.scorers.by_causality import ScorerByCausality
from blocksparse.scorers.flatten_max_pool import FlattenMaxPoolScorer
from blocksparse.scorers.key_history import KeyHistory
from blocksparse.scorers.mean_logit import MeanLogitScorer
from blocksparse.scorers.mean_pool import MeanPoolScorer
from blocksparse.scorers.no_scorer import NoScorer
from blocksparse.scorers.output_aware import OutputAwareScorer
from blocksparse.scorers.prefix_order import PrefixOrderScorer
from blocksparse.scorers.query_rows import QueryRowsScorer
from blocksparse.scorers.rotary_band import RotaryBandScorer
from blocksparse.scorers.scorer import Scorer
from blocksparse.scorers.scorer_pair import ScorerPair, ScoresPair
from blocksparse.scorers.similarity_gated import SimilarityGatedScorer
from blocksparse.scorers.value_scorer import ValueScorer
from blocksparse.scorers.vertical_slash import VerticalSlashScorer, VerticalSlashScores
from blocksparse.sdpa import scaled_dot_product_attention
from blocksparse.selectors.band import Band
from blocksparse.selectors.block_mask import BlockMask, RankedBlockMask
from blocksparse.selectors.by_causality import SelectorByCausality
from blocksparse.selectors.decaying_top_k import DecayingTopK
from blocksparse.selectors.everything import Everything
from blocksparse.selectors.frames import Frames
from blocksparse.selectors.global_top_cdf import GlobalTopCdf
from blocksparse.selectors.grid_selector import GridSelector
from blocksparse.selectors.last_keys import LastKeys
from blocksparse.selectors.last_queries import LastQueries
from blocksparse.selectors.mean_std import MeanStd
from blocksparse.selectors.on_tiles import OnTiles
from blocksparse.selectors.peak_share import PeakShare
from blocksparse.selectors.position_selector import PositionSelector
from blocksparse.selectors.radial import Radial
from blocksparse.selectors.random import Random
from blocksparse.selectors.ranked import Ranked
from blocksparse.selectors.refined import Refined
from blocksparse.selectors.routed_by_divergence import RoutedByDivergence
from blocksparse.selectors.selector import Selector
from blocksparse.selectors.selector_pair import SelectorPair
from blocksparse.selectors.shared_by_group import SharedByGroup
from blocksparse.selectors.sink import Sink
from blocksparse.selectors.stride import Stride
from blocksparse.selectors.threshold import Threshold
from blocksparse.selectors.tile_window import TileWindow
from blocksparse.selectors.top_cdf import TopCdf
from blocksparse.selectors.top_k import TopK
from blocksparse.selectors.vertical_slash_cdf import VerticalSlashCdf
from blocksparse.selectors.vertical_slash_top_k import VerticalSlashTopK
from blocksparse.trace import Trace

__all__ = [
    "AntidiagonalScorer",
    "Asked",
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
    "MeanLogitScorer",
    "MeanPoolScorer",
    "MeanStd",
    "NoScorer",
    "OnTiles",
    "OutputAwareScorer",
    "PageTable",
    "PagedKV",
    "PagedPipeline",
    "PeakShare",
    "Permutation",
    "Permuter",
    "Pipeline",
    "Places",
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
    "RemainderExecutor",
    "RotaryBandScorer",
    "RoutedByDivergence",
    "Schedule",
    "Scorer",
    "ScorerByCausality",
    "ScorerPair",
    "ScoresPair",
    "SegmentKeySort",
    "SegmentQuerySort",
    "Selector",
    "SelectorByCausality",
    "SelectorPair",
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
