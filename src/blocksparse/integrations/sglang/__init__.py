"""Sparse prefill inside SGLang (0.5.23): `--prefill-attention-backend blocksparse`.

SGLang finds `register` by itself once this package is installed. Nothing here needs SGLang before it is called.
"""

from blocksparse.integrations.density_recorder import DensityRecorder as DensityRecorder
from blocksparse.integrations.serving.settings import ConfigurationError as ConfigurationError
from blocksparse.integrations.serving.settings import Settings as Settings
from blocksparse.integrations.sglang.register import register as register
