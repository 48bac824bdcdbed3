"""Sparse prefill inside vLLM (0.30 to 0.33): `--attention-backend BLOCKSPARSE`.

vLLM finds `register` by itself once this package is installed. Nothing here needs vLLM before it is called.
"""

from blocksparse.integrations.density_recorder import DensityRecorder as DensityRecorder
from blocksparse.integrations.serving.settings import ConfigurationError as ConfigurationError
from blocksparse.integrations.serving.settings import Settings as Settings
from blocksparse.integrations.vllm.register import register as register
