"""How diffusers' transformers lay out their tokens, read from the arguments of their forward calls."""

from __future__ import annotations

from collections.abc import Mapping

from blocksparse.integrations.diffusers.families import alone, joint, packed
from blocksparse.integrations.diffusers.families.family import Arguments as Arguments
from blocksparse.integrations.diffusers.families.family import Family as Family
from blocksparse.integrations.diffusers.families.left_out import DENSE_BY_CHOICE as DENSE_BY_CHOICE
from blocksparse.integrations.diffusers.families.left_out import LEFT_OUT as LEFT_OUT
from blocksparse.integrations.diffusers.families.left_out import UNKNOWN as UNKNOWN

FAMILIES: Mapping[str, Family] = {
    "AnyFlowTransformer3DModel": alone.ANY_FLOW,
    "BriaTransformer2DModel": joint.FLUX,
    "ChromaTransformer2DModel": joint.CHROMA,
    "ChronoEditTransformer3DModel": alone.WAN,
    "CogVideoXTransformer3DModel": joint.COGVIDEOX,
    "CogView4Transformer2DModel": joint.COGVIEW_4,
    "ConsisIDTransformer3DModel": joint.COGVIDEOX,
    "Cosmos3OmniTransformer": packed.COSMOS_3,
    "CosmosTransformer3DModel": alone.COSMOS,
    "ErnieImageTransformer2DModel": joint.ERNIE_IMAGE,
    "Flux2Transformer2DModel": joint.FLUX_2,
    "Flux3Transformer2DModel": joint.FLUX_3,
    "FluxTransformer2DModel": joint.FLUX,
    "HeliosTransformer3DModel": packed.HELIOS,
    "HunyuanImageTransformer2DModel": joint.HUNYUAN_IMAGE,
    "HunyuanVideo15Transformer3DModel": joint.HUNYUAN_VIDEO_15,
    "HunyuanVideoFramepackTransformer3DModel": packed.HUNYUAN_VIDEO_FRAMEPACK,
    "HunyuanVideoTransformer3DModel": joint.HUNYUAN_VIDEO,
    "Kandinsky5Transformer3DModel": alone.KANDINSKY_5,
    "Kandinsky6Transformer3DModel": alone.KANDINSKY_6,
    "Krea2Transformer2DModel": joint.KREA_2,
    "LTX2VideoTransformer3DModel": alone.LTX_2,
    "LTXVideoTransformer3DModel": alone.LTX,
    "LongCatImageTransformer2DModel": joint.FLUX,
    "MiniMaxH3Transformer3DModel": packed.MINIMAX_H3,
    "MochiTransformer3DModel": joint.MOCHI,
    "MotifVideoTransformer3DModel": joint.MOTIF_VIDEO,
    "OvisImageTransformer2DModel": joint.FLUX,
    "QwenImage21Transformer2DModel": packed.QWEN_IMAGE_21,
    "QwenImageTransformer2DModel": joint.QWEN_IMAGE,
    "SD3Transformer2DModel": joint.SD_3,
    "SkyReelsV2Transformer3DModel": alone.WAN,
    "WanAnimateTransformer3DModel": alone.WAN,
    "WanTransformer3DModel": alone.WAN,
    "WanVACETransformer3DModel": alone.WAN_VACE,
    "ZImageTransformer2DModel": joint.Z_IMAGE,
}
"""The transformers that are known, by the names of their classes."""
