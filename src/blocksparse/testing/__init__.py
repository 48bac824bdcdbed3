"""Tools to test a custom stage: inputs, error budgets, the presets, and one check for each role."""

from blocksparse.presets import every_preset as every_preset
from blocksparse.presets import video_presets as video_presets
from blocksparse.testing.check_executor import check_executor as check_executor
from blocksparse.testing.check_stages import check_permuter as check_permuter
from blocksparse.testing.check_stages import check_scorer as check_scorer
from blocksparse.testing.check_stages import check_selector as check_selector
from blocksparse.testing.inputs import assert_within_budget as assert_within_budget
from blocksparse.testing.inputs import make_qkv as make_qkv
from blocksparse.testing.inputs import masked_attention as masked_attention
