"""Sparse attention inside Hugging Face diffusers (0.41 or later): `attach(pipe.transformer, pipeline)`."""

from blocksparse.integrations.density_recorder import DensityRecorder as DensityRecorder
from blocksparse.integrations.diffusers.attach import attach as attach
from blocksparse.integrations.diffusers.attachment import Attachment as Attachment
from blocksparse.integrations.diffusers.families import DENSE_BY_CHOICE as DENSE_BY_CHOICE
from blocksparse.integrations.diffusers.families import FAMILIES as FAMILIES
from blocksparse.integrations.diffusers.families import UNKNOWN as UNKNOWN
from blocksparse.integrations.diffusers.families import Family as Family
from blocksparse.integrations.token_layout import TokenLayout as TokenLayout
