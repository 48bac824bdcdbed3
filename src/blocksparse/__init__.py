"""Training-free block-sparse prefill attention: four typed stages, and every paper a preset.

q, k --Permuter--> Permutation --Scorer--> BlockScores --Selector--> BlockMask --Executor--> AttentionOutput
"""

from blocksparse.executors.attention_output import AttentionOutput as AttentionOutput
from blocksparse.executors.auto import AutoExecutor as AutoExecutor
from blocksparse.executors.block_plan import BlockPlan as BlockPlan
from blocksparse.executors.executor import Executor as Executor
from blocksparse.executors.flex import FlexExecutor as FlexExecutor
from blocksparse.executors.reference import ReferenceExecutor as ReferenceExecutor
from blocksparse.executors.triton import TritonExecutor as TritonExecutor
from blocksparse.permuters.identity import Identity as Identity
from blocksparse.permuters.permutation import GlobalPermutation as GlobalPermutation
from blocksparse.permuters.permutation import Permutation as Permutation
from blocksparse.permuters.permuter import Permuter as Permuter
from blocksparse.permuters.segment_key_sort import SegmentKeySort as SegmentKeySort
from blocksparse.pipeline import Pipeline as Pipeline
from blocksparse.pipeline import Trace as Trace
from blocksparse.presets.mean_pooling import mean_pooling as mean_pooling
from blocksparse.presets.pbs_attn import pbs_attn as pbs_attn
from blocksparse.scorers.block_scores import BlockMass as BlockMass
from blocksparse.scorers.block_scores import BlockScores as BlockScores
from blocksparse.scorers.grid import Grid as Grid
from blocksparse.scorers.mean_pool import MeanPoolScorer as MeanPoolScorer
from blocksparse.scorers.no_scorer import NoScorer as NoScorer
from blocksparse.scorers.scorer import Scorer as Scorer
from blocksparse.selectors.band import Band as Band
from blocksparse.selectors.block_mask import BlockMask as BlockMask
from blocksparse.selectors.block_mask import RankedBlockMask as RankedBlockMask
from blocksparse.selectors.everything import Everything as Everything
from blocksparse.selectors.first_token import FirstToken as FirstToken
from blocksparse.selectors.on_tiles import OnTiles as OnTiles
from blocksparse.selectors.position_selector import PositionSelector as PositionSelector
from blocksparse.selectors.ranked import Ranked as Ranked
from blocksparse.selectors.refined import Refined as Refined
from blocksparse.selectors.selector import Selector as Selector
from blocksparse.selectors.shared_by_group import SharedByGroup as SharedByGroup
from blocksparse.selectors.sink import Sink as Sink
from blocksparse.selectors.threshold import Threshold as Threshold
from blocksparse.selectors.top_cdf import TopCdf as TopCdf
from blocksparse.selectors.top_k import TopK as TopK
