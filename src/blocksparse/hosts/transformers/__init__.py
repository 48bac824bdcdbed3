"""Sparse prefill inside Hugging Face transformers (5.16 or later): `attach(model, pbs_attn())`."""

from blocksparse.hosts.transformers.attach import Attachment as Attachment
from blocksparse.hosts.transformers.attach import attach as attach
from blocksparse.observe.density_recorder import DensityRecorder as DensityRecorder
