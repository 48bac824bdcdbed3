"""Sparse attention inside Hugging Face diffusers (0.41 or later): `attach(pipe.transformer, pipeline)`."""

from blocksparse.hosts.diffusers.attach import Attachment as Attachment
from blocksparse.hosts.diffusers.attach import attach as attach
from blocksparse.hosts.diffusers.families import DENSE_BY_CHOICE as DENSE_BY_CHOICE
from blocksparse.hosts.diffusers.families import FAMILIES as FAMILIES
from blocksparse.hosts.diffusers.families import UNKNOWN as UNKNOWN
from blocksparse.hosts.diffusers.families import Family as Family
from blocksparse.hosts.token_layout import TokenLayout as TokenLayout
from blocksparse.observe.density_recorder import DensityRecorder as DensityRecorder
