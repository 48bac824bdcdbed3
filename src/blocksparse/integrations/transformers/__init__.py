"""Sparse prefill inside Hugging Face transformers (5.16 or later): `attach(model, pbs_attn())`."""

from blocksparse.integrations.density_recorder import DensityRecorder as DensityRecorder
from blocksparse.integrations.transformers.attach import attach as attach
from blocksparse.integrations.transformers.attachment import Attachment as Attachment
